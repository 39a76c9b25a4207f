"""Agents: what a session sends, how it waits for others, and what is counted; on a server that is only played."""

from __future__ import annotations

import argparse
import json
import lzma
import math
import random
import socket
import statistics
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import ClassVar

import numpy as np
import pytest

from benchmarks.serving import agents, streams, trace
from benchmarks.serving.client import BenchmarkError


class Played(BaseHTTPRequestHandler):
    """Answers with tokens 7 and 8 in turns, of which a stream tells all so far or, ``new``, those that came; knows what
    it was sent."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar[list[list[int]]] = []
    missing = 0
    new = False
    error: ClassVar[dict[str, object]] = {}
    status = 200
    wait = 0.0
    """Seconds before the first event, and half of them between two."""
    under_way: ClassVar[list[int]] = []
    """Requests under way whenever one begins."""
    lock, busy = Lock(), 0

    def do_POST(self) -> None:
        kind = type(self)
        with self.lock:
            kind.busy += 1
            self.under_way.append(kind.busy)
        self.counted = True
        try:
            self.answer()
        finally:
            self.over()

    def over(self) -> None:
        """The request is under way no more. Before its last event: behind that its client may send the next."""
        with self.lock:
            type(self).busy -= self.counted
        self.counted = False

    def answer(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids, count = body["input_ids"], body["sampling_params"]["max_new_tokens"] - self.missing
        cached = max((len(x) for x in self.asked if ids[: len(x)] == x), default=0)
        self.asked.append(ids)
        said = [7 + n % 2 for n in range(count)]
        upto = sorted({n for n in (1, 2, count) if n <= count})
        chunks: list[dict[str, object]] = [
            {
                "output_ids": said[before if self.new else 0 : n],
                "meta_info": {"completion_tokens": n, "cached_tokens": cached},
            }
            for before, n in zip([0, *upto], upto, strict=False)
        ]
        chunks += [self.error] if self.error else []
        chunks = chunks if self.status == 200 else [self.error]
        events = [f"data: {json.dumps(x)}\n\n".encode() for x in chunks] + [b"data: [DONE]\n\n"]
        self.send_response(self.status)
        self.send_header("Content-Length", str(sum(map(len, events))))
        self.end_headers()
        for number, event in enumerate(events):
            if number < len(chunks):
                time.sleep(self.wait / 2 if number else self.wait)
            if number == len(events) - 1:
                self.over()
            self.wfile.write(event)
            self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url(monkeypatch):
    monkeypatch.setattr(Played, "asked", [])
    monkeypatch.setattr(Played, "under_way", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), Played) as httpd:
        Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_address[1]}"
        httpd.shutdown()


LOAD = agents.Sessions("tools", sessions=3, at_once=1, shared=5, turns=2, new=2, reply=4)


def test_times_are_those_of_tokens_and_turns_run_at_once(url, monkeypatch):
    """Of tokens that come .6 s after the prompt, .3 and .3 s apart."""
    monkeypatch.setattr(Played, "wait", 0.6)
    load = agents.replace(LOAD, sessions=6, at_once=3, turns=1)
    found = agents.Run(url, load, 100, 0).run()
    assert 0.6 <= found["ttft_s"] < 1.2 and 0.24 < found["gap_s"] < 0.6 and found["ttft_s"] <= found["ttft_p99_s"] < 2
    assert max(Played.under_way) == 3 and 2.4 <= found["seconds"] < 6, "two after each other, not six"


@pytest.mark.parametrize("new", [False, True])
def test_sessions_take_turns_and_send_all_that_was_said(new, url, monkeypatch):
    """Whether a stream tells all so far each time, or what is new."""
    monkeypatch.setattr(Played, "new", new)
    found = agents.Run(url, LOAD, 100, 0).run()
    first, second = Played.asked[:3], Played.asked[3:]
    assert len({tuple(x[:5]) for x in Played.asked}) == 1, "all share a start"
    assert len({tuple(x) for x in first}) == 3
    for before, after in zip(first, second, strict=True):
        assert after[: len(before)] == before and after[7:11] == [7, 8, 7, 8] and len(after) == 13
    assert found["turns_answered"] == 6
    assert found["hit_rate"] == pytest.approx(3 * 7 / (3 * 7 + 3 * 13))
    assert found["output_throughput"] == pytest.approx(24 / found["seconds"])


def test_a_turn_that_is_not_whole_is_an_error(url, monkeypatch):
    monkeypatch.setattr(Played, "missing", 1)
    with pytest.raises(BenchmarkError, match="3 of 4 tokens"):
        agents.Run(url, LOAD, 100, 0).run()


def test_what_a_stream_tells_of_an_error_is_one(url, monkeypatch):
    monkeypatch.setattr(Played, "error", {"error": {"message": "no room"}})
    with pytest.raises(BenchmarkError, match="no room"):
        agents.Run(url, LOAD, 100, 0).run()


def test_what_a_server_refuses_is_told(url, monkeypatch):
    monkeypatch.setattr(Played, "status", 400)
    monkeypatch.setattr(Played, "error", {"error": {"message": "too long"}})
    with pytest.raises(BenchmarkError, match=r"answered with 400: .*too long"):
        agents.Run(url, LOAD, 100, 0).run()


def test_one_turn_that_fails_ends_the_others(url, monkeypatch):
    monkeypatch.setattr(Played, "missing", 1)
    with pytest.raises(BenchmarkError, match="3 of 4 tokens"):
        agents.Run(url, agents.replace(LOAD, at_once=2), 100, 0).run()
    assert len(Played.asked) <= 3


WHOLE = [{"output_ids": [7] * n, "meta_info": {"completion_tokens": n, "cached_tokens": 0}} for n in range(5)]
NEW = [{**whole, "output_ids": [7] * (n > 0)} for n, whole in enumerate(WHOLE)]
ERROR = {"error": {"message": "no room"}}


@pytest.mark.parametrize("events", [WHOLE[1:], WHOLE, NEW[1:], NEW, WHOLE[4:]])
def test_a_reply_is_all_that_a_stream_told(events):
    told = streams.Told()
    for event in events:
        told.add(json.dumps(event).encode())
    reply, meta = told.reply()
    assert reply == [7] * 4 and meta["completion_tokens"] == 4


@pytest.mark.parametrize("at", [0, 1, 2, 4])
@pytest.mark.parametrize("events", [WHOLE[1:], NEW[1:]])
def test_an_error_in_a_stream_stays(events, at):
    told = streams.Told()
    with pytest.raises(BenchmarkError, match="no room"):
        for event in [*events[:at], ERROR, *events[at:]]:
            told.add(json.dumps(event).encode())
        told.reply()


def test_what_is_no_json_is_an_error():
    told = streams.Told()
    with pytest.raises(BenchmarkError, match=r"a stream tells b'\{'"):
        told.add(b"{")


@pytest.mark.parametrize(
    "event", [{"text": "a"}, {"output_ids": [7]}, {"output_ids": None, "meta_info": {}}, {**WHOLE[1], "meta_info": {}}]
)
@pytest.mark.parametrize("before", [[], WHOLE[1:2], WHOLE[1:4]])
def test_events_without_tokens_are_an_error(before, event):
    """Of another server, perhaps: a report names it, and other servers are asked on."""
    told = streams.Told()
    with pytest.raises(BenchmarkError, match="tells no tokens"):
        for x in [*before, event]:
            told.add(json.dumps(x).encode())
        told.reply()


def test_a_server_that_is_gone_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(BenchmarkError, match="ClientConnectorError"):
        agents.Run(f"http://127.0.0.1:{port}", LOAD, 100, 0).run()


def test_loads_are_named_and_changed():
    assert agents.parse_load("coding").sessions == 24
    assert agents.parse_load('coding={"sessions": 48}').sessions == 48
    for wrong in (
        "none", "coding={", 'coding={"sessions": 0}', 'coding={"size": 1}', 'coding={"name": "x"}',
        'coding={"sigma": -1}', 'coding={"sigma": "x"}', 'coding={"sigma": 1}', 'lognormal={"most_reply": 199}',
    ):  # fmt: skip
        with pytest.raises(argparse.ArgumentTypeError):
            agents.parse_load(wrong)


def test_lengths_are_log_normal_where_they_are_drawn(url):
    load = agents.LOADS["lognormal"]
    drawn = [load.lengths(random.Random(seed)) for seed in range(2000)]
    for lengths, median, most in zip(zip(*drawn, strict=True), (400, 200), (8000, 2000), strict=True):
        assert min(lengths) >= 1 and max(lengths) == most and 0.9 < statistics.median(lengths) / median < 1.1
        assert 1.0 < statistics.pstdev(math.log(x) for x in lengths) < 1.2
    found = agents.Run(url, agents.replace(load, sessions=4, at_once=1), 100, 0).run()
    expected = [load.lengths(random.Random(f"lognormal 0 {n}")) for n in range(4)]
    assert [len(x) for x in Played.asked] == [new for new, _ in expected]
    assert found["output_throughput"] == pytest.approx(sum(reply for _, reply in expected) / found["seconds"])
    assert 0 <= found["gap_s"] <= found["gap_p99_s"] < 1
    assert load.lengths(random.Random(0)) == load.lengths(random.Random(0))
    assert agents.LOADS["coding"].lengths(random.Random(0)) == (1000, 150)


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 10, 100, 192])
def test_quantiles_of_few_turns_are_those_of_numpy(turns):
    """Of two turns the 99th percentile was the shorter one, below the median."""
    times = sorted(random.Random(turns).random() for _ in range(turns))
    for share in (0.5, 0.99, 1.0):
        expected = np.quantile(times, share) if times else 0.0
        assert agents._quantile(times, share) == pytest.approx(expected)


def test_the_table_has_a_row_for_each_load_and_server():
    args = agents.parse_args(["--backends", "fa3:bf16", "--load", "tools"])
    titles = [load.title for load in args.load]
    found = {
        "output_throughput": 1234.0,
        "hit_rate": 0.5,
        "ttft_s": 1.0,
        "ttft_p99_s": 2.0,
        "gap_s": 0.01,
        "gap_p99_s": 0.1,
    }
    rows = agents.table(
        [
            {"backend": "a", "status": "ok", "loads": [{**found, "prefix_cache": {"pages_over_needed": 1.1}}]},
            {"backend": "b", "status": "ok", "loads": [found]},
            {"backend": "c", "status": "failed", "error": "no memory"},
        ],
        titles,
    )
    assert "| a | 1,234 | 0.500 | 1.00, 2.00 | 10.0, 100 | 1.10 |" in rows
    assert "no memory" in rows


LINES = [
    {"timestamp": 0, "input_length": 700, "output_length": 2, "hash_ids": [0, 1]},
    {"timestamp": 60_000, "input_length": 1000, "output_length": 3, "hash_ids": [0, 1]},
    {"timestamp": 60_100, "input_length": 512, "output_length": 1, "hash_ids": [2]},
    {"timestamp": 60_150, "input_length": 2000, "output_length": 1, "hash_ids": [0, 1, 2, 3]},
    {"timestamp": 60_200, "input_length": 600, "output_length": 4, "hash_ids": [0, 4]},
]
"""Requests of a trace; the last but one is the longest."""


def test_a_trace_is_replayed_at_its_times(url, tmp_path):
    """Its second minute, but for a request that is too long. Equal hash ids are equal tokens."""
    path = tmp_path / "some_trace.jsonl.xz"
    path.write_bytes(lzma.compress("\n".join(map(json.dumps, LINES)).encode()))
    read = trace.Trace.read(path, minutes=1, start=1, longest=1500)
    assert [round(x.at, 3) for x in read.requests] == [0, 0.1, 0.2] and read.left_out == 1
    assert read.title("some_trace", 2) == "some_trace: 3 of 704 + 3 on average in 0 s, 1 longer ones left out"
    found = trace.replay(url, read, 100, 0, speed=2)
    one, two, three = sorted(Played.asked, key=len, reverse=True)[0], *sorted(Played.asked, key=len)[:2]
    assert sorted(map(len, Played.asked)) == [512, 600, 1000] and all(50 <= x < 100 for x in one)
    assert one[:512] == three[:512] != two and one[512:600] != three[512:]
    assert one == read.requests[0].tokens(100, 0) != read.requests[0].tokens(100, 1)
    assert found["turns_answered"] == 3 and found["seconds"] >= 0.1 and found["left_out"] == 1
    assert found["output_throughput"] == pytest.approx(8 / found["seconds"])


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "a line of a trace has timestamp"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1}', "hash_ids"),
        ('{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}', "too few tokens or hash ids"),
        ('{"timestamp": 90000, "input_length": 5, "output_length": 1, "hash_ids": [1]}', "no request"),
    ],
)
def test_what_is_no_trace_is_refused(line, problem, tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    path.write_text(line, encoding="utf-8")
    with pytest.raises(SystemExit):
        trace.parse_args(["--trace", str(path), "--minutes", "1", "--backends", "fa3:bf16"])
    assert problem in capsys.readouterr().err
