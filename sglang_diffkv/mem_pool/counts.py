"""What the host knows of the device's page counts, without either waiting for the other: bounds, never optimistic.

A snapshot of the counts is taken in stream order before each step and read before the next one is scheduled. So it
misses at most one launched step and the one to be scheduled. It says how many pages those two can take at most;
operations recorded after it are added as bounds. Several ranks exchange each snapshot, so that all decide on the same
numbers.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang_diffkv.kernels.count_rows.reference import DEMAND, ENTRIES, FAULT, PRIVATE
from sglang_diffkv.layout.geometry import Segment
from sglang_diffkv.layout.ranks import RankError, Ranks
from sglang_diffkv.layout.transfer import to_host
from sglang_diffkv.mem_pool.device import PageDevice
from sglang_diffkv.mem_pool.rows import RequestRows
from sglang_diffkv.mem_pool.steps import PlannedStep

LOOKAHEAD = 2
"""Decode steps that a snapshot has to cover: the one launched after it and the one scheduled while that runs."""


@dataclass
class Faults:
    """Faults of a pass on their way to the host: those of its ``rows``, as long as their requests have them."""

    rows: set[int]
    values: torch.Tensor  # [rows of all owners] int32 on the host
    event: Any  # device event that marks ``values`` as written, or None


@dataclass
class Snapshot:
    """Counts on their way to the host; ``kernels/count_rows`` names the columns of ``values``."""

    tick: int
    step: int  # all steps up to this one are counted
    rows: np.ndarray  # [n] int64
    total: np.ndarray  # [n] int64, tokens ever appended to each row
    steady: np.ndarray  # [n] bool, rows past their prompt's compaction: a step moves one token of a head at most
    slack: int  # pages that this rank counts as used for ranks that hold more, see ``RankCounts``
    values: torch.Tensor  # [n + 1, 4 + 2 * T] int64 on the host; the last T: tokens of uncounted segments
    event: Any  # device event that marks ``values`` as written, or None

    def wait(self) -> np.ndarray:
        """``values``, once they are written."""
        if self.event is not None:
            self.event.synchronize()
        return self.values.numpy()


class RankCounts:
    """Page counts of all ranks as those of one that has, for every row, as little room as any.

    A segment counts with the pages that it takes on the rank where it takes most, both in the prefix cache's totals and
    in the ring's. A rank where it takes less counts the difference (its *slack*) as used. So evicting a segment frees
    what it counted, and ring and segments still add up: a page lost on any rank shows on all.
    """

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.slack = 0
        """Pages that counted segments take less on this rank than they count."""
        self._slack_of: dict[int, int] = {}  # row of a segment -> its part of the slack

    def worst(self, mine: np.ndarray, rows: np.ndarray, new: np.ndarray, slack: int) -> np.ndarray:
        """Exchange a snapshot.

        Args:
            mine: [n + 1, 4 + 2 * T], the snapshot's values on this rank.
            rows: [n], what it counted.
            new: [n] bool, segments that count from now on.
            slack: when the snapshot was taken.

        Returns:
            [n + 1, 4 + 2 * T], the same for all ranks together; its last row gives 0 pages taken and the free pages as
            put.
        """
        if self.ranks.alone:
            return mine
        tag = zlib.crc32(rows.tobytes())
        packed = mine.copy()
        packed[:-1, PRIVATE] *= -1
        used = mine[-1, 0] - mine[-1, 1] + slack - mine[:-1, ENTRIES][new].sum()
        packed[-1] = 0
        packed[-1, :3] = (used, tag, -tag)
        worst = self.ranks.largest(packed.ravel()).reshape(packed.shape)
        if worst[-1, 1] != -worst[-1, 2]:
            raise RankError(f"diffkv: ranks count different rows; rank {self.ranks.rank} {rows.tolist()}")
        worst[:-1, PRIVATE] *= -1
        free = -worst[-1, 0] - worst[:-1, ENTRIES][new].sum()
        worst[-1] = 0
        worst[-1, 1] = free
        return worst

    def count(self, row: int, pages: int, mine: int) -> None:
        """A segment counts with ``pages`` from now on, of which this rank holds ``mine``."""
        self._slack_of[row] = pages - mine
        self.slack += pages - mine

    def drop(self, row: int) -> None:
        """A segment does not count any more."""
        self.slack -= self._slack_of.pop(row, 0)

    def held(self, row: int, pages: int) -> int:
        """What this rank holds of a segment that counts with ``pages``."""
        return pages - self._slack_of.get(row, 0)


class PageCounts:
    """Bounds of the pages of the ring and of every row, the pages of segments, and faults.

    Args:
        low_grows: whether a decode step may take a page of a lower tier too. step_tokens: tokens that a decode step may
            add to a request.

    Attributes:
        tick: grows with every change of who owns pages. faulted: rows that found the ring empty.
        faults: requests that ever did. pages: [rows] those that a row referred to when it was last counted.
        private: [rows] those that leave with it, at least. uncounted: row -> segment of which it is not known
            yet what it holds, nor, as a rule, its pages.
        upcoming: the planned step while its kernels are not launched.
        waits: whether reading a bound may wait for the device; if not, bounds are by what the host knows already.
    """

    def __init__(self, device: PageDevice, rows: RequestRows, ranks: Ranks, *, low_grows: bool, step_tokens: int = 1):
        geometry = device.geometry
        count = geometry.num_rows + geometry.num_segments
        self.device, self.rows, self.low_grows = device, rows, low_grows
        self.ranks = RankCounts(ranks)
        self.step_tokens = step_tokens
        self.lookahead = LOOKAHEAD * step_tokens
        """Tokens that a request may take until the next snapshot is read."""
        tiers = [-(-self.lookahead // x.tokens) for x in geometry.fmt.layouts]
        policy = device.ops.policy
        used = [policy.used_tiers(len(tiers), layer) for layer in range(geometry.num_layers)]
        lower = [min(sum(tiers[x] for x in layer if x), self.lookahead) if low_grows else 0 for layer in used]
        self.unknown = geometry.num_heads * (geometry.num_layers * tiers[0] + sum(lower))
        """Pages that a row may take in ``LOOKAHEAD`` decode steps when nothing is known of it. They are of the high
        tier, and of the lower tiers to which each new token may move another."""
        self.tick = 0
        self.known_free = geometry.num_pages
        self.log: deque[tuple[int, int]] = deque()  # (tick, pages given or taken since the last snapshot)
        self.demand = np.zeros(count, dtype=np.int64)
        self._loose: set[int] = set()  # rows that may hold table blocks which their entries do not reach any more
        self.private = np.zeros(count, dtype=np.int64)
        self.pages = np.zeros(count, dtype=np.int64)
        self.changed = np.zeros(count, dtype=np.int64)  # tick from which on a snapshot says something of a row
        self.faulted: set[int] = set()
        self.faults = 0
        self.uncounted: dict[int, Segment] = {}
        self.upcoming: PlannedStep | None = None
        self.waits = True
        self.steps = 0  # planned so far
        self.counted_step = 0  # all steps up to this one are known
        self.on_counted: Callable[[Segment], None] = lambda segment: None
        """Called when the pages of a segment become known; ``tell_counted`` sets it."""
        self._snapshots: deque[Snapshot] = deque()
        self._unreported: deque[int] = deque()  # planned steps whose results were not processed yet
        self._faults: dict[int, Faults] = {}  # of such steps, by number, where they come to the host by themselves
        self._settled = -1  # the tick at which counts were the device's, without a planned step
        self._numbers: tuple[list[int], torch.Tensor] = ([-1], torch.empty(0))
        """What the last snapshot had to know, here and on the device."""

    def tell_counted(self, told: Callable[[Segment], None]) -> None:
        """Call ``told`` from now on when the pages of a segment become known."""
        self.on_counted = told

    def wait_for_device(self, waits: bool) -> None:
        """Whether reading a bound may wait for the device from now on."""
        self.waits = waits

    @contextmanager
    def as_known(self) -> Iterator[None]:
        """Inside, reading a bound does not wait for the device."""
        waits, self.waits = self.waits, False
        try:
            yield
        finally:
            self.waits = waits

    # Operations of the host

    def record(self, pages: int, *, exactly: bool = False) -> None:
        """An operation that returns at least ``pages``, or takes at most ``-pages``. ``exactly``: no more, or no fewer,
        so what is settled stays settled."""
        stays = exactly and self._settled == self.tick
        self.tick += 1
        if stays:
            self._settled = self.tick
        if pages:
            self.log.append((self.tick, pages))

    def touch(self, row: int, *, grows: bool = True, decoded: bool = False) -> None:
        """A row's pages change otherwise than by a decode step: older snapshots say nothing of it.

        Args:
            grows: False for a segment, which takes no pages by itself.
            decoded: a decode step of the row may be launched and not counted.
        """
        self.record(-int(self.demand[row]) if decoded else 0, exactly=not (grows or decoded))
        self.changed[row] = self.tick
        self.demand[row] = self.unknown if grows else 0
        self.private[row] = self.pages[row] = 0
        if grows:
            self._loose.add(row)

    def forget(self, row: int, *, private: int | None = None, exactly: bool = False) -> None:
        """A row is released; its private pages, or as many as given, are free from now on. ``exactly``: no more than
        these."""
        self.record(int(self.private[row]) if private is None else private, exactly=exactly)
        self.changed[row] = self.tick
        self.demand[row] = self.private[row] = self.pages[row] = 0
        self.faulted.discard(row)
        self._loose.discard(row)
        for found in self._faults.values():
            found.rows.discard(row)

    def count_later(self, segment: Segment) -> None:
        """The next snapshot counts the segment's pages."""
        segment.pages, segment.held = 0, ()
        self.touch(segment.row, grows=False)
        self.ranks.drop(segment.row)
        self.uncounted[segment.row] = segment

    def know(self, segment: Segment, pages: int, mine: int, held: tuple[int, ...]) -> None:
        """What a snapshot counts of a segment: its ``pages``, of which this rank has ``mine``, and what it holds. One
        that was counted stays as it is."""
        if self.uncounted.get(segment.row) is segment:
            del self.uncounted[segment.row]
            segment.held = held
            self._know_pages(segment, pages, mine)

    def expect(self, segment: Segment, pages: int) -> None:
        """The host knows the pages of an uncounted segment, but not what it holds. With several ranks it is left to a
        snapshot, which they exchange."""
        if self.ranks.ranks.alone and self.uncounted.get(segment.row) is segment:
            self._know_pages(segment, pages, pages)

    def _know_pages(self, segment: Segment, pages: int, mine: int) -> None:
        if not segment.pages:
            segment.pages = pages
            self.ranks.count(segment.row, pages, mine)
            self.on_counted(segment)

    def dropped(self, segment: Segment) -> None:
        """The segment is about to be released."""
        self.uncounted.pop(segment.row, None)
        self.ranks.drop(segment.row)

    # Steps

    def plan(self, step: PlannedStep) -> None:
        """A step is planned, behind the snapshot that was taken for it; its results are reported later."""
        self.record(-step.pages)
        self.steps = step.number
        self.upcoming = step
        self._unreported.append(step.number)

    def joined(self, step: PlannedStep) -> None:
        """The planned step is ``step`` by now: rows that decode have joined it, whose pages its snapshot covers."""
        assert self.upcoming is not None and self.upcoming.number == step.number
        self.upcoming = step

    def launched(self) -> None:
        """The planned step's kernels follow all that are launched so far."""
        self._upcoming_is_over()

    def cancelled(self) -> None:
        """The planned step has no results; its rows are released next."""
        self._upcoming_is_over()
        if self._unreported:
            self._unreported.pop()

    def _upcoming_is_over(self) -> None:
        if self.upcoming is not None:
            self._settled = -1  # what it takes is a bound
        self.upcoming = None

    def watch_faults(self, step: PlannedStep) -> None:
        """The step's kernels are launched, and nothing behind them: its results need not wait for what comes next to
        know its faults. Several ranks exchange these, with all that is behind the step counted."""
        if self.ranks.ranks.alone:
            fault = self.device.state.fault
            with self.device.launching():
                copy = to_host(fault if fault.is_cuda else fault.clone())
            self._faults[step.number] = Faults(set(step.rows), *copy)

    def clear(self) -> None:
        """No results are to come."""
        self._unreported.clear()
        self._faults.clear()

    # Snapshots

    def take_snapshot(self, *, of_arriving: bool = True) -> None:
        """Enqueue a count of all request rows and of the segments not yet counted, after the last launched step.

        Args:
            of_arriving: of segments too whose bytes are on their way, which it comes behind. If not, the next one is;
                several ranks, which exchange counts of the same segments, wait all the same.
        """
        device, upcoming = self.device, self.upcoming
        of_arriving = of_arriving or not self.ranks.ranks.alone
        segments = [x for x in self.uncounted.values() if of_arriving or not device.arrives(x.row)]
        rows, more = [*self.rows, *(x.row for x in segments)], len(segments)
        count, tiers = len(rows), len(device.fmt.tiers)
        numbers = [*rows, *(x.lo for x in segments), *(x.hi for x in segments)]
        with device.launching(reads_pages=of_arriving and more > 0):
            if numbers != self._numbers[0]:
                self._numbers = numbers, device.to_device(numbers)
            there = self._numbers[1]
            counted = device.ops.count_rows(there[:count], steps=self.lookahead, low_grows=self.low_grows)
            if more:
                held = there[count - more : count], there[count : count + more], there[count + more :]
                device.ops.add_held(*held, counted[count - more : count, -tiers:])
            values, event = to_host(counted)
        at = np.array(rows, dtype=np.int64)
        total = device.space.total[at]
        if upcoming is not None:
            behind = dict(zip(upcoming.rows, upcoming.new_tokens, strict=True))
            total -= np.array([behind.get(row, 0) for row in rows], dtype=np.int64)
        steady = np.array([not self.rows.in_prompt(row) for row in rows], dtype=bool)
        self._snapshots.append(Snapshot(self.tick, self.steps, at, total, steady, self.ranks.slack, values, event))
        if upcoming is not None:
            self.record(-upcoming.pages)  # the snapshot does not see them

    def refresh(self) -> None:
        """Take over the snapshots on their way. They were enqueued before the last planned step.

        With several ranks each snapshot is exchanged, so all of them have to call this with the same ones on their way.
        """
        while self._snapshots:
            snapshot = self._snapshots.popleft()
            mine = snapshot.wait()
            requests = snapshot.rows < self.device.geometry.num_rows
            current = self.changed[snapshot.rows] <= snapshot.tick  # rows that changed by decode steps only
            new = current & ~requests
            values = self.ranks.worst(mine, snapshot.rows, new, snapshot.slack)
            self._apply(snapshot, values, current & requests)
            bounded = current & snapshot.steady
            tiers = len(self.device.fmt.tiers)
            most = values[:-1, FAULT + 1 : -tiers][bounded]
            self.device.space.tighten(snapshot.rows[bounded], most, snapshot.total[bounded])
            if self._loose:
                for row in self._loose.intersection(snapshot.rows[bounded].tolist()):
                    self.device.space.shrink(row)
                    self._loose.discard(row)
            counted = (values[:-1, ENTRIES], mine[:-1, ENTRIES], values[:-1, -tiers:], snapshot.rows)
            for pages, here, held, row in zip(*(x[new].tolist() for x in counted), strict=True):
                if segment := self.uncounted.get(row):
                    self.device.space.shrink(row)
                    self.know(segment, pages, here, tuple(held))
            self.counted_step = snapshot.step

    def _apply(self, snapshot: Snapshot, values: np.ndarray, told: np.ndarray) -> None:
        """Take over what a snapshot says of the ring and of the request rows ``told`` ([n] bool)."""
        self.known_free = int(values[-1, 1] - values[-1, 0])
        while self.log and self.log[0][0] <= snapshot.tick:
            self.log.popleft()
        rows, counts = snapshot.rows[told], values[:-1][told]
        self.demand[rows] = counts[:, DEMAND]
        self.private[rows] = counts[:, PRIVATE]
        self.pages[rows] = counts[:, ENTRIES]
        self._add_faults(rows[counts[:, FAULT] != 0].tolist())

    def _add_faults(self, rows: Iterable[int]) -> None:
        found = set(rows) - self.faulted
        self.faults += len(found)
        self.faulted |= found

    @property
    def settled(self) -> bool:
        """Whether the host knows the device's pages, those of all segments too, as they are before the planned step."""
        known = self._settled == self.tick and not self._snapshots
        return known and all(segment.pages for segment in self.uncounted.values())

    def settle(self) -> None:
        """Settle the host's counts: they are the device's, and no segment is uncounted. Waits for the device, unless
        that is so already."""
        if self.uncounted or not self.settled:
            self.take_snapshot()
            self.refresh()
            self._settled = self.tick

    @property
    def overtakes(self) -> bool:
        """Whether the host is ahead of the device: a step runs whose results nobody waits for, since its requests have
        ended. Then what no row holds is a bound for a moment longer, and the next prompt need not wait."""
        return bool(self._unreported) and self.ranks.ranks.alone and self.device.works()

    def report(self) -> None:
        """The results of the oldest planned step are about to be processed: know its faults. Waits for that step only,
        if the next one is planned or its faults were watched."""
        step = self._unreported.popleft() if self._unreported else self.steps
        if (watched := self._faults.pop(step, None)) is not None:
            if watched.event is not None:
                watched.event.synchronize()
            values = watched.values.numpy()
            self._add_faults(row for row in watched.rows if values[row])
            return
        self.refresh()
        if self.counted_step < step:
            self.take_snapshot()
            self.refresh()

    def meet(self) -> None:
        """Take over what the device has counted, and settle if nothing runs, but for what the host ``overtakes``.

        One rank alone does so whenever it reads a bound. Several exchange their counts, so reading a bound must not,
        and all of them call this before a step is scheduled.
        """
        if not (self.rows or self.overtakes or self.settled):
            self.settle()
        self.refresh()

    # Bounds

    def free(self) -> int:
        """Lower bound of the free pages by what the host knows; decode steps not counted yet take from them up to
        ``headroom``."""
        return self.known_free + sum(pages for _, pages in self.log)

    def headroom(self) -> int:
        """Upper bound, by what the host knows, of the pages that decode steps not counted yet and the next one take."""
        return int(self.demand.sum())

    def free_bound(self) -> int:
        """``free``, by what the device has counted by now too."""
        if self.ranks.ranks.alone and self.waits:
            self.meet()
        return self.free()

    def headroom_bound(self) -> int:
        """``headroom``, by what the device has counted by now too."""
        if self.ranks.ranks.alone and self.waits:
            self.refresh()
        return self.headroom()
