"""What a user sees of the memory: measured bytes of allocated pages against bf16 bytes of the same tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from sglang_diffkv.kernels.table import max_entries, row_table
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.mem_pool.transfer import to_host

COUNT_AT = 1024
"""Ended requests that are counted together at the latest."""

LONG_REQUEST = 1000
"""Tokens from which a finished request also counts in the totals of long requests."""


@dataclass
class Usage:
    """Totals over rows. ``tokens`` counts sequence tokens; the rest counts (token, layer, KV head) triples.

    Attributes:
        page_bytes: bytes of the pages held. token_bytes: bytes of the slots in use, without empty slots.
        bf16_bytes: what a two-byte cache takes for the same tokens.
        ratio_sum: sum over requests of each one's own token_bytes / bf16_bytes (short requests count as much as
            long ones in its mean).
    """

    requests: int = 0
    tokens: int = 0
    page_bytes: int = 0
    token_bytes: int = 0
    bf16_bytes: int = 0
    high: int = 0
    low: int = 0
    pruned: int = 0
    ratio_sum: float = 0.0

    def add(self, other: Usage) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def summary(self) -> dict[str, float]:
        """Ratios and shares, 0 where nothing is held."""
        whole = self.high + self.low + self.pruned
        return {
            "ratio_pages": self.page_bytes / self.bf16_bytes if self.bf16_bytes else 0.0,
            "ratio_tokens": self.token_bytes / self.bf16_bytes if self.bf16_bytes else 0.0,
            "share_high": self.high / whole if whole else 0.0,
            "share_low": self.low / whole if whole else 0.0,
            "share_pruned": self.pruned / whole if whole else 0.0,
        }


class UsageMeter:
    """Measures rows of a manager, in stream order with the forward passes."""

    def __init__(self, manager: PageManager):
        self.manager = manager
        self._finished = Usage()
        self._finished_1k = Usage()
        self._ended: list[tuple[torch.Tensor, int]] = []  # requests not yet counted: [L, H, T + 1] and tokens
        self._latest = Usage()
        self._coming: tuple[torch.Tensor, Any, int] | None = None  # totals on their way to the host

    def _measure(self, parts: list[tuple[int, int, int]]) -> torch.Tensor:
        """Tokens of each tier and pages, [n, L, H, T + 1] int32, of (row, first position, position after the last)."""
        manager = self.manager
        with manager.launching():
            columns = manager.to_device(parts or torch.empty(0, 3)).unbind(1)
            return manager.ops.measure(manager.state, *(x.contiguous() for x in columns))

    def _usage(self, counts: list[int], tokens: int) -> Usage:
        """``counts``: tokens of each tier and pages, summed over heads."""
        fmt = self.manager.fmt
        *held, pages = counts
        total = tokens * self.manager.geometry.heads
        sizes = [x.token_bytes(fmt.head_dim, fmt.v_head_dim) for x in fmt.tiers]
        return Usage(
            tokens=tokens,
            page_bytes=pages * fmt.page_bytes,
            token_bytes=sum(c * s for c, s in zip(held, sizes, strict=True)),
            bf16_bytes=total * fmt.bf16_token_bytes,
            high=held[0],
            low=sum(held[1:]),
            pruned=total - sum(held),
        )

    def finish(self, row: int) -> None:
        """Count a request that ends now, with the shared pages it refers to."""
        length = self.manager.lengths[row]
        self._ended.append((self._measure([(row, 0, length)])[0], length))
        if len(self._ended) >= COUNT_AT:
            self._count_ended()

    def _count_ended(self) -> None:
        """Add up what ended. Waits for the device."""
        if not self._ended:
            return
        with self.manager.launching():
            counts = torch.stack([x for x, _ in self._ended]).sum((1, 2)).tolist()
        for row, (_, length) in zip(counts, self._ended, strict=True):
            usage = self._usage(row, length)
            usage.requests = 1
            usage.ratio_sum = usage.token_bytes / usage.bf16_bytes if usage.bf16_bytes else 0.0
            self._finished.add(usage)
            if length >= LONG_REQUEST:
                self._finished_1k.add(usage)
        self._ended.clear()

    @property
    def finished(self) -> Usage:
        """Totals of requests that ended. Waits for the device."""
        self._count_ended()
        return self._finished

    @property
    def finished_1k(self) -> Usage:
        """The same for requests of ``LONG_REQUEST`` tokens and more."""
        self._count_ended()
        return self._finished_1k

    def _live_parts(self) -> list[tuple[int, int, int]]:
        manager = self.manager
        parts = [(row, manager.shared.get(row, 0), length) for row, length in manager.lengths.items()]
        return parts + [(segment.row, segment.lo, segment.hi) for segment in manager.segments.held]

    def by_head(self) -> torch.Tensor:
        """What each (layer, head) holds now: tokens of each tier and pages, [L, H, T + 1] on the host. Waits for the
        device."""
        with self.manager.launching():
            return self._measure(self._live_parts()).sum(0).cpu()

    def owners(self) -> dict[str, int]:
        """Pages by who refers to them: ``private`` to requests, ``shared`` by requests and the prefix cache, ``cached``
        in the prefix cache alone, ``free``. Waits for the device."""
        manager, state = self.manager, self.manager.state
        sides = ([*manager.lengths], [segment.row for segment in manager.segments.held])
        with manager.launching():
            held = torch.zeros(2, state.num_pages + 1, dtype=torch.bool, device=state.device)
            for side, rows in enumerate(sides):
                for row in manager.to_device(rows or torch.empty(0)).split(1):  # a table of all rows would be large
                    for tier in range(len(state.fmt.tiers)):
                        page, _, hi = row_table(state, row, tier, max_entries(state, row, tier))
                        held[side, page[hi > 0]] = True
            requests, tree = held[:, : state.num_pages]
            counts = torch.stack([requests & ~tree, requests & tree, tree & ~requests]).sum(1).tolist()
        names = ("private", "shared", "cached")
        return {**dict(zip(names, counts, strict=True)), "free": state.num_pages - sum(counts)}

    def live(self) -> Usage:
        """What is held now: each request's tokens that no segment holds, and all segments. Waits for the device."""
        return self._live(self.by_head())

    def _live(self, by_head: torch.Tensor) -> Usage:
        tokens = sum(hi - lo for _, lo, hi in self._live_parts())
        usage = self._usage(by_head.sum((0, 1)).tolist(), tokens)
        usage.requests = len(self.manager.lengths)
        return usage

    def latest(self) -> Usage:
        """What was held at the previous call; starts to measure what is held now, without waiting."""
        if not self.manager.state.pages.is_cuda:
            return self.live()
        if self._coming is not None and self._coming[1].query():
            self._latest = self._usage(self._coming[0].tolist(), self._coming[2])
            self._coming = None
        if self._coming is None:
            parts = self._live_parts()
            with self.manager.launching():
                totals, event = to_host(self._measure(parts).sum((0, 1, 2)))
            self._coming = (totals, event, sum(hi - lo for _, lo, hi in parts))
        return self._latest

    def report(self) -> dict[str, object]:
        """The ``diffkv`` entry of ``/server_info``. Waits for the device.

        Of several ``ranks`` this is the first one's: its ``kv_heads`` of each layer, their pages and their tokens.
        """
        manager = self.manager
        by_head = self.by_head()
        live, heads = self._live(by_head), by_head.tolist()
        used = manager.geometry.num_pages - manager.free_pages()
        names = ("high", "low")[: len(manager.fmt.tiers)]
        return {
            **live.summary(),
            "tokens": live.tokens,
            "ranks": manager.ranks.size,
            "kv_heads": manager.geometry.num_heads,
            "pages": manager.geometry.num_pages,
            "pages_used": used,
            "owners": self.owners(),
            "page_bytes": manager.fmt.page_bytes,
            "segments": len(manager.segments.cached),
            "faults": manager.counts.faults,
            "finished": asdict(self.finished),
            "finished_1k": asdict(self.finished_1k),
            "by_head": {
                "tokens": live.tokens,
                **{name: [[head[i] for head in layer] for layer in heads] for i, name in enumerate((*names, "pages"))},
            },
        }
