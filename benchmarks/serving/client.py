"""One call of SGLang's own serving benchmark against a running server, and the check that it measured the load."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import site
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.serving.loads import Point
from benchmarks.serving.process import run_module
from sglang_diffkv.evaluate.server import CPU_ENV, OFFLINE_ENV, Server, has_gpu

MODULES = ("sglang.benchmark.serving", "sglang.bench_serving")
METRICS = (
    "duration",
    "completed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "output_throughput",
    "mean_ttft_ms",
    "median_ttft_ms",
    "p99_ttft_ms",
    "mean_itl_ms",
    "median_itl_ms",
    "p99_itl_ms",
    "mean_e2e_latency_ms",
    "median_e2e_latency_ms",
    "p99_e2e_latency_ms",
    "concurrency",
)


class BenchmarkError(RuntimeError):
    """The load did not run as asked; the message says what was wrong."""


@cache
def benchmark_module() -> str:
    """The module of the installed SGLang's serving benchmark."""
    for name in MODULES:
        try:
            if importlib.util.find_spec(name) is not None:
                return name
        except ModuleNotFoundError:
            continue
    raise BenchmarkError(f"the installed SGLang has none of the modules {', '.join(MODULES)}")


def client_args(port: int, model: str, point: Point, seed: int, output: Path) -> list[str]:
    """The benchmark client's arguments. The server is warmed up before, so the client does not."""
    return [
        *("--backend", "sglang", "--host", "127.0.0.1", "--port", str(port)),
        *("--model", model, "--tokenizer", model, "--seed", str(seed), "--warmup-requests", "0"),
        *("--disable-tqdm", "--output-details", "--output-file", str(output), *point.args),
    ]


@cache
def client_home(model: str) -> tempfile.TemporaryDirectory[str]:
    """HOME of the clients that ask about a model: they keep generated prompts there, by a name that says nothing of
    the model, and find them again for the next server."""
    return tempfile.TemporaryDirectory(prefix="serving-home-")


def run_point(server: Server, model: str, point: Point, seed: int, timeout: float | None) -> dict[str, float]:
    """Run one point; its metrics. Raises BenchmarkError if anything differs from what was asked."""
    with tempfile.TemporaryDirectory(prefix="serving-") as folder:
        output = Path(folder) / "result.jsonl"
        home = {"HOME": client_home(model).name, "PYTHONUSERBASE": site.getuserbase()}
        env = {**os.environ, **OFFLINE_ENV, **({} if has_gpu() else CPU_ENV), **home}
        env.pop("TRITON_INTERPRET", None)
        log = Path(folder) / "log"
        status = run_module(benchmark_module(), client_args(server.port, model, point, seed, output), env, log, timeout)
        if status is None:
            raise BenchmarkError(f"not finished after {timeout:.0f} s")
        if status or not output.is_file():
            printed = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
            lines = [line for line in printed.splitlines() if line.strip()] or ["(no output)"]
            raise BenchmarkError(f"the client ended with status {status}: {lines[-1][-300:]}")
        result = json.loads(output.read_text(encoding="utf-8").splitlines()[-1])
    check_result(result, point)
    return {name: result[name] for name in METRICS}


def check_result(result: dict[str, Any], point: Point) -> None:
    """Raise BenchmarkError unless every request was answered in full, its tokens streamed."""
    if errors := [text for text in result["errors"] if text]:
        raise BenchmarkError(f"{len(errors)} of {point.requests} requests failed: {errors[0].strip()[-300:]}")
    lengths = result["output_lens"]
    if len(lengths) != point.requests or result["completed"] != point.requests:
        raise BenchmarkError(f"{result['completed']} of {point.requests} requests completed, {len(lengths)} recorded")
    if wrong := [n for n in lengths if not point.shortest_output <= n <= point.output]:
        asked = "" if point.shortest == 1 else f"{point.shortest_output} to "
        raise BenchmarkError(f"{len(wrong)} answers do not have {asked}{point.output} tokens, one has {wrong[0]}")
    if missing := sum(ttft <= 0 for ttft in result["ttfts"]):
        raise BenchmarkError(f"{missing} answers have no first token")
    if any(result[name] is None for name in METRICS):
        raise BenchmarkError(f"no value for {[name for name in METRICS if result[name] is None]}")


def warm_up(server: Server, vocab: int, length: int, requests: int, seed: int) -> None:
    """A few requests of the load's length, so that what is compiled at first use is; then an empty prefix cache."""
    draw = random.Random(f"warm up {seed}")
    prompts = [[draw.randrange(vocab // 2, vocab) for _ in range(length)] for _ in range(min(requests, 8))]
    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(lambda ids: _generate(server, ids), prompts))
    server.flush_cache()


def _generate(server: Server, ids: Sequence[int]) -> None:
    server.generate({"input_ids": list(ids), "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}})
