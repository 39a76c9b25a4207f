"""What the prefix cache's segments hold, by layer and head: each is measured once, not with every report."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_diffkv.layout.geometry import Geometry, Segment
from sglang_diffkv.mem_pool.device import PageDevice

MEASURE_AT = 32
"""New or cut segments that are measured together at the latest."""


class SegmentCounts:
    """Tokens of each tier in every segment row. Its pages are its table entries.

    A segment's pages are immutable, so what it holds is known from its insertion until it is cut, moved or dropped.
    Nothing is launched when one of these happens, but with the next ``totals``, or after ``MEASURE_AT`` segments.
    """

    def __init__(self, device: PageDevice):
        self.device = device
        self.counts = torch.zeros(self.shape(device.geometry), dtype=torch.int32, device=device.state.device)
        self.tokens = 0
        """Sequence tokens of all segments."""
        self._tokens: dict[int, int] = {}  # row -> those of its segment
        self._changed: dict[int, Segment] = {}  # row -> segment to be measured
        self._written: set[int] = set()  # rows whose counts are some segment's
        self._left: set[int] = set()  # those of them whose segment is gone

    @staticmethod
    def shape(geometry: Geometry) -> tuple[int, int, int, int]:
        """[num_segments, L, H, T] of the counts, int32."""
        return geometry.num_segments, geometry.num_layers, geometry.num_heads, len(geometry.fmt.tiers)

    def changed(self, segment: Segment) -> None:
        """The segment is new, has another range or another row; all that makes it so is launched."""
        row, tokens = segment.row, segment.hi - segment.lo
        if len(self._changed) >= MEASURE_AT:
            self._measure()
        self.tokens += tokens - self._tokens.get(row, 0)
        self._tokens[row] = tokens
        self._changed[row] = segment
        self._left.discard(row)

    def gone(self, row: int) -> None:
        """The row holds no segment any more."""
        self.tokens -= self._tokens.pop(row, 0)
        self._changed.pop(row, None)
        if row in self._written:
            self._left.add(row)

    def _measure(self) -> None:
        device, first = self.device, self.device.geometry.num_rows
        parts = [(segment.row, segment.lo, segment.hi) for segment in self._changed.values()]
        with device.launching():
            if self._left:
                self.counts.index_fill_(0, device.to_device([row - first for row in self._left]), 0)
            if parts:
                rows = device.to_device([row - first for row, _, _ in parts])
                self.counts.index_copy_(0, rows, device.measure(parts)[..., :-1])
        self._written.difference_update(self._left)
        self._written.update(self._changed)
        self._left.clear()
        self._changed.clear()

    def pages(self, chains: Sequence[Sequence[Segment]]) -> tuple[int, int]:
        """Pages that segments hold, and those that their tokens need if each chain of segments is one dense segment.
        Waits for the device."""
        if self._left or self._changed:
            self._measure()
        geometry, first = self.device.geometry, self.device.geometry.num_rows
        rows = [(chain, segment.row) for chain, segments in enumerate(chains) for segment in segments]
        if not rows:
            return 0, 0
        with self.device.launching():
            chain, row = self.device.to_device(rows).long().unbind(1)
            of_page = self.device.to_device([layout.tokens for layout in geometry.fmt.layouts])
            tokens = self.counts.new_zeros(len(chains), *self.counts.shape[1:])
            tokens.index_add_(0, chain, self.counts[row - first])
            needed = -(-tokens // of_page)
            held = self.device.state.entries[row].sum()
            pages: list[int] = torch.stack([held.long(), needed.sum().long()]).tolist()
        return pages[0], pages[1]

    def pages_each(self, segments: Sequence[Segment]) -> list[int]:
        """Pages of each segment. Waits for the device."""
        if not segments:
            return []
        with self.device.launching():
            rows = self.device.to_device([segment.row for segment in segments]).long()
            found: list[int] = self.device.state.entries[rows].sum((1, 2, 3)).tolist()
        return found

    def totals(self) -> torch.Tensor:
        """Tokens of each tier and pages of all segments: [L, H, T + 1] int64 on the device, which nothing waits for."""
        if self._left or self._changed:
            self._measure()
        with self.device.launching():
            pages = self.device.state.entries[self.device.geometry.num_rows :].sum((0, 3))
            return torch.cat([self.counts.sum(0), pages.unsqueeze(2)], dim=2)
