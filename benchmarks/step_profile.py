"""Where the time of a decode step goes: kernel times by part, from SGLang's own profiler.

Each backend gets a server of its own. All requests decode together when ``--steps`` steps are recorded; what they
took on the GPU is added up by part (matrix products, attention, its scores, page management, ...). Example:

    python -m benchmarks.step_profile --geometry llama3-8b --kv-gib 24 --batch 128 --length 1024 \\
        --backends flashinfer:bf16 --diffkv 'default={}'

NAME.json and NAME.md in the output folder. Exit code 1 if a server failed. A GPU is needed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import requests

from benchmarks.budget import Budget
from benchmarks.provenance import headline, provenance
from benchmarks.serving import add_model_arguments, model_name, prepare
from benchmarks.serving_backends import Backend, parse_backend, parse_diffkv
from benchmarks.serving_client import BenchmarkError, warm_up
from benchmarks.serving_session import FAILED, GUESSES, OK, Record, Setup, all_running, running, short
from sglang_diffkv.testing.report import markdown
from sglang_diffkv.testing.server import Server, ServerError

PARTS = {
    "attention": r"split_kernel|decode|paged_kv|flash_|fmha|batch_prefill",
    "scores, search, joining of splits": r"finish_kernel|offsets_kernel|merge_states",
    "quantise and append": r"append_kernel|store_kv|set_kv|create_flashinfer",
    "page management and compaction": r"(reserve|plan|move|count_rows|compact|release)_kernel",
    "matrix products": r"gemm|nvjet|cutlass|cublas|splitk|wgmma|matmul",
    "norms, rotary embedding, activation": r"norm|rope|rotary|rotate_kernel|silu|act_and_mul",
    "sampling": r"argmax|softmax|topk|sampl|sort|multinomial",
}
"""Part -> pattern of its kernels' names; the first that matches counts."""
OTHER = "other"


def part_of(kernel: str) -> str:
    """The part that a kernel's time counts to."""
    name = kernel.lower()
    return next((part for part, pattern in PARTS.items() if re.search(pattern, name)), OTHER)


def kernels(trace: dict[str, Any]) -> Iterable[tuple[str, float, float]]:
    """Name, start and duration in microseconds of what ran on the GPU."""
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            yield event["name"], float(event["ts"]), float(event["dur"])


def breakdown(trace: dict[str, Any], steps: int) -> Record:
    """Milliseconds of a step: by part, in kernels altogether, from first to last kernel; and the longest kernels."""
    parts: Counter[str] = Counter()
    names: Counter[str] = Counter()
    begin, end = float("inf"), 0.0
    for name, start, duration in kernels(trace):
        parts[part_of(name)] += duration  # type: ignore[assignment]
        names[name[:100]] += duration  # type: ignore[assignment]
        begin, end = min(begin, start), max(end, start + duration)
    if not parts:
        raise BenchmarkError("the profile holds no kernel: is this a GPU?")
    per_step = 1e-3 / steps
    return {
        "parts_ms": {name: value * per_step for name, value in parts.most_common()},
        "busy_ms": sum(parts.values()) * per_step,
        "span_ms": (end - begin) * per_step,
        "longest_ms": {name: value * per_step for name, value in names.most_common(12)},
    }


