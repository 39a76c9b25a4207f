"""Saved segments go from host memory to a folder, or another store, and come back, by threads of their own. Nothing of
the server waits for them.

*Out.* A saved segment is queued and written in pieces. If the queue is full, or its host pages are given to somebody
else meanwhile, it is not written. *In.* First a thread looks for objects that continue a prefix, and reads what stands
before their pages. The server then sets host pages aside, and a thread reads into them. What is damaged is removed from
the folder; what cannot be read or written is counted, and logged once.

Threads touch the folder, host pages that were set aside for them, and fields of the jobs here. All else is the
server's.
"""

from __future__ import annotations

import hashlib
import heapq
import logging
import queue
import secrets
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Hashable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, BinaryIO

import numpy as np
import torch

from sglang_diffkv.mem_pool import segment_object
from sglang_diffkv.mem_pool.host_pages import Run, first_of
from sglang_diffkv.mem_pool.object_folder import ObjectFolder
from sglang_diffkv.mem_pool.object_values import ObjectValues, StoreHangs
from sglang_diffkv.mem_pool.piece_reader import EndsEarly, Piece, PieceReader
from sglang_diffkv.mem_pool.saved_segments import SavedSegment, SavedSegments
from sglang_diffkv.mem_pool.segment_object import (
    CHECKSUM_BYTES,
    PREFIX,
    REASONS,
    ObjectHead,
    ObjectRefused,
    Origin,
    PagesChecksum,
    PrefixNames,
)

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
"""Of host memory that is written at once. So much is copied while the server may have to wait for it."""

MOST_QUEUED = 128
"""Segments that wait to be written, at most."""

READERS = 2
"""Threads that look and read."""

COUNTS = (
    "written", "tokens_written", "bytes_written", "there_already", "dropped", "read", "bytes_read", "errors",
    "seconds_written", "seconds_read",
    *(f"refused_{reason}" for reason in REASONS),
)  # fmt: skip
"""Since the start. Of objects: those that were written, with their tokens and bytes; that the folder had already; that
were read, with their bytes; that were refused, by the reason. ``dropped``: not written, as the queue was full, their
memory was wanted, or they were too large. ``errors``: failures of reading and writing. Seconds that a thread took to
write and to read."""

DAMAGED = ("format", "size", "checksum", "header", "table")
"""Of the reasons why an object is refused, those for which it is removed."""


@dataclass(eq=False)
class Writing:
    """A saved segment that is to be written. ``given_up``: its pages are somebody else's now."""

    saved: SavedSegment
    head: ObjectHead
    key: str
    name: str
    given_up: bool = False


@dataclass(frozen=True, eq=False)
class Found:
    """An object that continues a prefix up to position ``reach``. ``size``: bytes of all of it. ``room``: host pages to
    set aside for it."""

    key: str
    name: str
    head: ObjectHead
    reach: int
    size: int
    room: int

    @cached_property
    def key_numbers(self) -> tuple[int, ...]:
        """What ranks have to agree on, each of which has an object of its own. The last one tells the tokens: a rank
        may find others of as many tokens, which part from the prefix at the same position."""
        header, tokens = self.head.header, hashlib.blake2b(self.head.tokens.tobytes(), digest_size=7).digest()
        where = (self.reach, self.head.hi, self.head.lo, header["first"], header["end"], int(header["as_computed"]))
        return *where, int.from_bytes(tokens, "big")

    @property
    def identity(self) -> Hashable:
        """The same for two lookups on one rank if it is on the others. Names are not: each rank has its own."""
        return self.key, self.key_numbers


@dataclass(eq=False)
class Lookup:
    """A search for what continues a prefix from position ``at``.

    Attributes:
        starts: where objects may begin. found: by position, without gaps, once it is ``done``.
    """

    origin: Origin
    namespace: str
    tokens: np.ndarray
    at: int
    starts: list[int]
    found: list[Found] = field(default_factory=list)
    given_up: bool = False
    done: bool = False


@dataclass(eq=False)
class Load:
    """An object on its way to host pages. ``behind``: an event after which these are nobody else's. ``good``: it has
    arrived there, whole, once it is ``done``."""

    found: Found
    runs: list[Run]
    behind: Any = None
    given_up: bool = False
    good: bool = False
    done: bool = False


