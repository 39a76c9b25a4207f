"""Running requests give up bytes before one of them is retracted: what is theirs alone is compressed once more, by a
stricter rule of the policy (``Policy.under_pressure``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sglang_diffkv.mem_pool.counts import PageCounts
from sglang_diffkv.mem_pool.device import PageDevice
from sglang_diffkv.mem_pool.high_rows import HighRows
from sglang_diffkv.mem_pool.prompts import compact, lent_pages
from sglang_diffkv.mem_pool.row_windows import RowWindows
from sglang_diffkv.mem_pool.rows import RequestRows
from sglang_diffkv.policies.base import Policy

LEAST_GROWTH = 64


class Pressure:
    """What running requests give up.

    Attributes:
        rule: by which they are compressed. compressions: of requests, so far. least_growth: tokens that a request has
            generated since it was compressed so, for it to be worth while again.
    """

    def __init__(
        self, device: PageDevice, rows: RequestRows, counts: PageCounts, high: HighRows, windows: RowWindows,
        rule: Policy,
    ):  # fmt: skip
        self.device, self.rows, self.counts, self.high, self.rule = device, rows, counts, high, rule
        self.windows = windows
        self.compressions, self.least_growth = 0, LEAST_GROWTH
        self._done_at: dict[int, int] = {}  # row -> its length when it was last compressed so

    @property
    def lent(self) -> int:
        """Pages that a row borrows while it is compressed so."""
        return lent_pages(self.device)

    def relieve(self, rows: Iterable[int]) -> list[int]:
        """Compress those of ``rows`` that have grown since they last were, some at a time: each borrows pages. Behind
        all that is launched; waits for the device. Returns those that were compressed: none while a pass is planned
        that is not launched, for which it does not wait."""
        if self.counts.upcoming is not None:
            return []
        due = [row for row in rows if self._is_due(row)]
        done: list[int] = []
        while due and (fitting := self._fitting()) > 0:
            some = [row for row in due[:fitting] if self._has_table_room(row)]
            self._compress(some)
            done += some
            due = due[fitting:]
        if done:
            self.counts.settle()
        return done

    def _is_due(self, row: int) -> bool:
        if row in self.high or row in self.windows:  # what a request has asked for it keeps
            return False
        if row not in self.rows or self.rows.in_prompt(row) or row in self.counts.faulted:
            return False
        return self.rows.length(row) >= self.next_at(row)

    def next_at(self, row: int | None) -> int:
        """Length from which on a row is compressed so the next time; None: one that holds nothing yet."""
        begun = 0 if row is None else max(self.rows.closed(row), self._done_at.get(row, 0))
        return begun + self.rule.window + self.least_growth

    def begun(self, row: int) -> int:
        """Position from which on a row's window was not compressed so; 0 where none of it was."""
        return max(self._done_at[row] - self.rule.window, 0) if row in self._done_at else 0

    def _fitting(self) -> int:
        """Rows for which there are certainly pages. No step is in flight once the counts are settled, so what steps may
        take can be lent. It is back, but for a page of a head at most, before the next one is asked for its room."""
        self.counts.settle()
        return self.counts.free() // self.lent

    def _has_table_room(self, row: int) -> bool:
        """Make room in the page table for the tokens that may go down; False if there is none."""
        space = self.device.space
        own = self.rows.length(row) - self.rows.shared(row)
        lower = (n + 1 for n in space.dense_entries(own)[1:])
        return space.extended(row, (0, *lower))

    def _compress(self, rows: Sequence[int]) -> None:
        if not rows:
            return
        compact(self.device, self.counts, [(row, self.rows.length(row)) for row in rows], self.rule)
        for row in rows:
            self.counts.touch(row, decoded=True)
            self._done_at[row] = self.rows.length(row)
        self.compressions += len(rows)

    def forget(self, row: int) -> None:
        """The row is released."""
        self._done_at.pop(row, None)