def record_steps(server: Server, setup: Setup, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The trace of ``--steps`` steps in which all requests decode. Raises BenchmarkError."""
    draw = random.Random(f"profile {setup.seed}")
    vocab, started, over = setup.shape.vocab, threading.Semaphore(0), threading.Event()

    def stream(prompt: Sequence[int]) -> None:
        parameters = {"temperature": 0, "max_new_tokens": args.room, "ignore_eos": True}
        body = {"input_ids": list(prompt), "stream": True, "sampling_params": parameters}
        with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=600) as reply:
            reply.raise_for_status()
            for number, _ in enumerate(reply.iter_lines()):
                if number == 0:
                    started.release()
                if over.is_set():
                    return

    prompts = [[draw.randrange(vocab // 2, vocab) for _ in range(args.length)] for _ in range(args.batch)]
    with ThreadPoolExecutor(args.batch) as pool:
        streams = [pool.submit(stream, prompt) for prompt in prompts]
        try:
            for _ in prompts:
                if not started.acquire(timeout=300):
                    raise BenchmarkError("not all requests began to decode within 300 s")
            asked = {"output_dir": str(folder), "num_steps": args.steps, "activities": ["GPU"]}
            server.post("/start_profile", asked).raise_for_status()
            deadline = time.monotonic() + 120
            while not (found := sorted(folder.glob("*.json.gz"))) and time.monotonic() < deadline:
                time.sleep(0.5)
        finally:
            over.set()
    if not found or any(x.exception() for x in streams):
        raise BenchmarkError("no profile was written" if not found else "a request failed while steps were recorded")
    time.sleep(1.0)
    with gzip.open(found[0], "rt", encoding="utf-8") as file:
        return dict(json.load(file))


def table(records: Sequence[Record]) -> str:
    """A column for each backend, milliseconds a step and share of the kernels' time."""
    good = [x for x in records if x["status"] == OK]
    names = list(dict.fromkeys(name for x in good for name in x["parts_ms"]))
    rows = []
    for name in names:
        cells = [f"{x['parts_ms'].get(name, 0):.3f} ({x['parts_ms'].get(name, 0) / x['busy_ms']:.1%})" for x in good]
        rows.append([name, *cells])
    rows.append(["all kernels", *(f"{x['busy_ms']:.3f}" for x in good)])
    rows.append(["first to last kernel", *(f"{x['span_ms']:.3f}" for x in good)])
    failed = [f"\n\n{x['backend']}: {x['error']}" for x in records if x["status"] != OK]
    return markdown(["part, ms a step", *(x["backend"] for x in good)], rows) + "".join(failed)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--backends", nargs="*", type=parse_backend, default=[], metavar="ATTENTION:DTYPE")
    parser.add_argument("--diffkv", type=parse_diffkv, action="append", default=[], metavar="NAME=JSON")
    parser.add_argument("--batch", type=int, default=128, help="requests that decode (default: %(default)s)")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--room", type=int, default=512, help="tokens of a reply at most (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="recorded (default: %(default)s)")
    parser.add_argument("--start-together", action="store_true", help="start all servers at once, ask one at a time")
    args = parser.parse_args(argv)
    args.candidates = [*args.backends, *args.diffkv]
    if not args.candidates:
        parser.error("name at least one of --backends and --diffkv")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Profile all backends, print the table and write the results."""
    args = parse_args(argv)
    budget, name = Budget(args.budget_seconds, GUESSES), f"step_{model_name(args)}"
    source = provenance("step_profile", argv)
    records: list[Record] = []
    data = {"kind": "step", "name": name, "provenance": source, "steps": args.steps, "records": records}

    def take(backend: Backend, started: Any) -> None:
        record: Record = {"backend": backend.name, "status": OK}
        try:
            server, facts = started()
            warm_up(server, setup.shape.vocab, args.length, 8, setup.seed)
            with tempfile.TemporaryDirectory(prefix="profile-") as folder:
                record |= {**breakdown(record_steps(server, setup, args, Path(folder)), args.steps), **facts}
        except (ServerError, BenchmarkError, ValueError, requests.RequestException) as error:
            record |= {"status": FAILED, "error": short(error)}
        records.append(record)
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        title = f"# A decode step of {args.batch} requests of {args.length} tokens, {model_name(args)}"
        parts = [title, headline(source), f"`{source['command']}`", table(records)]
        (args.output / f"{name}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory(prefix="model-") as folder:
        setup = prepare(args, Path(folder), 40)
        if args.start_together:
            with all_running(args.candidates, setup, budget) as started:
                for backend, start in zip(args.candidates, started, strict=True):
                    take(backend, start.result)
        else:
            for backend in args.candidates:
                with ExitStack() as stack:
                    take(backend, partial(stack.enter_context, running(backend, setup, budget)))
    print(table(records))
    return int(any(record["status"] == FAILED for record in records))


if __name__ == "__main__":
    sys.exit(main())
