"""Carries page counts from the device to the host without making either wait for the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from sglang_diffkv.mem_pool.geometry import Segment
from sglang_diffkv.mem_pool.host_counts import LOOKAHEAD, HostCounts, Snapshot
from sglang_diffkv.mem_pool.ranks import PAGES, RankCounts
from sglang_diffkv.mem_pool.transfer import to_host

if TYPE_CHECKING:
    from sglang_diffkv.mem_pool.page_manager import PageManager


class CountTracker:
    """Takes snapshots for a manager and spreads what they say: bounds of pages and of table entries, faults, and the
    pages of new segments."""

    def __init__(self, manager: PageManager):
        self.manager = manager
        geometry = manager.geometry
        self.low_grows = manager.policy.compresses and len(geometry.fmt.tiers) > 1
        rows = geometry.num_rows + geometry.num_segments
        self.host = HostCounts(rows, geometry.num_pages, geometry.heads * (2 if self.low_grows else 1))
        self.ranks = RankCounts(manager.ranks)
        self.uncounted: dict[int, Segment] = {}  # row -> segment whose pages the host does not know
        self._snapshots: deque[Snapshot] = deque()
        self._unreported: deque[int] = deque()  # planned steps whose results were not processed yet
        self._settled = 0
        self.counted_step = 0  # all steps up to this one are known
        self.on_counted: Callable[[Segment], None] = lambda segment: None
        """Called when the pages of a segment become known."""
        self._rows: tuple[np.ndarray, torch.Tensor] = (np.array([-1]), torch.empty(0))

    def planned(self, step: int) -> None:
        """Step number ``step`` is planned; its results are reported later."""
        self._unreported.append(step)

    def cancelled(self) -> None:
        """The last planned step has no results."""
        if self._unreported:
            self._unreported.pop()

    def count_later(self, segment: Segment) -> None:
        """The next snapshot counts the segment's pages."""
        self.host.touch(segment.row, grows=False)
        self.ranks.drop(segment.row)
        self.uncounted[segment.row] = segment
        self._settled = -1

    def take_snapshot(self) -> None:
        """Enqueue a count of all request rows and of the segments not yet counted, after the last planned step."""
        manager = self.manager
        rows = np.array([*manager.lengths, *self.uncounted], dtype=np.int64)
        with manager.launching():
            if not np.array_equal(rows, self._rows[0]):
                self._rows = (rows, manager.to_device(rows))
            values = manager.ops.count_rows(manager.state, self._rows[1], steps=LOOKAHEAD, low_grows=self.low_grows)
            values, event = to_host(values)
        total = manager.space.total.copy()
        if not manager.launched and manager.planned is not None:
            total[manager.planned.rows] -= manager.planned.new_tokens
        steady = np.array([row not in manager.prompts.unfinished for row in rows.tolist()], dtype=bool)
        self._snapshots.append(
            Snapshot(self.host.tick, manager.step, rows, total[rows], steady, self.ranks.slack, values, event)
        )
        if not manager.launched and manager.planned is not None:
            self.host.record(-manager.planned.pages)  # the snapshot does not see them

    def dropped(self, segment: Segment) -> None:
        """The segment is about to be released."""
        self.uncounted.pop(segment.row, None)
        self.ranks.drop(segment.row)

    def refresh(self) -> None:
        """Take over the snapshots on their way. They were enqueued before the last planned step.

        With several ranks each snapshot is exchanged, so all of them have to call this with the same ones on their way.
        """
        while self._snapshots:
            snapshot = self._snapshots.popleft()
            mine = snapshot.wait()
            requests = snapshot.rows < self.manager.geometry.num_rows
            current = self.host.current(snapshot)
            new = current & ~requests
            values = self.ranks.worst(mine, snapshot.rows, new, snapshot.slack)
            self.host.apply(snapshot, values, current & requests)
            bounded = current & snapshot.steady
            self.manager.space.tighten(snapshot.rows[bounded], values[:-1, 1:3][bounded], snapshot.total[bounded])
            held = zip(*(x[:-1, PAGES][new].tolist() for x in (values, mine)), strict=True)
            for row, (pages, here) in zip(snapshot.rows[new].tolist(), held, strict=True):
                if segment := self.uncounted.pop(row, None):
                    segment.pages = pages
                    self.manager.space.shrink(row)
                    self.ranks.count(row, pages, here)
                    self.on_counted(segment)
            self.counted_step = snapshot.step

    def settle(self) -> None:
        """Make the host's counts exact. Waits for the device."""
        if self._settled != self.manager.version or self._snapshots:
            self.take_snapshot()
            self.refresh()
            self._settled = self.manager.version

    def report(self) -> None:
        """The results of the oldest planned step are about to be processed: know its faults. Waits for that step only,
        if the next one is planned."""
        step = self._unreported.popleft() if self._unreported else self.manager.step
        self.refresh()
        if self.counted_step < step:
            self.take_snapshot()
            self.refresh()

    def meet(self) -> None:
        """Take over what the device has counted, exactly if nothing runs.

        One rank alone does so whenever it reads a bound. Several exchange their counts, so reading a bound must not,
        and all of them call this before a step is scheduled.
        """
        if not self.manager.lengths:
            self.settle()
        self.refresh()

    def free_bound(self) -> int:
        """Pages in the ring, at least; decode steps not counted yet take from them up to ``headroom_bound``."""
        if self.manager.ranks.alone:
            self.meet()
        return self.host.free()

    def headroom_bound(self) -> int:
        """Pages, at most, that launched decode steps took since ``free_bound`` was counted and the next will take."""
        if self.manager.ranks.alone:
            self.refresh()
        return self.host.headroom()

    def clear(self) -> None:
        self._unreported.clear()
