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
import torch

from sglang_diffkv.mem_pool.geometry import Geometry
from sglang_diffkv.mem_pool.ledger import PageLedger, pages_for
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.ops import ReferenceOps
from sglang_diffkv.policies.diffkv import DiffKVPolicy

CLIP = 4096
"""SGLang's CLIP_MAX_NEW_TOKENS."""
FIRST_RATIO, LEAST_RATIO, DECAY_STEPS, RETRACT_STEPS = 0.7, 0.7 * 0.14, 600, 20


class CountingOps(ReferenceOps):
    """Counts of pages and slots, without their contents; the reference's ``count_rows`` reads them.

    Args:
        high: share of the tokens behind the window that stay high, by (layer, head); [L, H].
    """

    def __init__(self, high: np.ndarray, window: int, seed: int):
        super().__init__()
        self.high, self.window = torch.from_numpy(high), window
        self.random = torch.Generator().manual_seed(seed)

    def _settle(self, state: Any, rows: torch.Tensor) -> None:
        """As many entries as the slots in use need; the difference comes from the ring or returns to it."""
        tokens = torch.tensor([x.tokens for x in state.fmt.layouts])
        entries = state.own_entry[rows] + -(-state.own_tokens[rows] // tokens)
        more = entries - state.entries[rows]
        state.counters[0] += int(more.clamp(min=0).sum())
        state.counters[1] += int((-more).clamp(min=0).sum())
        assert state.counters[1] >= state.counters[0], "the ring is empty"
        state.entries[rows] = entries.int()

    def reserve(self, state: Any, rows: torch.Tensor, new_tokens: torch.Tensor, most: int) -> None:
        fills = (new_tokens[:, None, None] == 1) & (state.hole[rows] >= 0)
        state.own_tokens[rows, :, :, 0] += torch.where(fills, 0, new_tokens[:, None, None]).int()
        state.hole[rows] = torch.where(fills, -1, state.hole[rows])
        self._settle(state, rows)

    def compact_prompt(self, state: Any, row: int, seq_len: int, policy: Any) -> None:
        old = (state.own_tokens[row, :, :, 0] - self.window).clamp(min=0)
        goes = (old * (1 - self.high)).round().int()
        assert state.counters[1] - state.counters[0] >= self.high.numel(), "no spare pages for a compaction"
        state.own_tokens[row, :, :, 0] -= goes
        state.own_tokens[row, :, :, 1] += goes
        state.hole[row] = -1
        self._settle(state, torch.tensor([row]))

    def decode_step(self, state: Any, rows: torch.Tensor, *_: Any) -> Any:
        """A new token in every head, and the one that leaves the window goes down or stays."""
        self.reserve(state, rows, torch.ones_like(rows), 1)
        drawn = torch.rand(rows.shape[0], *self.high.shape, generator=self.random)
        goes = (drawn >= self.high) & (state.own_tokens[rows, :, :, 0] > self.window) & (state.hole[rows] < 0)
        state.hole[rows] = torch.where(goes, 0, state.hole[rows])
        state.own_tokens[rows, :, :, 1] += goes.int()
        self._settle(state, rows)

    def release(self, state: Any, row: int) -> None:
        state.counters[1] += int(state.entries[row].sum())
        for counts in (state.entries, state.kept_entry, state.own_entry, state.own_tokens):
            counts[row] = 0
        state.hole[row] = -1


@dataclass(eq=False)
class Request:
    """Prompt and reply lengths, and how far it is."""

    prompt: int
    reply: int
    made: int = 0
    row: int = 0
    done: int = 0  # tokens of its prompt, generated ones of a retracted request included, that were computed

    @property
    def fill(self) -> int:
        return self.prompt + self.made


class StockPool:
    """A pool of tokens, as SGLang's own."""

    def __init__(self, capacity: int):
        self.capacity, self.free = capacity, capacity
        self.held: dict[int, int] = {}

    price = 1.0

    def available(self) -> int:
        return self.free

    def admits(self, tokens: int) -> bool:
        return True

    def saved(self, tokens: int, chunk: int, longest: int) -> tuple[int, bool]:
        return 0, False

    def promise(self, req: Request, chunk: int) -> None: ...

    def holds(self, req: Request) -> bool:
        return False

    def prefill(self, batch: list[tuple[Request, int]]) -> None:
        for req, count in batch:
            self._take(req.row, count)

    def decode(self, reqs: list[Request]) -> None:
        for req in reqs:
            self._take(req.row, 1)

    def _take(self, row: int, count: int) -> None:
        self.free -= count
        assert self.free >= 0, "the pool is empty"
        self.held[row] = self.held.get(row, 0) + count

    def release(self, row: int) -> None:
        self.free += self.held.pop(row, 0)

    def price_of(self, row: int) -> float:
        return 1.0

    def retry(self, expected: list[tuple[int, float]]) -> bool:
        return False

    def refuse(self, wanted: float) -> None: ...

    def ratio(self) -> float:
        return 1.0


class DiffKVServer:
    """The ledger and the page manager of a server."""

    def __init__(
        self,
        fmt: Any,
        capacity: int,
        high: np.ndarray,
        *,
        rows: int,
        longest: int,
        window: int = 64,
        share_min_tokens: int | None = 128,
        compacts_chunks: bool = True,
    ):
        geometry = Geometry(
            fmt, *high.shape, pages_for(capacity, fmt.high.tokens, high.size), rows + 1, 512, max_tokens=longest
        )
        self.manager = PageManager(geometry, DiffKVPolicy(1.0, 0.0, window))
        self.manager.ops = self.ops = CountingOps(high, window, 0)
        self.manager.prompts.share_min_tokens = share_min_tokens
        self.ledger = PageLedger(self.manager, capacity)
        self.capacity, self.compacts_chunks = capacity, compacts_chunks

    @property
    def price(self) -> float:
        return self.ledger.growth_price()

    def available(self) -> int:
        return self.ledger.available()

    def admits(self, tokens: int) -> bool:
        return self.ledger.admits([], tokens)

    def saved(self, tokens: int, chunk: int, longest: int) -> tuple[int, bool]:
        """What a prompt takes less if it is compacted between chunks, 0 if it may not, and whether it fits then."""
        most = self.ledger.most_pages([], longest)
        if not self.compacts_chunks or tokens <= chunk or not self.ledger.may_compact([], tokens, most):
            return 0, False
        return tokens - self.ledger.compacting_tokens(tokens, chunk), self.ledger.admits_compacting(tokens, chunk)

    def promise(self, req: Request, chunk: int) -> None:
        """Set pages aside for an admitted prompt; ``chunk`` 0 if it is not compacted between chunks."""
        if chunk:
            self.ledger.chunks[str(req.row)] = chunk
        self.ledger.promise(str(req.row), [], req.fill)

    def holds(self, req: Request) -> bool:
        """Whether a prompt's next chunk has to wait."""
        if str(req.row) not in self.ledger.chunks or self.ledger.uncommitted_pages() >= 0:
            return False
        self.manager.tracker.settle()
        return self.ledger.uncommitted_pages() < 0

    def prefill(self, batch: list[tuple[Request, int]]) -> None:
        manager = self.manager
        rows, counts, starts = [], [], []
        for req, count in batch:
            if req.done + count < req.fill and str(req.row) in self.ledger.chunks:
                manager.prompts.chunking.add(req.row)
            self.ledger.promise(str(req.row), [], req.fill - req.done - count)
            rows.append(req.row)
            counts.append(count)
            starts.append(req.done)
        manager.plan_step(rows, counts, starts)
        manager.launch_step()
        manager.ops.reserve(manager.state, torch.tensor(rows), torch.tensor(counts), max(counts))
        for req, count in batch:
            if req.done + count == req.fill:
                manager.prompts.end(req.row)
        for row in manager.prompts.take_chunking(rows):
            manager.prompts.end_chunk(row)

    def decode(self, reqs: list[Request]) -> None:
        manager, rows = self.manager, [req.row for req in reqs]
        manager.plan_step(rows, [1] * len(rows), [manager.lengths[row] for row in rows])
        manager.launch_step()
        manager.ops.decode_step(manager.state, torch.tensor(rows), torch.tensor(rows), manager.policy)
        manager.tracker.report()

    def release(self, row: int) -> None:
        self.ledger.forget(str(row))
        if row in self.manager.lengths:
            self.manager.release(row)

    def refuse(self, wanted: float) -> None:
        self.ledger.refused = wanted

    def price_of(self, row: int) -> float:
        return self.ledger.price_of(row)

    def retry(self, expected: list[tuple[int, float]]) -> bool:
        return self.ledger.refused is not None and self.ledger.room_for_refused(expected)

    def ratio(self) -> float:
        """Bytes of the pages held over bf16 bytes of the tokens."""
        manager = self.manager
        pages = int(manager.state.entries[list(manager.lengths)].sum())
        tokens = sum(manager.lengths.values()) * manager.geometry.heads
        return pages * manager.fmt.page_bytes / (tokens * manager.fmt.bf16_token_bytes)


@dataclass
class Seen:
    """What a run showed while requests waited."""

    running: list[int] = field(default_factory=list)
    ratio: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)
    retracted: int = 0
    compacted: int = 0  # prompts admitted because they are compacted between chunks
    held: int = 0  # passes in which such a prompt waited
    steps: int = 0

    @property
    def mean(self) -> float:
        return float(np.mean(self.running))


