"""Segments of the prefix cache, copied to host memory, where they outlive their eviction.

A segment's pages never change, so they can be copied at any time. Nothing waits for that: the host knows how many pages
a counted segment has, the device lists them, and their bytes leave beside the passes (``PageDevice.launch_beside``).
What is listed of them follows. Until it is there a copy cannot be restored. Pages do not return to the ring before they
are copied: what gives them back is launched behind the copy.

Each rank copies the pages of its own heads. All of them set aside as many host pages as the rank with most, so that
their host memory fills alike. A copy can be restored once it is there on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sglang_diffkv.layout.geometry import Segment
from sglang_diffkv.layout.transfer import to_host
from sglang_diffkv.mem_pool.device import Beside, PageDevice
from sglang_diffkv.mem_pool.host_pages import Run, first_of
from sglang_diffkv.mem_pool.saved_rows import Needed, SavedRow, SavedRows, staging_pages

TIER, HEAD, LO, UPPER, LEAST, LAST = range(6)
"""Rows of what the device lists of each page."""

NONE = np.empty(0, dtype=np.int32)


@dataclass(eq=False)
class SavedSegment(SavedRow):
    """A segment's tokens at positions [start, hi) in host memory.

    Attributes:
        as_computed, first: as of ``Segment``. nodes: nodes of an index that name it. lost: a rank could not copy it.
        from_store: it came from a store, and no request has got it since.
    """

    start: int = 0
    first: int = 0
    as_computed: bool = False
    nodes: int = field(default=0)
    lost: bool = False
    from_store: bool = False

    @classmethod
    def of(cls, segment: Segment, runs: list[Run]) -> SavedSegment:
        """A segment whose pages are on their way to host pages; nothing is known of them yet."""
        hi, end, unknown = segment.hi, segment.end, NONE
        saved = cls(hi, end, runs, unknown, unknown, unknown, unknown, unknown, unknown)
        saved.start, saved.first, saved.as_computed = segment.lo, segment.first, segment.as_computed
        return saved

    def segment(self, lo: int, hi: int) -> Segment:
        """What a segment of the tokens at positions [lo, hi) is, but for its row."""
        first = self.first if self.as_computed else lo
        return Segment(0, lo, hi, as_computed=self.as_computed, first=first, end=self.end)


@dataclass(eq=False)
class Copying:
    """A copy on its way to the host.

    Attributes:
        listed: [6, n] on the host, once ``event`` has passed; None: it has. beside: the copy of the bytes, which reads
            ``pages``. lost: the device had no memory for it.
    """

    segment: Segment
    listed: torch.Tensor
    event: Any
    beside: Beside[None]
    pages: torch.Tensor
    lost: bool = False

    def done(self) -> bool:
        """Whether all of it is on the host, as far as is known without waiting."""
        return all(event is None or event.query() for event in (self.event, self.beside.end))


class SavedSegments:
    """Copies segments to the host pages of ``rows`` and back.

    Attributes:
        held: what is saved. bytes_out, bytes_in: copied so far, to the host and back.
    """

    def __init__(self, device: PageDevice, rows: SavedRows):
        self.device, self.rows, self.host, self.ranks = device, rows, rows.host, rows.ranks
        self.held: set[SavedSegment] = set()
        self.bytes_out = self.bytes_in = 0
        self._copying: dict[SavedSegment, Copying] = {}
        self._incoming: list[list[Run]] = []
        self._dropping: Callable[[SavedSegment], None] = lambda saved: None
        self._staging: torch.Tensor | None = None
        if device.state.pages.is_cuda:
            size = (staging_pages(device.fmt, device.geometry.num_pages), device.fmt.page_bytes)
            self._staging = torch.empty(size, dtype=torch.uint8, device=device.state.device)
        rows.segments.tell_changing(self._changing)

    @property
    def staging_bytes(self) -> int:
        """Bytes of the device that pages pass through on their way to the host."""
        return 0 if self._staging is None else self._staging.nbytes

    def runs(self) -> list[Run]:
        """Host pages of all that is saved, or on its way from elsewhere."""
        return [run for saved in self.held for run in saved.runs] + [run for runs in self._incoming for run in runs]

    def tell_dropping(self, told: Callable[[SavedSegment], None]) -> None:
        """Call ``told`` from now on before host pages of a saved segment are given back."""
        self._dropping = told

    # From elsewhere

    def expect(self, pages: int) -> list[Run] | None:
        """Host pages for a segment that is on its way from elsewhere; None if there are not so many."""
        runs = self.host.take(pages)
        if runs is not None:
            self._incoming.append(runs)
        return runs

    def last_launched(self) -> Any:
        """An event behind all that is launched by now, which may still read host pages that were given back, or write
        to them. None on a CPU, where nothing is."""
        if not self.device.state.pages.is_cuda:
            return None
        with self.device.launching():
            event = torch.cuda.Event()
            event.record()
        return event

    def adopt(self, saved: SavedSegment) -> None:
        """It has arrived from a store in host pages that were expected, ``saved.runs``."""
        saved.from_store = True
        self._arrived(saved.runs)
        self.held.add(saved)

    def give_up(self, runs: list[Run]) -> None:
        """What was expected does not come, and nobody writes to its host pages any more."""
        self._arrived(runs)
        self.host.give(runs)

    def _arrived(self, runs: list[Run]) -> None:
        self._incoming = [others for others in self._incoming if others is not runs]

    # To the host

    def save(self, segment: Segment) -> SavedSegment | None:
        """Copy a segment whose pages are counted. Waits for nothing. None if there is no host memory for it, or no
        memory of the device to list its pages. With several ranks such a copy is ``lost`` once all of them know."""
        runs = self.host.take(segment.pages)
        if runs is None:
            return None
        count = self.rows.counts.ranks.held(segment.row, segment.pages)
        try:
            with self.device.launching():
                pages, listed = self._list(segment, count)
                listed, event = to_host(listed)
            beside = self.device.launch_beside(lambda: self.rows.copy_out(pages, first_of(runs, count), self._staging))
            copying = Copying(segment, listed, event, beside, pages)
        except torch.OutOfMemoryError:
            if self.ranks.alone:
                self.host.give(runs)
                return None
            copying = Copying(segment, torch.empty(0), None, Beside(None, None), torch.empty(0), lost=True)
        saved = SavedSegment.of(segment, runs)
        self.held.add(saved)
        self._copying[saved] = copying
        self.bytes_out += count * self.device.fmt.page_bytes
        return saved

    def _list(self, segment: Segment, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The ``count`` pages of a segment, [n] int64 by tier, head and in order, and what is known of each, [6, n]
        int32."""
        tables = [self._of_tier(segment, tier) for tier in range(len(self.device.fmt.tiers))]
        pages, used, known = (torch.cat(column, dim=-1) for column in zip(*tables, strict=True))
        place = used.long().cumsum(0) - 1  # as ``nonzero``, but of a length that the host knows
        place = torch.where(used & (place < count), place, count)
        listed = known.new_zeros(len(known), count + 1).scatter_(1, place.expand(len(known), -1), known)
        return pages.new_zeros(count + 1).scatter_(0, place, pages)[:count], listed[:, :count].contiguous()

    def _of_tier(self, segment: Segment, tier: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        page, used, known = self.rows.table_of(segment.row, tier, segment.hi)
        known[1].clamp_(min=segment.lo)
        known = torch.cat([torch.full_like(known[:1], tier), known, self.rows.extremes(tier, page, known)])
        return page, used, known

    def finish(self) -> list[SavedSegment]:
        """Take over the copies that are on the host by now, on all ranks; these. With several ranks all have to call
        it."""
        finished: list[SavedSegment] = []
        every = list(self._copying.items())
        if not every:
            return finished
        mine = np.array([[not copying.done(), copying.lost] for _, copying in every], dtype=np.int64)
        known = self.ranks.largest(mine.ravel()).reshape(mine.shape).astype(bool)
        for (saved, copying), (late, lost) in zip(every, known.tolist(), strict=True):
            if late:
                break  # the others are behind it
            del self._copying[saved]
            saved.lost = lost
            if lost:
                continue
            listed = copying.listed.numpy()
            saved.tier, saved.head, saved.lo, saved.upper, saved.least, saved.last = listed.copy()
            finished.append(saved)
        return finished

    def ready(self, saved: SavedSegment) -> bool:
        """Whether it can be restored."""
        return saved not in self._copying and not saved.lost

    def _changing(self, segment: Segment) -> None:
        """Pages of the segment are about to return to the ring: not before they are copied."""
        for copying in self._copying.values():
            if copying.segment is segment:
                self.device.join(copying.beside)

    # Back

    def needed(self, parts: Sequence[tuple[SavedSegment, int, int]]) -> list[Needed]:
        """What a segment of each part takes, as ``SavedRows.needed``."""
        return self.rows.needed(parts)

    def restore(self, saved: SavedSegment, lo: int, hi: int, needed: Needed) -> Segment | None:
        """A segment of the tokens at positions [lo, hi), as ``SavedRows.restore_range``; None, changing nothing,
        without room."""
        segment = self.rows.restore_range(saved, saved.segment(lo, hi), needed)
        if segment is not None:
            self.bytes_in += saved.pages_from(lo, hi) * self.device.fmt.page_bytes
        return segment

    # The end

    def drop(self, saved: SavedSegment) -> None:
        """Nobody wants it any more. What is being copied is copied before its memory is written again."""
        copying = self._copying.pop(saved, None)
        if copying is not None:
            self.device.join(copying.beside)
        self.held.remove(saved)
        self._dropping(saved)
        self.host.give(saved.runs)

    def drop_all(self) -> None:
        """Nobody wants any of it any more."""
        for copying in self._copying.values():
            self.device.join(copying.beside)
        self._copying.clear()
        for saved in self.held:
            self._dropping(saved)
        runs = [run for saved in self.held for run in saved.runs]
        self.held.clear()
        self.host.give(runs)

    @property
    def incoming(self) -> list[list[Run]]:
        """Host pages that are expected to be filled, by segment."""
        return list(self._incoming)

    def check_integrity(self) -> None:
        """Raise AssertionError unless all is known of the pages of each segment, or on its way."""
        assert set(self._copying) <= self.held, "a copy that nobody holds is on its way"
        for saved in self.held:
            assert saved.nodes > 0 and saved.start < saved.hi, "a saved segment stands for no tokens"
            if self.ready(saved):
                saved.check_integrity()
                assert not self.ranks.alone or len(saved.tier) == saved.host_pages, "a saved segment has pages to spare"
