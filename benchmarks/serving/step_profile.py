"""Where the time of a decode step, or of a pass that reads a prompt, goes: kernel times by part, from SGLang's own
profiler.

Each backend gets a server of its own. All requests decode together when ``--steps`` steps are recorded; what they
took on the GPU is added up by part (matrix products, attention, its scores, page management, ...). Example:

    python -m benchmarks.serving.step_profile --geometry llama3-8b --kv-gib 24 --batch 128 --length 1024 \\
        --backends flashinfer:bf16 --diffkv 'default={}'

With ``--prompts`` it is passes that are recorded, each of which reads one prompt of ``--length`` tokens. With
``--passes`` it is every pass over one prompt, apart: its chunks, or a turn behind tokens that are cached. Example:

    python -m benchmarks.serving.step_profile --geometry llama3-8b --kv-gib 8 --passes 30000 13000:12000 \\
        --backends fa3:bf16 fa3:fp8_e4m3 --diffkv 'default={}'

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
    "prefixes read back": r"read_back_kernel",
    "scores of a prompt's tokens": r"(new|page)_scores_kernel|(stored|fold)_sums_kernel",
    "attention": r"(split|paged|ragged)_kernel|decode|paged_?kv|flash(_|::|attn)|fmha|batch_?prefill|prefillwith",
    "scores, search, joining of splits": r"(finish|offsets|ranges|scores|merge)_kernel|merge_?states",
    "quantise and append": r"append_kernel|store_kv|set_kv|create_flashinfer",
    "page management and compaction": (
        r"(reserve|plan|lower|move|count_rows|compact|release|spare|return|seal|spans?)_kernel"
    ),
    "matrix products": r"gemm|nvjet|cutlass|cublas|splitk|wgmma|matmul",
    "norms, rotary embedding, activation": r"norm|rope|rotary|rotate_kernel|silu|act_and_mul",
    "sampling": r"argmax|softmax|topk|sampl|sort|multinomial",
}
"""Part -> pattern of its kernels' names; the first that matches counts.

A kernel that is launched while the one before it ends counts from then on, so the second pass of DiffKV's attention
seems longer than it is, and kernels may take longer altogether than the time from the first to the last."""
OTHER = "other"
ONCE_A_LAYER = r"silu|gelu|act_and_mul"
"""Of kernels that run once in each layer of a pass, whatever the backend: the activation of Llama's block."""
SHORT_PROMPT = 16
"""Tokens of the prompts that end a profile."""
REST = 0.1
"""Seconds behind the prompt that is cached: what ends its request is not measured with the next."""


def part_of(kernel: str) -> str:
    """The part that a kernel's time counts to."""
    name = kernel.lower()
    return next((part for part, pattern in PARTS.items() if re.search(pattern, name)), OTHER)


Kernel = tuple[str, float, float]
"""Name, start and duration in microseconds."""


def kernels(trace: dict[str, Any]) -> Iterable[Kernel]:
    """Name, start and duration in microseconds of what ran on the GPU."""
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            yield event["name"], float(event["ts"]), float(event["dur"])


def breakdown(trace: dict[str, Any], steps: int) -> Record:
    """Milliseconds of a step: by part, in kernels altogether, from first to last kernel, of that without a kernel; and
    the longest kernels."""
    return of_kernels(sorted_kernels(trace), steps)


def sorted_kernels(trace: dict[str, Any]) -> list[Kernel]:
    """What ran on the GPU, in order. Raises BenchmarkError if nothing did."""
    found = sorted(kernels(trace), key=itemgetter(1))
    if not found:
        raise BenchmarkError("the profile holds no kernel: is this a GPU?")
    return found


def of_kernels(found: Sequence[Kernel], steps: int) -> Record:
    """``breakdown`` of kernels in order."""
    parts: Counter[str] = Counter()
    names: Counter[str] = Counter()
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
    start_profile(server, steps, folder)
    return written_trace(folder)


def start_profile(server: Server, steps: int, folder: Path) -> None:
    """Have the server record the next ``steps`` steps."""
    asked = {"output_dir": str(folder), "num_steps": steps, "activities": ["GPU"]}
    server.post("/start_profile", asked).raise_for_status()


def written_trace(folder: Path) -> dict[str, Any]:
    """The trace in ``folder``, once it is there. Raises BenchmarkError."""
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


