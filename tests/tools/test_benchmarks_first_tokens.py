"""Times to the first token: servers are asked in turns, with the same prompts; on servers that are only played."""

from __future__ import annotations

import asyncio
import json
import statistics
from concurrent.futures import Future
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import ClassVar

import pytest

from benchmarks.serving import first_tokens
from benchmarks.serving.client import BenchmarkError
from sglang_diffkv.evaluate.server import ServerError


class Played(BaseHTTPRequestHandler):
    """Keeps what it was asked as a prefix cache does."""

    protocol_version = "HTTP/1.1"
    order: ClassVar[list[tuple[int, tuple[int, ...]]]] = []
    known: ClassVar[dict[int, list[list[int]]]] = {}
    forgets = False

    def do_POST(self) -> None:
        body, port = json.loads(self.rfile.read(int(self.headers["Content-Length"]))), self.server.server_address[1]
        ids, count = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        known = [] if self.forgets else self.known.setdefault(port, [])
        cached = max((len(x) for x in known if ids[: len(x)] == x), default=0)
        known.append(ids)
        self.order.append((port, tuple(ids)))
        told = {"output_ids": [7] * count, "meta_info": {"completion_tokens": count, "cached_tokens": cached}}
        text = f"data: {json.dumps(told)}\n\ndata: [DONE]\n\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def servers(monkeypatch):
    monkeypatch.setattr(Played, "order", [])
    monkeypatch.setattr(Played, "known", {})
    monkeypatch.setattr(first_tokens, "PAUSE", 0.0)
    played = [ThreadingHTTPServer(("127.0.0.1", 0), Played) for _ in range(3)]
    for httpd in played:
        Thread(target=httpd.serve_forever, args=(0.01,), daemon=True).start()

    def server(httpd):
        port = httpd.server_address[1]
        return SimpleNamespace(url=f"http://127.0.0.1:{port}", flush_cache=lambda: Played.known.pop(port, None))

    yield dict(zip("abc", map(server, played), strict=True))
    for httpd in played:
        httpd.shutdown()
        httpd.server_close()


def asked(servers, prompts, repeat, found=None):
    found = {} if found is None else found
    asyncio.run(first_tokens.asked_in_turns(servers, prompts, repeat, 100, 0, found))
    return found


def test_each_round_asks_all_with_one_prompt_and_begins_with_another(servers):
    found = asked(servers, [(50, 0), (40, 30)], 4)
    ports = [int(server.url.rsplit(":", 1)[1]) for server in servers.values()]
    rounds = [[*ports[n % 3 :], *ports[: n % 3]] for n in range(4)]
    flat = [port for turn in rounds for port in turn]
    assert [port for port, _ in Played.order] == flat + ports + flat
    alone, before, behind = Played.order[:12], Played.order[12:15], Played.order[15:]
    for some in (alone, behind):
        prompts = [{ids for _, ids in some[at : at + 3]} for at in range(0, 12, 3)]
        assert all(len(turn) == 1 for turn in prompts) and len(set.union(*prompts)) == 4, "every round has its own"
    assert {len(ids) for _, ids in alone} == {50} and {len(ids) for _, ids in behind} == {40}
    assert len({ids for _, ids in before}) == 1 and all(ids[:30] == before[0][1] for _, ids in behind)
    for records in found.values():
        assert [x["prompt"] for x in records] == ["50", "40, 30 cached"]
        for x in records:
            assert x["ttft_ms"] == statistics.median(x["all_ms"]) and x["least_ms"] == min(x["all_ms"]) > 0


def test_a_prefix_that_is_not_cached_is_an_error(servers, monkeypatch):
    monkeypatch.setattr(Played, "forgets", True)
    with pytest.raises(BenchmarkError, match="a: 0 of 30 tokens were cached"):
        asked(servers, [(40, 30)], 1)


def test_what_was_cached_for_a_prompt_is_flushed_before_the_next(servers):
    asked(servers, [(50, 0), (40, 0)], 1)
    assert {len(known) for known in Played.known.values()} == {1}


