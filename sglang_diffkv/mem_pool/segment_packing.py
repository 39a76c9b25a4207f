"""Replies leave the pages that they share with their request's copy of the prompt.

With exact fidelity a request runs on a private copy of its prompt, and generated tokens take the slots that compressed
ones left there. When it ends, the prefix cache has the prompt already and takes the reply only, which lies spread
over pages full of prompt tokens that nobody reads there any more. So the reply's tokens are copied, as they are, to
pages of their own as soon as the request's row is released.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_diffkv.kernels.attach.reference import seal
from sglang_diffkv.mem_pool.geometry import Path, Segment, rows_of
from sglang_diffkv.policies.diffkv import KEEP

if TYPE_CHECKING:
    from sglang_diffkv.mem_pool.page_manager import PageManager


class SegmentPacker:
    """Segments that wait for their row to be released, and their copy to dense pages."""

    def __init__(self, manager: PageManager):
        self.manager = manager
        self.spread: list[Segment] = []

    def most_pages(self, segment: Segment) -> int:
        """Upper bound of the pages that the packed segment takes."""
        return self.manager.geometry.most_pages(segment.hi - segment.lo)

    def room(self, tokens: int) -> tuple[int, int]:
        """Table entries of each tier, at most, of ``tokens`` in dense pages."""
        high, *low = (-(-tokens // layout.tokens) for layout in self.manager.fmt.layouts)
        return high, low[0] if low else 0

    def join(self, parts: Path) -> Segment:
        """A segment of the tokens of consecutive parts, copied as they are to dense pages, that no node names yet. The
        caller has made sure of pages, a segment row and table blocks."""
        manager, (lo, hi) = self.manager, (parts[0][1], parts[-1][2])
        row = manager.segments.take_row(*self.room(hi - lo))
        assert row is not None, "no room to join segments"
        self._copy(row, parts)
        exact = all(segment.exact for segment, _, _ in parts)
        joined = Segment(row, lo, hi, nodes=0, exact=exact, first=lo)
        manager.segments.add(joined)
        return joined

    def _copy(self, row: int, parts: Path) -> None:
        """Fill an empty segment row with the tokens of ``parts`` as they are."""
        manager, state = self.manager, self.manager.state
        with manager.launching():
            manager.ops.copy_compact(state, row, rows_of(parts), parts[-1][2], KEEP, None)
            seal(state, row)
            state.kept_entry[row] = state.entries[row]
        manager.counts.record(-manager.geometry.most_pages(parts[-1][2] - parts[0][1]))

    def pack(self, segment: Segment) -> bool:
        """Copy a segment's tokens to dense pages and drop the old ones. The caller has made sure of the pages.

        Only for a segment whose pages no other row refers to and the prefix cache does not count. Returns False,
        changing nothing, if no segment row or table block is left.
        """
        manager, old = self.manager, segment.row
        row = manager.segments.take_row(*self.room(segment.hi - segment.lo))
        if row is None:
            return False
        self._copy(row, [(segment, segment.lo, segment.hi)])
        segment.reads.clear()
        manager.tracker.dropped(segment)
        manager.release(old)
        manager.segments.return_row(old)
        segment.row, segment.pages = row, 0
        manager.segment_counts.changed(segment)
        manager.tracker.count_later(segment)
        return True
