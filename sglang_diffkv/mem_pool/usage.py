"""What a user sees of the memory: measured bytes of allocated pages against bf16 bytes of the same tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from sglang_diffkv.kernels.table import max_entries, row_table
from sglang_diffkv.mem_pool.page_manager import PageManager

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
    """Measures rows of a manager. Reads the device."""

    def __init__(self, manager: PageManager):
        self.manager = manager
        self.finished = Usage()
        self.finished_1k = Usage()

    def of_row(self, row: int, start: int, end: int) -> Usage:
        """Usage of a row for its sequence positions [start, end)."""
        manager, state = self.manager, self.manager.state
        rows = torch.tensor([row], device=state.device)
        counts, pages = [0, 0], 0
        for tier, seg in enumerate(state.segments):
            page, lo, hi = row_table(state, rows, tier, max_entries(state, rows, tier))
            position = seg.positions[page]
            lo, hi = lo.clamp(min=start).unsqueeze(4), hi.clamp(max=end).unsqueeze(4)
            held = (position >= lo) & (position < hi)
            counts[tier] = int(held.sum())
            pages += int(held.any(4).sum())
        sizes = [x.token_bytes(manager.fmt.head_dim, manager.fmt.v_head_dim) for x in manager.fmt.tiers]
        total = (end - start) * manager.geometry.heads
        token_bytes = sum(c * s for c, s in zip(counts, sizes, strict=False))
        bf16_bytes = total * manager.fmt.bf16_token_bytes
        return Usage(
            requests=1,
            tokens=end - start,
            page_bytes=pages * manager.fmt.page_bytes,
            token_bytes=token_bytes,
            bf16_bytes=bf16_bytes,
            high=counts[0],
            low=counts[1],
            pruned=total - sum(counts),
            ratio_sum=token_bytes / bf16_bytes if bf16_bytes else 0.0,
        )

    def finish(self, row: int) -> None:
        """Count a request that ends now, with the shared pages it refers to."""
        usage = self.of_row(row, 0, self.manager.lengths[row])
        self.finished.add(usage)
        if usage.tokens >= LONG_REQUEST:
            self.finished_1k.add(usage)

    def live(self) -> Usage:
        """What is held now: each request's tokens that no segment holds, and all segments."""
        total = Usage()
        for row, length in self.manager.lengths.items():
            total.add(self.of_row(row, self.manager.shared.get(row, 0), length))
        total.requests = len(self.manager.lengths)
        for segment in self.manager.segments:
            usage = self.of_row(segment.row, segment.lo, segment.hi)
            usage.requests = 0
            total.add(usage)
        return total

    def report(self) -> dict[str, object]:
        """The ``diffkv`` entry of ``/server_info``."""
        manager = self.manager
        live = self.live()
        used = manager.geometry.num_pages - manager.free_pages()
        return {
            **live.summary(),
            "tokens": live.tokens,
            "pages": manager.geometry.num_pages,
            "pages_used": used,
            "page_bytes": manager.fmt.page_bytes,
            "segments": len(manager.segments),
            "finished": asdict(self.finished),
            "finished_1k": asdict(self.finished_1k),
        }
