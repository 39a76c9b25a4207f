"""A file's bytes to places in memory, in pieces that several threads read at once.

One thread copies from the page cache of a disk at a few GB a second, which is less than memory has. The thread that has
read a piece does what is to be done with it, while it is in its caches.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

THREADS = min(8, len(os.sched_getaffinity(0)))
"""Eight took 19 ms for 270 MB on a machine with 16 cores, four 29, one 89."""

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
        self._asked: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._start = threading.Lock()
        self._started = False

    def _begin(self) -> None:
        """Start the threads, if there are none yet: some stores never need them."""
        with self._start:
            if self._started:
                return
            self._started = True
            for _ in range(THREADS):
                threading.Thread(target=self._read_all, name="diffkv-read", daemon=True).start()

    def _read_all(self) -> None:
        while True:
            done, read = self._asked.get()
            if not done.set_running_or_notify_cancel():
                continue
            try:
                found = read()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(found)

    def read(
        self, number: int, at: int, views: Iterable[memoryview], piece_bytes: int, then: Callable[[Piece], T]
    ) -> Generator[T]:
        """Fill ``views`` from position ``at`` of an open file on, and give what ``then`` makes of each piece, in order.

        Once it has ended or was closed, nobody writes to the views any more.

        Args:
            number: of the file. piece_bytes: of each piece; the last one may have fewer.

        Raises EndsEarly and OSError.
        """
        self._begin()
        reading: deque[Future[T]] = deque()
        try:
            for piece in pieces_of(views, piece_bytes):
                done = Future[T]()
                self._asked.put((done, partial(_filled, number, piece, at, then)))
                reading.append(done)
                at += sum(map(len, piece))
                if len(reading) == AHEAD:
                    yield _first_of(reading)
            while reading:
                yield _first_of(reading)
        finally:
            wait([done for done in reading if not done.cancel()])


def _filled(number: int, piece: Piece, at: int, then: Callable[[Piece], T]) -> T:
    fill(number, piece, at)
    return then(piece)


def _first_of(reading: deque[Future[T]]) -> T:
    """What the first gives, once it is done. Until then it stays among those that are waited for."""
    found = reading[0].result()
    reading.popleft()
    return found


def pieces_of(views: Iterable[memoryview], piece_bytes: int) -> Generator[Piece]:
    """Places in memory, of ``piece_bytes`` together; the last ones may have fewer."""
    piece, left = Piece(), piece_bytes
    for view in views:
        while view:
            part = view[:left]
            piece.append(part)
            view, left = view[len(part) :], left - len(part)
            if not left:
                yield piece
                piece, left = [], piece_bytes
    if piece:
        yield piece


def fill(number: int, piece: Sequence[memoryview], at: int) -> None:
    """Read from position ``at`` of an open file on until all places are full. Raises EndsEarly and OSError."""
    left = deque(piece)
    while left:
        count = os.preadv(number, [left[index] for index in range(min(len(left), MOST_VIEWS))], at)
        if not count:
            raise EndsEarly
        at += count
        while left and count >= len(left[0]):
            count -= len(left.popleft())
        if count:
            left[0] = left[0][count:]
