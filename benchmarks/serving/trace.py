"""Requests of a service's trace, at the times at which they came: a JSON object a line, as Mooncake publishes them.

A line has ``timestamp`` (milliseconds), ``input_length`` and ``output_length`` (tokens), and ``hash_ids``: a number for
each block of 512 prompt tokens. Equal numbers are equal prefixes, and a number's tokens are drawn from it. Example,
five minutes of a trace at half its rate:

    python -m benchmarks.serving.trace --trace conversation_trace.jsonl --minutes 5 --speed 0.5 --geometry llama3-8b \\
        --kv-gib 40 --longest 30000 --backends fa3:fp8_e4m3 --diffkv 'default={}'

Requests longer than ``--longest`` are left out, and counted. NAME.json and NAME.md in the output folder. Exit
code 1 if a server failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import lzma
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving.agents import Outcome, table
from benchmarks.serving.cli import model_name
from benchmarks.serving.client import warm_up
from benchmarks.serving.each_backend import add_arguments, measure_each, parse
from benchmarks.serving.session import Record, Setup
from benchmarks.serving.streams import Client, ended
from sglang_diffkv.evaluate.server import Server

BLOCK = 512
"""Tokens of a hash id."""


@dataclass(frozen=True)
class Request:
    """A line of a trace. ``at``: seconds after the first one that is asked."""

    at: float
    input: int
    output: int
    blocks: tuple[int, ...]

    @classmethod
    def parse(cls, line: str) -> Request:
        """Raises ValueError for a line of another form."""
        try:
            found = json.loads(line)
            blocks = tuple(map(int, found["hash_ids"]))
            request = cls(found["timestamp"] / 1e3, int(found["input_length"]), int(found["output_length"]), blocks)
        except (KeyError, TypeError, ValueError) as error:
            fields = "timestamp, input_length, output_length and hash_ids"
            raise ValueError(f"a line of a trace has {fields}: {error!r}") from None
        if request.input < 1 or request.output < 1 or len(blocks) * BLOCK < request.input:
            raise ValueError(f"a trace's line has too few tokens or hash ids: {line.strip()[:80]}")
        return request

    def tokens(self, vocab: int, seed: int) -> list[int]:
        """The prompt, of the upper half of the vocabulary."""
        return [token for block in self._blocks(vocab, seed) for token in block][: self.input]

    def _blocks(self, vocab: int, seed: int) -> Iterator[list[int]]:
        for number in self.blocks:
            yield np.random.default_rng((seed, number)).integers(vocab // 2, vocab, BLOCK).tolist()


@dataclass(frozen=True)
class Trace:
    """Requests in order, and how many were too long."""

    requests: tuple[Request, ...]
    left_out: int

    @classmethod
    def read(cls, path: Path, *, minutes: float, start: float = 0.0, longest: int | None = None) -> Trace:
        """So many minutes of a file (``.jsonl`` or ``.jsonl.xz``), from minute ``start`` on. Raises ValueError."""
        with lzma.open(path, "rt") if path.suffix == ".xz" else path.open(encoding="utf-8") as file:
            every = [Request.parse(line) for line in file if line.strip()]
        some = [x for x in every if start * 60 <= x.at < (start + minutes) * 60]
        fitting = [x for x in some if longest is None or x.input + x.output <= longest]
        if not fitting:
            raise ValueError(f"{path} has no request that fits in these minutes")
        first = fitting[0].at
        requests = tuple(Request(x.at - first, x.input, x.output, x.blocks) for x in fitting)
        return cls(requests, len(some) - len(fitting))

    def title(self, name: str, speed: float) -> str:
        """What was asked, in words."""
        seconds = self.requests[-1].at / speed
        mean = sum(x.input for x in self.requests) / len(self.requests)
        mean_reply = sum(x.output for x in self.requests) / len(self.requests)
        left = f", {self.left_out} longer ones left out" if self.left_out else ""
        return f"{name}: {len(self.requests)} of {mean:,.0f} + {mean_reply:,.0f} on average in {seconds:,.0f} s{left}"


def replay(url: str, trace: Trace, vocab: int, seed: int, speed: float = 1.0) -> Record:
    """Ask each request at its time, ``speed`` times as fast as it was. Raises BenchmarkError if one is not answered
    whole. ``late_s``: how much later than planned the last was sent, at most."""
    prompts = [x.tokens(vocab, seed) for x in trace.requests]
    return asyncio.run(_replayed(url, trace, prompts, speed))


async def _replayed(url: str, trace: Trace, prompts: Sequence[Sequence[int]], speed: float) -> Record:
    outcome, late = Outcome(), 0.0
    begin = time.perf_counter()
    async with Client(url) as client:
        asked = []
        for request, prompt in zip(trace.requests, prompts, strict=True):
            await asyncio.sleep(max(begin + request.at / speed - time.perf_counter(), 0.0))
            late = max(late, time.perf_counter() - begin - request.at / speed)
            asked.append(asyncio.create_task(client.answered(prompt, request.output)))
        for found, prompt in zip(await ended(asked), prompts, strict=True):
            outcome.add(found, len(prompt))
    return {**outcome.record(time.perf_counter() - begin), "left_out": trace.left_out, "late_s": late}


def measure(server: Server, setup: Setup, args: argparse.Namespace) -> Record:
    """The trace on one server, on an empty prefix cache."""
    vocab = setup.shape.vocab
    warm_up(server, vocab, 1024, 8, setup.seed)
    server.flush_cache()
    found = replay(server.url, args.requests, vocab, setup.seed, args.speed)
    cache = (server.stats() or {}).get("prefix_cache")
    print(f"{found['output_throughput']:.0f} tok/s, hit rate {found['hit_rate']:.3f}", flush=True)
    return {"loads": [{**found, "prefix_cache": cache} if cache else found]}


def positive(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--trace", type=Path, required=True, help="the file, .jsonl or .jsonl.xz")
    parser.add_argument("--minutes", type=positive, default=5.0, help="of the trace (default: %(default)s)")
    parser.add_argument("--start-minute", type=float, default=0.0, help="where they begin (default: %(default)s)")
    parser.add_argument("--speed", type=positive, default=1.0, help="times the trace's rate (default: %(default)s)")
    parser.add_argument("--longest", type=int, metavar="TOKENS", help="of a request, its reply included (default: any)")
    parser.add_argument("--name", help="of the result files (default: trace_MODEL)")
    args: Any = parse(parser, argv)
    try:
        args.requests = Trace.read(args.trace, minutes=args.minutes, start=args.start_minute, longest=args.longest)
    except (OSError, ValueError, lzma.LZMAError) as error:
        parser.error(str(error))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all backends, print the table and write the results."""
    args = parse_args(argv)
    model = model_name(args)
    name = args.trace.name.partition(".")[0]
    data = {"kind": "trace", "name": args.name or f"trace_{model}"}
    titles = [args.requests.title(name, args.speed)]
    return measure_each(args, data, f"A trace, {model}", partial(measure, args=args), partial(table, titles=titles))


if __name__ == "__main__":
    sys.exit(main())
