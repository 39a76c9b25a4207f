"""Where the time of a decode step, or of a pass that reads a prompt, goes: kernel times by part, from SGLang's own
profiler.

Each backend gets a server of its own. All requests decode together when ``--steps`` steps are recorded; what they
took on the GPU is added up by part (matrix products, attention, its scores, page management, ...). Example:

    python -m benchmarks.serving.step_profile --geometry llama3-8b --kv-gib 24 --batch 128 --length 1024 \\
        --backends flashinfer:bf16 --diffkv 'default={}'

With ``--prompts`` it is passes that are recorded, each of which reads one prompt of ``--length`` tokens.

NAME.json, NAME.md and a chart in the output folder. Exit code 1 if a server failed. A GPU is needed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import requests

from benchmarks.serving.charts import breakdown as breakdown_chart
from benchmarks.serving.cli import model_name
from benchmarks.serving.client import BenchmarkError, warm_up
from benchmarks.serving.each_backend import add_arguments, measure_each
from benchmarks.serving.session import OK, Record, Setup
from sglang_diffkv.drawing import drawn
from sglang_diffkv.evaluate.report import markdown
from sglang_diffkv.evaluate.server import Server

PARTS = {
    "attention": r"split_kernel|decode|paged_?kv|flash(_|::|attn)|fmha|batch_?prefill|prefillwith",
    "scores, search, joining of splits": r"(finish|offsets|ranges|scores|merge)_kernel|merge_?states",
    "quantise and append": r"append_kernel|store_kv|set_kv|create_flashinfer",
    "page management and compaction": r"(reserve|plan|move|count_rows|compact|release|spare|return|seal|spans?)_kernel",
    "matrix products": r"gemm|nvjet|cutlass|cublas|splitk|wgmma|matmul",
    "norms, rotary embedding, activation": r"norm|rope|rotary|rotate_kernel|silu|act_and_mul",
    "sampling": r"argmax|softmax|topk|sampl|sort|multinomial",
}
"""Part -> pattern of its kernels' names; the first that matches counts.

