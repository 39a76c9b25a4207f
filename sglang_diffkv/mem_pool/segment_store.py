"""Segments of the prefix cache: rows of their own behind those of requests, from a request's pages to their release."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from sglang_diffkv.mem_pool.geometry import Path, Segment
from sglang_diffkv.mem_pool.table_space import TableFull, blocks_of

if TYPE_CHECKING:
    from sglang_diffkv.mem_pool.page_manager import PageManager


MOST_READS = 64
"""Ranges of a segment whose entries are remembered."""


class SegmentStore:
    """Makes segments of rows' pages, cuts them and gives them back."""

    def __init__(self, manager: PageManager):
        self.manager = manager
        self.cached: set[Segment] = set()  # of the prefix cache
        geometry = manager.geometry
        self._free_rows = list(range(geometry.num_rows + geometry.num_segments - 1, geometry.num_rows - 1, -1))

    @property
    def held(self) -> list[Segment]:
        """Segments of the prefix cache, and those that wait for it."""
        return [*self.cached, *self.manager.copies.pending.values()]

    @property
    def rows_free(self) -> int:
        """Rows for further segments."""
        return len(self._free_rows)

    def take_row(self, high: int, low: int) -> int | None:
        """A free row for a segment, with room for ``high`` and ``low`` entries; None, changing nothing, if no row or no
        table block is left."""
        if not self._free_rows:
            return None
        try:
            self.manager.space.extend(self._free_rows[-1], high, low)
        except TableFull:
            return None
        return self._free_rows.pop()

    def return_row(self, row: int) -> None:
        """The segment row holds nothing any more."""
        self.manager.segment_counts.gone(row)
        self.manager.space.release(row)
        self._free_rows.append(row)

    def can_share(self, row: int) -> bool:
        """Whether a segment row and table blocks are left to make a segment of the row's own pages, or of a part of its
        pending one."""
        space, pending = self.manager.space, self.manager.copies.pending
        rows = [row, pending[row].row] if row in pending else [row]
        needed = max(blocks_of(space.bound(x)) for x in rows)
        return bool(self._free_rows) and needed <= len(space.free_blocks)

    def share(self, row: int, lo: int, hi: int) -> Segment | None:
        """Make the pages that no segment holds yet a segment for positions [lo, hi), immutable from now on.

        A running row is shared up to where it was sealed; a row that ends, up to any position.
        Returns None, changing nothing, if no segment row or table block is left.
        """
        manager, state = self.manager, self.manager.state
        segment_row = self.take_row(*manager.space.bound(row))
        if segment_row is None:
            return None
        with manager.launching():
            manager.ops.attach(state, segment_row, row, lo, hi, kept_only=True)
        ends = manager.sealed.get(row) != hi
        exact = row in manager.copies.untouched and not ends
        first = manager.shared.get(row, 0)
        if ends:
            manager.seal(row)
        with manager.launching():
            state.kept_entry[row] = state.own_entry[row]
        manager.shared[row] = hi
        manager.counts.touch(row, decoded=True)
        segment = Segment(segment_row, lo, hi, exact=exact, first=first)
        self.add(segment)
        if ends and lo > first:  # its pages hold tokens below lo too
            manager.packer.spread.append(segment)
        return segment

    def add(self, segment: Segment) -> None:
        """The prefix cache has the segment from now on."""
        self.cached.add(segment)
        self.manager.segment_counts.changed(segment)
        self.manager.tracker.count_later(segment)
        self.manager.version += 1

    def release(self, segment: Segment, *, exclusive: bool = False) -> None:
        """Drop a segment. Rows that refer to its pages keep them.

        Its pages count as free at once if ``exclusive``: if no row refers to them.
        """
        manager = self.manager
        self.cached.remove(segment)
        manager.tracker.dropped(segment)
        manager.counts.private[segment.row] = segment.pages if exclusive else 0
        manager.release(segment.row)
        self.return_row(segment.row)
        segment.pages = 0

    def release_all(self) -> None:
        """Drop all segments of the prefix cache, in an order that is the same on all ranks."""
        for segment in sorted(self.cached, key=lambda segment: segment.row):
            self.release(segment)

    def trim(self, segment: Segment, hi: int) -> None:
        """Forget positions from ``hi`` on and return the pages that held nothing else. Waits for the device, unless
        the segment is exact."""
        manager = self.manager
        with manager.launching():
            manager.ops.trim(manager.state, segment.row, hi)
        segment.hi = hi
        manager.segment_counts.changed(segment)
        manager.version += 1
        if segment.exact:
            held, segment.pages = segment.pages, self.exact_pages(segment)
            manager.counts.record(held - segment.pages)
            manager.tracker.on_counted(segment)
        else:
            manager.tracker.count_later(segment)
            manager.tracker.settle()

    def cut_front(self, segment: Segment, lo: int) -> None:
        """Forget positions below ``lo`` and return the pages that held nothing else and no row refers to. The caller
        has made sure of a segment row and of table blocks."""
        manager, old = self.manager, segment.row
        row = self.take_row(*manager.space.bound(old))
        assert row is not None, "no room to cut a segment"
        with manager.launching():
            manager.ops.attach(manager.state, row, old, lo, segment.hi)
        manager.tracker.dropped(segment)
        manager.release(old)
        self.return_row(old)
        segment.row, segment.lo, segment.pages = row, lo, 0
        manager.segment_counts.changed(segment)
        manager.tracker.count_later(segment)

    def count_reads(self, path: Path) -> None:
        """Have the device count the table entries that parts of segments take, where the bound is far from what their
        tokens fill. Waits for the device; with several ranks all have to call it."""
        manager = self.manager
        room, bound = manager.packer.room, manager.space.part_entries
        parts = [(s, lo, hi) for s, lo, hi in path if sum(bound(s, lo, hi)) > sum(room(hi - lo)) + 2]
        parts = [(s, lo, hi) for s, lo, hi in parts if (lo, hi) not in s.reads]
        if not parts:
            return
        with manager.launching():
            columns = manager.to_device([(s.row, lo, hi) for s, lo, hi in parts]).unbind(1)
            measured = manager.ops.measure(manager.state, *(x.contiguous() for x in columns))  # [n, L, H, T + 1]
            most = torch.minimum(measured[..., :-1], measured[..., -1:])  # a page holds a token at least
            counts = most.amax((1, 2)).cpu().numpy().astype(np.int64)  # [n, T]
        entries: list[list[int]] = manager.ranks.largest(counts.ravel()).reshape(counts.shape).tolist()
        for (segment, lo, hi), of_tiers in zip(parts, entries, strict=True):
            if len(segment.reads) >= MOST_READS:
                del segment.reads[next(iter(segment.reads))]
            segment.reads[lo, hi] = (of_tiers[0], of_tiers[1] if len(of_tiers) > 1 else 0)

    def exact_pages(self, segment: Segment) -> int:
        """Pages of an exact segment."""
        tokens = self.manager.fmt.high.tokens
        first, end = (segment.lo - segment.first) // tokens, -(-(segment.hi - segment.first) // tokens)
        return self.manager.geometry.heads * (end - first)

    def tokens_for(self, segment: Segment, pages: float) -> float:
        """Tokens to trim from a segment's end so that about ``pages`` return; infinity where that is not known."""
        heads, tokens = self.manager.geometry.heads, self.manager.fmt.high.tokens
        if math.isinf(pages) or not segment.pages:
            return math.inf
        if segment.exact:
            end = -(-(segment.hi - segment.first) // tokens) - -(-pages // heads)
            return segment.hi - segment.first - end * tokens
        return math.ceil((pages + heads) * (segment.hi - segment.lo) / segment.pages)
