"""Segments of the prefix cache, copied to host memory, where they outlive their eviction.

A segment's pages never change, so they can be copied at any time. Nothing waits for that: the host knows how many pages
a counted segment has. The device lists them, and their bytes leave, all beside the passes
(``PageDevice.launch_beside``). Until what is listed of them is there a copy cannot be restored. Pages do not return to
the ring before they are copied: what gives them back is launched behind the copy.

Each rank copies the pages of its own heads. All of them set aside as many host pages as the rank with most, so that
their host memory fills alike. A copy can be restored once it is there on all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sglang_diffkv.layout.geometry import Segment
from sglang_diffkv.layout.transfer import to_host
from sglang_diffkv.mem_pool.device import Beside, PageDevice
from sglang_diffkv.mem_pool.host_pages import Run, first_of
from sglang_diffkv.mem_pool.page_copies import staging_pages
from sglang_diffkv.mem_pool.saved_rows import Needed, SavedRow, SavedRows
from sglang_diffkv.mem_pool.saved_slots import SavedSlots, SlotStore

MOST_NEEDED = 8
"""Ranges of a saved segment for which it is remembered what they take."""

NONE = np.empty(0, dtype=np.int32)

GUESTS = "evicted prefixes"
"""Of host memory, in reports."""


@dataclass(eq=False)
class SavedSegment(SavedRow):
    """A segment's tokens at positions [start, hi) in host memory.

    Attributes:
        as_computed, first, unsettled, held: as of ``Segment``; ``held`` is empty where that is not known. slots: what a
            draft model has of its tokens, if there is one. nodes: nodes of an index that name it. lost: a rank could
            not copy it. from_store: it came from a store, and no request has got it since. needed: what ranges [lo, hi)
            take, as far as somebody asked.
    """

    start: int = 0
    first: int = 0
    as_computed: bool = False
    unsettled: tuple[tuple[int, int], ...] | None = None
    held: tuple[int, ...] = ()
    slots: SavedSlots | None = None
    nodes: int = field(default=0)
    lost: bool = False
    from_store: bool = False
    needed: dict[tuple[int, int], Needed] = field(default_factory=dict)

    @classmethod
    def of(cls, segment: Segment, runs: list[Run]) -> SavedSegment:
        """A segment whose pages are on their way to host pages; nothing is known of them yet."""
        hi, end, unknown = segment.hi, segment.end, NONE
        saved = cls(hi, end, runs, unknown, unknown, unknown, unknown, unknown, unknown)
        saved.start, saved.first = segment.lo, segment.first
        saved.as_computed, saved.unsettled, saved.held = segment.as_computed, segment.unsettled, segment.held
        return saved

    def segment(self, lo: int, hi: int) -> Segment:
        """What a segment of the tokens at positions [lo, hi) is, but for its row."""
        first = self.first if self.as_computed else lo
        found = Segment(0, lo, hi, as_computed=self.as_computed, first=first, end=self.end)
        found.unsettled = self.unsettled
        return found

    @property
    def settled(self) -> bool:
        """As of ``Segment``."""
        return self.unsettled == ()


@dataclass(eq=False)
class Copying:
    """A copy on its way to the host.

    Attributes:
        listed: [6, n] on the host, once ``event`` has passed; None: it has. beside: the copy of the bytes, which reads
            ``pages``, perhaps those of other segments too. lost: the device had no memory for it.
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
        held: what is saved. bytes_out, bytes_in: copied so far, to the host and back. drafts: where a draft model's
            keys and values are, which go along by KV slot; None without one.
    """

    def __init__(self, device: PageDevice, rows: SavedRows):
        self.device, self.rows, self.host, self.ranks = device, rows, rows.host, rows.ranks
        self.drafts: SlotStore | None = None
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

    def save(self, segment: Segment, kv_slots: torch.Tensor | None = None) -> SavedSegment | None:
        """As ``save_all``, of one."""
        return self.save_all([segment], None if kv_slots is None else [kv_slots])[0]

    def save_all(
        self, segments: Sequence[Segment], kv_slots: Sequence[torch.Tensor] | None = None
    ) -> list[SavedSegment | None]:
        """Copy different segments whose pages are counted, together: that takes about as many launches as one. Waits
        for nothing. None for those for which there is no host memory, or no memory of the device to list their pages.
        With several ranks such a copy is ``lost`` once all of them know.

        Args:
            kv_slots: of the tokens of each segment, [n] int64, with a draft model.
        """
        copied = [taken for segment in segments if (taken := self._take(segment)) is not None]
        found = dict(copied)
        drafts: list[tuple[SavedSegment, torch.Tensor]] = []
        if self.drafts is not None:
            assert kv_slots is not None, "nobody says where a draft model's keys are"
            drafts = [(found[x], slots) for x, slots in zip(segments, kv_slots, strict=True) if x in found]
        copying = self._copy_out([(segment, saved.runs) for segment, saved in copied], drafts) if copied else []
        if copying is None and self.ranks.alone:
            for _, saved in copied:
                self._give(saved)
            return [None] * len(segments)
        for index, (segment, saved) in enumerate(copied):
            self.held.add(saved)
            nothing = Copying(segment, torch.empty(0), None, Beside(None, None), torch.empty(0), lost=True)
            self._copying[saved] = nothing if copying is None else copying[index]
            self.bytes_out += self._held_here(segment) * self.device.fmt.page_bytes
        return [found.get(segment) for segment in segments]

    def _take(self, segment: Segment) -> tuple[Segment, SavedSegment] | None:
        """Host memory for a segment, and for what a draft model has of it; None if there is none."""
        runs = self.host.take(segment.pages)
        if runs is None:
            return None
        saved = SavedSegment.of(segment, runs)
        if self.drafts is not None:
            saved.slots = self.drafts.take(segment.hi - segment.lo)
            if saved.slots is None:
                self.host.give(runs)
                return None
        return segment, saved

    def _give(self, saved: SavedSegment) -> None:
        self.host.give(saved.runs)
        if self.drafts is not None and saved.slots is not None:
            self.drafts.drop(saved.slots)

    def _drafts_out(self, copied: Sequence[tuple[SavedSegment, torch.Tensor]]) -> None:
        """On the stream beside the passes: what a draft model has in KV slots of segments."""
        for saved, kv_slots in copied:
            assert self.drafts is not None and saved.slots is not None
            assert len(kv_slots) == saved.slots.count, "a segment and its KV slots disagree"
            self.drafts.copy_out(saved.slots, kv_slots)

    def _held_here(self, segment: Segment) -> int:
        """Pages of a segment on this rank."""
        return self.rows.counts.ranks.held(segment.row, segment.pages)

    def _copy_out(
        self, copied: Sequence[tuple[Segment, list[Run]]], drafts: Sequence[tuple[SavedSegment, torch.Tensor]]
    ) -> list[Copying] | None:
        """Launch the copies of segments to host pages, beside the passes, behind those of what a draft model has in
        their KV slots; None if the device has no memory for that."""
        segments = [segment for segment, _ in copied]
        counts = [self._held_here(segment) for segment in segments]
        runs = [run for (_, runs), count in zip(copied, counts, strict=True) for run in first_of(runs, count)]

        def launch() -> tuple[torch.Tensor, torch.Tensor, Any]:
            self._drafts_out(drafts)
            pages, listed = self._list(segments, counts)
            listed, event = to_host(listed)
            self.rows.copy_out(pages, runs, self._staging)
            return pages, listed, event

        try:
            beside = self.device.launch_beside(launch)
        except torch.OutOfMemoryError:
            return None
        (pages, listed, event), behind = beside.result, Beside(None, beside.end)
        parts = listed.split(counts, dim=1)
        return [Copying(x, part, event, behind, pages) for x, part in zip(segments, parts, strict=True)]

    def _list(self, segments: Sequence[Segment], counts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The pages of segments, so many of each, one segment after the other, [n] int64 by tier, head and in order,
        and what is known of each, [6, n] int32 (``kernels/list_pages``)."""
        first = [0, *itertools.accumulate(counts)]
        rows, lo, hi = zip(*((x.row, x.lo, x.hi) for x in segments), strict=True)
        return self.device.ops.list_pages(self.device.to_device([rows, lo, hi, first[:-1], counts]), first[-1])

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
        """What a segment of each part takes, as ``SavedRows.needed``. A request that waits asks again and again, so it
        is remembered: on all ranks alike, which ask alike."""
        new = [part for part in parts if part[1:] not in part[0].needed]
        asked = dict(zip(new, self.rows.needed(new) if new else (), strict=True))
        found = [asked[part] if part in asked else part[0].needed[part[1:]] for part in parts]
        for (saved, lo, hi), needed in asked.items():  # a path may go through a segment twice
            if len(saved.needed) >= MOST_NEEDED:
                saved.needed.clear()
            saved.needed[lo, hi] = needed
        return found

    def restore(
        self,
        parts: Sequence[tuple[SavedSegment, int, int]],
        needed: Sequence[Needed],
        kv_slots: torch.Tensor | None = None,
    ) -> list[Segment] | None:
        """Segments of the tokens at positions [lo, hi) of each part, as ``SavedRows.restore_all``; None, changing
        nothing, without room. ``kv_slots``: new ones of all these tokens, [n] int64, with a draft model."""
        segments = self.rows.restore_all([(saved, saved.segment(lo, hi)) for saved, lo, hi in parts], needed)
        if segments is not None:
            pages = sum(saved.pages_from(lo, hi) for saved, lo, hi in parts)
            self.bytes_in += pages * self.device.fmt.page_bytes
            self._drafts_in(parts, kv_slots)
        return segments

    def count(
        self,
        parts: Sequence[tuple[SavedSegment, int, int]],
        needed: Sequence[Needed],
        segments: Sequence[Segment],
    ) -> None:
        """Of restored segments that the prefix cache names by now: the host knows their pages. Those that are all of
        what was saved need not be counted on the device, which would wait for their bytes."""
        counts = self.rows.counts
        for (saved, lo, hi), takes, segment in zip(parts, needed, segments, strict=True):
            if saved.held and (lo, hi) == (saved.start, saved.hi):
                counts.know(segment, takes.pages, saved.pages_from(lo, hi), saved.held)
            else:
                counts.expect(segment, takes.pages)

    def _drafts_in(self, parts: Sequence[tuple[SavedSegment, int, int]], kv_slots: torch.Tensor | None) -> None:
        if self.drafts is None:
            return
        assert kv_slots is not None, "nobody says where a draft model's keys go"
        for (saved, lo, _), slots in zip(parts, kv_slots.split([hi - lo for _, lo, hi in parts]), strict=True):
            assert saved.slots is not None
            self.drafts.restore(saved.slots, slots, lo - saved.start)

    # The end

    def drop(self, saved: SavedSegment) -> None:
        """Nobody wants it any more. What is being copied is copied before its memory is written again."""
        copying = self._copying.pop(saved, None)
        if copying is not None:
            self.device.join(copying.beside)
        self.held.remove(saved)
        self._dropping(saved)
        self._give(saved)

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
        if self.drafts is not None:
            self.drafts.drop_all()

    @property
    def incoming(self) -> list[list[Run]]:
        """Host pages that are expected to be filled, by segment."""
        return list(self._incoming)

    def check_integrity(self) -> None:
        """Raise AssertionError unless all is known of the pages of each segment, or on its way."""
        if self.drafts is not None:
            slots = {saved.slots for saved in self.held}
            assert self.drafts.held == slots, "host memory of a draft model's keys is lost"
        assert set(self._copying) <= self.held, "a copy that nobody holds is on its way"
        for saved in self.held:
            assert (saved.nodes or not self.ready(saved)) and saved.start < saved.hi, "a copy stands for no tokens"
            assert (saved.slots is None) == (self.drafts is None), "a draft model's keys are lost"
            assert saved.slots is None or saved.slots.count == saved.hi - saved.start, "a draft model lacks some keys"
            if self.ready(saved):
                saved.check_integrity()
                assert not self.ranks.alone or len(saved.tier) == saved.host_pages, "a saved segment has pages to spare"