class Scheduler:
    """SGLang's loop over a pool: prompts first, in chunks, then a decode step of all running requests."""

    def __init__(
        self,
        pool: Any,
        requests: list[Request],
        rows: int,
        *,
        chunk: int = 8192,
        on_step: Callable[[int], None] = lambda step: None,
    ):
        self.pool, self.chunk, self.on_step = pool, chunk, on_step
        self.waiting = deque(requests)
        self.running: list[Request] = []
        self.chunked: Request | None = None
        self.rows = list(range(rows, 0, -1))
        self.new_ratio = FIRST_RATIO
        self.full = False
        self.seen = Seen()

    def run(self) -> Seen:
        while self.waiting or self.running or self.chunked:
            if not self._prefill():
                self._decode()
        return self.seen

    def _rest(self, req: Request) -> int:
        return min(max(req.reply - req.made, 0), CLIP)

    def _expected(self) -> list[tuple[int, float]]:
        return [(x.row, self._rest(x) * self.new_ratio) for x in self.running]

    def _prefill(self) -> bool:
        if (self.full or not self.waiting) and self.chunked is None:
            return False
        pool, batch, left = self.pool, [], self.chunk
        offset = sum(tokens * pool.price_of(row) for row, tokens in self._expected())
        held = self.chunked is not None and bool(self.running) and pool.holds(self.chunked)
        self.seen.held += held
        if self.chunked is not None and not held:
            req = self.chunked
            count = min(req.fill - req.done, left)
            batch.append((req, count))
            left -= count
            self.chunked = None if req.done + count == req.fill else req
            offset += count + (0 if self.chunked else self._rest(req) * pool.price)
        while self.waiting and left > 0 and self.chunked is None and self._admit(self.waiting[0], batch, left, offset):
            req, count = batch[-1]
            left -= count
            offset += count + 1 + (0 if self.chunked else math.ceil(self._rest(req) * pool.price))
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
        wanted, room = req.fill + math.ceil(self._rest(req) * pool.price) + 1, pool.available() - offset
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
            if len(self.seen.running) % 50 == 0 and isinstance(self.pool, DiffKVServer):
                self.seen.parts.append(shares(self.pool, self.running, self.new_ratio))
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
        self.running = order
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


def shares(server: DiffKVServer, running: list[Request], new_ratio: float) -> dict[str, float]:
    """Parts of the pool by what they are for."""
    manager, ledger = server.manager, server.ledger
    total, heads = manager.geometry.num_pages, manager.geometry.heads
    page = manager.fmt.high.tokens
    held = int(manager.state.entries.sum())
    state = manager.state
    tokens = torch.tensor([x.tokens for x in manager.fmt.layouts])
    filled = (state.own_tokens.long() / tokens).sum() + state.own_entry.sum()
    rest = sum(min(x.reply - x.made, CLIP) for x in running)
    return {
        "held": held / total,
        "part-filled": (held - float(filled)) / total,
        "headroom": manager.tracker.headroom_bound() / total,
        "lag": (total - held - manager.tracker.free_bound()) / total,
        "promised": ledger.promised_pages() / total,
        "growth": rest * new_ratio * ledger.growth_price() * heads / page / total,
        "free": (total - held) / total,
    }
