"""Agents and chats: sessions of many turns that share a system prompt, more of them than run at once.

A session's next turn sends all tokens so far and some new ones, and waits behind the other sessions' turns. So what
counts is whether its prefix is still cached. Sessions of one turn are single requests: long ones (``long``), or of
lengths as services see them (``lognormal``). Each backend gets a server of its own with the same bytes of KV cache:

    python -m benchmarks.serving.agents --geometry llama3-8b --kv-gib 8 \\
        --backends fa3:bf16 fa3:fp8_e4m3 --diffkv 'default={}' \\
        --load tools --load 'coding={"sessions": 48, "at_once": 24}'

NAME.json and NAME.md in the output folder. Exit code 1 if a server failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial

import numpy as np

from benchmarks.serving.cli import model_name
from benchmarks.serving.client import warm_up
from benchmarks.serving.each_backend import add_arguments, measure_each, parse
from benchmarks.serving.session import OK, Record, Setup
from benchmarks.serving.streams import Answer, Client, ended
from sglang_diffkv.evaluate.report import markdown
from sglang_diffkv.evaluate.server import Server


@dataclass(frozen=True)
class Sessions:
    """A load: ``sessions`` of ``turns``, of which ``at_once`` run at a time. All begin with the same ``shared`` tokens;
    each turn adds ``new`` tokens and a reply of ``reply`` tokens. With ``sigma`` these two are medians of log-normal
    lengths, of which none is above ``most_new`` and ``most_reply``."""

    name: str
    sessions: int
    at_once: int
    shared: int
    turns: int
    new: int
    reply: int
    sigma: float = 0.0
    most_new: int = 0
    most_reply: int = 0

    def __post_init__(self) -> None:
        for part in fields(self):
            value = getattr(self, part.name)
            if part.name == "sigma":
                if not isinstance(value, int | float) or value < 0:
                    raise ValueError(f"sigma {value!r}: a number of at least 0")
                continue
            least = 0 if part.name in ("shared", "most_new", "most_reply") else 1
            if part.name != "name" and (not isinstance(value, int) or value < least):
                raise ValueError(f"{part.name} {value!r}: a whole number of at least {least}")
        if self.sigma and (self.most_new < self.new or self.most_reply < self.reply):
            raise ValueError(f"sigma {self.sigma}: most_new and most_reply are at least new and reply, their medians")

    @property
    def title(self) -> str:
        drawn = f" (medians; log-normal, sigma {self.sigma:g}, at most {self.most_new} + {self.most_reply})"
        return (
            f"{self.sessions} sessions, {self.at_once} at once; {self.shared} shared tokens, {self.turns} turns of "
            f"{self.new} + {self.reply}{drawn if self.sigma else ''}"
        )

    def lengths(self, draw: random.Random) -> tuple[int, int]:
        """New tokens and tokens of the reply of a turn."""
        if not self.sigma:
            return self.new, self.reply
        return (
            _log_normal(draw, self.new, self.sigma, self.most_new),
            _log_normal(draw, self.reply, self.sigma, self.most_reply),
        )


def _log_normal(draw: random.Random, median: int, sigma: float, most: int) -> int:
    return min(max(round(draw.lognormvariate(math.log(median), sigma)), 1), most)


LOADS = {
    load.name: load
    for load in (
        Sessions("coding", sessions=24, at_once=16, shared=4000, turns=8, new=1000, reply=150),
        Sessions("tools", sessions=64, at_once=32, shared=2000, turns=48, new=24, reply=16),
        Sessions("chats", sessions=64, at_once=48, shared=1000, turns=5, new=200, reply=256),
        Sessions("long", sessions=12, at_once=12, shared=0, turns=1, new=30_000, reply=512),
        Sessions(
            "lognormal",
            sessions=256,
            at_once=160,
            shared=0,
            turns=1,
            new=400,
            reply=200,
            sigma=1.1,
            most_new=8000,
            most_reply=2000,
        ),
    )
}


def parse_load(text: str) -> Sessions:
    """``NAME`` of ``LOADS``, or ``NAME={"field": value, ...}`` with the fields that differ from it."""
    name, _, value = text.partition("=")
    if name not in LOADS:
        raise argparse.ArgumentTypeError(f"unknown load {name!r}: one of {', '.join(LOADS)}")
    try:
        changes = json.loads(value or "{}")
        if not isinstance(changes, dict) or "name" in changes:
            raise ValueError("fields as a JSON object, without the name")
        return replace(LOADS[name], **changes)
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"load {text!r}: {error}") from None


@dataclass
class Session:
    """A session's tokens so far, and its turns that are left: the tokens that each adds, and how many it asks for."""

    tokens: list[int]
    turns: deque[tuple[list[int], int]]

    @classmethod
    def drawn(cls, draw: random.Random, load: Sessions, vocab: int, shared: Sequence[int]) -> Session:
        """All of it is drawn before anything is timed."""
        turns: deque[tuple[list[int], int]] = deque()
        for _ in range(load.turns):
            new, wanted = load.lengths(draw)
            turns.append((drawn(draw, vocab, new), wanted))
        return cls(list(shared), turns)


