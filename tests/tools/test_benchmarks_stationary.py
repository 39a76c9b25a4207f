"""The stationary load against a server that is only played: it runs so many requests at a time, and others wait."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from benchmarks import redraw
from benchmarks.serving import each_backend, stationary
from benchmarks.serving.client import BenchmarkError
from benchmarks.serving.compression_time import compression_time
from benchmarks.serving.stationary import Crowd, Stream, running_over_time, table, tokens_between

SLOTS, RATE, REPLY, SHARED = 5, 200, 900, 4


class Played:
    """``SLOTS`` requests at a time, each of ``RATE`` tokens a second in lists that grow, as SGLang streams them.

    What a machine that stands still keeps back comes at once when it goes on. ``written``: the tokens so far of each.
    """

    def __init__(self) -> None:
        self.slots = asyncio.Semaphore(SLOTS)
        self.running = self.waiting = 0
        self.least_waiting: list[int] = []
        self.asked: list[tuple[int, int]] = []
        self.openings: set[tuple[int, ...]] = set()
        self.prompts: set[tuple[int, ...]] = set()
        self.written: list[list[tuple[float, int]]] = []
        self.aborted = asyncio.Event()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        asked = body["sampling_params"]["max_new_tokens"]
        self.asked.append((len(body["input_ids"]), asked))
        self.openings.add(tuple(body["input_ids"][:SHARED]))
        self.prompts.add(tuple(body["input_ids"]))
        if sum(self.asked[-1]) == 10 + 13:
            return web.Response(status=400, text="refused by name")
        answer = web.StreamResponse()
        await answer.prepare(request)
        self.waiting += 1
        async with self.slots:
            self.waiting -= 1
            begun, written = time.perf_counter(), list[tuple[float, int]]()
            self.written.append(written)
            for number in range(1, asked + 1):
                if self.aborted.is_set():
                    break
                await asyncio.sleep(max(begun + number / RATE - time.perf_counter(), 0))
                if not self.aborted.is_set() and (number % 4 == 0 or number == asked):
                    line = {"output_ids": [7] * number, "meta_info": {"completion_tokens": number}}
                    self.least_waiting.append(self.waiting)
                    await answer.write(f"data: {json.dumps(line)}\n\n".encode())
                    written.append((time.perf_counter(), number))
        return answer

    async def abort(self, _: web.Request) -> web.Response:
        self.aborted.set()
        return web.Response()


async def against(
    reply: int, watch: Callable[[Played], None] = lambda played: None
) -> tuple[Played, Crowd, float, float]:
    played = Played()
    app = web.Application()
    app.router.add_post("/generate", played.generate)
    app.router.add_post("/abort_request", played.abort)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        crowd = Crowd(f"http://127.0.0.1:{port}", 100, 10, reply, 3, seed=0, shared=SHARED)
        bounds: list[float] = []
        bound = partial(mark, bounds)
        begin, end = await crowd.run(0.3, 2.0, most=50, watch=partial(watch, played), bound=bound)
        assert len(bounds) == 2 and bounds[0] <= begin < end <= bounds[1]
    finally:
        await runner.cleanup()
    return played, crowd, begin, end


def mark(moments: list[float]) -> None:
    moments.append(time.perf_counter())


def test_a_full_server_is_counted_while_some_always_wait(monkeypatch):
    monkeypatch.setattr(stationary, "FULL_AFTER", 0.4)
    watched: list[int] = []

    def watch(played: Played) -> None:
        before = len(played.least_waiting)
        time.sleep(0.2)
        watched.append(len(played.least_waiting) - before)

    played, crowd, begin, end = asyncio.run(against(REPLY, watch))
    assert watched[0] > 0, "the load goes on while it is watched"
    counted = sum(tokens_between(x.counts, begin, end) for x in crowd.streams)
    assert counted == pytest.approx(sum(tokens_between(x, begin, end) for x in played.written), abs=SLOTS * RATE / 5)
    assert counted > 0.5 * SLOTS * RATE * (end - begin)
    assert all(prompt + reply == 10 + REPLY for prompt, reply in played.asked)
    assert len(played.openings) == 1 and len(played.prompts) == len(played.asked)
    prompts = [prompt for prompt, _ in played.asked]
    filling = prompts.index(10)
    assert filling > SLOTS, "requests come until one has to wait"
    assert len(set(prompts[:filling])) == filling, "the first ones are at different places of their replies"
    assert len(prompts) > filling + 3 and set(prompts[filling:]) == {10}
    assert min(played.least_waiting[-40:]) >= 1, "as soon as one begins, another comes"
    running = [n for at, n in running_over_time(crowd.streams, begin - 1, end) if at >= 1]
    assert running and all(SLOTS - 1 <= n <= SLOTS + 1 for n in running)


def test_prompts_share_less_than_all(capsys):
    with pytest.raises(SystemExit):
        stationary.parse_args(["--backends", "triton:bf16", "--prompt", "64", "--shared", "64"])
    assert "--shared 64 leaves nothing" in capsys.readouterr().err


def test_a_refused_request_ends_it():
    with pytest.raises(BenchmarkError, match="refused by name"):
        asyncio.run(against(13))


def test_a_server_that_dies_is_one_backends_failure(tmp_path, monkeypatch):
    """Its requests are told as such, though nothing answers the abort; the others are measured."""

    @contextmanager
    def started(backend, setup, budget):
        yield SimpleNamespace(url="http://127.0.0.1:9", log_text=str), {"capacity_tokens": 9}

    monkeypatch.setattr(each_backend, "running", started)
    monkeypatch.setattr(stationary, "warm_up", lambda *args: None)
    given = ["--geometry", "llama3-8b", "--backends", "triton:bf16", "torch_native:bf16", "--output", str(tmp_path)]
    assert stationary.main(given) == 1
    records = json.loads((tmp_path / "stationary_llama3-8b.json").read_text())["records"]
    assert [x["status"] for x in records] == ["failed", "failed"]
    assert all("requests failed: Cannot connect" in x["error"] for x in records)


def test_a_server_without_tokens_is_no_result(monkeypatch):
    async def nothing(*args):
        return time.perf_counter() - 2.0, time.perf_counter()

    monkeypatch.setattr(Crowd, "run", nothing)
    monkeypatch.setattr(stationary, "warm_up", lambda *args: None)
    args = stationary.parse_args(["--backends", "triton:bf16"])
    setup = SimpleNamespace(shape=SimpleNamespace(vocab=100), seed=0, max_running=4)
    with pytest.raises(BenchmarkError, match="no token came"):
        stationary.measure(SimpleNamespace(url="", log_text=str), setup, args)  # type: ignore[arg-type]


def test_tokens_are_counted_between_two_moments():
    counts = [(1.0, 3), (2.0, 10), (3.0, 14)]
    assert tokens_between(counts, 1.5, 2.5) == 7
    assert tokens_between(counts, 0.0, 0.5) == tokens_between([], 0, 9) == tokens_between(counts, 3.0, 9.0) == 0
    assert tokens_between(counts, 0.0, 9.0) == 14
    streams = [Stream(0.0, counts, ended=True), Stream(0.0, [(2.5, 1)]), Stream(0.0)]
    assert running_over_time(streams, 0.0, 5.0) == [(0, 0), (1, 1), (2, 1), (3, 2), (4, 1)]


class Counting:
    """A server of which ``measure`` asks what it counted; each time 5 more compressions."""

    def __init__(self) -> None:
        self.url, self.compressions = "", 20

    def log_text(self) -> str:
        return ""

    def stats(self) -> dict[str, Any]:
        self.compressions += 5
        return {"admission": {"price": 1.0, "budget_compressions": self.compressions, "budget_waited_steps": 3}}

    def flush_cache(self) -> None:
        pass


@pytest.mark.parametrize("recorded", [True, False])
def test_compressions_are_those_of_the_counted_time(recorded, monkeypatch):
    """And where steps cannot be recorded, what was counted stays."""

    async def run(self, settle, seconds, most, watch, bound):
        now = time.perf_counter()
        self.streams.append(Stream(now, [(now, 1), (now + 2, 400), (now + 4, 800)]))
        bound()
        bound()
        watch()
        return now + 1.0, now + 4.0

    def steps(server, steps, folder):
        if not recorded:
            raise BenchmarkError("no profile was written")
        return {"traceEvents": [kernel(7, "nvjet_a", 0, 90), kernel(7, "sums_kernel", 90, 10)]}

    monkeypatch.setattr(Crowd, "run", run)
    monkeypatch.setattr(stationary, "warm_up", lambda *args: None)
    monkeypatch.setattr(stationary, "next_steps", steps)
    args = stationary.parse_args(["--backends", "triton:bf16", "--profile-steps", "2"])
    setup = SimpleNamespace(shape=SimpleNamespace(vocab=100), seed=0, max_running=4)
    record = stationary.measure(Counting(), setup, args)  # type: ignore[arg-type]
    assert record["counted"] == {"budget_compressions": 5, "budget_waited_steps": 0}
    assert record["admission"]["budget_compressions"] == 35
    text = table([{**record, "backend": "budget", "status": "ok", "capacity_tokens": 9}])
    assert "| 5 | 0 |" in text
    if recorded:
        assert record["compression"]["share"] == pytest.approx(0.1)
        assert "budget: a step took 0.05 ms on the GPU" in text and "10.0% of the time it compressed, 1 times" in text
    else:
        assert "budget: no steps were recorded: no profile was written" in text


def kernel(stream: int, name: str, start: float, duration: float) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "tid": stream, "name": name, "ts": start, "dur": duration}


def test_time_in_compression():
    """From a compression's first kernel to its last, pauses included; passes of the model are not part of it."""
    step = [kernel(7, "nvjet_sm90_a", 0, 50), kernel(7, "split_kernel", 50, 40), kernel(7, "elementwise", 90, 10)]
    judged = [kernel(7, "sums_kernel", 110, 10), kernel(7, "void at::native::elementwise", 125, 5)]
    moved = [kernel(7, "put_kernel", 150, 10), kernel(7, "return_kernel", 160, 40), kernel(7, "elementwise", 200, 9)]
    rest = [kernel(7, "nvjet_sm90_a", 300, 100), {"ph": "X", "cat": "cpu_op", "tid": 7, "name": "x", "ts": 0, "dur": 1}]
    found = compression_time({"traceEvents": [*rest, *moved, *judged, *step]})
    assert (found.times, found.beside) == (1, 0.0)
    assert found.mean_ms == pytest.approx(0.09) and found.share == pytest.approx(90 / 400)

    beside = [kernel(9, "gather_kernel", 40, 10), kernel(9, "tie_kernel", 80, 40)]  # 20 of it behind the pass
    again = [kernel(9, "gather_kernel", 5000, 100), kernel(7, "nvjet_sm90_a", 5200, 100)]
    found = compression_time({"traceEvents": [*step, *beside, *again]})
    assert found.times == 2, "a stream that does nothing for long has ended one"
    assert found.share == pytest.approx((80 + 100) / 5300) and found.beside == pytest.approx(60 / 5300)
    stock = compression_time({"traceEvents": step})
    assert (stock.times, stock.mean_ms, stock.share) == (0, 0.0, 0.0)
    with pytest.raises(BenchmarkError, match="no kernel"):
        compression_time({"traceEvents": []})


