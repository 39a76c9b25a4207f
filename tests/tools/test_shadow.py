"""The shadow proxy: what passes through, what is sampled, and what of a bad reference reaches clients (nothing)."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import re
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from sglang_diffkv.access import Access
from sglang_diffkv.evaluate.distribution import Comparison, compare, pack
from sglang_diffkv.shadow import cli
from sglang_diffkv.shadow.exchange import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    MOST_BYTES,
    REASONS,
    Exchange,
    LeftOut,
    exchange_of_line,
    question_of,
)
from sglang_diffkv.shadow.judge import Judge, Judged, obstacle
from sglang_diffkv.shadow.report import lines, metrics, render
from sglang_diffkv.shadow.sampler import Sampler
from sglang_diffkv.shadow.tally import PARTED, POSITIONS, PROMPTS, Tally
from tests.tools.certificates import make_certificate
from tests.tools.fake_server import FakeServer
from tests.tools.shadowing import FakeModel, Shadow
from tests.tools.test_page import ATTACK, check_page

BODY = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4}}
NOBODY = "http://127.0.0.1:9"
SERVER = "http://localhost:80"
"""Which is not asked."""


def counting(ids: Any) -> list[tuple[float, int]]:
    """A model that counts."""
    return [(math.log(0.7), ids[-1] + 1), (math.log(0.2), 0), (math.log(0.05), 1)]


def doubting(ids: Any) -> list[tuple[float, int]]:
    """Another one, of another opinion behind every multiple of 4."""
    first, second = (0.3, 0.6) if ids[-1] % 4 == 0 else (0.6, 0.3)
    return sorted([(math.log(first), ids[-1] + 1), (math.log(second), 0), (math.log(0.05), 1)], reverse=True)


def settled(shadow: Shadow, count: int) -> dict[str, Any]:
    """The figures once so many samples are judged or left out."""
    deadline = time.monotonic() + 20
    while True:
        told = shadow.told()
        if told["requests"]["judged"] + sum(told["requests"]["left_out"].values()) >= count:
            return told
        assert time.monotonic() < deadline, told["requests"]
        time.sleep(0.02)


# What is asked


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (GENERATE, {"input_ids": [1, 2], "extra_key": "t"}, {"ids": (1, 2), "more": {"extra_key": "t"}}),
        (GENERATE, {"input_ids": [[1, 2], [3]], "extra_key": ["a", "b"]}, {"ids": (1, 2), "more": {"extra_key": "a"}}),
        (GENERATE, {"text": ["x", "y"], "sampling_params": [{"max_new_tokens": 3}]}, {"text": "x", "most_tokens": 3}),
        (
            GENERATE,
            {"text": "x", "sampling_params": {"custom_params": {"diffkv": {"tier": "high"}, "mine": 1}}},
            {"text": "x", "more": {"custom_params": {"diffkv": {"tier": "high"}}}},
        ),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 3}, {"text": "x", "most_tokens": 3}),
        (COMPLETIONS, {"prompt": [4, 5], "max_tokens": None}, {"ids": (4, 5)}),
        (
            CHAT,
            {
                "messages": [{"role": "user", "content": "x"}],
                "max_completion_tokens": 2,
                "temperature": 1,
                "tools": None,
            },
            {"chat": {"messages": [{"role": "user", "content": "x"}]}, "most_tokens": 2},
        ),
    ],
)
def test_what_of_a_request_is_asked_again(path: str, body: dict[str, Any], expected: dict[str, Any]) -> None:
    found = question_of(Exchange(path, json.dumps(body).encode()))
    empty: dict[str, Any] = {"ids": (), "text": "", "chat": None, "most_tokens": None, "more": {}}
    assert vars(found) == {**empty, **expected}


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (GENERATE, b"{", "unreadable"),
        (GENERATE, b"[1]", "unreadable"),
        (GENERATE, b"[" * 100_000, "unreadable"),
        (GENERATE, b"\xff", "unreadable"),
        (GENERATE, {"text": ""}, "unreadable"),
        (GENERATE, {"input_ids": []}, "unreadable"),
        (GENERATE, {"input_ids": [1, "a"]}, "unreadable"),
        (GENERATE, {"input_ids": [True]}, "unreadable"),
        (GENERATE, {"text": "x", "image_data": ["y"]}, "not_text"),
        (GENERATE, {"input_embeds": [[0.1]]}, "not_text"),
        (GENERATE, {"text": "x", "lora_path": "y"}, "lora"),
        (COMPLETIONS, {"model": "m:adapter", "prompt": "x"}, "lora"),
        (COMPLETIONS, {"prompt": {"a": 1}}, "unreadable"),
        (CHAT, {"messages": "x"}, "unreadable"),
        (CHAT, {"messages": [{"content": [{"type": "image_url"}]}]}, "not_text"),
        (CHAT, {"messages": [{"content": ["x"]}]}, "not_text"),
    ],
)
def test_what_is_not_judged(path: str, body: Any, reason: str) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(LeftOut) as found:
        question_of(Exchange(path, data))
    assert found.value.reason == reason and str(found.value) == REASONS[found.value.reason]


def test_lines_of_a_file() -> None:
    assert exchange_of_line({"messages": []}).path == CHAT and exchange_of_line({"prompt": "x"}).path == COMPLETIONS
    assert exchange_of_line(BODY) == Exchange(GENERATE, json.dumps(BODY).encode())
    assert exchange_of_line({"url": CHAT, "body": {"a": 1}}) == Exchange(CHAT, b'{"a": 1}')
    with pytest.raises(LeftOut):
        exchange_of_line({"url": "/v1/embeddings", "body": {"input": "x"}})


# The judge


def test_both_are_asked_about_the_same_tokens() -> None:
    """The comparison is that of ``evaluate``; the server is asked as the client did, with its key and namespace."""
    body = {**BODY, "extra_key": "t", "temperature": 0.9, "stream": True}
    with FakeModel(doubting) as server, FakeModel(counting) as reference:
        found = Judge(server.url, reference.url).judge(Exchange(GENERATE, json.dumps(body).encode()))
    asked, known = server.asked[-1], reference.asked[-1]
    assert asked["input_ids"] == BODY["input_ids"] and asked["extra_key"] == "t" and "stream" not in asked
    assert asked["sampling_params"] == {"temperature": 0, "max_new_tokens": 4}
    assert known["input_ids"] == [5, 6, 7, 8, 0, 0, 0] and "extra_key" not in known
    behind = [[5, 6, 7], [5, 6, 7, 8], [5, 6, 7, 8, 0], [5, 6, 7, 8, 0, 0]]
    expected = compare(*(pack([model(ids) for ids in behind]) for model in (counting, doubting)))
    assert np.array_equal(found.comparison.divergence, expected.divergence) and expected.divergence.max() > 0.1
    assert found.parted == 1 and found.comparison.agreeing.tolist() == [True, False, False, False]
    assert found.prompt_tokens == 3


def test_text_is_split_by_the_server_itself() -> None:
    with FakeModel(counting) as server, FakeModel(counting) as reference:
        judge = Judge(server.url, reference.url, reply_tokens=3)
        for path, body in (
            (COMPLETIONS, {"prompt": "ab", "max_tokens": 99}),
            (CHAT, {"messages": [{"role": "u", "content": "b"}]}),
        ):
            judge.judge(Exchange(path, json.dumps(body).encode()))
    assert [x["input_ids"] for x in server.asked] == [[97, 98], [60, 117, 62, 98]]
    assert [len(x["input_ids"]) for x in reference.asked] == [5, 7]


LOSSLESS = {"tiers": ["BF16"], "policy": {"name": "uniform"}}


def told_by(values: Any, **more: Any) -> dict[str, Any]:
    stats = {"diffkv": {"configuration": {"values": values}}}
    return {"attention_backend": "diffkv", "kv_cache_dtype": "auto", "internal_states": [stats], **more}


@pytest.mark.parametrize(
    ("info", "problem"),
    [
        ({"attention_backend": "fa3", "kv_cache_dtype": "auto"}, ""),
        ({"attention_backend": "fa3", "kv_cache_dtype": "fp8_e4m3"}, "rounds its KV cache (fp8_e4m3)"),
        (told_by(LOSSLESS), ""),
        (told_by({**LOSSLESS, "tiers": ["K8V8"]}), "the reference compresses"),
        (told_by({"tiers": ["BF16", "K4V2"], "policy": {"name": "diffkv"}}), "the reference compresses"),
        (told_by(None), "the reference compresses"),
        ({"attention_backend": "diffkv"}, "the reference compresses"),
        ([], ""),
    ],
)
def test_what_may_be_a_reference(info: Any, problem: str) -> None:
    found = obstacle(info)
    assert problem in found and bool(found) == bool(problem)


def left_out(judge: Judge, body: dict[str, Any] = BODY) -> str:
    with pytest.raises(LeftOut) as found:
        judge.judge(Exchange(GENERATE, json.dumps(body).encode()))
    return found.value.reason


def test_servers_that_do_not_answer() -> None:
    with FakeModel(counting) as up, FakeModel(counting, key="k") as locked, FakeModel(counting, offset=1) as other:
        assert left_out(Judge(up.url, NOBODY)) == "reference_down"
        assert left_out(Judge(NOBODY, up.url)) == "server_down"
        assert left_out(Judge(up.url, locked.url)) == "reference_refused"
        assert left_out(Judge(locked.url, up.url)) == "server_refused"
        judge = Judge(up.url, other.url)
        assert left_out(judge) == "reference_unfit" and "splits text into other tokens" in judge.problem
        assert not up.asked and not other.asked, "an unfit reference is asked nothing"
        assert Judge(locked.url, locked.url, access=Access("k"), reference_access=Access("k")).judge(
            Exchange(GENERATE, json.dumps(BODY).encode())
        )
    with FakeModel(lambda ids: []) as silent, FakeModel(counting) as up:
        assert left_out(Judge(up.url, silent.url)) == "reference_refused", "it told no tokens"


def test_an_unfit_reference_is_looked_at_again_later() -> None:
    with FakeModel(counting) as server, FakeModel(counting, info=told_by({"tiers": ["K8V4"]})) as reference:
        judge = Judge(server.url, reference.url)
        assert left_out(judge) == "reference_unfit" and "compresses" in judge.problem
        reference.info = told_by(LOSSLESS)
        assert left_out(judge) == "reference_unfit"
        judge._checked_at -= 60
        assert judge.judge(Exchange(GENERATE, json.dumps(BODY).encode())) and not judge.problem


# Figures


def some_tally(seed: int = 0, count: int = 40) -> tuple[Tally, list[Judged]]:
    source, tally, every = np.random.default_rng(seed), Tally(), []
    for _ in range(count):
        length = int(source.integers(1, 90))
        agreeing, divergence = source.random(length) < 0.97, source.random(length)
        comparison = Comparison(divergence, agreeing, np.full(length, 0.9))
        every.append(Judged(int(source.integers(1, 5000)), 1, comparison))
        tally.add(every[-1])
    return tally, every


def test_figures_are_those_of_numpy() -> None:
    tally, every = some_tally()
    told = tally.as_json()
    of_requests = [x.comparison.divergence.mean() for x in every]
    assert told["divergence"]["mean"] == pytest.approx(np.mean(of_requests))
    assert told["divergence"]["error"] == pytest.approx(np.std(of_requests, ddof=1) / math.sqrt(len(every)))
    joined = np.concatenate([x.comparison.agreeing for x in every])
    assert told["tokens"]["tokens"] == len(joined) and told["tokens"]["agreeing"] == joined.sum()
    assert told["covered"] == pytest.approx(0.9)
    at = [x.parted for x in every if x.parted is not None]
    assert told["parted"]["requests"] == len(at) and told["parted"]["mean_token"] == pytest.approx(np.mean(at))
    assert told["parted"]["counts"] == np.histogram(at, [-1, *(x + 0.5 for x in PARTED), np.inf])[0].tolist()
    lengths = [x.prompt_tokens for x in every]
    assert [x["requests"] for x in told["by_prompt"]] == np.histogram(lengths, [*PROMPTS, np.inf])[0].tolist()
    places = np.concatenate([np.arange(len(x.comparison.agreeing)) for x in every])
    assert [x["tokens"] for x in told["by_position"]] == np.histogram(places, [*POSITIONS, np.inf])[0].tolist()


def test_prometheus_reads_them() -> None:
    tally, _ = some_tally()
    for _ in range(3):
        tally.leave_out("reference_down")
    told = tally.as_json()
    found = {x.name: x for x in text_string_to_metric_families(metrics(told, "why"))}
    samples = {(x.name, *x.labels.values()): x.value for family in found.values() for x in family.samples}
    assert samples["diffkv_shadow_left_out_requests_total", "reference_down"] == 3
    assert {x.labels["reason"] for x in found["diffkv_shadow_left_out_requests"].samples} == {*REASONS}
    assert samples[("diffkv_shadow_reference_unfit",)] == 1 and samples[("diffkv_shadow_judged_requests_total",)] == 40
    assert samples["diffkv_shadow_parted_token_bucket", "+Inf"] == told["parted"]["requests"]
    total = told["divergence"]["mean"] and told["tokens"]["divergence"] * told["tokens"]["tokens"]
    assert samples[("diffkv_shadow_divergence_nats_total",)] == pytest.approx(total)
    assert [*text_string_to_metric_families(metrics(Tally().as_json(), ""))]


@pytest.mark.parametrize("judged", [0, 1, 40])
def test_the_page_shows_them(judged: int) -> None:
    tally = some_tally(count=judged)[0]
    tally.leave_out("lora")
    about = {"url": ATTACK, "reference": ATTACK, "share": 0.01, "problem": ATTACK if judged == 1 else ""}
    told = tally.as_json()
    found = check_page(render(told, about, refresh=True))
    assert "for a LoRA adapter" in found.text and found.named("form") == [{"method": "get"}]
    assert ("not known yet" in found.text) == (judged == 0)
    assert ("Nothing is judged" in found.text) == (judged == 1)
    assert len(lines(told)) >= 6 and "65,536 and more" not in found.text
    json.dumps(told, allow_nan=False)


# The proxy


class _Echo(BaseHTTPRequestHandler):
    """Answers with what it was asked, in the form that the path names."""

    protocol_version = "HTTP/1.1"

    def _any(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while (length := int(self.rfile.readline(), 16)) > 0:
                body += self.rfile.read(length)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(size)
        headers = {name.lower(): x for name, x in self.headers.items()}
        digest = hashlib.sha256(body).hexdigest()
        told = {"method": self.command, "path": self.path, "headers": headers, "size": len(body), "digest": digest}
        data = gzip.compress(json.dumps(told).encode())
        status = 307 if self.path.startswith("/moved") else 404 if self.path.startswith("/none") else 200
        self.send_response(status, "As It Is")
        if self.path.startswith("/cut"):
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"begun")
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.send_header("Content-Encoding", "gzip")
        self.send_header("Set-Cookie", "a=1")
        self.send_header("Set-Cookie", "b=2")
        self.send_header("Content-Type", "application/x-odd")
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = _any

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def echo() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Echo)
    server.handle_error = lambda *args: None  # type: ignore[method-assign]
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_requests_and_answers_pass_through_as_they_are() -> None:
    """Whatever the method, path, status, form and size; a redirect is the client's to follow."""
    with echo() as url, Shadow(url, NOBODY, share=0.5) as shadow:
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE"):
            for path in ("/", "/a%2Fb/%C3%A4?x=%20y&z=+", "/none", "/moved?a"):
                asked = {"headers": {"X-Own": "ä".encode(), "Authorization": "Bearer k"}, "data": b"x" * 1000}
                reply = requests.request(method, shadow.url + path, allow_redirects=False, timeout=10, **asked)
                told = reply.json()
                assert (told["method"], told["path"], told["size"]) == (method, path, 1000)
                assert told["headers"]["authorization"] == "Bearer k" and told["headers"]["host"] == url[7:]
                assert told["headers"]["user-agent"].startswith("python-requests")
                assert reply.reason == "As It Is" and reply.headers["Content-Type"] == "application/x-odd"
                assert reply.raw.headers.getlist("Set-Cookie") == ["a=1", "b=2"]
        head = requests.head(shadow.url, timeout=10)
        assert head.status_code == 200 and head.text == "" and int(head.headers["Content-Length"]) > 100
        large = requests.post(shadow.url, data=iter([b"y" * (1 << 20)] * 9), timeout=20).json()
        assert large["size"] == 9 << 20
        assert requests.get(shadow.url, headers={"Connection": "upgrade", "Upgrade": "websocket"}, timeout=9).status_code == 501  # fmt: skip # noqa: E501
        assert shadow.told()["requests"]["forwarded"] == 22


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("encoding", "pack_body"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_a_packed_body_reaches_the_server_as_it_is(
    encoding: str, pack_body: Callable[[bytes], bytes], chunked: bool
) -> None:
    """Its length and its encoding are those of the client, also where a copy is kept."""
    body = pack_body(json.dumps({"text": "many words " * 5000}).encode())
    with echo() as url, Shadow(url, NOBODY, share=1.0) as shadow:
        for path in ("/other", GENERATE):
            asked = {"data": iter([body[:50], body[50:]]) if chunked else body, "timeout": 10}
            told = requests.post(shadow.url + path, headers={"Content-Encoding": encoding}, **asked).json()
            assert (told["size"], told["digest"]) == (len(body), hashlib.sha256(body).hexdigest())
            assert told["headers"]["content-encoding"] == encoding
            assert told["headers"].get("content-length") == (None if chunked else str(len(body)))
        assert settled(shadow, 1)["requests"]["left_out"] == {"unreadable": 1}


def test_a_server_that_is_gone_or_breaks_off() -> None:
    """The client never takes a part for the whole."""
    with Shadow(NOBODY, NOBODY, share=1.0) as shadow:
        reply = requests.post(shadow.url + GENERATE, json=BODY, timeout=10)
        assert reply.status_code == 502 and "does not answer" in reply.text
        assert settled(shadow, 1)["requests"]["left_out"] == {"not_answered": 1}
    with echo() as url, Shadow(url, NOBODY, share=1.0) as shadow:
        with pytest.raises(requests.RequestException):
            requests.get(shadow.url + "/cut", timeout=10)
        assert requests.get(shadow.url, timeout=10).ok


def test_a_share_is_sampled_and_what_is_too_large_is_not_kept() -> None:
    with FakeModel(counting) as server, FakeModel(counting) as reference, Shadow(
        server.url, reference.url, share=0.5
    ) as shadow:  # fmt: skip
        drawn = iter([0.4, 0.5, 0.9, 0.0, 0.1])
        shadow.proxy.draw = lambda: next(drawn)
        for _ in range(4):
            assert requests.post(shadow.url + GENERATE, json=BODY, timeout=10).json()["output_ids"] == [8, 9, 10, 11]
        requests.post(shadow.url + "/v1/tokenize", json={"prompt": "x"}, timeout=10)  # which draws nothing
        requests.post(shadow.url + GENERATE, json={**BODY, "rid": "x" * MOST_BYTES}, timeout=20)
        told = settled(shadow, 3)["requests"]
    assert (told["forwarded"], told["sampled"], told["judged"]) == (6, 3, 2) and told["left_out"] == {"too_large": 1}


@pytest.mark.parametrize("kind", ["slow", "down", "wrong", "unfit"])
def test_a_bad_reference_reaches_no_client(kind: str) -> None:
    """Answers are as fast and as right as without it, and no more than some samples wait."""
    wrong: Callable[[Any], Any] = lambda ids: [("x", None)]  # noqa: E731
    info = told_by({"tiers": ["K8V4"]}) if kind == "unfit" else None
    with FakeModel(counting) as server, FakeModel(
        wrong if kind == "wrong" else counting, delay=5.0 if kind == "slow" else 0.0, info=info
    ) as reference:  # fmt: skip
        url = NOBODY if kind == "down" else reference.url
        with Shadow(server.url, url, share=1.0, most=2, timeout=4.0) as shadow:
            begun = time.monotonic()
            for _ in range(12):
                reply = requests.post(shadow.url + GENERATE, json=BODY, timeout=10)
                assert reply.json()["output_ids"] == [8, 9, 10, 11]
            assert time.monotonic() - begun < 3
            expected = {"slow": "queue_full", "down": "reference_down", "unfit": "reference_unfit"}
            told = settled(shadow, 8 if kind == "slow" else 12)
    found = told["requests"]["left_out"]
    assert told["requests"]["judged"] == 0 and (kind != "slow" or told["requests"]["waiting"] <= 2)
    assert found.get(expected[kind], 0) >= 8 if kind != "wrong" else sum(found.values()) == 12


def test_an_error_of_a_sample_ends_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    with FakeModel(counting) as server, FakeModel(counting) as reference:
        tally, judge = Tally(), Judge(server.url, reference.url)
        sampler = Sampler(judge, tally, most=4)
        right, judge.judge = judge.judge, lambda exchange: 1 / 0  # type: ignore[assignment, method-assign, return-value]
        sampler.put(Exchange(GENERATE, b"a secret"))
        deadline = time.monotonic() + 10
        while not tally.as_json()["requests"]["left_out"] and time.monotonic() < deadline:
            time.sleep(0.01)
        judge.judge = right  # type: ignore[method-assign]
        sampler.put(Exchange(GENERATE, json.dumps(BODY).encode()))
        sampler.finish()
    assert tally.as_json()["requests"]["judged"] == 1 and tally.as_json()["requests"]["left_out"] == {"failed": 1}
    assert "ZeroDivisionError" in caplog.text and "secret" not in caplog.text


def test_figures_are_told_to_this_machine_alone() -> None:
    with echo() as url, Shadow(url, NOBODY, share=0.01) as shadow:
        port = shadow.report.rpartition(":")[2]
        assert (
            requests.get(shadow.report, timeout=10).headers["Content-Security-Policy"].startswith("default-src 'none'")
        )
        assert requests.get(f"http://localhost:{port}/metrics", timeout=10).text.startswith("# HELP diffkv_shadow_")
        for name in ("elsewhere.example", f"elsewhere.example:{port}", "127.0.0.1.example"):
            assert requests.get(shadow.report, headers={"Host": name}, timeout=10).status_code == 421
        assert requests.get(f"{shadow.report}/other", timeout=10).status_code == 404
        assert requests.get(f"{shadow.url}/metrics", timeout=10).json()["path"] == "/metrics", "is the server's"


# The command


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "--reference"),
        (["--reference", "x"], "is no address"),
        (["--reference", NOBODY, "--share", "0"], "above 0 and at most 1"),
        (["--reference", NOBODY, "--share", "1.5"], "above 0 and at most 1"),
        (["--reference", NOBODY, "--queue", "0"], "from 1 to 256"),
        (["--reference", NOBODY, "--timeout", "0"], "from 1 to"),
        (["--reference", NOBODY, "--html", "x.html"], "are of a --file"),
        (["--reference", NOBODY, "--reference-api-key", "a b"], "has a space"),
        (["--reference", f"{SERVER}/v1"], "without /v1"),
        (["--reference", SERVER], "--url and --reference are one server"),
        (["--reference", "HTTP://LocalHost/"], "--url and --reference are one server"),
        (["--reference", NOBODY, "--file", "/none/such"], '"/none/such" cannot be read: No such file or directory'),
        (["--reference", NOBODY, "--file", "/"], '"/" is a folder, not a file'),
    ],
)
def test_what_the_command_refuses(more: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--url", SERVER, *more])
    assert ended.value.code == 2 and said in " ".join(capsys.readouterr().err.split())


def test_keys_are_each_server_s(monkeypatch: pytest.MonkeyPatch) -> None:
    both = ["--url", SERVER, "--reference", NOBODY]
    monkeypatch.delenv("SGLANG_API_KEY", raising=False)
    assert cli.parse_args(both).reference_access.api_key is None
    monkeypatch.setenv("SGLANG_API_KEY", "one")
    args = cli.parse_args(both)
    assert (args.access.api_key, args.reference_access.api_key) == ("one", "one")
    monkeypatch.setenv("SGLANG_REFERENCE_API_KEY", "two")
    args = cli.parse_args(both)
    assert (args.access.api_key, args.reference_access.api_key) == ("one", "two") and "two" not in repr(args)
    assert cli.parse_args([*both, "--reference-api-key", "three"]).reference_access.api_key == "three"


def test_a_taken_port_and_a_file_without_a_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = ["--port", "0", "--report-port", str(taken.getsockname()[1])]
        assert cli.main(["--url", SERVER, "--reference", NOBODY, *ports]) == 1
    told = capsys.readouterr().err
    assert told.startswith("sglang_diffkv.shadow: ") and ports[-1] in told and "name another --host" in told
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b"x" * (MOST_BYTES * 2) + b"\n[1]\n")
    with FakeModel(counting) as server, FakeModel(counting) as reference:
        assert cli.main(["--url", server.url, "--reference", reference.url, "--file", str(path)]) == 1
    printed = capsys.readouterr()
    assert "was judged" in printed.err and "larger than 4 MiB" in printed.out