@dataclass
class Outcome:
    """What the turns of a load took."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    prompt: int = 0
    cached: int = 0
    output: int = 0

    def add(self, answer: Answer, prompt: int) -> None:
        """A turn of ``prompt`` tokens was answered."""
        self.first.append(answer.first)
        self.gaps += answer.gaps
        self.prompt += prompt
        self.cached += answer.cached
        self.output += len(answer.reply)

    def record(self, seconds: float) -> Record:
        """What the table shows, after so many seconds."""
        ordered, gaps = sorted(self.first), sorted(self.gaps)
        return {
            "seconds": seconds,
            "turns_answered": len(ordered),
            "output_throughput": self.output / seconds,
            "hit_rate": self.cached / self.prompt,
            "ttft_s": statistics.median(ordered),
            "ttft_p99_s": _quantile(ordered, 0.99),
            "gap_s": _quantile(gaps, 0.5),
            "gap_p99_s": _quantile(gaps, 0.99),
        }


class Run:
    """A load on a server. The client keeps ``at_once`` turns under way; sessions take turns in order."""

    def __init__(self, url: str, load: Sessions, vocab: int, seed: int):
        self.url, self.load = url, load
        shared = drawn(random.Random(f"shared {seed}"), vocab, load.shared)
        draws = (random.Random(f"{load.name} {seed} {n}") for n in range(load.sessions))
        self.waiting = deque(Session.drawn(draw, load, vocab, shared) for draw in draws)
        self.outcome = Outcome()

    def run(self) -> Record:
        """All turns. Raises BenchmarkError if a turn is not answered whole."""
        begin = time.perf_counter()
        asyncio.run(self._all())
        return {**asdict(self.load), **self.outcome.record(time.perf_counter() - begin)}

    async def _all(self) -> None:
        async with Client(self.url) as client:
            await ended([asyncio.create_task(self._work(client)) for _ in range(self.load.at_once)])

    async def _work(self, client: Client) -> None:
        while self.waiting:  # else the sessions under way have workers of their own
            session = self.waiting.popleft()
            await self._turn(client, session)
            if session.turns:
                self.waiting.append(session)

    async def _turn(self, client: Client, session: Session) -> None:
        new, wanted = session.turns.popleft()
        prompt = session.tokens + new
        found = await client.answered(prompt, wanted)
        session.tokens = prompt + found.reply
        self.outcome.add(found, len(prompt))


def _quantile(times: Sequence[float], share: float) -> float:
    """Between two of them where it lies there, so that of a few it is near the largest, and never below the median."""
    return float(np.quantile(times, share)) if times else 0.0


def drawn(draw: random.Random, vocab: int, count: int) -> list[int]:
    return [draw.randrange(vocab // 2, vocab) for _ in range(count)]


def measure(server: Server, setup: Setup, args: argparse.Namespace) -> Record:
    """All loads on one server, one after the other, each on an empty prefix cache."""
    vocab = setup.shape.vocab
    warm_up(server, vocab, 1024, 8, setup.seed)
    record: Record = {"loads": []}
    for load in args.load:
        server.flush_cache()
        found = Run(server.url, load, vocab, setup.seed).run()
        cache = (server.stats() or {}).get("prefix_cache")
        record["loads"].append({**found, "prefix_cache": cache} if cache else found)
        print(f"{load.name}: {found['output_throughput']:.0f} tok/s, hit rate {found['hit_rate']:.3f}", flush=True)
    return record


def table(records: Sequence[Record], titles: Sequence[str]) -> str:
    """A row for each backend and load, which has a title."""
    header = [
        "load", "backend", "output tok/s", "hit rate", "first token, median and p99 s", "gap, median and p99 ms",
        "pages over needed",
    ]  # fmt: skip
    rows = []
    for number, title in enumerate(titles):
        for record in records:
            if record["status"] != OK:
                rows.append([title, record["backend"], record["error"], "", "", "", ""])
                continue
            found = record["loads"][number]
            rows.append(
                [
                    title,
                    record["backend"],
                    f"{found['output_throughput']:,.0f}",
                    f"{found['hit_rate']:.3f}",
                    f"{found['ttft_s']:.2f}, {found['ttft_p99_s']:.2f}",
                    f"{1e3 * found['gap_s']:.1f}, {1e3 * found['gap_p99_s']:.0f}",
                    f"{found['prefix_cache']['pages_over_needed']:.2f}" if "prefix_cache" in found else "",
                ]
            )
    return markdown(header, rows)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument(
        "--load",
        type=parse_load,
        action="append",
        metavar="NAME[=JSON]",
        help=f"one of {', '.join(LOADS)}, with the fields to change as JSON (default: all); repeatable",
    )
    parser.add_argument("--name", help="of the result files (default: agents_MODEL)")
    args = parse(parser, argv)
    args.load = args.load or [*LOADS.values()]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all backends, print the table and write the results."""
    args = parse_args(argv)
    model = model_name(args)
    titles = [load.title for load in args.load]
    data = {"kind": "agents", "name": args.name or f"agents_{model}"}
    return measure_each(args, data, f"Agents, {model}", partial(measure, args=args), partial(table, titles=titles))


if __name__ == "__main__":
    sys.exit(main())
