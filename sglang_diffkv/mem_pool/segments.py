"""Segments of the prefix cache: rows of their own behind those of requests, from a request's pages to their release."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from itertools import groupby

import numpy as np
import torch

from sglang_diffkv.layout.geometry import Path, Segment, rows_of
from sglang_diffkv.layout.spans import joined_end, longest_span
from sglang_diffkv.mem_pool.counts import PageCounts
from sglang_diffkv.mem_pool.device import PageDevice
from sglang_diffkv.mem_pool.rows import RequestRows
from sglang_diffkv.mem_pool.segment_counts import SegmentCounts
from sglang_diffkv.mem_pool.table_space import Entries, blocks_of
from sglang_diffkv.policies.base import Policy
from sglang_diffkv.policies.diffkv import KEEP

MOST_READS = 64
"""Ranges of a segment whose entries are remembered."""


class SegmentStore:
    """Makes segments of rows' pages, cuts them, copies them to dense pages and gives them back.

    Args:
        turns: the rule by which earlier turns are compressed; None: they are not.

    Attributes:
        cached: segments of the prefix cache. counts_of: tokens that they and pending ones hold, by head.
        fragmented: replies among them that lie between tokens of their request's copy of its prompt, until its row is
            released.
    """

    def __init__(self, device: PageDevice, rows: RequestRows, counts: PageCounts, turns: Policy | None = None):
        self.device, self.rows, self.counts, self.turns = device, rows, counts, turns
        self.cached: set[Segment] = set()
        self.fragmented: list[Segment] = []
        self.counts_of = SegmentCounts(device)
        self._changing: Callable[[Segment], None] = lambda segment: None
        geometry = device.geometry
        self._free_rows = list(range(geometry.num_rows + geometry.num_segments - 1, geometry.num_rows - 1, -1))

    def tell_changing(self, told: Callable[[Segment], None]) -> None:
        """Call ``told`` from now on before pages of a segment return to the ring."""
        self._changing = told

    def take_fragmented(self) -> list[Segment]:
        """The fragmented replies, of which the caller takes care from now on."""
        found, self.fragmented = self.fragmented, []
        return found

    # Rows

    @property
    def rows_free(self) -> int:
        """Rows for further segments."""
        return len(self._free_rows)

    def take_row(self, entries: Entries) -> int | None:
        """A free row for a segment, with room for so many entries of each tier; None, changing nothing, if no row or no
        table block is left."""
        if not self._free_rows or not self.device.space.extended(self._free_rows[-1], entries):
            return None
        return self._free_rows.pop()

    def return_row(self, row: int) -> None:
        """Give up a segment row, with all that it holds."""
        self.device.release(row)
        self.counts_of.gone(row)
        self._free_rows.append(row)

    def has_room(self, rows: list[int]) -> bool:
        """Whether a segment row and table blocks are left for the pages of any of ``rows``."""
        space = self.device.space
        return bool(self._free_rows) and max(blocks_of(space.bound(x)) for x in rows) <= len(space.free_blocks)

    # From a request's pages

    def share(self, row: int, lo: int, hi: int, *, as_computed: bool = False) -> Segment | None:
        """Make the pages that no segment holds yet a segment for positions [lo, hi), immutable from now on.

        A running row is shared up to where it was frozen; a row that ends, up to any position. ``as_computed``: the
        row's prompt was left as it is.
        Returns None, changing nothing, if no segment row or table block is left.
        """
        device = self.device
        segment_row = self.take_row(device.space.bound(row))
        if segment_row is None:
            return None
        device.share(segment_row, row, lo, hi, kept_only=True)
        ends, first = self.rows.frozen(row) != hi, self.rows.shared(row)
        if ends:
            device.seal(row)
            self.rows.freeze(row)
        else:
            device.keep(row)
        self.rows.share(row, hi)
        self.counts.touch(row, decoded=True)
        end = max(hi, self.rows.most(row)) if ends else hi
        segment = Segment(segment_row, lo, hi, as_computed=as_computed and not ends, first=first, end=end)
        self.add(segment)
        if ends and lo > first:  # its pages hold tokens below lo too
            self.fragmented.append(segment)
        return segment

    def add(self, segment: Segment) -> None:
        """The prefix cache has the segment from now on."""
        self.cached.add(segment)
        self.counts_of.changed(segment)
        self.counts.count_later(segment)

    # Release

    def _empty(self, row: int, *, private: int | None = None, exactly: bool = False) -> None:
        """Give up a segment's row, with ``private`` pages that no other row refers to: at least, or ``exactly``."""
        self.return_row(row)
        self.counts.forget(row, private=private, exactly=exactly)

    def release(self, segment: Segment, *, exclusive: bool = False) -> None:
        """Drop a segment. Rows that refer to its pages keep them.

        Its pages count as free at once if ``exclusive``: if no row refers to them.
        """
        self._changing(segment)
        self.cached.remove(segment)
        known = exclusive and segment.row not in self.counts.uncounted
        self.counts.dropped(segment)
        self._empty(segment.row, private=segment.pages if exclusive else 0, exactly=known)
        segment.pages = 0

    def release_all(self) -> None:
        """Drop all segments of the prefix cache, in an order that is the same on all ranks."""
        for segment in sorted(self.cached, key=lambda segment: segment.row):
            self.release(segment)

    def trim(self, segment: Segment, hi: int, *, wait: bool = True) -> None:
        """Forget positions from ``hi`` on and return the pages that held nothing else. Waits for the device to count
        them, unless the segment is as computed or ``wait`` is False."""
        self._changing(segment)
        self.device.trim(segment.row, hi)
        segment.hi = hi
        self.counts_of.changed(segment)
        if segment.as_computed:
            before, segment.pages = segment.pages, self.computed_pages(segment)
            segment.held = (self.device.geometry.heads * (hi - segment.lo), *segment.held[1:])
            self.counts.record(before - segment.pages)
            self.counts.on_counted(segment)
        else:
            self.counts.record(0)  # only the device knows what has returned
            self.counts.count_later(segment)
            if wait:
                self.counts.settle()

    def cut_front(self, segment: Segment, lo: int) -> None:
        """Forget positions below ``lo`` and return the pages that held nothing else and no row refers to. The caller
        has made sure of a segment row and of table blocks."""
        row = self.take_row(self.device.space.bound(segment.row))
        assert row is not None, "no room to cut a segment"
        self.device.share(row, segment.row, lo, segment.hi)
        self._move(segment, row, lo)

    def _move(self, segment: Segment, row: int, lo: int) -> None:
        """The segment begins at ``lo`` and its pages are those of ``row`` from now on."""
        self._changing(segment)
        self.counts.dropped(segment)
        self._empty(segment.row)
        segment.row, segment.lo = row, lo
        self.counts_of.changed(segment)
        self.counts.count_later(segment)

    # Dense copies

    def _copy(self, row: int, parts: Path, settling: Collection[Segment] = ()) -> None:
        """Fill an empty segment row with the tokens of ``parts``: as they are, or, of segments that are ``settling``,
        compressed as earlier turns are."""
        pages = self.dense_pages(parts, settling)
        for settles, some in groupby(parts, lambda part: part[0] in settling):
            if not settles:
                self.device.copy(row, rows_of(copied := [*some]), copied[-1][2], KEEP)
                continue
            assert self.turns is not None, "earlier turns stay as they are"
            for segment, lo, hi in some:
                at = lo
                for begin, end in self._turns_of(segment):  # each ends with tokens that few others have seen
                    if at < begin:
                        self.device.copy(row, [(segment.row, at, begin)], begin, KEEP)
                    self.device.copy(row, [(segment.row, begin, end)], end, self.turns)
                    at = end
                if at < hi:
                    self.device.copy(row, [(segment.row, at, hi)], hi, KEEP)
        self.device.seal(row)
        self.counts.record(-pages)

    def join(self, parts: Path, settling: Collection[Segment] = ()) -> Segment:
        """A segment of the tokens of consecutive parts, copied to dense pages, that no node names yet. They are copied
        as they are, but of segments that are ``settling`` they are compressed as earlier turns. The caller has made
        sure of pages, a segment row and table blocks."""
        lo, hi = parts[0][1], parts[-1][2]
        row = self.take_row(self.device.space.dense_entries(hi - lo))
        assert row is not None, "no room to join segments"
        self._copy(row, parts, settling)
        as_computed = not settling and all(segment.as_computed for segment, _, _ in parts)
        end = joined_end(parts, longest_span(self.device.geometry.attention_spans))
        joined = Segment(row, lo, hi, nodes=0, as_computed=as_computed, first=lo, end=end)
        if self.turns is not None:
            left = [self._turns_of(segment) for segment, _, _ in parts if segment not in settling]
            joined.unsettled = tuple(turn for turns in left for turn in turns)
        self.add(joined)
        return joined

    def dense_pages(self, parts: Path, settling: Collection[Segment] = ()) -> int:
        """Upper bound of the pages that a dense copy of consecutive parts takes: by their tokens of each tier where
        they are whole segments and counted."""
        geometry = self.device.geometry
        most = geometry.most_pages(parts[-1][2] - parts[0][1])
        if not all(x.pages and x.held and (x.lo, x.hi) == (lo, hi) for x, lo, hi in parts):
            return most
        each = zip(self.held(parts), geometry.fmt.layouts, strict=True)
        if settling:  # as many as before, but for the pages that each tier may begin, and a whole one of what is over
            return min(most, sum(n // x.tokens + geometry.heads + 1 for n, x in each))
        return min(most, sum(n // x.tokens + min(n, geometry.heads) for n, x in each))

    def held(self, parts: Path) -> list[int]:
        """Tokens of each tier in whole counted segments, over all heads."""
        return [sum(of_tier) for of_tier in zip(*(segment.held for segment, _, _ in parts), strict=True)]

    # Earlier turns

    def settles(self, segment: Segment) -> bool:
        """Whether some of a segment's tokens go down once it is an earlier turn."""
        return bool(self._turns_of(segment))

    def _turns_of(self, segment: Segment) -> list[tuple[int, int]]:
        """Positions [lo, hi) of the turns in a segment of which some tokens go down."""
        if self.turns is None:
            return []
        turns = ((segment.lo, segment.hi),) if segment.unsettled is None else segment.unsettled
        inside = [(max(lo, segment.lo), min(hi, segment.hi)) for lo, hi in turns]
        return [(lo, hi) for lo, hi in inside if hi - lo > self._lasting(lo, hi)]

    def _lasting(self, lo: int, hi: int) -> int:
        """Tokens of a turn at positions [lo, hi) that stay in the high tier when it settles, whatever their scores."""
        assert self.turns is not None
        return self.turns.window + max(min(self.turns.sinks, hi) - lo, 0)

    def settled_tokens(self, segment: Segment) -> tuple[int, ...]:
        """Tokens of each tier, over all heads, that a whole counted segment is expected to hold once it has settled: no
        score keeps any in the high tier."""
        high, *between, low = segment.held
        heads, turns = self.device.geometry.heads, self._turns_of(segment)
        lasting = sum(self._lasting(*turn) for turn in turns)
        most = sum(hi - lo for lo, hi in turns) - lasting
        down = max(min(high - heads * lasting, heads * most), 0)
        return (high - down, *between, low + down)

    def needed_pages(self, held: Sequence[int]) -> float:
        """Pages that so many tokens of each tier are expected to take in one dense segment. The last page of a head and
        tier is half full on average, and a head that holds a token has a page."""
        heads, layouts = self.device.geometry.heads, self.device.geometry.fmt.layouts
        each = zip(held, layouts, strict=True)
        return sum(max(n / x.tokens + heads / 2, min(n, heads)) if n else 0.0 for n, x in each)

    def packed_pages(self, segment: Segment) -> int:
        """Upper bound of the pages that the packed segment takes."""
        return self.device.geometry.most_pages(self._most_held(segment))

    def _most_held(self, segment: Segment) -> int:
        """Upper bound of the tokens that each head holds of a segment: of a reply whose request held a budget, few."""
        return min(segment.hi - segment.lo, self.device.space.most_tokens(segment.row))

    def pack(self, segment: Segment) -> bool:
        """Copy a segment's tokens to dense pages and drop the old ones. The caller has made sure of the pages.

        A reply needs it: with exact fidelity a request runs on a private copy of its prompt, and generated tokens take
        the slots that compressed ones left there. The prefix cache has the prompt already and takes the reply only,
        spread over pages full of prompt tokens that nobody reads there any more.

        Only for a segment whose pages no other row refers to and the prefix cache does not count. Returns False,
        changing nothing, if no segment row or table block is left.
        """
        row = self.take_row(self.device.space.dense_entries(self._most_held(segment)))
        if row is None:
            return False
        self._copy(row, [(segment, segment.lo, segment.hi)])
        segment.reads.clear()
        self._move(segment, row, segment.lo)
        return True

    # Sizes

    def count_reads(self, path: Path) -> None:
        """Have the device count the table entries that parts of segments take, where the bound is far from what their
        tokens fill. Waits for the device; with several ranks all have to call it."""
        space = self.device.space
        dense, bound = space.dense_entries, space.part_entries
        parts = [(s, lo, hi) for s, lo, hi in path if sum(bound(s, lo, hi)) > sum(dense(hi - lo)) + 2]
        parts = [(s, lo, hi) for s, lo, hi in parts if (lo, hi) not in s.reads]
        if not parts:
            return
        measured = self.device.measure(rows_of(parts))  # [n, L, H, T + 1]
        with self.device.launching():
            most = torch.minimum(measured[..., :-1], measured[..., -1:])  # a page holds a token at least
            counts = most.amax((1, 2)).cpu().numpy().astype(np.int64)  # [n, T]
        ranks = self.counts.ranks.ranks
        entries: list[list[int]] = ranks.largest(counts.ravel()).reshape(counts.shape).tolist()
        for (segment, lo, hi), of_tiers in zip(parts, entries, strict=True):
            if len(segment.reads) >= MOST_READS:
                del segment.reads[next(iter(segment.reads))]
            segment.reads[lo, hi] = tuple(of_tiers)

    def computed_pages(self, segment: Segment) -> int:
        """Pages of a segment as computed."""
        tokens = self.device.fmt.high.tokens
        first, end = (segment.lo - segment.first) // tokens, -(-(segment.hi - segment.first) // tokens)
        return self.device.geometry.heads * (end - first)

    def tokens_for(self, segment: Segment, pages: float) -> float:
        """Tokens to trim from a segment's end so that about ``pages`` return; infinity where that is not known."""
        heads, tokens = self.device.geometry.heads, self.device.fmt.high.tokens
        if math.isinf(pages) or not segment.pages:
            return math.inf
        if segment.as_computed:
            end = -(-(segment.hi - segment.first) // tokens) - -(-pages // heads)
            return segment.hi - segment.first - end * tokens
        return math.ceil((pages + heads) * (segment.hi - segment.lo) / segment.pages)