def test_the_table_compares_with_the_first():
    good = {"status": "ok", "capacity_tokens": 65536, "running_mean": 14.0, "finished": 3, "retracted": 0}
    text = table([
        {**good, "backend": "stock", "tokens_per_s": 2000.0, "admission": None},
        {**good, "backend": "budget", "tokens_per_s": 5000.0, "admission": {"budget_compressions": 99},
         "counted": {"budget_compressions": 12, "budget_waited_steps": 1}},
        {"backend": "broken", "status": "failed", "error": "no room"},
    ])  # fmt: skip
    assert "| 5,000 | 2.50 | 14.0 | 3 | 0 | 12 | 1 |" in text and "no room" in text


def test_one_chart_of_several_commands(tmp_path):
    def result(name, running):
        record = {"backend": name, "status": "ok", "running": running, "running_mean": 2.0}
        failed = {"backend": "broken", "status": "failed", "error": "no room"}
        load = {"prompt": 512, "output_tokens": 8192, "waiting": 8}
        data = {"kind": "stationary", "name": "stationary_nano", "load": load, "records": [record, failed]}
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
        return str(tmp_path / f"{name}.json")

    paths = [result("a", [[0, 1], [1, 3]]), result("b", [[0, 2], [1, 2], [2, 2]])]
    redraw.main([*paths, "--together", str(tmp_path / "both.png")])
    assert (tmp_path / "both.png").stat().st_size > 1000 and not (tmp_path / "a.png").exists()
    redraw.main(paths[:1])
    assert (tmp_path / "a.png").stat().st_size > 1000
    (tmp_path / "c.json").write_text(json.dumps({"kind": "serving"}))
    with pytest.raises(SystemExit):
        redraw.main([paths[0], str(tmp_path / "c.json"), "--together", str(tmp_path / "both.png")])
