"""Latency, step profile and charts of evaluations: what is counted, on servers and traces that are only played."""

from __future__ import annotations

import gzip
import itertools
import json
import statistics
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace

import pytest

from benchmarks import redraw
from benchmarks.figures import evaluated
from benchmarks.paths import NANO, REPOSITORY
from benchmarks.serving import each_backend, latency, step_profile
from benchmarks.serving import session as serving_session
from benchmarks.serving.client import BenchmarkError
from sglang_diffkv.evaluate.server import ServerError

DATA = REPOSITORY / "tests" / "data"


class Streaming(BaseHTTPRequestHandler):
    """Streams tokens; requests with a longer prompt begin later."""

    protocol_version = "HTTP/1.1"
    stops = False

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        time.sleep(0.02 * len(body["input_ids"]))
        try:
            for number in itertools.count():
                if number == body["sampling_params"]["max_new_tokens"] or (self.stops and number == 3):
                    self.wfile.write(b"0\r\n\r\n")
                    return
                self.wfile.write(b"a\r\ndata: {}\n\n\r\n")
                self.wfile.flush()
                time.sleep(0.02)
        except (BrokenPipeError, ConnectionResetError):
            pass

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Streaming) as httpd:
        Thread(target=httpd.serve_forever, daemon=True).start()
        yield SimpleNamespace(url=f"http://127.0.0.1:{httpd.server_address[1]}")
        httpd.shutdown()


def test_gaps_count_only_while_all_decode(server):
    streams = latency.Streams(server, [[1], [1] * 10], 6, 1000)
    firsts, gaps = streams.run()
    assert firsts[0] < firsts[1] and firsts[1] >= 0.2
    assert 10 <= len(gaps) <= 40, "the early request's first tokens do not count, nor what comes after"
    assert len(streams.times[0]) > len(streams.times[1]) >= 7
    assert 0.01 < statistics.median(gaps) < 0.1, "a client that stood still gets several at once"


def test_a_first_token_ends_the_stream(server):
    firsts, gaps = latency.Streams(server, [[1] * 5], 0, 1).run()
    assert firsts[0] >= 0.1 and not gaps


def test_replies_that_end_too_early_are_an_error(server, monkeypatch):
    monkeypatch.setattr(Streaming, "stops", True)
    with pytest.raises(BenchmarkError, match="while all 2 requests were decoding"):
        latency.Streams(server, [[1], [1] * 10], 6, 1000).run()


def test_decode_points():
    assert latency.parse_decode("8x1024") == (8, 1024)
    for text in ("8", "x3", "0x4", "8x", "ax4"):
        with pytest.raises(latency.argparse.ArgumentTypeError):
            latency.parse_decode(text)


def event(name: str, ts: float, dur: float, cat: str = "kernel") -> dict[str, object]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}


def test_a_step_s_kernels_by_part():
    trace = {
        "traceEvents": [
            event("split_kernel", 0, 100),
            event("finish_kernel", 100, 40),
            event("nvjet_tst_128x256_64x4_2x1_v_bz_coopB_TNT", 150, 300),
            event("BatchDecodeWithPagedKVCacheKernel", 500, 60),
            event("reserve_kernel", 600, 4),
            event("append_kernel", 610, 6),
            event("FusedAddRMSNormKernel", 620, 10),
            event("void at::native::vectorized_elementwise_kernel", 640, 20),
            event("cudaLaunchKernel", 0, 999, "cuda_runtime"),
        ]
    }
    found = step_profile.breakdown(trace, 2)
    assert found["parts_ms"] == pytest.approx(
        {
            "matrix products": 0.15,
            "attention": 0.08,
            "scores, search, joining of splits": 0.02,
            "other": 0.01,
            "norms, rotary embedding, activation": 0.005,
            "quantise and append": 0.003,
            "page management and compaction": 0.002,
        }
    )
    assert found["busy_ms"] == pytest.approx(0.27) and found["span_ms"] == pytest.approx(0.33)
    assert found["idle_ms"] == pytest.approx((10 + 50 + 40 + 6 + 4 + 10) / 2000), (
        "one second kernel ends before the next"
    )
    text = step_profile.table(
        [{"backend": "x", "status": "ok", **found}, {"backend": "y", "status": "failed", "error": "e"}]
    )
    assert "| attention | 0.080 (29.6%) |" in text and "y: e" in text
    with pytest.raises(BenchmarkError, match="no kernel"):
        step_profile.breakdown({"traceEvents": []}, 2)


