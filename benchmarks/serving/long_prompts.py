"""A long prompt among short requests that decode: what it waits for, and what they wait for.

Short requests decode. Then a long prompt comes, is read, and decodes beside them. Times between the short requests'
tokens are told for these three parts of the run, and the time to the long one's first token, alone and beside them.
SGLang reads a prompt's chunks one after the other, so all decode steps wait for all of it, unless
``--enable-mixed-chunk`` is given. Each backend gets a server of its own with the same bytes of KV cache. Example:

    python -m benchmarks.serving.long_prompts --geometry llama3-8b --context 140000 --kv-gib 10 --prompt 65536 131072 \\
        --backends fa3:fp8_e4m3 --diffkv 'default={}' --diffkv 'mixed --enable-mixed-chunk={}'

NAME.json and NAME.md in the output folder. Exit code 1 if a server failed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

from benchmarks.serving.agents import drawn
from benchmarks.serving.cli import model_name
from benchmarks.serving.client import BenchmarkError, warm_up
from benchmarks.serving.each_backend import add_arguments, failed_row, measure_each, parse
from benchmarks.serving.session import OK, Record, Setup
from benchmarks.serving.streams import token_times
from sglang_diffkv.evaluate.report import markdown
from sglang_diffkv.evaluate.server import Server

PARTS = ("before", "read", "beside")
"""Short requests alone; while the long prompt waits and is read; while it decodes beside them."""
WAIT = 0.005
"""Seconds between two looks at what has come."""
ROOM = 64
"""Extra tokens asked of the long reply, beyond those that are watched."""
PATIENCE = 300.0
"""Seconds after which what does not come is an error."""


class Decoding:
    """Streamed replies of up to ``most`` tokens, cut off by ``end``; ``times``: when each token came."""

    def __init__(self, url: str, prompts: Sequence[Sequence[int]], most: int):
        self._url, self._most, self._over = url, most, threading.Event()
        self.times: list[list[float]] = [[] for _ in prompts]
        self._pool = ThreadPoolExecutor(len(prompts))
        self._tasks = [
            self._pool.submit(self._stream, prompt, times) for prompt, times in zip(prompts, self.times, strict=True)
        ]

    def _stream(self, prompt: Sequence[int], times: list[float]) -> None:
        for now in token_times(self._url, prompt, self._most):
            times.append(now)
            if self._over.is_set():
                return
        if not self._over.is_set() and len(times) < self._most:
            raise BenchmarkError(f"a reply ended with {len(times)} of {self._most} tokens")

    def wait(self, enough: Callable[[list[float]], bool]) -> None:
        """Until ``enough`` is true of the times of each. Raises as ``check`` does, and BenchmarkError if it lasts."""
        end = time.perf_counter() + PATIENCE
        while not all(map(enough, self.times)):
            self.check()
            if time.perf_counter() > end:
                raise BenchmarkError(f"tokens did not come within {PATIENCE:.0f} s")
            time.sleep(WAIT)

    def check(self) -> None:
        """Raise what a stream raised, or BenchmarkError if one is over."""
        for task in self._tasks:
            if task.done():
                task.result()
                raise BenchmarkError("a reply was over while it was watched: give --reply more")

    def end(self) -> None:
        """Cut off what still runs."""
        self._over.set()
        self._pool.shutdown(wait=True)

    def gaps(self, begin: float, end: float) -> list[float]:
        """Milliseconds between tokens, of those gaps whose middle lies between ``begin`` and ``end``."""
        return sorted(
            1e3 * (b - a) for times in list(self.times) for a, b in pairwise(list(times)) if begin < (a + b) / 2 <= end
        )


def of_gaps(gaps: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile and largest."""
    if not gaps:
        raise BenchmarkError("no token came in a part of the run")
    return {"n": len(gaps), "p50": statistics.median(gaps), "p99": gaps[int(0.99 * (len(gaps) - 1))], "most": gaps[-1]}


