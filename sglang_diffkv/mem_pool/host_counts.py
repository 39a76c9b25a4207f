"""What the host knows of the device's page counts without waiting for it: bounds that are never optimistic.

A snapshot of the counts is taken in stream order before each step and read before the next one is scheduled, so
what it misses is at most one launched step and the one to be scheduled. It says how many pages those two can
take at most; operations recorded after it are added as bounds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

LOOKAHEAD = 2
"""Decode steps that a snapshot has to cover: the one launched after it and the one scheduled while that runs."""


@dataclass
class Snapshot:
    """Counts on their way to the host; ``kernels/count_rows`` names the columns of ``values``."""

    tick: int
    step: int  # all steps up to this one are counted
    rows: np.ndarray  # [n] int64
    total: np.ndarray  # [n] int64, tokens ever appended to each row
    steady: np.ndarray  # [n] bool, rows past their prompt's compaction: a step moves one token of a head at most
    slack: int  # pages that this rank counts as used for ranks that hold more, see ``RankCounts``
    values: torch.Tensor  # [n + 1, 6] int64 on the host
    event: Any  # device event that marks ``values`` as written, or None

    def wait(self) -> np.ndarray:
        if self.event is not None:
            self.event.synchronize()
        return self.values.numpy()


class HostCounts:
    """Page counts of rows, as bounds.

    Args:
        unknown: pages that a request's row may take in ``LOOKAHEAD`` decode steps when nothing is known of it.
    """

    def __init__(self, num_rows: int, num_pages: int, unknown: int):
        self.unknown = unknown
        self.tick = 0
        self.known_free = num_pages
        self.log: deque[tuple[int, int]] = deque()  # (tick, pages given or taken since the last snapshot)
        self.demand = np.zeros(num_rows, dtype=np.int64)
        self.private = np.zeros(num_rows, dtype=np.int64)  # pages that leave with the row, at least
        self.pages = np.zeros(num_rows, dtype=np.int64)  # pages the row referred to when it was last counted
        self.changed = np.zeros(num_rows, dtype=np.int64)  # tick from which on a snapshot says something of a row
        self.faulted: set[int] = set()
        self.faults = 0  # requests ever seen to have found the ring empty

    def free(self) -> int:
        """Lower bound of the free pages after all operations so far, decode steps aside."""
        return self.known_free + sum(pages for _, pages in self.log)

    def headroom(self) -> int:
        """Upper bound of the pages that decode steps not yet counted, and the next one, take."""
        return int(self.demand.sum())

    def record(self, pages: int) -> None:
        """An operation that returns at least ``pages``, or takes at most ``-pages``."""
        self.tick += 1
        if pages:
            self.log.append((self.tick, pages))

    def touch(self, row: int, *, grows: bool = True, decoded: bool = False) -> None:
        """A row's pages change otherwise than by a decode step: older snapshots say nothing of it.

        Args:
            grows: False for a segment, which takes no pages by itself.
            decoded: a decode step of the row may be launched and not counted.
        """
        self.record(-int(self.demand[row]) if decoded else 0)
        self.changed[row] = self.tick
        self.demand[row] = self.unknown if grows else 0
        self.private[row] = self.pages[row] = 0

    def forget(self, row: int) -> None:
        """A row is released; its private pages are free from now on."""
        self.record(int(self.private[row]))
        self.changed[row] = self.tick
        self.demand[row] = self.private[row] = self.pages[row] = 0
        self.faulted.discard(row)

    def current(self, snapshot: Snapshot) -> np.ndarray:
        """[n] bool: the rows of a snapshot that did not change since, other than by decode steps."""
        return self.changed[snapshot.rows] <= snapshot.tick

    def apply(self, snapshot: Snapshot, values: np.ndarray, told: np.ndarray) -> None:
        """Take over what a snapshot says of the ring and of the request rows ``told`` ([n] bool)."""
        self.known_free = int(values[-1, 1] - values[-1, 0])
        while self.log and self.log[0][0] <= snapshot.tick:
            self.log.popleft()
        rows, counts = snapshot.rows[told], values[:-1][told]
        self.demand[rows] = counts[:, 0]
        self.private[rows] = counts[:, 4]
        self.pages[rows] = counts[:, 3]
        found = set(rows[counts[:, 5] != 0].tolist()) - self.faulted
        self.faults += len(found)
        self.faulted |= found