A kernel that is launched while the one before it ends counts from then on, so the second pass of DiffKV's attention
seems longer than it is, and kernels may take longer altogether than the time from the first to the last."""
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
    """Milliseconds of a step: by part, in kernels altogether, from first to last kernel, of that without a kernel; and
    the longest kernels."""
    parts: Counter[str] = Counter()
    names: Counter[str] = Counter()
    found = sorted(kernels(trace), key=itemgetter(1))
    if not found:
        raise BenchmarkError("the profile holds no kernel: is this a GPU?")
    begin = end = found[0][1]
    idle = 0.0
    for name, start, duration in found:
        parts[part_of(name)] += duration  # type: ignore[assignment]
        names[name[:100]] += duration  # type: ignore[assignment]
        idle += max(start - end, 0.0)
        end = max(end, start + duration)
    per_step = 1e-3 / steps
    return {
        "parts_ms": {name: value * per_step for name, value in parts.most_common()},
        "busy_ms": sum(parts.values()) * per_step,
        "span_ms": (end - begin) * per_step,
        "idle_ms": idle * per_step,
        "longest_ms": {name: value * per_step for name, value in names.most_common(12)},
    }


def next_steps(server: Server, steps: int, folder: Path) -> dict[str, Any]:
    """The trace of the next ``steps`` steps, written to ``folder``. Raises BenchmarkError."""
    asked = {"output_dir": str(folder), "num_steps": steps, "activities": ["GPU"]}
    server.post("/start_profile", asked).raise_for_status()
    deadline = time.monotonic() + 120
    while True:
        try:
            for found in sorted(folder.glob("*.json.gz")):
                with gzip.open(found, "rt", encoding="utf-8") as file:
                    return dict(json.load(file))
        except (EOFError, json.JSONDecodeError):  # still being written
            pass
        if time.monotonic() > deadline:
            raise BenchmarkError("no profile was written")
        time.sleep(0.5)


def lengths(batch: int, longest: int, shortest: float) -> list[int]:
    """Tokens of each prompt: in even steps from ``shortest`` times ``longest`` up to that."""
    return [round(longest * (shortest + (1 - shortest) * i / max(batch - 1, 1))) for i in range(batch)]


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

    prompts = [
        [draw.randrange(vocab // 2, vocab) for _ in range(length)]
        for length in lengths(args.batch, args.length, args.shortest)
    ]
    with ThreadPoolExecutor(args.batch) as pool:
        streams = [pool.submit(stream, prompt) for prompt in prompts]
        try:
            for _ in prompts:
                if not started.acquire(timeout=300):
                    raise BenchmarkError("not all requests began to decode within 300 s")
            trace = next_steps(server, args.steps, folder)
        finally:
            over.set()
    if any(x.exception() for x in streams):
        raise BenchmarkError("a request failed while steps were recorded")
    return trace


def record_prompts(server: Server, setup: Setup, args: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], int]:
    """A trace while prompts are read one after the other, and how many of them it holds. Raises BenchmarkError."""
    draw, vocab = random.Random(f"profile {setup.seed}"), setup.shape.vocab
    seconds: list[float] = []

    def read(count: int) -> None:
        for _ in range(count):
            prompt = [draw.randrange(vocab // 2, vocab) for _ in range(args.length)]
            body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
            begin = time.perf_counter()
            server.post("/generate", body).raise_for_status()
            seconds.append(time.perf_counter() - begin)

    read(3)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(next_steps, server, args.steps, folder)
        while not found.done():  # the profiler ends with the pass behind the last that it counts
            read(1)
        trace = found.result()
    return trace, passes(trace, statistics.median(seconds))


def passes(trace: dict[str, Any], seconds: float) -> int:
    """How many prompts a trace holds, each of which takes ``seconds``. SGLang counts steps, and of a prompt with one
    token of reply there may be one or two."""
    found = [(start, start + duration) for _, start, duration in kernels(trace)]
    if not found:
        raise BenchmarkError("the profile holds no kernel: is this a GPU?")
    span = max(end for _, end in found) - min(start for start, _ in found)
    return max(round(span * 1e-6 / seconds), 1)


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
    rows.append(["of that no kernel", *(f"{x['idle_ms']:.3f}" for x in good)])
    failed = [f"\n\n{x['backend']}: {x['error']}" for x in records if x["status"] != OK]
    return markdown(["part, ms a step", *(x["backend"] for x in good)], rows) + "".join(failed)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--batch", type=int, default=128, help="requests that decode (default: %(default)s)")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument(
        "--shortest", type=float, default=1.0, metavar="SHARE", help="of --length, that the shortest prompt has"
    )
    parser.add_argument("--room", type=int, default=512, help="tokens of a reply at most (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="recorded (default: %(default)s)")
    parser.add_argument("--prompts", action="store_true", help="record passes over one prompt each, not decode steps")
    args = parser.parse_args(argv)
    args.argv = argv
    args.candidates = [*(args.backends or []), *args.diffkv]
    if not args.candidates:
        parser.error("name at least one of --backends and --diffkv")
    return args


def measure(server: Server, setup: Setup, args: argparse.Namespace) -> Record:
    """A step's breakdown on one server."""
    warm_up(server, setup.shape.vocab, args.length, 8, setup.seed)
    with tempfile.TemporaryDirectory(prefix="profile-") as folder:
        if args.prompts:
            return breakdown(*record_prompts(server, setup, args, Path(folder)))
        return breakdown(record_steps(server, setup, args, Path(folder)), args.steps)


def main(argv: Sequence[str] | None = None) -> int:
    """Profile all backends, print the table and write the results."""
    args = parse_args(argv)
    model = model_name(args)
    kind = "prompt" if args.prompts else "step"
    data = {"kind": "step_profile", "name": f"{kind}_{model}", "steps": args.steps}
    tokens = f"{args.length}" if args.shortest == 1 else f"{round(args.shortest * args.length)} to {args.length}"
    title = f"A decode step of {args.batch} requests of {tokens} tokens, {model}"
    if args.prompts:
        title = f"A pass over a prompt of {args.length} tokens, {model}"
    status = measure_each(args, data, title, partial(measure, args=args), table)
    drawn(
        lambda: breakdown_chart(data, args.output / f"{data['name']}.png"),
        f"python -m benchmarks.redraw {data['name']}.json",
    )
    return status


if __name__ == "__main__":
    sys.exit(main())
