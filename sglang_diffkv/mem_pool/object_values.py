"""Objects in a key-value store of others: SGLang's storage backends, which know values of fixed sizes and no folders.

Such a store may keep the first value of a key, lose some, return others, or answer nobody. So:

- an object is cut into *blocks* under names that nobody used before, and read back only as a whole: a writer that stops
  leaves nothing that is found;
- what finds it is an *entry* of fixed size, written last. A key has ``SLOTS`` places for entries, of which a writer
  takes the first that is free, and looks whether it has got it;
- entries and objects have checksums. What is wrong or gone is passed over from then on, and can be written again in
  another place. A store that can forget a value is asked to forget its entry;
- a store that answers nobody for ``HANGING_SECONDS`` is not asked until it does, nor for as long behind that. Nor is
  one behind a call that failed after ``FAILING_SECONDS``: each would take as long to fail.

The store bounds itself. Who may write to it may change replies.
"""

from __future__ import annotations

import io
import itertools
import secrets
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol, TypeVar, cast

import xxhash

from sglang_diffkv.mem_pool.segment_object import ObjectRefused

T = TypeVar("T")

BLOCK_BYTES = 1 << 20
"""Of an object, so many bytes are a value; the last ones fewer."""

SLOTS = 8
"""Entries of one key, at most."""

MOST_GAPS = 2
"""Places of a key in a row that are looked at and have no entry; behind them none is expected."""

HANGING_SECONDS = 10.0
"""A store that has left a call without an answer for so long is not asked meanwhile."""

FAILING_SECONDS = 1.0
"""A call that fails after longer has waited for too long: where no master of Mooncake's is left it takes 4 s."""

MOST_REFUSED = 1 << 16
"""Objects that are known to be of no use, at most; the newest of more."""

MAGIC, VERSION = b"DiffKVst", 1
ENTRY = struct.Struct("<8sIQ16s16s")
CHECKSUM_BYTES = 16
ENTRY_BYTES = 128
"""Of an entry: magic, version, bytes of the object, its name, that of its blocks, a checksum of these, zeros."""


class Values(Protocol):
    """A store of values under keys. Any thread may call it; what goes wrong may raise anything.

    Attributes:
        at_once: keys that one call is given at most. forgets: whether ``forget`` does anything.
    """

    at_once: int
    forgets: bool

    def put(self, keys: Sequence[str], values: Sequence[memoryview]) -> list[bool]:
        """For each key whether the store has a value of it now, this one or another."""

    def fetch(self, keys: Sequence[str], targets: Sequence[memoryview]) -> list[bool]:
        """For each key whether its target has its value now, of as many bytes, as far as the store says."""

    def has(self, keys: Sequence[str]) -> list[bool]:
        """For each key whether the store has a value of it, as far as it says."""

    def forget(self, key: str) -> None:
        """Have no value of a key any more, if the store can."""


class StoreHangs(OSError):
    """The store does not answer."""

    def __init__(self) -> None:
        super().__init__(110, "the store does not answer")


@dataclass(frozen=True)
class Entry:
    """Where an object is. ``size``: its bytes. name: of the object. blocks: what the names of its blocks begin with."""

    size: int
    name: str
    blocks: str

    def encode(self) -> bytes:
        body = ENTRY.pack(MAGIC, VERSION, self.size, bytes.fromhex(self.name), bytes.fromhex(self.blocks))
        return (body + xxhash.xxh3_128(body).digest()).ljust(ENTRY_BYTES, b"\0")

    @classmethod
    def decode(cls, data: bytes | bytearray) -> Entry | None:
        """None if it is none."""
        body, given = bytes(data[: ENTRY.size]), bytes(data[ENTRY.size : ENTRY.size + CHECKSUM_BYTES])
        magic, version, size, name, blocks = ENTRY.unpack(body)
        known = magic == MAGIC and version == VERSION and xxhash.xxh3_128(body).digest() == given
        return cls(size, name.hex(), blocks.hex()) if known else None