@pytest.mark.parametrize("gone", ["--url", "--reference"])
def test_a_file_needs_both_servers(gone: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence says which is not there, and no table of what is not known."""
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps(BODY) + "\n")
    with FakeModel(counting) as there:
        urls = {"--url": there.url, "--reference": there.url, gone: NOBODY}
        assert cli.main([*(x for pair in urls.items() for x in pair), "--file", str(path)]) == 1
    assert capsys.readouterr() == ("", f"sglang_diffkv.shadow: {NOBODY} does not answer\n") and not there.asked


def test_a_file_needs_a_fit_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps(BODY) + "\n")
    with FakeModel(counting) as server, FakeModel(counting, offset=1) as other:
        assert cli.main(["--url", server.url, "--reference", other.url, "--file", str(path)]) == 1
        assert not server.asked and not other.asked
    out, err = capsys.readouterr()
    assert not out and "splits text into other tokens" in err


def test_keys_and_https(tmp_path: Path) -> None:
    """A client's key is passed on; samples are asked with the proxy's own, over TLS too."""
    certificate = make_certificate(tmp_path)
    with FakeServer(keys=lambda path: "k", certificate=certificate) as server:
        access = Access("k", cacert=certificate[0])
        with Shadow(server.url, NOBODY, share=1.0, access=access) as shadow:
            assert requests.get(f"{shadow.url}/v1/models", timeout=10).status_code == 401
            shown = {"Authorization": "Bearer k"}
            assert requests.get(f"{shadow.url}/v1/models", headers=shown, timeout=10).json()["data"]
        with Shadow(server.url, NOBODY, share=1.0) as untrusting:
            assert requests.get(f"{untrusting.url}/v1/models", headers=shown, timeout=10).status_code == 502


def test_the_command_serves_until_it_is_told_to_end() -> None:
    ports = ["--port", "0", "--report-port", "0"]
    with FakeModel(counting) as server, FakeModel(counting) as reference:
        command = [sys.executable, "-m", "sglang_diffkv.shadow", "--url", server.url, "--reference", reference.url]
        with subprocess.Popen([*command, "--share", "1", *ports], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            found = re.fullmatch(r"(\S+) answers for (\S+); figures: (\S+)/\n", process.stdout.readline())
            assert found and found[2] == server.url
            assert requests.post(found[1] + GENERATE, json=BODY, timeout=10).json()["output_ids"] == [8, 9, 10, 11]
            deadline = time.monotonic() + 20
            while not requests.get(f"{found[3]}/json", timeout=10).json()["requests"]["judged"]:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            process.terminate()
            assert process.wait(20) == 0


def test_the_command_says_who_does_not_answer(tmp_path: Path) -> None:
    """And serves clients all the same: a reference may come later."""
    ports, said = ["--port", "0", "--report-port", "0"], tmp_path / "said"
    with FakeModel(counting) as server, said.open("w") as errors:
        command = [sys.executable, "-m", "sglang_diffkv.shadow", "--url", server.url, "--reference", NOBODY, *ports]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout is not None
            address = process.stdout.readline().split()[0]
            assert requests.post(address + GENERATE, json=BODY, timeout=10).ok
            process.terminate()
            assert process.wait(20) == 0
    assert f"{NOBODY} does not answer. Until it does, no request is judged" in said.read_text()
    assert server.url not in said.read_text()
