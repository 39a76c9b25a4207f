"""Objects in a key-value store of others: SGLang's storage backends, which know values of fixed sizes and no folders.

Such a store may keep the first value of a key, lose some, return others, or answer nobody. So:

- an object is cut into *blocks* under names that nobody used before, and read back only as a whole: a writer that stops
  leaves nothing that is found;
- what finds it is an *entry* of fixed size, written last. A key has ``SLOTS`` places for entries, of which a writer
  takes the first that is free, and looks whether it has got it;
- entries and objects have checksums. What is wrong or gone is passed over from then on, and can be written again in
  another place;
- a store that answers nobody for ``HANGING_SECONDS`` is not asked until it does.

The store bounds itself. Who may write to it may change replies.
"""

from __future__ import annotations

import io
import secrets
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol, cast

import xxhash

from sglang_diffkv.mem_pool.segment_object import ObjectRefused

BLOCK_BYTES = 1 << 20
"""Of an object, so many bytes are a value; the last ones fewer."""

SLOTS = 8
"""Entries of one key, at most."""

MOST_GAPS = 2
"""Places of a key in a row that are looked at and have no entry; behind them none is expected."""

HANGING_SECONDS = 10.0
"""A store that has left a call without an answer for so long is not asked meanwhile."""

MOST_REFUSED = 1 << 16
"""Objects that are known to be of no use, at most; the newest of more."""

MAGIC, VERSION = b"DiffKVst", 1
ENTRY = struct.Struct("<8sIQ16s16s")
CHECKSUM_BYTES = 16
ENTRY_BYTES = 128
"""Of an entry: magic, version, bytes of the object, its name, that of its blocks, a checksum of these, zeros."""


class Values(Protocol):
    """A store of values under keys. Any thread may call it; what goes wrong may raise anything."""

    def put(self, key: str, value: memoryview) -> bool:
        """Whether the store has a value of the key now, this one or another."""

    def fetch(self, key: str, target: memoryview) -> bool:
        """Whether ``target`` has the value of the key now, of as many bytes, as far as the store says."""

    def has(self, key: str) -> bool:
        """Whether the store has a value of the key, as far as it says."""


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
        self._known: OrderedDict[str, int] = OrderedDict()  # blocks' name -> bytes of the object
        self._refused: OrderedDict[str, None] = OrderedDict()
        self._calls: dict[int, float] = {}  # thread -> since when it waits for an answer

    @property
    def held(self) -> int:
        """Bytes that were written here."""
        return self._written

    @property
    def hangs(self) -> bool:
        """Whether the store has left a call without an answer for too long."""
        with self._lock:
            return any(time.monotonic() - since > HANGING_SECONDS for since in self._calls.values())

    # Reading

    def names(self, key: str) -> list[str]:
        """Of the objects under a key: what the names of their blocks begin with."""
        found = [entry for _, entry in self._entries(key) if entry is not None and entry.blocks not in self._refused]
        with self._lock:
            for entry in found:
                _remember(self._known, entry.blocks, entry.size)
        return [entry.blocks for entry in found]

    def open(self, key: str, name: str) -> tuple[BinaryIO, int]:
        """An object whose bytes can be read, and how many they are."""
        with self._lock:
            size = self._known.get(name)
        if size is None:
            raise FileNotFoundError(f"{name} was not found before")
        return cast(BinaryIO, BlockReader(lambda index, target: self._fetch(_block(name, index), target), size)), size

    def used(self, key: str, name: str) -> None:
        """An object was of use just now, which the store has seen."""

    def remove(self, key: str, name: str) -> None:
        """It is damaged: it is not found here any more."""
        with self._lock:
            _remember(self._refused, name, None)

    # Writing

    def has(self, key: str, name: str) -> bool:
        """Whether an object is there, as far as the store says of its first and last block."""
        for _, entry in self._entries(key):
            if entry is not None and entry.name == name and entry.blocks not in self._refused:
                ends = {0, (entry.size - 1) // BLOCK_BYTES}
                if all(self._has(_block(entry.blocks, index)) for index in ends):
                    return True
                self.remove(key, entry.blocks)
        return False

    def write(self, key: str, name: str, pieces: Iterable[bytes | memoryview], size: int) -> bool:
        """Write an object of ``size`` bytes. False if all places of its key are taken. Raises OSError, and whatever
        ``pieces`` or the store raises."""
        free = [slot for slot, entry in self._entries(key, every=True) if entry is None]
        entry = Entry(size, name, secrets.token_hex(16))
        if not free:
            return False
        for index, block in enumerate(_blocks(pieces)):
            if not self._put(_block(entry.blocks, index), block):
                raise OSError(5, "the store takes no value")
        for slot in free:
            place = _place(key, slot)
            if self._has(place):
                continue  # damaged, or somebody else's by now
            if not self._put(place, memoryview(bytearray(entry.encode()))):
                raise OSError(5, "the store takes no value")
            if self._entry(place) == entry:
                self._written += size
                return True
        return False

    def _entries(self, key: str, *, every: bool = False) -> Iterator[tuple[int, Entry | None]]:
        """The places of a key, and what is there; ``every``: to the last one."""
        gaps = 0
        for slot in range(SLOTS):
            place = _place(key, slot)
            there = self._has(place)
            gaps = 0 if there else gaps + 1
            yield slot, self._entry(place) if there else None
            if gaps == MOST_GAPS and not every:
                return

    def _entry(self, place: str) -> Entry | None:
        data = bytearray(ENTRY_BYTES)
        return Entry.decode(data) if self._fetch(place, memoryview(data)) else None

    # Calls

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Inside, this thread waits for the store. Raises StoreHangs if others wait for too long already."""
        if self.hangs:
            raise StoreHangs
        me = threading.get_ident()
        with self._lock:
            self._calls[me] = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                del self._calls[me]

    def _put(self, key: str, value: memoryview) -> bool:
        with self._calling():
            return self._values.put(key, value)

    def _fetch(self, key: str, target: memoryview) -> bool:
        with self._calling():
            return self._values.fetch(key, target)

    def _has(self, key: str) -> bool:
        with self._calling():
            return self._values.has(key)


class BlockReader(io.RawIOBase):
    """An object's bytes, of which one block is in memory.

    Args:
        fetch: fills a block, by its number; False if the store has it not.
    """

    def __init__(self, fetch: Callable[[int, memoryview], bool], size: int):
        super().__init__()
        self._fetch, self._size, self._at = fetch, size, 0
        self._number, self._block = -1, bytearray()

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
        if number != self._number:
            block = bytearray(min(BLOCK_BYTES, self._size - number * BLOCK_BYTES))
            if not self._fetch(number, memoryview(block)):
                raise ObjectRefused("size", "a part of it is gone")
            self._number, self._block = number, block
        view = memoryview(target).cast("B")
        count = min(len(view), len(self._block) - start)
        view[:count] = memoryview(self._block)[start : start + count]
        self._at += count
        return count


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


def _remember(known: OrderedDict[str, Any], name: str, value: Any) -> None:
    known[name] = value
    known.move_to_end(name)
    if len(known) > MOST_REFUSED:
        known.popitem(last=False)
