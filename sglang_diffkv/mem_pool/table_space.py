"""Host-side owner of page-table blocks: which blocks back which columns of which row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from sglang_diffkv.kernels.set_blocks import reference
from sglang_diffkv.layout.geometry import Path, Segment, path_end
from sglang_diffkv.layout.state import TABLE_BLOCK, PageState

PART_FILLED = 2
"""Entries of a tier that a row may have beyond those its tokens fill: a page ends where a prompt was frozen."""

LEFT_AT_MOST = 256
"""Blocks that rows have let go and the device's table still has, before all are taken off with one copy."""

Entries = tuple[int, ...]
"""Table entries of each tier."""


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

    Attributes:
        let_go: flat places in the device's row blocks whose blocks their rows have let go. They lie behind the rows'
            entries, where no kernel reads.

    Args:
        write: ``kernels/set_blocks`` of the state's row blocks; None for the reference.
    """

    def __init__(self, state: PageState, write: Callable[[Sequence[int], Sequence[int]], None] | None = None):
        self.state = state
        self._write = write or partial(reference.set_blocks, state.row_blocks)
        rows, self.max_blocks = state.row_blocks.shape
        self.free_blocks = list(range(state.page_table.shape[0] - 1, 0, -1))
        self.tokens = tuple(layout.tokens for layout in state.fmt.layouts)
        self.base = np.zeros((rows, len(self.tokens)), dtype=np.int64)  # entries when they were last counted
        self.total = np.zeros(rows, dtype=np.int64)  # own tokens ever appended
        self.counted = np.zeros(rows, dtype=np.int64)  # of these, those that ``base`` covers
        self.blocks: list[tuple[list[int], ...]] = [tuple([] for _ in self.tokens) for _ in range(rows)]
        """Of each row, those of each tier."""
        self.held = np.zeros((rows, len(self.tokens)), dtype=np.int64)  # how many these are
        self._of_page = np.array(self.tokens, dtype=np.int64)
        self._taken: dict[int, int] = {}  # flat place in the row blocks -> block that a row has taken
        self.let_go: set[int] = set()

    @property
    def num_blocks(self) -> int:
        """Blocks that rows can use (block 0 backs unused columns)."""
        return self.state.page_table.shape[0] - 1

    def bound(self, row: int, new_tokens: int = 0) -> Entries:
        """Upper bound of the row's entries after ``new_tokens`` more."""
        base, added = self.base[row].tolist(), int(self.total[row] - self.counted[row]) + new_tokens
        if not added:  # as of every segment
            return tuple(base)
        return tuple([n + -(-added // of_page) for n, of_page in zip(base, self.tokens, strict=True)])

    def most_tokens(self, row: int) -> int:
        """Upper bound of the tokens that each head of the row holds, shared ones too."""
        return sum(n * of_page for n, of_page in zip(self.bound(row), self.tokens, strict=True))

    def part_entries(self, segment: Segment, lo: int, hi: int) -> Entries:
        """Upper bound of the entries that attaching a part of a segment takes: a page holds a token at least, and to
        read less takes no more."""
        bound, most = self.bound(segment.row), hi - lo
        counted = [reads for (start, end), reads in segment.reads.items() if start <= lo and hi <= end]
        if not counted:
            return tuple([min(n, most) for n in bound])
        return tuple([min(*column, most) for column in zip(bound, *counted, strict=True)])

    def path_entries(self, path: Path) -> Entries:
        """Upper bound of the entries that attaching ``path`` takes."""
        parts = [self.part_entries(*part) for part in path]
        return tuple(map(sum, zip(*parts, strict=True))) if parts else (0,) * len(self.tokens)

    def dense_entries(self, tokens: int) -> Entries:
        """Entries, at most, of ``tokens`` in dense pages."""
        return tuple(-(-tokens // of_page) for of_page in self.tokens)

    def blocks_for(self, path: Path, new_tokens: int, *, spare: int = 0) -> int:
        """Upper bound of the blocks of a row with ``path`` attached, ``new_tokens`` of its own and ``spare`` entries
        of each tier."""
        return blocks_of(self._row_entries(path, new_tokens, spare))

    def _row_entries(self, path: Path, new_tokens: int, spare: int) -> Entries:
        own = self.dense_entries(new_tokens)
        return tuple(n + m + spare for n, m in zip(self.path_entries(path), own, strict=True))

    def fits(self, path: Path, max_tokens: int) -> bool:
        """Whether a row with ``path`` attached has room to grow to ``max_tokens``, whatever becomes of the rest."""
        entries = self._row_entries(path, max_tokens - path_end(path), PART_FILLED)
        return self._fits_tables([blocks_of([n]) for n in entries])

    @property
    def table_blocks(self) -> int:
        """Blocks of each of a row's bidirectional tables."""
        return self.max_blocks if len(self.tokens) <= 2 else self.max_blocks // 2

    def _fits_tables(self, blocks: Sequence[int]) -> bool:
        """Whether a row's tables have room for so many blocks of each tier."""
        if len(blocks) <= 2:
            return sum(blocks) <= self.table_blocks
        return sum(blocks[::2]) <= self.table_blocks and sum(blocks[1::2]) <= self.table_blocks

    def refused(self, rows: list[int], new_tokens: int) -> dict[int, str]:
        """Those of ``rows``, in this order, that have no room for ``new_tokens`` more each, and why."""
        found: dict[int, str] = {}
        free = len(self.free_blocks)
        most = len(self.tokens) * -(-new_tokens // TABLE_BLOCK)  # a token takes an entry of each tier at most
        least = self.table_blocks - most
        if most * len(rows) <= free and all(sum(map(len, self.blocks[row])) <= least for row in rows):
            return found
        for row in rows:
            needed = self._needed(row, self.bound(row, new_tokens))
            if problem := self._problem(row, needed, free):
                found[row] = problem
            else:
                free -= sum(needed)
        return found

    def _needed(self, row: int, entries: Entries) -> list[int]:
        """Blocks of each tier that a row lacks for so many entries."""
        held = zip(entries, self.blocks[row], strict=True)
        return [max(-(-n // TABLE_BLOCK) - len(blocks), 0) for n, blocks in held]

    def _problem(self, row: int, needed: Sequence[int], free: int) -> str | None:
        """Why a row cannot have ``needed`` more of ``free`` blocks; None if it can."""
        if sum(needed) > free:
            return f"the page table has {free} free blocks, {sum(needed)} needed"
        held = zip(needed, self.blocks[row], strict=True)
        if any(needed) and not self._fits_tables([more + len(blocks) for more, blocks in held]):
            return f"a row holds at most {self.table_blocks} table blocks; too many shared segments"
        return None

    def append(self, row: int, new_tokens: int) -> None:
        """Room for ``new_tokens`` more own tokens. Raises TableFull, changing nothing."""
        self.append_all([row], [new_tokens])

    def append_all(self, rows: Sequence[int], new_tokens: Sequence[int]) -> None:
        """Room for ``new_tokens[i]`` more own tokens of each of different ``rows``. Raises TableFull, changing
        nothing."""
        at, more = np.array(rows, dtype=np.int64), np.array(new_tokens, dtype=np.int64)
        behind = self.total[at] - self.counted[at] + more
        entries = self.base[at] + -(-behind[:, None] // self._of_page)  # [n, T]
        short = np.flatnonzero((-(-entries // TABLE_BLOCK) > self.held[at]).any(1)).tolist()
        self.total[at] += more
        try:
            for i in short:
                self._grow(rows[i], tuple(entries[i].tolist()))
        except TableFull:
            for row, count in zip(rows, new_tokens, strict=True):
                self.withdraw(row, count)
            raise

    def extend(self, row: int, attached: Entries) -> None:
        """Room for so many attached entries. Raises TableFull, changing nothing."""
        entries = tuple(n + more for n, more in zip(self.bound(row), attached, strict=True))
        self._grow(row, entries)
        self.base[row] = entries
        self.counted[row] = self.total[row]

    def extended(self, row: int, attached: Entries) -> bool:
        """``extend`` where there is room; False, changing nothing, where there is none."""
        try:
            self.extend(row, attached)
        except TableFull:
            return False
        return True

    def freeze(self, row: int) -> None:
        """The row's next token starts a page of its own: count what it has now as entries."""
        self.base[row] = self.bound(row)
        self.counted[row] = self.total[row]

    def withdraw(self, row: int, new_tokens: int) -> None:
        """Undo the last ``append``; blocks stay with a row that holds entries."""
        self.total[row] -= new_tokens
        if not any(self.bound(row)):
            self.release(row)

    def tighten(self, rows: np.ndarray, entries: np.ndarray, total: np.ndarray) -> None:
        """Replace bounds by counted entries that lower them; surplus blocks stay with the row until ``shrink``.

        Args:
            rows: [n], rows that only appended since they were counted.
            entries: [n, T], entries counted.
            total: [n], what ``self.total`` was when they were counted.
        """

        def bound(base: np.ndarray, counted: np.ndarray) -> np.ndarray:
            return base + -(-(self.total[rows] - counted)[:, None] // self._of_page)  # [n, T]

        lower = (bound(entries, total) <= bound(self.base[rows], self.counted[rows])).all(1)
        self.base[rows[lower]] = entries[lower]
        self.counted[rows[lower]] = total[lower]

    def release(self, row: int) -> None:
        """Take all blocks of the row back."""
        for tier, blocks in enumerate(self.blocks[row]):
            for number in range(len(blocks)):
                self._leave(row, tier, number)
            self.free_blocks.extend(blocks)
            blocks.clear()
        self.held[row] = self.base[row] = 0
        self.counted[row] = self.total[row]

    def shrink(self, row: int) -> None:
        """Take back the blocks that a row's entries do not reach, if it takes no more."""
        for tier, (blocks, n) in enumerate(zip(self.blocks[row], self.bound(row), strict=True)):
            while len(blocks) > -(-n // TABLE_BLOCK):
                self.free_blocks.append(blocks.pop())
                self.held[row, tier] -= 1
                self._leave(row, tier, len(blocks))

    def _leave(self, row: int, tier: int, number: int) -> None:
        place = self._place(row, tier, number)
        self._taken.pop(place, None)
        self.let_go.add(place)

    def _place(self, row: int, tier: int, number: int) -> int:
        """Flat index into the row blocks of a tier's block."""
        middle = self.max_blocks // 2
        column = (number, self.max_blocks - 1 - number, middle - 1 - number, middle + number)[tier]
        return row * self.max_blocks + column

    @property
    def flush_allocates(self) -> bool:
        """Whether ``flush`` takes memory of the device."""
        return len(self._taken) > reference.FEW or len(self.let_go) > LEFT_AT_MOST

    def flush(self) -> None:
        """Bring the blocks that rows hold up to date on the device, on the current stream, without waiting."""
        if self._taken:
            self._write([*self._taken], [*self._taken.values()])
            self._taken.clear()
        if len(self.let_go) > LEFT_AT_MOST:
            self._write([*self.let_go], [0] * len(self.let_go))
            self.let_go.clear()

    def _grow(self, row: int, entries: Entries) -> None:
        needed = self._needed(row, entries)
        if not any(needed):
            return
        if problem := self._problem(row, needed, len(self.free_blocks)):
            raise TableFull(row, problem)
        for tier, (more, blocks) in enumerate(zip(needed, self.blocks[row], strict=True)):
            for _ in range(more):
                block = self.free_blocks.pop()
                place = self._place(row, tier, len(blocks))
                self._taken[place] = block
                self.let_go.discard(place)
                blocks.append(block)
            self.held[row, tier] += more