class StoredSegments:
    """Writes saved segments to a folder, and reads them back.

    Attributes:
        origin: what it reads and writes is of. It changes with the weights.
    """

    def __init__(self, saved: SavedSegments, folder: ObjectFolder | ObjectValues, origin: Origin):
        self.saved, self.folder, self.origin = saved, folder, origin
        self.geometry = saved.device.geometry
        self._counts: defaultdict[str, float] = defaultdict(int)
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._queue: deque[Writing] = deque()
        self._now: Writing | None = None
        self._asked: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._logged = False
        self._reader = PieceReader()
        saved.tell_dropping(self._dropping)
        for target, count in ((self._write_all, 1), (self._read_all, READERS)):
            for _ in range(count):
                threading.Thread(target=self._run, args=(target,), name="diffkv-store", daemon=True).start()

    def _run(self, target: Callable[[], None]) -> None:
        """A thread. It is on the first GPU until it is told another, and would take memory there."""
        device = self.saved.device.state.device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        target()

    def change_identity(self) -> None:
        """The weights change. What they compute is found by nobody else, and what others computed is not found."""
        self.origin = replace(self.origin, model=secrets.token_hex(16))

    # Out

    def write(self, saved: SavedSegment, namespace: str, tokens: np.ndarray) -> None:
        """Write a segment that is on the host, some time. ``tokens``: those of its sequence, up to its end."""
        assert len(tokens) == saved.hi
        with self._lock:
            if len(self._queue) >= MOST_QUEUED:
                self._counts["dropped"] += 1
                return
        names = PrefixNames(self.origin.digest(namespace), tokens)
        lo, hi = saved.start, saved.hi
        header = {
            "lo": lo, "hi": hi, "first": saved.first, "end": saved.end, "as_computed": saved.as_computed,
            "namespace": namespace, "prefix": names.prefix(lo), "through": names.prefix(hi), **self.origin.fields(),
        }  # fmt: skip
        table = np.stack([saved.tier, saved.head, saved.lo, saved.upper, saved.least, saved.last])
        head = ObjectHead(header, names.tokens[lo:hi], table)
        with self._wake:
            self._queue.append(Writing(saved, head, names.key_of(lo, hi), names.name(lo, hi)))
            self._wake.notify()

    def _dropping(self, saved: SavedSegment) -> None:
        """The host pages of a segment are wanted: it waits for a piece that is just being copied, and no longer."""
        with self._lock:
            if self._now is not None and self._now.saved is saved:
                self._now.given_up = True
            for job in self._queue:
                if job.saved is saved:
                    self._queue.remove(job)
                    self._counts["dropped"] += 1
                    return

    def _write_all(self) -> None:
        while True:
            with self._wake:
                while not self._queue:
                    self._wake.wait()
                job = self._now = self._queue.popleft()
            try:
                self._write(job)
            except _GivenUp:
                self._count(dropped=1)
            except Exception as error:
                self._failed("written", error)
            with self._lock:
                self._now = None

    def _write(self, job: Writing) -> None:
        if self.folder.has(job.key, job.name):
            self.folder.used(job.key, job.name)
            self._count(there_already=1)
            return
        pieces, size, began = segment_object.encode(job.head, self._pieces_of(job)), job.head.size, time.perf_counter()
        if self.folder.write(job.key, job.name, pieces, size):
            took = time.perf_counter() - began
            self._count(written=1, tokens_written=len(job.head.tokens), bytes_written=size, seconds_written=took)
        else:
            self._count(dropped=1)

    def _pieces_of(self, job: Writing) -> Iterator[bytes]:
        for view in self._views(first_of(job.saved.runs, job.head.pages)):
            with self._lock:
                if job.given_up:
                    raise _GivenUp
                piece = bytes(view)
            yield piece

    def _views(self, runs: list[Run]) -> Iterator[memoryview]:
        """The bytes of host pages, in pieces."""
        pages = self.saved.host.pages
        for start, count in runs:
            whole: Any = pages[start : start + count].numpy().reshape(-1)
            view = memoryview(whole)
            for at in range(0, len(view), PIECE_BYTES):
                yield view[at : at + PIECE_BYTES]

    # In

    def look(self, namespace: str, tokens: np.ndarray, at: int, starts: list[int]) -> Lookup:
        """Look for what continues a prefix of ``tokens`` from position ``at``, without waiting. ``starts``: where else
        than at 0 and ``at`` an object may begin that reaches beyond ``at``."""
        lookup = Lookup(self.origin, namespace, tokens, at, starts)
        if self.folder.hangs:  # nor does a request wait for what nobody answers
            self._failed("read", StoreHangs())
            lookup.done = True
        else:
            self._asked.put(lambda: self._look(lookup))
        return lookup

    def load(self, found: Found) -> Load | None:
        """Read an object to host pages, without waiting; None if there are not so many."""
        runs = self.saved.expect(found.room)
        if runs is None:
            return None
        load = Load(found, runs, self.saved.last_launched())
        self._asked.put(lambda: self._load(load))
        return load

    def take_over(self, load: Load, *, good: bool) -> SavedSegment | None:
        """The segment of a load that is done; None if it did not arrive or is wanted no more. ``good``: it arrived, on
        all ranks."""
        assert load.done
        if load.given_up or not good:
            self.saved.give_up(load.runs)
            return None
        header, table = load.found.head.header, load.found.head.table
        saved = SavedSegment(load.found.head.hi, int(header["end"]), load.runs, *(row.copy() for row in table))
        saved.start, saved.first = load.found.head.lo, int(header["first"])
        saved.as_computed = bool(header["as_computed"])
        saved.unsettled = ()  # an object does not say which turns were compressed, and twice would be worse than never
        self.saved.adopt(saved)
        return saved

    def _read_all(self) -> None:
        while True:
            self._asked.get()()

    def _look(self, lookup: Lookup) -> None:
        try:
            if not lookup.given_up:
                lookup.found = self._walk(lookup)
        except Exception as error:
            self._failed("read", error)
        finally:
            lookup.done = True

    def _walk(self, lookup: Lookup) -> list[Found]:
        """From each position where an object may begin, to where those end that are of the same tokens, and so on."""
        names = PrefixNames(lookup.origin.digest(lookup.namespace), lookup.tokens)
        starts, seen, found, covered = sorted({0, lookup.at, *lookup.starts}), set(), list[Found](), lookup.at
        while starts and not lookup.given_up:
            start = heapq.heappop(starts)
            if start in seen or start > covered:
                continue
            seen.add(start)
            here = [
                x
                for key in names.keys(start)
                for name in self.folder.names(key)
                if (x := self._see(key, name, names, lookup))
            ]
            for x in here:  # another object may begin where this one ends, or where it goes another way
                heapq.heappush(starts, x.reach)
            furthest = max(here, key=lambda x: x.key_numbers, default=None)  # not by names, which ranks have their own
            if furthest is not None and furthest.reach > covered:
                found.append(furthest)
                covered = furthest.reach
        return found

    def _see(self, key: str, name: str, names: PrefixNames, lookup: Lookup) -> Found | None:
        """An object as far as its pages, if it is of these tokens and for this server."""

        def read(file: BinaryIO, size: int) -> Found:
            data = _exactly(file, min(PREFIX.size, size))
            before = segment_object.head_bytes(data, size)
            head = segment_object.decode_head(data + _exactly(file, before - len(data)), size)
            segment_object.check_origin(head, lookup.origin)
            segment_object.check_table(head, self.geometry)
            common = segment_object.check_tokens(head, names, lookup.namespace)
            return Found(key, name, head, head.lo + common, size, head.pages)

        return self._reading(key, name, read)

    def _load(self, load: Load) -> None:
        try:
            if not load.given_up:
                load.good = bool(
                    self._reading(load.found.key, load.found.name, lambda file, size: self._fill(load, file, size))
                )
        except Exception as error:
            self._failed("read", error)
        finally:
            load.done = True

    def _fill(self, load: Load, file: BinaryIO, size: int) -> bool:
        """Read the pages of an object to where they go. False if they are not wanted any more."""
        head = load.found.head.encode()
        if size != load.found.size:
            raise ObjectRefused("size", "it has changed")
        if load.behind is not None:
            load.behind.synchronize()
        found, began = PagesChecksum(head), time.perf_counter()
        with closing(self._fill_pages(file, len(head), first_of(load.runs, load.found.head.pages), found)) as filled:
            for _ in filled:
                if load.given_up:
                    return False
        file.seek(size - CHECKSUM_BYTES)
        if found.digest() != _exactly(file, CHECKSUM_BYTES):
            raise ObjectRefused("checksum", "its pages are damaged")
        self.folder.used(load.found.key, load.found.name)
        self._count(read=1, bytes_read=size, seconds_read=time.perf_counter() - began)
        return True

    def _fill_pages(self, file: BinaryIO, at: int, runs: list[Run], found: PagesChecksum) -> Generator[None]:
        """Fill host pages, some at a time, from position ``at`` of an object on, and add up their checksum: by several
        threads, if it is a file. Raises ObjectRefused and OSError."""
        try:
            number = file.fileno()
        except OSError:  # a store other than a folder gives blocks, one after another
            file.seek(at)
            for view in self._views(runs):
                _read_to(file, view)
                found.update(view)
                yield
            return
        try:
            views, size = self._views(runs), segment_object.PART_BYTES
            with closing(self._reader.read(number, at, views, size, _checksum_of)) as digests:
                for digest in digests:
                    found.add(digest)
                    yield
        except EndsEarly:
            raise ObjectRefused("size", "it ends too early") from None

    def _reading(self, key: str, name: str, read: Callable[[BinaryIO, int], Any]) -> Any:
        """What ``read`` makes of an object's file and its bytes; None if it is refused or cannot be read."""
        try:
            file, size = self.folder.open(key, name)
            with file:
                return read(file, size)
        except FileNotFoundError:
            return None  # it has just been removed to make room
        except ObjectRefused as refused:
            self._count(**{f"refused_{refused.reason}": 1})
            if refused.reason in DAMAGED:
                self._say("DiffKV: a stored prefix is damaged (%s): %s is removed.", refused, name)
                self.folder.remove(key, name)
        except OSError as error:
            self._failed("read", error)
        return None

    # Reports

    def _count(self, **counts: float) -> None:
        with self._lock:
            for name, more in counts.items():
                self._counts[name] += more

    def _failed(self, what: str, error: Exception) -> None:
        self._count(errors=1)
        known = isinstance(error, OSError)
        self._say("DiffKV: a prefix cannot be %s: %s.", what, error.strerror if known else repr(error))  # type: ignore[attr-defined]

    def _say(self, text: str, *values: Any) -> None:
        if not self._logged:
            self._logged = True
            logger.warning(text + " Such prefixes are computed; further cases are counted, not logged.", *values)

    def report(self) -> dict[str, float]:
        """``COUNTS``, and what waits to be written and what the folder has now."""
        with self._lock:
            waiting = len(self._queue) + (self._now is not None)
            found = {name: self._counts[name] for name in COUNTS}
        return {
            **found, "waiting": waiting, "evicted": self.folder.evicted, "folder_bytes": self.folder.held,
            "folder_bytes_most": self.folder.most,
        }  # fmt: skip


class _GivenUp(Exception):
    """The host pages that are being written are somebody else's now."""


def _checksum_of(piece: Piece) -> bytes:
    """Of a part of the pages."""
    running = segment_object.checksum(b"")
    for view in piece:
        running.update(view)
    return bytes(running.digest())


def _read_to(file: BinaryIO, view: memoryview) -> None:
    """Fill ``view``. Raises ObjectRefused if the file has fewer bytes."""
    while view:
        count = file.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise ObjectRefused("size", "it ends too early")
        view = view[count:]


def _exactly(file: BinaryIO, count: int) -> bytes:
    """So many bytes of a file. Raises ObjectRefused if it has fewer."""
    data = bytearray()
    while len(data) < count:
        piece = file.read(count - len(data))
        if not piece:
            raise ObjectRefused("size", "it ends too early")
        data += piece
    return bytes(data)