@pytest.mark.parametrize("steps_of_a_prompt", [1, 2])
def test_a_profile_of_prompts_is_divided_by_the_prompts_that_it_holds(tmp_path, steps_of_a_prompt):
    """SGLang counts steps; a prompt may have a decode step behind it that is not worth speaking of."""
    length, steps, prompts = 9, 4, []

    class Reading:
        def __init__(self):
            self.left, self.kernels = 0, []

        def post(self, path, body):
            if path == "/start_profile":
                self.left = body["num_steps"]
                return SimpleNamespace(raise_for_status=lambda: None)
            prompts.append(len(body["input_ids"]))
            assert body["sampling_params"] == {"temperature": 0, "max_new_tokens": 1}
            begin = time.perf_counter()
            time.sleep(0.04)
            if self.left > 0:
                event = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": begin * 1e6}
                self.kernels.append({**event, "dur": (time.perf_counter() - begin) * 1e6})
                self.left -= steps_of_a_prompt
                if self.left <= 0:
                    with gzip.open(tmp_path / "x.json.gz", "wt", encoding="utf-8") as file:
                        json.dump({"traceEvents": self.kernels}, file)
            return SimpleNamespace(raise_for_status=lambda: None)

    args = SimpleNamespace(length=length, steps=steps)
    setup = SimpleNamespace(seed=0, shape=SimpleNamespace(vocab=100))
    trace, count = step_profile.record_prompts(Reading(), setup, args, tmp_path)
    assert count == steps // steps_of_a_prompt == len(trace["traceEvents"]) and set(prompts) == {length}
    mean = sum(x["dur"] for x in trace["traceEvents"]) / count
    assert step_profile.breakdown(trace, count)["parts_ms"]["matrix products"] == pytest.approx(mean / 1e3)


LAYER = ("nvjet_qkv", "append_kernel", "read_back_kernel", "prefill::PrefillWithKVCacheKernel", "stored_sums_kernel",
         "nvjet_o", "act_and_mul_kernel", "nvjet_down")  # fmt: skip