class ObjectValues:
    """Writes and finds objects under keys, as ``ObjectFolder``, in a store of values.

    Attributes:
        most: bytes that it may have; 0, as the store alone knows. evicted: none is known to be.
    """

    most = evicted = 0

    def __init__(self, values: Values):
        self._values, self._lock = values, threading.Lock()
        self._written = 0
        self._known: OrderedDict[str, tuple[str, Entry]] = OrderedDict()  # blocks' name -> place, entry
        self._refused: OrderedDict[str, None] = OrderedDict()
        self._calls: dict[int, float] = {}  # thread -> since when it waits for an answer
        self._answered = -HANGING_SECONDS  # when a call ended that had waited for too long

    @property
    def held(self) -> int:
        """Bytes that were written here."""
        return self._written

    @property
    def hangs(self) -> bool:
        """Whether the store leaves a call without an answer for too long, or did so or failed slowly just now."""
        now = time.monotonic()
        with self._lock:
            late = any(now - since > HANGING_SECONDS for since in self._calls.values())
            return late or now - self._answered < HANGING_SECONDS

    # Reading

    def names(self, key: str) -> list[str]:
        """Of the objects under a key: what the names of their blocks begin with."""
        found = [
            (place, entry)
            for place, entry in self._entries(key)
            if entry is not None and entry.blocks not in self._refused
        ]
        with self._lock:
            for place, entry in found:
                _remember(self._known, entry.blocks, (place, entry))
        return [entry.blocks for _, entry in found]

    def open(self, key: str, name: str) -> tuple[BinaryIO, int]:
        """An object whose bytes can be read, and how many they are."""
        with self._lock:
            known = self._known.get(name)
        if known is None:
            raise FileNotFoundError(f"{name} was not found before")
        size = known[1].size
        reader = BlockReader(lambda first, into: self._blocks(name, first, into), size, self._values.at_once)
        return cast(BinaryIO, reader), size

    def used(self, key: str, name: str) -> None:
        """An object was of use just now, which the store has seen."""

    def remove(self, key: str, name: str) -> None:
        """It is damaged: it is not found here any more, and by nobody else if the store can forget its entry."""
        with self._lock:
            _remember(self._refused, name, None)
            place, entry = self._known.pop(name, ("", None))
        if entry is not None and self._values.forgets:
            with suppress(Exception):  # it stays in its place then
                if self._entry(place) == entry:
                    self._forget(place)

    # Writing

    def has(self, key: str, name: str) -> bool:
        """Whether an object is there, as far as the store says of its first and last block."""
        for place, entry in self._entries(key):
            if entry is not None and entry.name == name and entry.blocks not in self._refused:
                ends = sorted({0, (entry.size - 1) // BLOCK_BYTES})
                if all(self._has([_block(entry.blocks, index) for index in ends])):
                    return True
                with self._lock:
                    _remember(self._known, entry.blocks, (place, entry))
                self.remove(key, entry.blocks)
        return False

    def write(self, key: str, name: str, pieces: Iterable[bytes | memoryview], size: int) -> bool:
        """Write an object of ``size`` bytes. False if all places of its key are taken. Raises OSError, and whatever
        ``pieces`` or the store raises."""
        free = [place for place, entry in self._entries(key, every=True) if entry is None]
        entry, first = Entry(size, name, secrets.token_hex(16)), 0
        if not free:
            return False
        for blocks in _some(_blocks(pieces), self._values.at_once):
            self._put([_block(entry.blocks, first + index) for index in range(len(blocks))], blocks)
            first += len(blocks)
        for place in free:
            if all(self._has([place])):
                continue  # damaged, or somebody else's by now
            self._put([place], [memoryview(bytearray(entry.encode()))])
            if self._entry(place) == entry:
                self._written += size
                return True
        return False

    def _entries(self, key: str, *, every: bool = False) -> Iterator[tuple[str, Entry | None]]:
        """The places of a key, and what is there; ``every``: to the last one."""
        gaps, places = 0, [_place(key, slot) for slot in range(SLOTS)]
        for some in _some(places, self._values.at_once):
            found = dict(zip(some, self._has(some), strict=True))
            entries = self._entries_at([place for place, there in found.items() if there])
            for place, there in found.items():
                gaps = 0 if there else gaps + 1
                yield place, entries.get(place)
                if gaps == MOST_GAPS and not every:
                    return

    def _entry(self, place: str) -> Entry | None:
        return self._entries_at([place]).get(place)

    def _entries_at(self, places: list[str]) -> dict[str, Entry]:
        """The entries of those places that have one."""
        targets = [memoryview(bytearray(ENTRY_BYTES)) for _ in places]
        found = zip(places, self._fetch(places, targets), targets, strict=True) if places else ()
        entries = {place: Entry.decode(bytes(data)) for place, there, data in found if there}
        return {place: entry for place, entry in entries.items() if entry is not None}

    def _blocks(self, blocks: str, first: int, targets: list[memoryview]) -> bool:
        """Fill the targets with an object's blocks from the ``first`` on; False if the store lacks one."""
        return all(self._fetch([_block(blocks, first + index) for index in range(len(targets))], targets))

    # Calls

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Inside, this thread waits for the store. Raises StoreHangs if others wait for too long already."""
        if self.hangs:
            raise StoreHangs
        me, most = threading.get_ident(), FAILING_SECONDS
        with self._lock:
            self._calls[me] = time.monotonic()
        try:
            yield
            most = HANGING_SECONDS
        finally:
            now = time.monotonic()
            with self._lock:
                if now - self._calls.pop(me) > most:
                    self._answered = now

    def _put(self, keys: Sequence[str], values: Sequence[memoryview]) -> None:
        """Raises OSError unless the store takes them all."""
        with self._calling():
            taken = self._values.put(keys, values)
        if not all(taken):
            raise OSError(5, "the store takes no value")

    def _fetch(self, keys: Sequence[str], targets: Sequence[memoryview]) -> list[bool]:
        with self._calling():
            return self._values.fetch(keys, targets)

    def _has(self, keys: Sequence[str]) -> list[bool]:
        """As ``Values.has``, of a store that may be given fewer keys at a time."""
        found: list[bool] = []
        for some in _some(keys, self._values.at_once):
            with self._calling():
                found += self._values.has(some)
        return found

    def _forget(self, key: str) -> None:
        with self._calling():
            self._values.forget(key)


class BlockReader(io.RawIOBase):
    """An object's bytes, of which one block is in memory, or ``at_once`` where one is read after another.

    Args:
        fetch: fills blocks, from a number on; False if the store lacks one.
    """

    def __init__(self, fetch: Callable[[int, list[memoryview]], bool], size: int, at_once: int = 1):
        super().__init__()
        self._fetch, self._size, self._at, self._at_once = fetch, size, 0, at_once
        self._first, self._blocks = 0, list[bytearray]()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert whence == io.SEEK_SET
        self._at = offset
        return offset

    def readinto(self, target: Any) -> int:
        """Fill the beginning of ``target``. Raises ObjectRefused if a block is gone."""
        number, start = divmod(self._at, BLOCK_BYTES)
        if self._at >= self._size:
            return 0
        if not 0 <= number - self._first < len(self._blocks):
            self._read(number)
        block = self._blocks[number - self._first]
        view = memoryview(target).cast("B")
        count = min(len(view), len(block) - start)
        view[:count] = memoryview(block)[start : start + count]
        self._at += count
        return count

    def _read(self, number: int) -> None:
        """Have the block of a number in memory, and those behind it if it follows what was there."""
        follows = bool(self._blocks) and number == self._first + len(self._blocks)
        last, self._blocks = (self._size - 1) // BLOCK_BYTES, []
        upto = min(number + (self._at_once if follows else 1), last + 1)
        blocks = [bytearray(min(BLOCK_BYTES, self._size - index * BLOCK_BYTES)) for index in range(number, upto)]
        if not self._fetch(number, [memoryview(block) for block in blocks]):
            raise ObjectRefused("size", "a part of it is gone")
        self._first, self._blocks = number, blocks


def _place(key: str, slot: int) -> str:
    return f"diffkv-{key}-{slot}"


def _block(blocks: str, index: int) -> str:
    return f"diffkv-{blocks}-block-{index}"


def _blocks(pieces: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    """Bytes in blocks. Each is a memory of its own, as a store may read it later."""
    block = bytearray()
    for piece in pieces:
        left = memoryview(piece)
        while left:
            count = min(len(left), BLOCK_BYTES - len(block))
            block += left[:count]
            left = left[count:]
            if len(block) == BLOCK_BYTES:
                yield memoryview(block)
                block = bytearray()
    if block:
        yield memoryview(block)


def _some(every: Iterable[T], count: int) -> Iterator[list[T]]:
    """So many at a time."""
    left = iter(every)
    while some := list(itertools.islice(left, count)):
        yield some


def _remember(known: OrderedDict[str, Any], name: str, value: Any) -> None:
    known[name] = value
    known.move_to_end(name)
    if len(known) > MOST_REFUSED:
        known.popitem(last=False)