def cut_into_passes(found: Sequence[Kernel], layers: int) -> list[list[Kernel]]:
    """Kernels in order, cut into passes through a model of so many layers.

    Between the last layer of a pass and the first attention of the next the cut is where the GPU waited longest; a few
    small kernels may be counted with the pass before or behind. Raises BenchmarkError for what is no whole passes.
    """
    inside = [number for number, (name, *_) in enumerate(found) if re.search(ONCE_A_LAYER, name.lower())]
    if not inside or len(inside) % layers:
        raise BenchmarkError(f"the profile has {len(inside)} activations, which is no multiple of {layers} layers")
    cuts = []
    for last, first in zip(inside[layers - 1 :: layers], inside[layers::layers], strict=False):
        attention = next((x for x in range(last + 1, first) if part_of(found[x][0]) == "attention"), first)
        gaps = {x: found[x][1] - found[x - 1][1] - found[x - 1][2] for x in range(last + 2, attention + 1)}
        cuts.append(max(gaps, key=lambda x: gaps[x], default=first))
    return [list(found[a:b]) for a, b in zip([0, *cuts], [*cuts, len(found)], strict=True)]


def host_ms(trace: dict[str, Any], begin: float, end: float) -> float | None:
    """Milliseconds from the first to the last call that launched what ran from ``begin`` to ``end`` (microseconds on
    the GPU); None if the trace does not say which call that was."""
    ran = {
        event.get("args", {}).get("correlation")
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") == "kernel" and begin <= float(event["ts"]) < end
    }
    calls = [
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in trace["traceEvents"]
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
        and event.get("args", {}).get("correlation") in ran - {None}
    ]
    return 1e-3 * (max(b for _, b in calls) - min(a for a, _ in calls)) if calls else None