class Chunked:
    """A server whose profile holds passes of two layers: 10 us a kernel, 5 us between two, 100 us between passes."""

    def __init__(self, folder, chunk, layers=2):
        self.folder, self.chunk, self.layers = folder, chunk, layers
        self.prompts, self.events, self.left, self.now = [], [], 0, 1000

    def post(self, path, body):
        if path == "/start_profile":
            self.left = body["num_steps"]
        else:
            self.prompts.append(body["input_ids"])
            cached = max((len(x) for x in self.prompts[:-1] if body["input_ids"][: len(x)] == x), default=0)
            for _ in range(-(-(len(body["input_ids"]) - cached) // self.chunk)):
                self.one_pass()
        return SimpleNamespace(raise_for_status=lambda: None)

    def one_pass(self):
        if not self.left:
            return
        self.now += 95
        for name in ("embedding", *self.layers * LAYER, "nvjet_logits"):
            number = len(self.events)
            self.events.append({**event(name, self.now, 10), "args": {"correlation": number}})
            launch = event("cudaLaunchKernel", self.now - 500 - number % 2, 3, "cuda_runtime")
            self.events.append({**launch, "args": {"correlation": number}})
            self.now += 15
        self.left -= 1
        if not self.left:
            with gzip.open(self.folder / "x.json.gz", "wt", encoding="utf-8") as file:
                json.dump({"traceEvents": self.events}, file)


@pytest.mark.parametrize(("length", "cached", "passes"), [(250, 0, 3), (130, 120, 1)])
def test_passes_over_a_prompt_are_recorded_apart(tmp_path, length, cached, passes):
    setup = SimpleNamespace(seed=0, shape=SimpleNamespace(vocab=1000, all_layers=2))
    args = SimpleNamespace(chunk=100, repeat=1)
    found = step_profile.record_passes(Chunked(tmp_path, 100), setup, args, tmp_path, length, cached)
    assert [x["pass"] for x in found["passes"]] == list(range(1, passes + 1))
    for one in found["passes"]:
        assert one["parts_ms"] == pytest.approx(
            {
                "matrix products": 0.07,
                "attention": 0.02,
                "prefixes read back": 0.02,
                "scores of a prompt's tokens": 0.02,
                "quantise and append": 0.02,
                "norms, rotary embedding, activation": 0.02,
                "other": 0.01,
            }
        )
        assert one["span_ms"] == pytest.approx(0.265) and one["idle_ms"] == pytest.approx(0.085)
        assert one["host_ms"] == pytest.approx(0.258, abs=0.002)
    text = step_profile.tables_of_passes(
        [{"backend": "x", "status": "ok", "prompts": [found]}, {"backend": "y", "status": "failed", "error": "e"}]
    )
    assert text.count("| prefixes read back |") == passes and "y: e" in text and f"pass {passes}" in text


def test_a_profile_of_half_a_pass_is_an_error(tmp_path):
    setup = SimpleNamespace(seed=0, shape=SimpleNamespace(vocab=1000, all_layers=4))
    with pytest.raises(BenchmarkError, match="no multiple of 4 layers"):
        step_profile.record_passes(
            Chunked(tmp_path, 100, layers=2), setup, SimpleNamespace(chunk=100, repeat=1), tmp_path, 90, 0
        )
    for text in ("", "a", "5:5", "5:a", "-1"):
        with pytest.raises(step_profile.argparse.ArgumentTypeError):
            step_profile.parse_prompt(text)
    assert step_profile.parse_prompt("5") == (5, 0) and step_profile.parse_prompt("5:4") == (5, 4)


@pytest.mark.parametrize("together", [False, True])
def test_every_backend_is_measured_and_a_failed_one_is_named(server, monkeypatch, tmp_path, together):
    stopped = []

    @contextmanager
    def running(backend, setup, budget):
        if backend.name == "bad":
            raise ServerError("the server ended\nOutOfMemoryError: no")
        yield server, {"start_s": 1.0}
        stopped.append(backend.name)

    server.flush_cache = lambda: None
    monkeypatch.setattr(each_backend, "running", running)
    monkeypatch.setattr(serving_session, "running", running)
    monkeypatch.setattr(latency, "warm_up", lambda *_: None)
    args = ["--model", str(NANO), "--backends", "triton:bf16", "--diffkv", "bad={}", "--diffkv", "good={}"]
    args += ["--prompt", "5", "--decode", "2x3", "--tokens", "4", "--output", str(tmp_path)]
    assert latency.main([*args, *(["--start-together"] if together else [])]) == 1
    assert stopped == (["good", "triton bf16"] if together else ["triton bf16", "good"])
    data = json.loads((tmp_path / "latency_nano.json").read_text())
    assert [(x["backend"], x["status"]) for x in data["records"]] == [
        ("triton bf16", "ok"), ("bad", "failed"), ("good", "ok"),
    ]  # fmt: skip
    assert data["records"][2]["decode"][0]["n"] >= 6 and data["records"][2]["start_s"] == 1.0
    text = (tmp_path / "latency_nano.md").read_text()
    assert "OutOfMemoryError" in text and text.count("| good |") == 1


def test_an_evaluation_as_a_chart(tmp_path):
    results = json.loads((DATA / "evaluation_small_h200.json").read_text())
    data = evaluated.figure(results)
    found = {x.configuration: x for x in data.points}
    assert list(found) == list(results["configurations"]) and (data.model, data.ratio) == ("small", "pages")
    assert (found["stock"].series, found["fp8"].series) == ("stock bf16", "stock fp8")
    assert (found["fp8"].ratio_pages, found["a5w256r"].n) == (0.5, 1008)
    assert found["K8V4"].series != found["a5w256r"].series
    copy = tmp_path / "quality.json"
    copy.write_text(json.dumps(results))
    redraw.main([str(copy)])
    assert copy.with_suffix(".png").stat().st_size > 10000
    with pytest.raises(ValueError, match="no accuracies"):
        evaluated.figure({**results, "results": []})