def first_token(
    url: str, prompt: Sequence[int], most: int = 8, then: Callable[[Decoding], None] = lambda one: None
) -> float:
    """Seconds to the first token of up to ``most``; ``then`` watches the others."""
    begin, one = time.perf_counter(), Decoding(url, [prompt], most)
    try:
        one.wait(lambda times: len(times) >= 1)
        then(one)
        return one.times[0][0] - begin
    finally:
        one.end()


def measure(server: Server, setup: Setup, args: argparse.Namespace) -> Record:
    """All long prompts on one server, one after the other."""
    vocab, draw = setup.shape.vocab, random.Random(f"long prompts {setup.seed}")
    warm_up(server, vocab, args.tokens, 8, setup.seed)
    record: Record = {"prompts": []}
    for length in args.prompt:
        first_token(server.url, drawn(draw, vocab, length))  # what the first prompt of a length compiles
        alone = statistics.median(first_token(server.url, drawn(draw, vocab, length)) for _ in range(args.repeat))
        server.flush_cache()
        found = beside(server, args, partial(drawn, draw, vocab), length)
        record["prompts"].append({"length": length, "alone": alone, **found})
        server.flush_cache()
    return record


def beside(server: Server, args: argparse.Namespace, draw: Callable[[int], list[int]], length: int) -> dict[str, Any]:
    """One long prompt beside the short requests: seconds to its first token, and their gaps by part."""
    short, marks = Decoding(server.url, [draw(args.tokens) for _ in range(args.short)], args.reply), [0.0]
    try:
        short.wait(lambda times: len(times) >= 2)
        marks[0] = time.perf_counter()
        count = len(short.times[0])
        short.wait(lambda times: len(times) >= count + args.watched)
        marks.append(time.perf_counter())

        def watch(long: Decoding) -> None:
            marks.append(long.times[0][0])
            long.wait(lambda times: len(times) > args.watched)
            marks.append(time.perf_counter())

        seconds = first_token(server.url, draw(length), args.watched + ROOM, watch)
        short.check()
        gaps = [of_gaps(short.gaps(begin, end)) for begin, end in pairwise(marks)]
    finally:
        short.end()
    return {"beside": seconds, "gaps": dict(zip(PARTS, gaps, strict=True))}


def table(records: Sequence[Record], args: argparse.Namespace) -> str:
    """A row for each long prompt of each backend."""
    header = ["backend", "prompt", "first token alone, s", "beside, s"]
    header += ["gaps before, p50 / p99 ms", "while it is read, p50 / most ms", "beside it, p50 / p99 ms"]
    rows = []
    for record in records:
        if record["status"] != OK:
            rows.append(failed_row(record, len(header)))
            continue
        for found in record["prompts"]:
            before, read, after = (found["gaps"][part] for part in PARTS)
            cells = [f"{found['alone']:.2f}", f"{found['beside']:.2f}", f"{before['p50']:.1f} / {before['p99']:.1f}"]
            cells += [f"{read['p50']:.1f} / {read['most']:.0f}", f"{after['p50']:.1f} / {after['p99']:.1f}"]
            rows.append([record["backend"], f"{found['length']:,}", *cells])
    return markdown(header, rows)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--prompt", type=int, nargs="+", default=[65536], metavar="TOKENS", help="long prompts")
    parser.add_argument("--repeat", type=int, default=1, help="times each alone, for the median (default: %(default)s)")
    parser.add_argument("--short", type=int, default=8, help="short requests (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="of a short prompt (default: %(default)s)")
    parser.add_argument("--reply", type=int, default=2048, help="of a short reply at most (default: %(default)s)")
    parser.add_argument(
        "--watched",
        type=int,
        default=200,
        help="of a reply before the long prompt, and of its own (default: 200)",
    )
    return parse(parser, argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all backends, print the table and write the results."""
    args = parse_args(argv)
    model = model_name(args)
    data = {"kind": "long_prompts", "name": f"long_prompts_{model}"}
    return measure_each(args, data, f"Long prompts, {model}", partial(measure, args=args), partial(table, args=args))


if __name__ == "__main__":
    sys.exit(main())
