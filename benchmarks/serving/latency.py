"""Latency of a few requests: time to the first token of a long prompt, and between tokens at small batches.

Each backend gets a server of its own with the same bytes of KV cache. Times between tokens count only while all
requests of a batch are decoding: their streams are cut off when each has shown so many tokens after the last prompt
was read. Example:

    python -m benchmarks.serving.latency --geometry llama3-8b --kv-gib 20 \\
        --backends flashinfer:bf16 flashinfer:fp8_e4m3 --diffkv 'default={}' \\
        --prompt 8192 --decode 1x1024 8x1024 1x16000 8x16000

NAME.json and NAME.md in the output folder. Exit code 1 if a server failed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise

from benchmarks.serving.cli import model_name
from benchmarks.serving.client import BenchmarkError, warm_up
from benchmarks.serving.each_backend import add_arguments, failed_row, measure_each, parse
from benchmarks.serving.session import OK, Record, Setup
from benchmarks.serving.streams import token_times
from sglang_diffkv.evaluate.report import markdown
from sglang_diffkv.evaluate.server import Server

Decode = tuple[int, int]
"""Requests, and tokens of each prompt."""
ROOM = 64
"""Tokens that a request may decode for each prompt read beside it. A server admits no request for whose whole reply
it lacks room, so replies are not asked to be as long as the context."""


def parse_decode(text: str) -> Decode:
    """``REQUESTSxTOKENS``."""
    batch, cross, length = text.partition("x")
    if not cross or not batch.isdecimal() or not length.isdecimal() or int(batch) < 1 or int(length) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not REQUESTSxTOKENS, for example 8x1024")
    return int(batch), int(length)


class Streams:
    """Streamed replies to prompts that start at once, cut off when all have decoded ``tokens`` tokens together."""

    def __init__(self, server: Server, prompts: Sequence[Sequence[int]], tokens: int, most: int):
        self.server, self.tokens, self.most = server, tokens, most
        self.times: list[list[float]] = [[] for _ in prompts]
        self._prompts = prompts
        self._enough = threading.Event()

    def run(self) -> tuple[list[float], list[float]]:
        """Seconds to each first token; seconds between tokens while all decode. Raises BenchmarkError."""
        begin = time.perf_counter()
        with ThreadPoolExecutor(len(self._prompts)) as pool:
            list(pool.map(self._stream, range(len(self._prompts))))
        firsts = [times[0] for times in self.times]
        last = max(firsts)
        gaps = [b - a for times in self.times for a, b in pairwise(times) if a >= last]
        if not self.tokens:
            return [x - begin for x in firsts], []
        if len(gaps) < (self.tokens - 1) * len(self.times):
            raise BenchmarkError(f"only {len(gaps)} tokens came while all {len(self.times)} requests were decoding")
        return [x - begin for x in firsts], gaps

    def _stream(self, number: int) -> None:
        times = self.times[number]
        for now in token_times(self.server.url, self._prompts[number], self.most):
            times.append(now)
            if self._done() or self._enough.is_set():
                self._enough.set()
                return
        if not times:
            raise BenchmarkError("a stream ended without a token")

    def _done(self) -> bool:
        if not all(self.times):
            return False
        last = max(times[0] for times in self.times)
        return all(sum(x > last for x in reversed(times[-2 * self.tokens :])) >= self.tokens for times in self.times)


def measure(server: Server, setup: Setup, args: argparse.Namespace) -> Record:
    """All latencies of one server, in milliseconds."""
    draw, vocab = random.Random(f"latency {setup.seed}"), setup.shape.vocab

    def prompts(batch: int, length: int) -> list[list[int]]:
        return [[draw.randrange(vocab // 2, vocab) for _ in range(length)] for _ in range(batch)]

    warm_up(server, vocab, min(max(args.prompt), 1024), 8, setup.seed)
    record: Record = {"first_token": [], "decode": []}
    for length in args.prompt:
        Streams(server, prompts(1, length), 0, 1).run()
        times = [Streams(server, prompts(1, length), 0, 1).run()[0][0] * 1e3 for _ in range(args.repeat)]
        record["first_token"].append({"length": length, "ttft_ms": statistics.median(times), "all_ttft_ms": times})
    for batch, length in args.decode:
        most = min(args.tokens + ROOM * batch, setup.shape.context - length - 8)
        server.flush_cache()
        _, gaps = Streams(server, prompts(batch, length), args.tokens, most).run()
        ordered = sorted(x * 1e3 for x in gaps)
        p99 = ordered[int(0.99 * (len(ordered) - 1))]
        record["decode"].append(
            {"batch": batch, "length": length, "n": len(gaps), "itl_ms": statistics.median(ordered), "itl_p99_ms": p99}
        )
    return record


def table(records: Sequence[Record], args: argparse.Namespace) -> str:
    """A row for each backend."""
    first = [f"first token of {n} ms" for n in args.prompt]
    header = ["backend", *first, *(f"{b} x {n}: ITL p50 / p99 ms" for b, n in args.decode)]
    rows = []
    for record in records:
        if record["status"] != OK:
            rows.append(failed_row(record, len(header)))
            continue
        cells = [f"{x['ttft_ms']:.1f}" for x in record["first_token"]]
        cells += [f"{x['itl_ms']:.2f} / {x['itl_p99_ms']:.2f}" for x in record["decode"]]
        rows.append([record["backend"], *cells])
    return markdown(header, rows)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--prompt", type=int, nargs="+", default=[8192], metavar="TOKENS", help="prompts to read")
    parser.add_argument("--repeat", type=int, default=5, help="times each, for the median (default: %(default)s)")
    parser.add_argument("--decode", type=parse_decode, nargs="+", default=[(1, 1024), (8, 1024)], metavar="NxTOKENS")
    parser.add_argument("--tokens", type=int, default=64, help="of each request, all decoding (default: %(default)s)")
    return parse(parser, argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all backends, print the table and write the results."""
    args = parse_args(argv)
    model = model_name(args)
    data = {"kind": "latency", "name": f"latency_{model}"}
    return measure_each(args, data, f"Latency, {model}", partial(measure, args=args), partial(table, args=args))


if __name__ == "__main__":
    sys.exit(main())
