"""Tensor parallelism: every rank holds the pages of its own KV heads, and all decide on the same numbers.

Each rank runs a scheduler of its own, so whatever decides must be equal on all of them: for each number, that of the
rank that has the least room. Ranks exchange numbers only where all of them pass, in the same order; a number
that is merely read (a log line, a load report of rank 0) never starts an exchange.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np

PAGES, PRIVATE = 3, 4
"""Columns of ``kernels/count_rows`` that are named here."""


class RankError(RuntimeError):
    """Ranks that must not differ do."""


class Ranks:
    """The ranks of a server, by default one alone.

    Args:
        size, rank: how many there are, and which of them this is.
        largest: replaces [n] int64 by its elementwise maximum over all ranks. Waits for them.
    """

    def __init__(
        self, size: int = 1, rank: int = 0, largest: Callable[[np.ndarray], np.ndarray] = lambda numbers: numbers
    ):
        self.size, self.rank, self.largest = size, rank, largest

    @property
    def alone(self) -> bool:
        return self.size == 1

    def require_equal(self, what: str, numbers: Sequence[int]) -> None:
        """Raise RankError unless all ranks give the same numbers. All ranks have to call it."""
        if self.alone:
            return
        mine = np.array(numbers, dtype=np.int64)
        bounds = self.largest(np.concatenate([mine, -mine])).reshape(2, -1)
        if (bounds[0] != -bounds[1]).any():
            raise RankError(f"diffkv: ranks differ in {what}: {mine.tolist()} on rank {self.rank}")


class RankCounts:
    """Page counts of all ranks as those of one that has, for every row, as little room as any.

    A segment counts with the pages that it takes on the rank where it takes most, in the prefix cache's totals and in
    the ring's alike: a rank where it takes less counts the difference (its *slack*) as used. So evicting a segment
    frees what it counted, and ring and segments still add up: a page lost on any rank shows on all.
    """

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.slack = 0
        """Pages that counted segments take less on this rank than they count."""
        self._slack_of: dict[int, int] = {}  # row of a segment -> its part of the slack

    def worst(self, mine: np.ndarray, rows: np.ndarray, new: np.ndarray, slack: int) -> np.ndarray:
        """Exchange a snapshot.

        Args:
            mine: [n + 1, 6], what ``kernels/count_rows`` gave on this rank.
            rows: [n], what it counted.
            new: [n] bool, segments that count from now on.
            slack: when the snapshot was taken.

        Returns:
            [n + 1, 6], the same for all ranks together; its last row gives 0 pages taken and the free pages as put.
        """
        if self.ranks.alone:
            return mine
        tag = zlib.crc32(rows.tobytes())
        packed = mine.copy()
        packed[:-1, PRIVATE] *= -1
        used = mine[-1, 0] - mine[-1, 1] + slack - mine[:-1, PAGES][new].sum()
        packed[-1] = (used, tag, -tag, 0, 0, 0)
        worst = self.ranks.largest(packed.ravel()).reshape(packed.shape)
        if worst[-1, 1] != -worst[-1, 2]:
            raise RankError(f"diffkv: ranks count different rows; rank {self.ranks.rank} {rows.tolist()}")
        worst[:-1, PRIVATE] *= -1
        worst[-1] = (0, -worst[-1, 0] - worst[:-1, PAGES][new].sum(), 0, 0, 0, 0)
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
