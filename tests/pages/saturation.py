"""A server's scheduling under more requests than fit, without a model: page counts are real, tokens are not.

The ledger, the page manager's plans and the host's counts are those of a server; ``CountingOps`` does to a state's
counts what kernels do, and draws which tokens go down a tier. Admission, chunking and retraction follow SGLang
(``PrefillAdder``, ``ScheduleBatch.retract_decode``) for prompts that share nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sglang_diffkv.mem_pool.growth import Expected
from tests.pages.saturation_pools import Request

CLIP = 4096
"""SGLang's CLIP_MAX_NEW_TOKENS."""
FIRST_RATIO, LEAST_RATIO, DECAY_STEPS, RETRACT_STEPS = 0.7, 0.7 * 0.14, 600, 20


@dataclass
class Seen:
    """What a run showed while requests waited."""

    running: list[int] = field(default_factory=list)
    ratio: list[float] = field(default_factory=list)
    retracted: int = 0
    relieved: int = 0  # compressions under pressure
    compacted: int = 0  # prompts admitted because they are compacted between chunks
    held: int = 0  # passes in which such a prompt waited
    steps: int = 0

    @property
    def mean(self) -> float:
        return float(np.mean(self.running))


class Scheduler:
    """SGLang's loop over a pool: prompts first, in chunks, then a decode step of all running requests. ``certain``: it
    reserves whole replies, and guesses nothing."""

    def __init__(
        self,
        pool: Any,
        requests: list[Request],
        rows: int,
        *,
        chunk: int = 8192,
        certain: bool = False,
        on_step: Callable[[int], None] = lambda step: None,
    ):
        self.pool, self.chunk, self.on_step = pool, chunk, on_step
        self.waiting = deque(requests)
        self.running: list[Request] = []
        self.chunked: Request | None = None
        self.rows = list(range(rows, 0, -1))
        self.certain, self.new_ratio = certain, FIRST_RATIO
        self.full = False
        self.seen = Seen()

    def run(self) -> Seen:
        while self.waiting or self.running or self.chunked:
            if not self._prefill():
                self._decode()
        return self.seen

    def _rest(self, req: Request) -> int:
        return min(max(req.reply - req.made, 0), CLIP)

    def _expected(self) -> list[Expected]:
        return [
            Expected(x.row, self._rest(x) * (1 if self.certain else self.new_ratio), self.certain) for x in self.running
        ]

    def _growth(self, req: Request) -> float:
        return self.pool.growth(req.fill, self._rest(req), self.certain)

    def _prefill(self) -> bool:
        if (self.full or not self.waiting) and self.chunked is None:
            return False
        pool, batch, left = self.pool, [], self.chunk
        offset = sum(pool.growth_of(*expected) for expected in self._expected())
        held = self.chunked is not None and bool(self.running) and pool.holds(self.chunked)
        self.seen.held += held
        if self.chunked is not None and not held:
            req = self.chunked
            count = min(req.fill - req.done, left)
            batch.append((req, count))
            left -= count
            self.chunked = None if req.done + count == req.fill else req
            offset += count + (0 if self.chunked else self._growth(req))
        while self.waiting and left > 0 and self.chunked is None and self._admit(self.waiting[0], batch, left, offset):
            req, count = batch[-1]
            left -= count
            offset += count + 1 + (0 if self.chunked else math.ceil(self._growth(req)))
        if not batch:
            return False
        pool.prefill(batch)
        for req, count in batch:
            req.done += count
            if req.done == req.fill:
                req.made += 1
                self.running.append(req)
        self._retire()
        return True

    def _admit(self, req: Request, batch: list[tuple[Request, int]], left: int, offset: float) -> bool:
        """Whether the first of the waiting requests joins the batch."""
        pool = self.pool
        wanted, room = (
            req.fill + math.ceil(self._growth(req)) + 1,
            pool.available() - offset,
        )
        chunk = 0
        if not pool.admits(req.fill) or wanted >= room:
            others = [*self.running, *(x for x, _ in batch)]
            saved, fits = pool.saved(req.fill, self.chunk, max((x.prompt + x.reply for x in others), default=0))
            if not fits or wanted - saved >= room:
                pool.refuse(wanted - saved)
                self.full = True
                return False
            chunk = self.chunk
            self.seen.compacted += 1
        if not self.rows:
            self.full = True
            return False
        self.waiting.popleft()
        req.row = self.rows.pop()
        pool.promise(req, chunk)
        count = min(req.fill, left)
        batch.append((req, count))
        if count < req.fill:
            self.chunked = req
        return True

    def _decode(self) -> None:
        self._make_room()
        if self.waiting:
            self.seen.running.append(len(self.running))
            self.seen.ratio.append(self.pool.ratio())
        self.pool.decode(self.running)
        self.seen.steps += 1
        self.on_step(self.seen.steps)
        for req in self.running:
            req.made += 1
            req.done += 1
        self._retire()
        if self.full and self.pool.retry(self._expected()):
            self.full = False

    def _make_room(self) -> None:
        if self.pool.available() < len(self.running) or self.pool.lends_no_more():
            self.seen.relieved += self.pool.relieve(self.running)
        if self.pool.available() >= len(self.running):
            self.new_ratio = max(self.new_ratio - (FIRST_RATIO - LEAST_RATIO) / DECAY_STEPS, LEAST_RATIO)
            return
        order = sorted(self.running, key=lambda req: (req.made, -req.prompt), reverse=True)
        while self.pool.available() < len(order) or len(order) == len(self.running):
            assert len(order) > 1, "the last request does not fit"
            req = order.pop()
            self._leave(req)
            req.done = 0
            self.waiting.append(req)
            self.seen.retracted += 1
        self.running, self.full = order, False
        made, most = sum(x.made for x in order), sum(x.reply for x in order)
        self.new_ratio = min((made + RETRACT_STEPS * len(order)) / (most + 1), 1.0)

    def _leave(self, req: Request) -> None:
        self.pool.release(req.row)
        self.rows.append(req.row)
        req.row = 0

    def _retire(self) -> None:
        done = [x for x in self.running if x.made >= x.reply]
        for req in done:
            self._leave(req)
        if done:
            self.running = [x for x in self.running if x.made < x.reply]
            self.full = False
