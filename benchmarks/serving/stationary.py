"""Tokens a second of a server that has been busy for long: long replies, begun at different times, some always waiting.

A load whose requests begin together shows a pool that fills up and empties again. Here
the first requests come with part of their reply as prompt, an even share of all lengths, one
after the other until one has to wait; from then on a new request comes for each that begins, so that ``--waiting``
always wait. After ``--settle`` seconds, tokens are counted for ``--seconds``, as their streams show them; then all
requests are aborted. Example:

    python -m benchmarks.serving.stationary --geometry llama3-8b --kv-gib 8 --backends fa3:bf16 fa3:fp8_e4m3 \\
        --diffkv 'zipage={"tiers": ["BF16"], "policy": {"name": "zipage", "max_blocks": 8}}' \\
        --diffkv 'beside={"tiers": ["BF16"], "policy": {"name": "zipage", "max_blocks": 8, "asynchronous": true}}' \\
        --output-tokens 8192

Compressions of running requests are counted over the same time. ``--profile-steps`` (a GPU is needed) records steps
behind that, and says how much of their time went into compressing (``compression_time``).

NAME.json, NAME.md and a chart of running requests in the output folder; ``python -m benchmarks.redraw --together``
draws those of several commands as one. Exit code 1 if a server failed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import requests

from benchmarks.serving import charts
from benchmarks.serving.cli import model_name
from benchmarks.serving.client import BenchmarkError, warm_up
from benchmarks.serving.compression_time import compression_time
from benchmarks.serving.each_backend import add_arguments, failed_row, measure_each, parse
from benchmarks.serving.log import mean, parse_log
from benchmarks.serving.session import OK, Record, Setup, short
from benchmarks.serving.step_profile import breakdown, next_steps
from sglang_diffkv.drawing import drawn
from sglang_diffkv.evaluate.report import markdown
from sglang_diffkv.evaluate.server import Server

COUNT = re.compile(rb'"completion_tokens": ?(\d+)')
FULL_AFTER = 4.0
"""Seconds without a first token after which the server counts as full."""
END_WITHIN = 30.0
"""Seconds for aborted requests to end."""
GOLDEN = 0.6180339887
"""Multiples of it, less their whole part, are spread evenly however many there are."""


@dataclass
class Stream:
    """One request. ``counts``: its tokens so far, at a time."""

    sent: float
    counts: list[tuple[float, int]] = field(default_factory=list)
    ended: bool = False


class Crowd:
    """Requests of ``prompt`` and ``reply`` tokens against one server, of which some always wait. All prompts begin with
    the same ``shared`` tokens."""

    def __init__(self, url: str, vocab: int, prompt: int, reply: int, waiting: int, seed: int, shared: int = 0):
        self.url, self.vocab, self.prompt, self.reply, self.waiting = url, vocab, prompt, reply, waiting
        self.draw = random.Random(f"stationary {seed}")
        self.opening = self._tokens(shared)
        self.streams: list[Stream] = []
        self.errors: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(
        self,
        settle: float,
        seconds: float,
        most: int,
        watch: Callable[[], None] = lambda: None,
        bound: Callable[[], None] = lambda: None,
    ) -> tuple[float, float]:
        """When counting began and ended. Raises BenchmarkError if a request failed.

        Args:
            most: requests that may run. watch: is called behind that, in a thread of its own, under the same load.
            bound: is called so just before counting begins and just after it ends.
        """
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
            try:
                await self._fill(session, most)
                filled = time.perf_counter()
                await self._hold(session, lambda: time.perf_counter() > filled + settle)
                await asyncio.to_thread(bound)
                begin = time.perf_counter()
                await self._hold(session, lambda: time.perf_counter() > begin + seconds)
                end = time.perf_counter()
                await asyncio.to_thread(bound)
                watching = asyncio.create_task(asyncio.to_thread(watch))
                await self._hold(session, watching.done)
                await watching
                return begin, end
            finally:
                await self._end(session)

    async def _end(self, session: aiohttp.ClientSession) -> None:
        """Abort all requests. A server that does not answer any more is no error here: why it does not is told."""
        limit = aiohttp.ClientTimeout(total=END_WITHIN)
        try:
            async with session.post(f"{self.url}/abort_request", json={"abort_all": True}, timeout=limit) as reply:
                await reply.read()
            await asyncio.wait_for(asyncio.gather(*self._tasks, return_exceptions=True), END_WITHIN)
        except (aiohttp.ClientError, asyncio.TimeoutError):
            for task in self._tasks:
                task.cancel()

    async def _fill(self, session: aiohttp.ClientSession, most: int) -> None:
        """Requests as they stand in a long queue's midst, until one has to wait."""
        while len(self.streams) < most:
            done = int(self.reply * (0.5 + GOLDEN * len(self.streams)) % self.reply)
            stream = self._send(session, self.prompt + done, self.reply - done)
            while not stream.counts and not stream.ended:
                if time.perf_counter() > stream.sent + FULL_AFTER:
                    return
                await self._look()

    async def _hold(self, session: aiohttp.ClientSession, over: Callable[[], bool]) -> None:
        while not over():
            for _ in range(self.waiting - sum(not (x.counts or x.ended) for x in self.streams)):
                self._send(session, self.prompt, self.reply)
            await self._look()

    async def _look(self) -> None:
        await asyncio.sleep(0.02)
        if self.errors:
            raise BenchmarkError(f"{len(self.errors)} requests failed: {self.errors[0][-300:]}")

    def _send(self, session: aiohttp.ClientSession, prompt: int, reply: int) -> Stream:
        stream = Stream(time.perf_counter())
        ids = [*self.opening, *self._tokens(prompt - len(self.opening))]
        self.streams.append(stream)
        task = asyncio.create_task(self._follow(session, stream, ids, reply))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream

    def _tokens(self, count: int) -> list[int]:
        return [self.draw.randrange(self.vocab // 2, self.vocab) for _ in range(count)]

    async def _follow(self, session: aiohttp.ClientSession, stream: Stream, ids: list[int], reply: int) -> None:
        parameters = {"temperature": 0, "max_new_tokens": reply, "ignore_eos": True}
        body = {"input_ids": ids, "stream": True, "sampling_params": parameters}
        try:
            async with session.post(f"{self.url}/generate", json=body) as answer:
                if answer.status != 200:
                    self.errors.append(await answer.text())
                async for chunk in answer.content.iter_any():
                    if found := COUNT.findall(chunk):
                        # A number that a chunk's end cuts is smaller than the last one.
                        known = stream.counts[-1][1] if stream.counts else 0
                        stream.counts.append((time.perf_counter(), max(int(found[-1]), known)))
        except aiohttp.ClientError as error:
            self.errors.append(str(error))
        stream.ended = True


def tokens_between(counts: Sequence[tuple[float, int]], begin: float, end: float) -> int:
    """Tokens that a stream showed after ``begin`` and not after ``end``."""
    before = max((n for at, n in counts if at <= begin), default=0)
    return max(max((n for at, n in counts if at <= end), default=0) - before, 0)


def measure(server: Server, setup: Setup, args: argparse.Namespace) -> Record:
    """What one server generates, and how many requests run meanwhile."""
    warm_up(server, setup.shape.vocab, 1024, 8, setup.seed)
    start = len(server.log_text())
    crowd = Crowd(server.url, setup.shape.vocab, args.prompt, args.output_tokens, args.waiting, setup.seed, args.shared)
    first = time.perf_counter()
    steps: Record = {}
    bounds: list[Record] = []

    def watch() -> None:
        if not args.profile_steps:
            return
        try:
            with tempfile.TemporaryDirectory(prefix="profile-") as folder:
                trace = next_steps(server, args.profile_steps, Path(folder))
            steps["steps"] = breakdown(trace, args.profile_steps)
            if bounds[-1]:
                steps["compression"] = asdict(compression_time(trace))
        except (BenchmarkError, OSError, requests.RequestException) as error:  # what was counted stays
            steps["not_recorded"] = short(error)

    def bound() -> None:
        bounds.append(budget_counts(server))

    begin, end = asyncio.run(crowd.run(args.settle, args.seconds, setup.max_running, watch, bound))
    generated = sum(tokens_between(x.counts, begin, end) for x in crowd.streams)
    log = server.log_text()[start:]
    running = running_over_time(crowd.streams, first, end)
    counted = [n for at, n in running if at >= begin - first]
    if not generated or not counted:
        raise BenchmarkError(f"no token came, or no whole second was counted, in {end - begin:.1f} s")
    stats = server.stats() or {}
    server.flush_cache()
    return {
        "tokens_per_s": generated / (end - begin),
        "filled_s": begin - first - args.settle,
        "running": running,
        "counted_from_s": begin - first,
        "finished": sum(x.ended and bool(x.counts) and begin < x.counts[-1][0] < end for x in crowd.streams),
        **asdict(parse_log(log)),
        "running_mean": mean(counted),
        "admission": stats.get("admission"),
        "counted": {name: count - bounds[0][name] for name, count in bounds[-1].items()},
        **steps,
    }  # fmt: skip


def budget_counts(server: Server) -> dict[str, int]:
    """What a server has counted so far of requests that hold a budget; nothing where none does."""
    admission = (server.stats() or {}).get("admission") or {}
    return {name: count for name, count in admission.items() if name.startswith("budget_")}


def running_over_time(streams: Sequence[Stream], first: float, end: float) -> list[tuple[int, int]]:
    """Each second since ``first``, and the requests that have begun and not ended."""
    spans = [(x.counts[0][0], x.counts[-1][0] if x.ended else end) for x in streams if x.counts]
    return [(t, sum(a <= first + t <= b for a, b in spans)) for t in range(int(end - first))]


def table(records: Sequence[Record]) -> str:
    """A row for each backend, against the first; of recorded steps, the time, that without a kernel, and that which
    went into compressing."""
    header = [
        "backend",
        "tokens that fit",
        "tokens/s",
        "of the first",
        "running",
        "finished",
        "retracted",
        "compressions",
        "waited steps",
    ]
    rows = []
    good = [x for x in records if x["status"] == OK]
    for record in records:
        if record["status"] != OK:
            rows.append(failed_row(record, len(header)))
            continue
        counted = record.get("counted") or {}
        rows.append([
            record["backend"], f"{record['capacity_tokens']:,}", f"{record['tokens_per_s']:,.0f}",
            f"{record['tokens_per_s'] / good[0]['tokens_per_s']:.2f}", f"{record['running_mean']:.1f}",
            str(record["finished"]), str(record["retracted"]),
            *(str(counted.get(f"budget_{name}", "")) for name in ("compressions", "waited_steps")),
        ])  # fmt: skip
    return "\n\n".join([markdown(header, rows), *(_recorded(x) for x in good if "steps" in x or "not_recorded" in x)])


def _recorded(record: Record) -> str:
    """What was recorded of a server's steps."""
    if "not_recorded" in record:
        return f"{record['backend']}: no steps were recorded: {record['not_recorded']}"
    step, time = record["steps"], record.get("compression")
    told = (
        f"{record['backend']}: a step took {step['span_ms']:.2f} ms on the GPU, {step['idle_ms']:.2f} without a kernel"
    )
    if time:
        told += f"; {time['share']:.1%} of the time it compressed, {time['times']} times, {time['mean_ms']:.2f} ms each"
        told += f" ({time['beside']:.1%} beside other work)"
    return told


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument(
        "--shared", type=int, default=0, help="of them that all prompts begin with (default: %(default)s)"
    )
    parser.add_argument("--output-tokens", type=int, default=8192, help="of a reply (default: %(default)s)")
    parser.add_argument("--waiting", type=int, default=8, help="requests that always wait (default: %(default)s)")
    parser.add_argument("--settle", type=float, default=20.0, help="seconds before counting (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of counting (default: %(default)s)")
    parser.add_argument(
        "--profile-steps",
        type=int,
        default=0,
        metavar="N",
        help="record N steps on the GPU behind that, as step_profile",
    )
    args = parse(parser, argv)
    if not 0 <= args.shared < args.prompt:
        parser.error(f"--shared {args.shared} leaves nothing of a prompt of {args.prompt} tokens")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all backends, print the table, write the results and the chart."""
    args = parse_args(argv)
    name = f"stationary_{model_name(args)}"
    load = {key: getattr(args, key) for key in ("prompt", "shared", "output_tokens", "waiting", "settle", "seconds")}
    data: dict[str, Any] = {"kind": "stationary", "name": name, "load": load}
    title = f"Long replies, some always waiting, {model_name(args)}"
    status = measure_each(args, data, title, partial(measure, args=args), table)
    drawn(lambda: charts.running([data], args.output / f"{name}.png"), f"python -m benchmarks.redraw {name}.json")
    return status


if __name__ == "__main__":
    sys.exit(main())
