"""Replies leave the pages that they share with their request's copy of the prompt.

With exact fidelity a request runs on a private copy of its prompt, and generated tokens take the slots that compressed
ones left there. When it ends, the prefix cache has the prompt already and takes the reply only, which lies spread
over pages full of prompt tokens that nobody reads there any more. So the reply's tokens are copied, as they are, to
pages of their own as soon as the request's row is released.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_diffkv.kernels.attach.reference import seal
from sglang_diffkv.mem_pool.geometry import Segment
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

    def pack(self, segment: Segment) -> bool:
        """Copy a segment's tokens to dense pages and drop the old ones. The caller has made sure of the pages.

        Only for a segment whose pages no other row refers to and the prefix cache does not count. Returns False,
        changing nothing, if no segment row or table block is left.
        """
        manager, state, old = self.manager, self.manager.state, segment.row
        tokens = segment.hi - segment.lo
        room = [-(-tokens // layout.tokens) for layout in manager.fmt.layouts]
        row = manager.segments.take_row(room[0], room[1] if len(room) > 1 else 0)
        if row is None:
            return False
        with manager.launching():
            manager.ops.copy_compact(state, row, old, segment.lo, segment.hi, segment.hi, KEEP, None)
            seal(state, row)
            state.kept_entry[row] = state.entries[row]
        manager.counts.record(-self.most_pages(segment))
        manager.tracker.dropped(segment)
        manager.release(old)
        manager.segments.return_row(old)
        segment.row, segment.pages = row, 0
        manager.segment_counts.changed(segment)
        manager.tracker.count_later(segment)
        return True
