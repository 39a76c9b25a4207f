"""Pools of a simulated server, stock SGLang's and DiffKV's, as its scheduler sees them: see ``saturation.py``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang_diffkv.layout.geometry import Geometry
from sglang_diffkv.mem_pool.growth import Expected
from sglang_diffkv.mem_pool.ledger import PageLedger, pages_for
from sglang_diffkv.mem_pool.page_manager import PageManager
from tests.pages.counting_ops import CountingOps
from tests.policies import diffkv_policy


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

    def growth(self, length: int, more: int, certain: bool) -> float:
        return more

    def available(self) -> int:
        return self.free

    def admits(self, tokens: int) -> bool:
        return True

    def saved(self, tokens: int, chunk: int, longest: int) -> tuple[int, bool]:
        return 0, False

    def promise(self, req: Request, chunk: int) -> None: ...

    def holds(self, req: Request) -> bool:
        return False

    def lends_no_more(self) -> bool:
        return False

    def relieve(self, reqs: list[Request]) -> int:
        return 0

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

    def growth_of(self, row: int, tokens: float, certain: bool) -> float:
        return tokens

    def retry(self, expected: list[Expected]) -> bool:
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
        pressure_window: int | None = None,
        share_min_tokens: int | None = 128,
        compacts_chunks: bool = True,
    ):
        geometry = Geometry(
            fmt, *high.shape, pages_for(capacity, fmt.high.tokens, high.size), rows + 1, 512, max_tokens=longest
        )
        policy = diffkv_policy(1.0, 0.0, window, pressure_window=pressure_window)
        self.manager = PageManager(geometry, policy, make_ops=lambda state: CountingOps(state, policy, high, 0))
        self.ops = self.manager.ops
        self.manager.prompts.share_min_tokens = share_min_tokens
        self.ledger = PageLedger(self.manager, capacity)
        self.capacity, self.compacts_chunks = capacity, compacts_chunks

    def growth(self, length: int, more: int, certain: bool) -> float:
        return self.ledger.growth(length, more, certain=certain)

    def available(self) -> int:
        return self.ledger.available()

    def admits(self, tokens: int) -> bool:
        return self.ledger.admits(tokens, self.ledger.blocks_for([], tokens))

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
        self.ledger.promise(str(req.row), req.fill)

    def holds(self, req: Request) -> bool:
        """Whether a prompt's next chunk has to wait."""
        if str(req.row) not in self.ledger.chunks or self.ledger.uncommitted_pages() >= 0:
            return False
        self.manager.counts.settle()
        return self.ledger.uncommitted_pages() < 0

    def prefill(self, batch: list[tuple[Request, int]]) -> None:
        manager = self.manager
        rows, counts, starts, ending, compacting = [], [], [], [], []
        for req, count in batch:
            if req.done + count == req.fill:
                ending.append(req.row)
            elif str(req.row) in self.ledger.chunks:
                compacting.append(req.row)
            self.ledger.promise(str(req.row), req.fill - req.done - count)
            rows.append(req.row)
            counts.append(count)
            starts.append(req.done)
        manager.plan_step(rows, counts, starts, ending=ending, compacting=compacting)
        step = manager.launch_step()
        assert step is not None
        manager.ops.reserve(torch.tensor(rows), torch.tensor(counts), max(counts))
        manager.end_prompts(step)

    def decode(self, reqs: list[Request]) -> None:
        manager, rows = self.manager, [req.row for req in reqs]
        manager.plan_step(rows, [1] * len(rows), [manager.rows.length(row) for row in rows])
        manager.launch_step()
        manager.ops.decode_step(torch.tensor(rows), torch.tensor(rows))
        manager.counts.report()

    def lends_no_more(self) -> bool:
        """Whether the next step may take the last pages that a compression borrows."""
        pressure = self.manager.pressure
        return pressure is not None and self.ledger.uncommitted_pages() < pressure.lent

    def relieve(self, reqs: list[Request]) -> int:
        """Compress what requests hold once more; how many of them."""
        pressure = self.manager.pressure
        return 0 if pressure is None else len(pressure.relieve([req.row for req in reqs]))

    def release(self, row: int) -> None:
        self.ledger.forget(str(row))
        if row in self.manager.rows:
            self.manager.release(row)

    def refuse(self, wanted: float) -> None:
        self.ledger.refused = wanted

    def growth_of(self, row: int, tokens: float, certain: bool) -> float:
        return self.ledger.growth_of(row, tokens, certain)

    def retry(self, expected: list[Expected]) -> bool:
        return self.ledger.refused is not None and self.ledger.room_for_refused(expected)

    def ratio(self) -> float:
        """Bytes of the pages held over bf16 bytes of the tokens."""
        manager = self.manager
        pages = int(manager.state.entries[list(manager.rows)].sum())
        tokens = sum(manager.rows.lengths().values()) * manager.geometry.heads
        return pages * manager.fmt.page_bytes / (tokens * manager.fmt.bf16_token_bytes)
