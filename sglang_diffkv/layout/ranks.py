"""Tensor parallelism: every rank holds the pages of its own KV heads, and all decide on the same numbers.

Each rank runs a scheduler of its own, so whatever decides must be equal on all of them: for each number, that of the
rank that has the least room. Ranks exchange numbers only where all of them pass, in the same order; a number
that is merely read (a log line, a load report of rank 0) never starts an exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch

Found = TypeVar("Found")


class RankError(RuntimeError):
    """Ranks that must not differ do."""


class OtherRankError(RuntimeError):
    """Something was done here, and could not be on another rank."""

    def __init__(self) -> None:
        super().__init__("it failed on another tensor-parallel rank; that rank's log has the reason")


class Ranks:
    """The ranks of a server, by default one alone.

    Args:
        size, rank: how many there are, and which of them this is.
        largest: replaces [n] int64 by its elementwise maximum over all ranks. Waits for them.
        add: replaces a tensor on the device by its sum over all ranks, the same bits on each. It is launched in order
            with the forward passes, and the host does not wait for it where the device is a GPU.
    """

    def __init__(
        self,
        size: int = 1,
        rank: int = 0,
        largest: Callable[[np.ndarray], np.ndarray] = lambda numbers: numbers,
        add: Callable[[torch.Tensor], None] = lambda tensor: None,
    ):
        self.size, self.rank, self.largest, self.add = size, rank, largest, add

    @property
    def alone(self) -> bool:
        return self.size == 1

    def least(self, numbers: np.ndarray) -> np.ndarray:
        """[n] int64: the elementwise minimum over all ranks. Waits for them."""
        return -self.largest(-numbers)

    def largest_of(self, *columns: Sequence[int]) -> list[list[int]]:
        """Columns of numbers, each replaced by the largest over all ranks, in one exchange."""
        ends = np.cumsum([len(column) for column in columns])
        numbers = np.array([x for column in columns for x in column], dtype=np.int64)
        return [column.tolist() for column in np.split(self.largest(numbers), ends[:-1])]

    def each(self, number: int) -> list[int]:
        """The number of each rank, by rank. All ranks have to call it."""
        mine = np.full(self.size, np.iinfo(np.int64).min)
        mine[self.rank] = number
        return self.largest(mine).tolist()

    def together(self, act: Callable[[], Found]) -> Found:
        """What ``act`` gives. If it raises on any rank, it does on all: its own error, or OtherRankError. All ranks
        have to call it, and ``act`` exchanges nothing."""
        if self.alone:
            return act()
        error, found = None, []
        try:
            found.append(act())
        except Exception as raised:
            error = raised
        failed = self.largest(np.array([error is not None], dtype=np.int64))[0]
        if error is not None:
            raise error
        if failed:
            raise OtherRankError
        return found[0]

    def require_equal(self, what: str, numbers: Sequence[int]) -> None:
        """Raise RankError unless all ranks give the same numbers. All ranks have to call it."""
        if self.alone:
            return
        mine = np.array(numbers, dtype=np.int64)
        bounds = self.largest(np.concatenate([mine, -mine])).reshape(2, -1)
        if (bounds[0] != -bounds[1]).any():
            raise RankError(f"diffkv: ranks differ in {what}: {mine.tolist()} on rank {self.rank}")
