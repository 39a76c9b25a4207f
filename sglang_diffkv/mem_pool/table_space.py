"""Host-side owner of page-table blocks: which blocks back which columns of which row."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sglang_diffkv.mem_pool.geometry import Path, Segment, path_end
from sglang_diffkv.mem_pool.state import NO_LIMIT, TABLE_BLOCK, PageState
from sglang_diffkv.mem_pool.transfer import to_device

PART_FILLED = 2
"""Entries of a tier that a row may have beyond those its tokens fill: a page ends where a prompt was sealed."""


def blocks_of(entries: Iterable[int]) -> int:
    """Table blocks of so many entries of each tier."""
    return sum(-(-n // TABLE_BLOCK) for n in entries)


class TableFull(RuntimeError):
    """The page table has no room for the next entries of ``row``."""

    def __init__(self, row: int, problem: str):
        super().__init__(problem)
        self.row = row


class TableSpace:
    """Hands out table blocks so that a row's entries always lie in blocks of its own.

    Entry counts live on the device; the host works with upper bounds of them: a row whose own region
    took ``n`` tokens has at most ``ceil(n / tokens of a page)`` own entries in each tier. Changes of the device's
    row blocks are gathered and written by ``flush``, which has to precede every kernel that reads tables.
    """

    def __init__(self, state: PageState):
        self.state = state
        rows, self.max_blocks = state.row_blocks.shape
        self.free_blocks = list(range(state.page_table.shape[0] - 1, 0, -1))
        self.base = np.zeros((rows, 2), dtype=np.int64)  # entries when they were last counted
        self.total = np.zeros(rows, dtype=np.int64)  # own tokens ever appended
        self.counted = np.zeros(rows, dtype=np.int64)  # of these, those that ``base`` covers
        self.blocks: list[tuple[list[int], list[int]]] = [([], []) for _ in range(rows)]
        self._writes: dict[int, int] = {}  # flat index into the row blocks -> block

    @property
    def num_blocks(self) -> int:
        """Blocks that rows can use (block 0 backs unused columns)."""
        return self.state.page_table.shape[0] - 1

    def bound(self, row: int, new_tokens: int = 0) -> tuple[int, int]:
        """Upper bound of the row's high and low entries after ``new_tokens`` more."""
        layouts = self.state.fmt.layouts
        tokens = int(self.total[row] - self.counted[row]) + new_tokens
        high = int(self.base[row, 0]) + -(-tokens // layouts[0].tokens)
        low = int(self.base[row, 1]) + -(-tokens // layouts[1].tokens) if len(layouts) > 1 else 0
        return high, low

    def part_entries(self, segment: Segment, lo: int, hi: int) -> tuple[int, int]:
        """Upper bound of the entries, of each tier, that attaching a part of a segment takes: a page holds a token at
        least, and to read less takes no more."""
        counted = [reads for (start, end), reads in segment.reads.items() if start <= lo and hi <= end]
        high, low = (min(column) for column in zip(self.bound(segment.row), *counted, strict=True))
        return min(high, hi - lo), min(low, hi - lo)

    def path_entries(self, path: Path) -> tuple[int, int]:
        """Upper bound of the entries, of each tier, that attaching ``path`` takes."""
        parts = [self.part_entries(*part) for part in path]
        return sum(high for high, _ in parts), sum(low for _, low in parts)

    def dense_entries(self, tokens: int) -> tuple[int, int]:
        """Entries of each tier, at most, of ``tokens`` in dense pages."""
        high, *low = (-(-tokens // layout.tokens) for layout in self.state.fmt.layouts)
        return high, low[0] if low else 0

    def blocks_for(self, path: Path, new_tokens: int, *, spare: int = 0) -> int:
        """Upper bound of the blocks of a row with ``path`` attached, ``new_tokens`` of its own and ``spare`` entries
        of each tier."""
        layouts = self.state.fmt.layouts
        own = [-(-new_tokens // layouts[0].tokens), -(-new_tokens // layouts[-1].tokens)]
        return blocks_of(n + m + spare for n, m in zip(self.path_entries(path), own, strict=True))

    def fits(self, path: Path, max_tokens: int) -> bool:
        """Whether a row with ``path`` attached has room to grow to ``max_tokens``, whatever becomes of the rest."""
        return self.blocks_for(path, max_tokens - path_end(path), spare=PART_FILLED) <= self.max_blocks

    def fitting(self, path: Path, max_tokens: int) -> Path:
        """The longest start of ``path`` that fits."""
        count = len(path)
        while count and not self.fits(path[:count], max_tokens):
            count -= 1
        return path[:count]

    def refused(self, rows: list[int], new_tokens: int) -> dict[int, str]:
        """Those of ``rows``, in this order, that have no room for ``new_tokens`` more each, and why."""
        found: dict[int, str] = {}
        free = len(self.free_blocks)
        most = 2 * -(-new_tokens // TABLE_BLOCK)  # a token takes an entry of each tier at most
        if most * len(rows) <= free and all(sum(map(len, self.blocks[row])) + most <= self.max_blocks for row in rows):
            return found
        for row in rows:
            needed = sum(self._needed(row, *self.bound(row, new_tokens)))
            if problem := self._problem(row, needed, free):
                found[row] = problem
            else:
                free -= needed
        return found

    def _needed(self, row: int, high: int, low: int) -> tuple[int, int]:
        """Blocks of each tier that a row lacks for so many entries."""
        left, right = self.blocks[row]
        return max(-(-high // TABLE_BLOCK) - len(left), 0), max(-(-low // TABLE_BLOCK) - len(right), 0)

    def _problem(self, row: int, needed: int, free: int) -> str | None:
        """Why a row cannot have ``needed`` more of ``free`` blocks; None if it can."""
        if needed > free:
            return f"the page table has {free} free blocks, {needed} needed"
        if needed and needed + sum(map(len, self.blocks[row])) > self.max_blocks:
            return f"a row holds at most {self.max_blocks} table blocks; too many shared segments"
        return None

    def append(self, row: int, new_tokens: int) -> None:
        """Room for ``new_tokens`` more own tokens. Raises TableFull, changing nothing."""
        self._grow(row, *self.bound(row, new_tokens))
        self.total[row] += new_tokens

    def extend(self, row: int, high: int, low: int) -> None:
        """Room for ``high`` and ``low`` attached entries. Raises TableFull, changing nothing."""
        have_high, have_low = self.bound(row)
        self._grow(row, have_high + high, have_low + low)
        self.base[row] = (have_high + high, have_low + low)
        self.counted[row] = self.total[row]

    def seal(self, row: int) -> None:
        """The row's next token starts a page of its own: count what it has now as entries."""
        self.base[row] = self.bound(row)
        self.counted[row] = self.total[row]

    def withdraw(self, row: int, new_tokens: int) -> None:
        """Undo the last ``append`` of a step that did not run; blocks stay with a row that holds entries."""
        self.total[row] -= new_tokens
        if self.bound(row) == (0, 0):
            self.release(row)

    def tighten(self, rows: np.ndarray, entries: np.ndarray, total: np.ndarray) -> None:
        """Replace bounds by counted entries where that lowers them; surplus blocks stay with their row.

        Args:
            rows: [n], rows that only appended since they were counted.
            entries: [n, 2], high and low entries counted.
            total: [n], what ``self.total`` was when they were counted.
        """
        tokens = np.array([x.tokens for x in self.state.fmt.layouts] + [NO_LIMIT])[:2]

        def bound(base: np.ndarray, counted: np.ndarray) -> np.ndarray:
            return base + -(-(self.total[rows] - counted)[:, None] // tokens)  # [n, 2]

        lower = (bound(entries, total) <= bound(self.base[rows], self.counted[rows])).all(1)
        self.base[rows[lower]] = entries[lower]
        self.counted[rows[lower]] = total[lower]

    def release(self, row: int) -> None:
        """Take all blocks of the row back."""
        left, right = self.blocks[row]
        first = row * self.max_blocks
        for at in [*range(len(left)), *range(self.max_blocks - len(right), self.max_blocks)]:
            self._writes[first + at] = 0
        for side in (left, right):
            self.free_blocks.extend(side)
            side.clear()
        self.base[row] = 0
        self.counted[row] = self.total[row]

    def shrink(self, row: int) -> None:
        """Take back the blocks that a row's entries do not reach, if it takes no more."""
        first = row * self.max_blocks
        for side, n, right in zip(self.blocks[row], self.bound(row), (False, True), strict=True):
            while len(side) > -(-n // TABLE_BLOCK):
                self.free_blocks.append(side.pop())
                self._writes[first + (self.max_blocks - 1 - len(side) if right else len(side))] = 0

    def flush(self) -> None:
        """Bring the device's row blocks up to date, on the current stream, without waiting."""
        if not self._writes:
            return
        table = self.state.row_blocks
        changes = to_device([[*self._writes], [*self._writes.values()]], table.device)
        table.view(-1)[changes[0]] = changes[1].int()
        self._writes.clear()

    def _grow(self, row: int, high: int, low: int) -> None:
        left, right = self.blocks[row]
        need_left, need_right = self._needed(row, high, low)
        if not need_left and not need_right:
            return
        if problem := self._problem(row, need_left + need_right, len(self.free_blocks)):
            raise TableFull(row, problem)
        at = [len(left) + i for i in range(need_left)]
        at += [self.max_blocks - 1 - len(right) - i for i in range(need_right)]
        taken = [self.free_blocks.pop() for _ in at]
        left.extend(taken[:need_left])
        right.extend(taken[need_left:])
        for column, block in zip(at, taken, strict=True):
            self._writes[row * self.max_blocks + column] = block
