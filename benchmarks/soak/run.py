"""The course of a soak on a running server: questions, rounds of load with a check after each, the questions again."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.soak.client import ANSWERED, ENDS, LOST, REFUSED, Client, Outcome
from benchmarks.soak.load import Load, Order
from benchmarks.soak.report import Answer, Question, Tally
from benchmarks.soak.running import RunningServer
from benchmarks.soak.watch import Watch
from sglang_diffkv.evaluate.server import Server
from sglang_diffkv.evaluate.tasks import reference
from sglang_diffkv.evaluate.tasks.generation import Example

ASIDE = 60.0
"""Seconds that anything but a request for tokens may take."""
SETTLE = 60.0
"""Seconds that a server may take to forget requests whose clients are gone."""


@dataclass(frozen=True)
class Plan:
    """How long and how hard: ``seconds`` of load in all, ``rounds`` they are divided into, requests at a time, seconds
    until a request counts as lost, seconds between two samples."""

    seconds: float
    rounds: int
    concurrency: int
    deadline: float
    interval: float


@dataclass
class Soak:
    """A soak and all that it has found so far. ``failures`` are reasons to fail that no count shows. ``store`` is what
    the server's store did, if it has one."""

    server: Server | RunningServer
    plan: Plan
    load: Load
    items: Sequence[Example]
    questions: list[Question] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    failures: list[str] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    store: dict[str, float] = field(default_factory=dict)

    async def run(self) -> None:
        """Run it to its end, or until the server dies."""
        timeout = aiohttp.ClientTimeout(total=ASIDE)
        access, url = self.server.access, self.server.url
        connector = aiohttp.TCPConnector(limit=0, force_close=True, ssl=access.context())
        async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=access.headers()) as session:
            self.client = Client(url, session, self.plan.deadline, access.headers("/abort_request"))
            self.watch = Watch(url, self.server.pid, session)
            self.samples = self.watch.samples
            try:
                self.questions = [await self._first(i) for i in range(len(self.items))]
                self.watch.start = time.monotonic()
                for number in range(self.plan.rounds):
                    await self._round(number)
                for index, question in enumerate(self.questions):
                    question.after = await self._ask(index, flush=True)
                self.store = store_of(await self.watch.stats() or {})
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError, SoakError) as error:
                state = "running elsewhere" if self.server.pid is None else "alive" if self.server.alive() else "dead"
                self.failures.append(f"stopped: {type(error).__name__}: {error}; the server is {state}")

    async def _first(self, index: int) -> Question:
        alone = await self._ask(index, flush=True)
        return Question(self.items[index].id, alone, await self._ask(index, flush=False))

    async def _ask(self, index: int, *, flush: bool) -> Answer:
        """The idle server's answer to a reference question."""
        if flush:
            await self._flush()
        outcome = await self.client.send(self.load.reference(index))
        if outcome.end != ANSWERED:
            raise SoakError(f"reference question {self.items[index].id} was {outcome.end}: {outcome.detail}")
        return self._answer(index, outcome)

    def _answer(self, index: int, outcome: Outcome) -> Answer:
        (choice,) = outcome.choices
        right = reference.grade(choice["text"], self.items[index].answers)
        meta = choice["meta_info"]
        return Answer(right, choice["text"], meta["cached_tokens"] / meta["prompt_tokens"])

    async def _round(self, number: int) -> None:
        """Load, then nothing, then the check that nothing is left. Every second round ends with an abort of all."""
        end = self.watch.start + self.plan.seconds * (number + 1) / self.plan.rounds
        watching = asyncio.create_task(self._watch())
        workers = [asyncio.create_task(self._work(end, 0.05 * i)) for i in range(self.plan.concurrency)]
        await asyncio.sleep(max(0.0, end - time.monotonic()))
        aborts = number % 2 == 1
        if aborts and self.server.alive():
            await self.client.abort_all()
        await asyncio.gather(*workers)
        watching.cancel()
        self.client.aborting_all = False
        await self._check(number, aborts)

    async def _work(self, end: float, delay: float) -> None:
        """One client: a request after the other until ``end``."""
        await asyncio.sleep(delay)
        while time.monotonic() < end and self.server.alive():
            order = self.load.next()
            self._count(order, await self.client.send(order))
            if self.tally.last in (REFUSED, LOST) and order.kind != "invalid":
                await asyncio.sleep(random.uniform(1.0, 4.0))

    def _count(self, order: Order, outcome: Outcome) -> None:
        self.tally.add(outcome, time.monotonic() - self.watch.start)
        answered = outcome.end == ANSWERED
        single = outcome.choices[0].get("output_ids") if answered and order.samples == 1 else None
        self.load.give_back(order, single)
        if answered:
            self.load.typical += 0.05 * (outcome.seconds - self.load.typical)
        if answered and order.question is not None:
            self.questions[order.question].loaded.append(self._answer(order.question, outcome))

    async def _watch(self) -> None:
        """Take samples until cancelled."""
        while True:
            sums = {end: self.tally.count(end) for end in ENDS}
            tokens = self.tally.sums["completion_tokens"]
            with contextlib.suppress(aiohttp.ClientError, OSError, asyncio.TimeoutError):
                await self.watch.look(in_flight=self.client.in_flight, tokens_out=tokens, **sums)
            await asyncio.sleep(self.plan.interval)

    async def _check(self, number: int, aborted_all: bool) -> None:
        """With nothing running and an empty prefix cache every page must be free."""
        place = f"round {number + 1}"
        begin = time.monotonic()
        if not await self.watch.idle(SETTLE + self.plan.deadline):
            self.failures.append(f"{place}: requests are left that no client waits for: {await self.watch.queue()}")
            return
        settled = time.monotonic() - begin
        await self._flush()
        sample = await self.watch.look(in_flight=self.client.in_flight, idle=True)
        stats = await self.watch.stats() or {}
        about = {"aborted_all": aborted_all, "settled_s": round(settled, 1), "pages_used": stats.get("pages_used")}
        self.rounds.append({**about, **sample})
        left = {name: stats[name] for name in ("pages_used", "segments", "tokens") if stats.get(name)}
        if left:
            self.failures.append(f"{place}: left on the idle server: {left}")
        if stats.get("faults"):
            self.failures.append(f"{place}: {stats['faults']} requests found the pool empty")

    async def _flush(self) -> None:
        """Empty the prefix cache; a request has left the scheduler only some steps after its reply."""
        await asyncio.to_thread(self.server.flush_cache)


def store_of(stats: dict[str, Any]) -> dict[str, float]:
    """What a server's store did, by DiffKV's figures; empty if it has none."""
    stored = stats.get("stored_prefixes")
    if not stored:
        return {}
    refused = sum(count for name, count in stored.items() if name.startswith("refused_"))
    return {**{name: stored[name] for name in ("hits", "tokens_read", "written", "late", "errors")}, "refused": refused}


class SoakError(RuntimeError):
    """The soak cannot go on."""