def record_passes(
    server: Server, setup: Setup, args: argparse.Namespace, folder: Path, length: int, cached: int
) -> Record:
    """Every pass over one prompt of ``length`` tokens, the first ``cached`` of which are in the prefix cache. Raises
    BenchmarkError."""
    draw, vocab = random.Random(f"passes {setup.seed} {length} {cached}"), setup.shape.vocab

    def read(prompt: Sequence[int]) -> float:
        body = {"input_ids": list(prompt), "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
        begin = time.perf_counter()
        server.post("/generate", body).raise_for_status()
        return time.perf_counter() - begin

    def prepared() -> list[int]:
        prompt = [draw.randrange(vocab // 2, vocab) for _ in range(length)]
        if cached:
            read(prompt[:cached])
            time.sleep(REST)
        return prompt

    seconds = [read(prepared()) for _ in range(1 + args.repeat)][1:]
    expected = -(-(length - cached) // args.chunk)
    prompt = prepared()
    with ThreadPoolExecutor(1) as pool:
        start_profile(server, expected, folder)
        read(prompt)
        found = pool.submit(written_trace, folder)
        while not found.done():  # the profiler ends with the pass behind the last that it counts
            read([draw.randrange(vocab // 2, vocab) for _ in range(SHORT_PROMPT)])
            time.sleep(0.1)
        trace = found.result()
    passes = cut_into_passes(sorted_kernels(trace), setup.shape.all_layers)[:expected]
    if len(passes) < expected:
        raise BenchmarkError(f"{length}: the profile holds {len(passes)} passes, not {expected}: is --chunk right?")
    columns = []
    for number, found_kernels in enumerate(passes, 1):
        begin, end = found_kernels[0][1], found_kernels[-1][1] + 1
        of_pass = {"pass": number, "host_ms": host_ms(trace, begin, end)}
        columns.append({**of_kernels(found_kernels, 1), **of_pass})
    span = {"length": length, "cached": cached, "first_token_ms": 1e3 * statistics.median(seconds), "n": len(seconds)}
    return {**span, "passes": columns}


def tables_of_passes(records: Sequence[Record]) -> str:
    """A table for each pass of each prompt, and one of the times to first tokens."""
    good = [x for x in records if x["status"] == OK]
    failed = [f"{x['backend']}: {x['error']}" for x in records if x["status"] != OK]
    if not good:
        return "\n\n".join(failed)
    rows, parts = [], []
    for number, prompt in enumerate(good[0]["prompts"]):
        tokens = f"{prompt['length']}, {prompt['cached']} cached" if prompt["cached"] else f"{prompt['length']}"
        rows.append([tokens, *(f"{x['prompts'][number]['first_token_ms']:.1f}" for x in good)])
        for at in range(len(prompt["passes"])):
            title = f"Prompt of {tokens}: pass {at + 1}"
            shown = [{**x["prompts"][number]["passes"][at], "backend": x["backend"], "status": OK} for x in good]
            parts.append(f"{title}\n\n{table(shown, 'a pass')}")
    first = markdown(["prompt, ms to the answer without profiler", *(x["backend"] for x in good)], rows)
    return "\n\n".join([first, *parts, *failed])


def table(records: Sequence[Record], of: str = "a step") -> str:
    """A column for each backend, milliseconds of a step (or what it is ``of``) and share of the kernels' time."""
    good = [x for x in records if x["status"] == OK]
    names = list(dict.fromkeys(name for x in good for name in x["parts_ms"]))
    rows = []
    for name in names:
        cells = [f"{x['parts_ms'].get(name, 0):.3f} ({x['parts_ms'].get(name, 0) / x['busy_ms']:.1%})" for x in good]
        rows.append([name, *cells])
    rows.append(["all kernels", *(f"{x['busy_ms']:.3f}" for x in good)])
    rows.append(["first to last kernel", *(f"{x['span_ms']:.3f}" for x in good)])
    rows.append(["of that no kernel", *(f"{x['idle_ms']:.3f}" for x in good)])
    if any(x.get("host_ms") is not None for x in good):
        rows.append(["first to last launch by the host", *(_known(x["host_ms"]) for x in good)])
    failed = [f"\n\n{x['backend']}: {x['error']}" for x in records if x["status"] != OK]
    return markdown([f"part, ms {of}", *(x["backend"] for x in good)], rows) + "".join(failed)


def _known(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def parse_prompt(text: str) -> tuple[int, int]:
    """``30000`` or ``13000:12000``: tokens, and how many of them are cached."""
    length, _, cached = text.partition(":")
    if not length.isdecimal() or not (cached or "0").isdecimal() or not int(cached or 0) < int(length):
        raise argparse.ArgumentTypeError(f"{text!r} is not LENGTH or LENGTH:CACHED, as 30000 or 13000:12000")
    return int(length), int(cached or 0)


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
    parser.add_argument(
        "--passes", nargs="+", type=parse_prompt, metavar="LENGTH[:CACHED]", help="record all passes over such a prompt"
    )
    parser.add_argument(
        "--chunk", type=int, default=8192, help="SGLang's --chunked-prefill-size (default: %(default)s)"
    )
    parser.add_argument(
        "--repeat", type=int, default=3, help="prompts timed without profiler, with --passes (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    args.argv = argv
    args.candidates = [*(args.backends or []), *args.diffkv]
    if not args.candidates:
        parser.error("name at least one of --backends and --diffkv")
    return args


def measure(server: Server, setup: Setup, args: argparse.Namespace) -> Record:
    """A step's breakdown on one server."""
    if args.passes:
        warm_up(server, setup.shape.vocab, min(args.length, args.chunk), 1, setup.seed)
        prompts = []
        for length, cached in args.passes:
            with tempfile.TemporaryDirectory(prefix="profile-") as folder:
                prompts.append(record_passes(server, setup, args, Path(folder), length, cached))
        return {"prompts": prompts}
    warm_up(server, setup.shape.vocab, args.length, 8, setup.seed)
    with tempfile.TemporaryDirectory(prefix="profile-") as folder:
        if args.prompts:
            return breakdown(*record_prompts(server, setup, args, Path(folder)))
        return breakdown(record_steps(server, setup, args, Path(folder)), args.steps)


def main(argv: Sequence[str] | None = None) -> int:
    """Profile all backends, print the table and write the results."""
    args = parse_args(argv)
    model = model_name(args)
    kind = "passes" if args.passes else "prompt" if args.prompts else "step"
    data = {"kind": "step_profile", "name": f"{kind}_{model}", "steps": args.steps}
    tokens = f"{args.length}" if args.shortest == 1 else f"{round(args.shortest * args.length)} to {args.length}"
    title = f"A decode step of {args.batch} requests of {tokens} tokens, {model}"
    if args.prompts:
        title = f"A pass over a prompt of {args.length} tokens, {model}"
    if args.passes:
        title = f"Passes over one prompt in chunks of {args.chunk}, {model}"
    shown = tables_of_passes if args.passes else table
    status = measure_each(args, data, title, partial(measure, args=args), shown)
    if args.passes:
        return status
    drawn(
        lambda: breakdown_chart(data, args.output / f"{data['name']}.png"),
        f"python -m benchmarks.redraw {data['name']}.json",
    )
    return status


if __name__ == "__main__":
    sys.exit(main())
