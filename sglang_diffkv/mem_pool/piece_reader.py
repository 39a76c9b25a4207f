"""A file's bytes to places in memory, in pieces that several threads read at once.

One thread copies from the page cache of a disk at a few GB a second, which is less than memory has. Pieces are handed
on in order, so what is computed of them, as a checksum, takes its time beside the reading.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait

THREADS = 4
PIECE_BYTES = 4 << 20
"""Of a piece, about: what a thread reads at once."""

AHEAD = 2 * THREADS
"""Pieces that are read, or wait to be, before the first of them is taken."""

MOST_VIEWS = 1024
"""Places that one call of the operating system fills at most (IOV_MAX of Linux)."""

Piece = list[memoryview]
"""Places that follow one another in the file."""


class EndsEarly(EOFError):
    """A file has fewer bytes than it should have."""


class PieceReader:
    """Threads that read files. They are daemons: a disk that hangs does not keep the process."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[tuple[Future[None], int, Piece, int]] = queue.SimpleQueue()
        for _ in range(THREADS):
            threading.Thread(target=self._read_all, name="diffkv-read", daemon=True).start()

    def _read_all(self) -> None:
        while True:
            done, number, piece, at = self._asked.get()
            if not done.set_running_or_notify_cancel():
                continue
            try:
                fill(number, piece, at)
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

    def read(self, number: int, at: int, views: Iterable[memoryview]) -> Iterator[Piece]:
        """Fill ``views`` from position ``at`` of an open file on, and hand them on in order, some at a time.

        Once it has ended or was closed, nobody writes to them any more. Raises EndsEarly and OSError."""
        reading: deque[tuple[Future[None], Piece]] = deque()
        try:
            for piece in pieces_of(views):
                done = Future[None]()
                self._asked.put((done, number, piece, at))
                reading.append((done, piece))
                at += sum(map(len, piece))
                if len(reading) == AHEAD:
                    yield _taken(reading)
            while reading:
                yield _taken(reading)
        finally:
            wait([done for done, _ in reading if not done.cancel()])


def _taken(reading: deque[tuple[Future[None], Piece]]) -> Piece:
    """The first piece, once it is read. While it is not, it stays among those that are waited for."""
    done, piece = reading[0]
    done.result()
    reading.popleft()
    return piece


def pieces_of(views: Iterable[memoryview]) -> Iterator[Piece]:
    """Places in memory, as many together as one call may fill, and about ``PIECE_BYTES`` at most."""
    piece, left = Piece(), PIECE_BYTES
    for view in views:
        for start in range(0, len(view), PIECE_BYTES):
            part = view[start : start + PIECE_BYTES]
            if piece and (len(part) > left or len(piece) == MOST_VIEWS):
                yield piece
                piece, left = [], PIECE_BYTES
            piece.append(part)
            left -= len(part)
    if piece:
        yield piece


def fill(number: int, piece: Sequence[memoryview], at: int) -> None:
    """Read from position ``at`` of an open file on until all places are full. Raises EndsEarly and OSError."""
    left = list(piece)
    while left:
        count = os.preadv(number, left, at)
        if not count:
            raise EndsEarly
        at += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]