def test_a_server_that_dies_is_named_and_what_was_measured_stays(servers):
    found: dict[str, list[dict]] = {}
    url, answers = servers["b"].url, first_tokens.Client.answered

    async def answered(self, prompt, wanted):
        if len(prompt) == 40 and self._url.startswith(url):
            raise BenchmarkError("a turn ended with ClientPayloadError")
        return await answers(self, prompt, wanted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_tokens.Client, "answered", answered)
        with pytest.raises(BenchmarkError, match="b: a turn ended with ClientPayloadError"):
            asked(servers, [(50, 0), (40, 0)], 1, found)
    assert {name: len(records) for name, records in found.items()} == {"a": 1, "b": 1, "c": 1}


@pytest.fixture
def reported(servers, monkeypatch, tmp_path):
    """Runs the command over servers that start or raise; what it wrote, and what it did meanwhile."""

    def run(starts, *more):
        given, did = [], []
        for result in starts:
            start: Future = Future()
            if isinstance(result, Exception):
                start.set_exception(result)
            else:
                start.set_result((servers[result], {"cache_gib": 8.0}))
            given.append(start)

        @contextmanager
        def all_running(*_):
            yield given

        monkeypatch.setattr(first_tokens, "all_running", all_running)
        monkeypatch.setattr(first_tokens, "warm_up", lambda *_: did.append("warm"))
        monkeypatch.setattr(first_tokens.time, "sleep", lambda seconds: did.append(seconds))
        setup = SimpleNamespace(seed=0, shape=SimpleNamespace(vocab=100))
        monkeypatch.setattr(first_tokens, "prepare", lambda *_: setup)
        options = ["--prompts", "40:30", "--repeat", "2", "--settle", "7", "--name", "x", "--output", str(tmp_path)]
        status = first_tokens.main([*options, "--backends", "fa3:bf16", "fa3:fp8_e4m3", *more])
        report = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
        return status, report, (tmp_path / "x.md").read_text(encoding="utf-8"), did

    return run


def test_servers_are_warm_and_rest_before_they_are_asked(reported):
    status, report, text, did = reported(["a", "b"])
    assert status == 0 and [*report["found"]] == ["fa3 bf16", "fa3 fp8_e4m3"] and did == ["warm", "warm", 7.0]
    assert "| 40, 30 cached |" in text and "failed" not in text


def test_the_report_names_what_failed(reported):
    """A server that does not start; the others are asked, and the status tells."""
    status, report, text, _ = reported(["a", ServerError("no memory")])
    assert status == 1 and report["failed"] == {"fa3 fp8_e4m3": "no memory"} and [*report["found"]] == ["fa3 bf16"]
    assert "| 40, 30 cached |" in text and "fa3 fp8_e4m3 failed: no memory" in text


def test_where_none_starts_the_report_says_why(reported):
    status, report, text, did = reported([ServerError("no memory"), ServerError("no model")])
    assert status == 1 and not report["found"] and not did
    assert "fa3 bf16 failed: no memory" in text and "fa3 fp8_e4m3 failed: no model" in text


def test_where_asking_fails_the_report_says_why(reported, monkeypatch):
    monkeypatch.setattr(Played, "forgets", True)
    status, report, text, _ = reported(["a", "b"])
    assert status == 1 and report["failed"] == {"asking": "fa3 bf16: 0 of 30 tokens were cached"}
    assert "asking failed" in text


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--repeat", "0"], "--repeat must be at least 1"),
        (["--prompts", "10:10"], "'10:10' is not LENGTH"),
        (["--settle", "-1"], "--settle must be a number"),
        (["--settle", "nan"], "--settle must be a number"),
        (["--diffkv", "a={}", "--diffkv", 'a={"page_tokens": 16}'], "each only once"),
        (["--model", "/no/such"], "--model: /no/such is not a model's folder: it has no config.json"),
    ],
)
def test_what_cannot_be_asked_is_refused(wrong, message, capsys):
    with pytest.raises(SystemExit):
        first_tokens.parse_args(["--backends", "fa3:bf16", *wrong])
    assert message in capsys.readouterr().err.splitlines()[-1], "the usage before it names all options"


def test_a_folder_that_describes_no_model_is_refused(tmp_path, capsys):
    for text, said in (("{}", "has no num_attention_heads"), ("[]", "is no JSON object"), ("{", "Expecting")):
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        with pytest.raises(SystemExit):
            first_tokens.parse_args(["--model", str(tmp_path)])
        assert said in capsys.readouterr().err.splitlines()[-1]
