"""A saved segment as one object of bytes, which can be read without the server that wrote it.

The parts of format 2 follow one another without gaps. All numbers are little-endian:

| part | bytes | what it is |
|---|---|---|
| magic | 8 | ``DiffKVso`` |
| version | 4 | of the format: 2 |
| H | 4 | bytes of the header, at most 65,536 |
| t | 4 | token ids: those of positions [lo, hi) |
| n | 4 | pages |
| whole | 8 | bytes of the object |
| header | H | JSON in ASCII, keys in order, no spaces |
| token ids | 4 t | int32 |
| table | 24 n | int32 [6, n]: tier, head, lo, upper, least and last of each page, as ``SavedRow`` has them |
| checksum | 16 | XXH3 (128 bits) of all before |
| pages | n x page bytes | as the device has them, by tier, head and in order |
| checksum | 16 | XXH3 (128 bits) of the first checksum and of those of each 4 MiB of the pages, in order |

The header says what the pages are: ``lo``, ``hi``, ``first``, ``end`` and ``as_computed`` as of ``Segment``. It says of
what they are: ``namespace``, ``prefix`` and ``through``, digests of the tokens before ``lo`` and before ``hi``. And it
has the fields of ``Origin``: who wrote them.

A reader takes nothing on trust. It looks at sizes before it allocates, at checksums before it reads, and at each number
of the table. What is wrong raises ``ObjectRefused``. The checksums find damage, not forgery: who may write to a store
may change replies. Parts of the pages have checksums of their own, so that several threads can look at one object.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import xxhash

from sglang_diffkv.layout.geometry import Geometry
from sglang_diffkv.layout.page_format import EMPTY
from sglang_diffkv.layout.ranks import Ranks

MAGIC, VERSION = b"DiffKVso", 2
PREFIX = struct.Struct("<8sIIIIQ")
MOST_HEADER = 1 << 16
CHECKSUM_BYTES = 16
PART_BYTES = 4 << 20
"""Of pages that have a checksum together; the last part may have fewer."""
COLUMNS = 6
NOWHERE = int(torch.iinfo(torch.int32).max)
"""``least`` of a page that holds no token in its range."""

INTS = ("lo", "hi", "first", "end")
DIGESTS = ("namespace", "prefix", "through")
FIRST_TOKENS = 16
"""Of an object's tokens, so many stand in its key, if it has them."""


class ObjectRefused(ValueError):
    """Bytes that are no object for this server.

    Attributes:
        reason: one of ``REASONS``.
    """

    def __init__(self, reason: str, text: str):
        super().__init__(text)
        assert reason in REASONS
        self.reason = reason


REASONS = ("format", "version", "size", "checksum", "header", "origin", "table", "tokens")
"""Why an object is refused. It is no object, or of another version of the format. It is not as long as it says, or is
damaged. Its header is none, or another server wrote it. Its table contradicts itself, or it is of other tokens."""


@dataclass(frozen=True)
class Origin:
    """What a reader of pages has in common with who wrote them.

    Attributes:
        model, configuration: digests in hex, of the weights with all that changes what they compute, and of the
            plugin's configuration with all files that it names.
        dtype: of numbers in a raw tier. shape: of pages and tables. rank, ranks: of whose heads, of how many.
    """

    model: str
    configuration: str
    dtype: str
    shape: tuple[tuple[str, Any], ...]
    rank: int = 0
    ranks: int = 1

    @classmethod
    def of(
        cls, geometry: Geometry, dtype: torch.dtype, model: str, configuration: str, ranks: Ranks | None = None
    ) -> Origin:
        """Of a server's rank that has pages of this geometry; without ``ranks`` its only one."""
        fmt = geometry.fmt
        shape = {
            "head_dim": fmt.head_dim,
            "v_head_dim": fmt.v_head_dim,
            "tiers": [tier.name for tier in fmt.tiers],
            "page_tokens": [layout.tokens for layout in fmt.layouts],
            "scored": fmt.scored,
            "position_bytes": fmt.position_bytes,
            "page_bytes": fmt.page_bytes,
            "layers": geometry.num_layers,
            "kv_heads": geometry.num_heads,
            "attention_spans": list(geometry.attention_spans),
        }
        ranks = ranks or Ranks()
        name = str(dtype).removeprefix("torch.")
        return cls(model, configuration, name, tuple(shape.items()), ranks.rank, ranks.size)

    def fields(self) -> dict[str, Any]:
        """For a header."""
        known = {name: getattr(self, name) for name in ("model", "configuration", "dtype", "rank", "ranks")}
        return {**known, "shape": dict(self.shape)}

    def of_part(self, part: int, parts: int) -> Origin:
        """Of a server like this one, on which so many ranks have these heads: of that ``part``, from 0 on."""
        shape = {name: value // parts if name == "kv_heads" else value for name, value in self.shape}
        return replace(self, rank=self.rank * parts + part, ranks=self.ranks * parts, shape=tuple(shape.items()))

    def digest(self, namespace: str) -> bytes:
        """What the names of objects begin from."""
        return hashlib.blake2b(canonical([VERSION, self.fields(), namespace]), digest_size=32).digest()


def canonical(value: Any) -> bytes:
    """A value of JSON in the one form in which it is written."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def namespace_digest(space: Iterable[str | list[Any] | None]) -> str:
    """Of what keeps prompts of equal tokens apart, in hex. A list is what no client can name."""
    return hashlib.blake2b(canonical(list(space)), digest_size=16).hexdigest()


class PrefixNames:
    """Names of a sequence's objects: digests in hex, which no client can choose.

    Args:
        base: ``Origin.digest``. tokens: [n].
    """

    def __init__(self, base: bytes, tokens: np.ndarray):
        self.tokens = np.ascontiguousarray(tokens, dtype="<i4")
        self._base = hashlib.blake2b(base, digest_size=16)
        self._at, self._state = 0, self._base

    def _upto(self, end: int) -> hashlib.blake2b:
        if end < self._at:
            self._at, self._state = 0, self._base
        state = self._state.copy()
        state.update(self.tokens[self._at : end].tobytes())
        self._at, self._state = end, state
        return state.copy()

    def prefix(self, end: int) -> str:
        """Of the first ``end`` tokens."""
        return self._upto(end).hexdigest()

    def key(self, lo: int, count: int) -> str:
        """Under which objects are found that begin at ``lo`` with the next ``count`` tokens."""
        state = self._upto(lo)
        state.update(b"next" + self.tokens[lo : lo + count].tobytes())
        return state.hexdigest()

    def keys(self, lo: int) -> list[str]:
        """Under which all objects are found that begin at ``lo``: long ones, and short ones."""
        left = len(self.tokens) - lo
        return [self.key(lo, count) for count in (FIRST_TOKENS, 1) if left >= count]

    def name(self, lo: int, hi: int) -> str:
        """Of the object of the tokens at positions [lo, hi)."""
        state = self._upto(hi)
        state.update(f"from {lo}".encode())
        return state.hexdigest()

    def key_of(self, lo: int, hi: int) -> str:
        """Under which that object is found."""
        return self.key(lo, FIRST_TOKENS if hi - lo >= FIRST_TOKENS else 1)


@dataclass(frozen=True)
class ObjectHead:
    """All of an object but its pages.

    Attributes:
        header: as the module says. tokens: [hi - lo] int32. table: [6, n] int32.
    """

    header: dict[str, Any]
    tokens: np.ndarray
    table: np.ndarray

    @property
    def lo(self) -> int:
        return int(self.header["lo"])

    @property
    def hi(self) -> int:
        return int(self.header["hi"])

    @property
    def pages(self) -> int:
        return int(self.table.shape[1])

    @property
    def page_bytes(self) -> int:
        return int(self.header["shape"]["page_bytes"])

    @property
    def size(self) -> int:
        """Bytes of the object."""
        return _size(len(canonical(self.header)), len(self.tokens), self.pages, self.page_bytes)

    def encode(self) -> bytes:
        """What stands before the pages, with its checksum."""
        header = canonical(self.header)
        assert len(header) <= MOST_HEADER and len(self.tokens) == self.hi - self.lo
        prefix = PREFIX.pack(MAGIC, VERSION, len(header), len(self.tokens), self.pages, self.size)
        head = prefix + header + self.tokens.astype("<i4").tobytes() + self.table.astype("<i4").tobytes()
        return head + checksum(head).digest()


def _size(header: int, tokens: int, pages: int, page_bytes: int) -> int:
    return _head_size(header, tokens, pages) + pages * page_bytes + CHECKSUM_BYTES


def _head_size(header: int, tokens: int, pages: int) -> int:
    return PREFIX.size + header + 4 * tokens + 4 * COLUMNS * pages + CHECKSUM_BYTES


def checksum(head: bytes | bytearray | memoryview) -> Any:
    """A running checksum: ``update`` takes more, ``digest`` gives it."""
    return xxhash.xxh3_128(head)


class PagesChecksum:
    """That of an object's pages, which come in order.

    Args:
        head: what stands before them, or its end with the checksum.
    """

    def __init__(self, head: bytes | bytearray | memoryview):
        self._whole = checksum(head[-CHECKSUM_BYTES:])
        self._part, self._left = checksum(b""), PART_BYTES

    def update(self, pages: bytes | bytearray | memoryview) -> None:
        """More bytes of pages, which part where they like."""
        left = memoryview(pages)
        while left:
            count = min(len(left), self._left)
            self._part.update(left[:count])
            left, self._left = left[count:], self._left - count
            if not self._left:
                self._end_part()

    def add(self, digest: bytes) -> None:
        """The checksum of the next part. Nothing came by ``update`` before."""
        self._whole.update(digest)

    def _end_part(self) -> None:
        self.add(self._part.digest())
        self._part, self._left = checksum(b""), PART_BYTES

    def digest(self) -> bytes:
        """Once all pages have come."""
        if self._left < PART_BYTES:
            self._end_part()
        return bytes(self._whole.digest())


def head_bytes(start: bytes, whole: int) -> int:
    """Bytes before the pages, of an object of ``whole`` bytes that begins with ``start`` (``PREFIX.size`` bytes).
    Raises ObjectRefused."""
    if len(start) < PREFIX.size or not start.startswith(MAGIC):
        raise ObjectRefused("format", "it does not begin as an object does")
    _, version, header, tokens, pages, said = PREFIX.unpack(start[: PREFIX.size])
    if version != VERSION:
        raise ObjectRefused("version", f"format {version}, and {VERSION} is read")
    head = _head_size(header, tokens, pages)
    if said != whole or header > MOST_HEADER or head + CHECKSUM_BYTES > whole:
        raise ObjectRefused("size", f"it has {whole} bytes, and its first ones say otherwise")
    return head


def decode_head(data: bytes, whole: int) -> ObjectHead:
    """What stands before the pages of an object of ``whole`` bytes. Raises ObjectRefused. Whether it is for this
    server, ``check_origin`` and ``check_table`` say."""
    size = head_bytes(data[: PREFIX.size], whole)
    if len(data) < size:
        raise ObjectRefused("size", "it ends too early")
    body, given = data[: size - CHECKSUM_BYTES], data[size - CHECKSUM_BYTES : size]
    if checksum(body).digest() != given:
        raise ObjectRefused("checksum", "it is damaged before its pages")
    _, _, length, tokens, pages, _ = PREFIX.unpack(data[: PREFIX.size])
    at = PREFIX.size + length
    header = _header(body[PREFIX.size : at])
    found = ObjectHead(
        header,
        np.frombuffer(body, "<i4", tokens, at),
        np.frombuffer(body, "<i4", COLUMNS * pages, at + 4 * tokens).reshape(COLUMNS, pages),
    )
    if found.hi - found.lo != tokens:
        raise ObjectRefused("header", "it has other tokens than its header says")
    if _size(length, tokens, pages, found.page_bytes) != whole:
        raise ObjectRefused("size", "its pages do not fill it")
    return found


def parse_header(text: bytes) -> dict[str, Any]:
    """An object's header, in the one form in which it is written. Raises ObjectRefused."""
    try:
        found = json.loads(text.decode("ascii"))
        same = canonical(found) == text
    except (ValueError, RecursionError):
        raise ObjectRefused("header", "its header is no JSON") from None
    if not same or not isinstance(found, dict):
        raise ObjectRefused("header", "its header lacks what pages are")
    return found


def _header(text: bytes) -> dict[str, Any]:
    found = parse_header(text)
    shape = found.get("shape")
    if not isinstance(shape, dict) or not _whole(shape.get("page_bytes"), least=1):
        raise ObjectRefused("header", "its header lacks what pages are")
    if not all(_whole(found.get(name)) for name in INTS) or not isinstance(found.get("as_computed"), bool):
        raise ObjectRefused("header", "its header lacks positions")
    if not all(isinstance(found.get(name), str) for name in DIGESTS):
        raise ObjectRefused("header", "its header lacks digests")
    if not found["first"] <= found["lo"] < found["hi"]:
        raise ObjectRefused("header", "the positions of its header contradict each other")
    return found


def _whole(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value < NOWHERE


def check_origin(head: ObjectHead, origin: Origin) -> None:
    """Raise ObjectRefused for an object that another kind of server wrote."""
    for name, value in origin.fields().items():
        if head.header.get(name) != value:
            raise ObjectRefused("origin", f"another {name} wrote it")


def check_table(head: ObjectHead, geometry: Geometry) -> None:
    """Raise ObjectRefused unless each page of the table has a place among those of the ``geometry``, in order, and a
    range of positions that the object has."""
    tier, which, lo, upper, least, last = (column.astype(np.int64) for column in head.table)
    fmt, heads = geometry.fmt, geometry.heads
    known = (tier >= 0) & (tier < len(fmt.tiers)) & (which >= 0) & (which < heads)
    if not known.all():
        raise ObjectRefused("table", "a page of it has a tier or a head that is none")
    place = tier * heads + which
    if (place[1:] < place[:-1]).any():
        raise ObjectRefused("table", "its pages are not in order")
    empty = last == EMPTY
    ranges = (lo >= head.lo) & (lo < NOWHERE) & (upper >= 0) & (upper <= head.hi)
    inside = (least >= lo) & (least <= last) & (last < upper)
    if not (ranges & (inside | (empty & (least == NOWHERE)))).all():
        raise ObjectRefused("table", "a page of it has positions outside of its range")
    if max(head.header["end"], head.hi) > geometry.max_tokens:
        raise ObjectRefused("table", "it is of a longer sequence than is served")
    if np.bincount(place[~empty], minlength=1).max(initial=0) > head.hi - head.lo:
        raise ObjectRefused("table", "a head has more pages than tokens")


def check_tokens(head: ObjectHead, names: PrefixNames, namespace: str) -> int:
    """How many of the object's tokens the sequence of ``names`` has at their place. Raises ObjectRefused if none, or if
    what is before them differs."""
    header, lo = head.header, head.lo
    if header["namespace"] != namespace or lo > len(names.tokens) or header["prefix"] != names.prefix(lo):
        raise ObjectRefused("tokens", "it is of another prefix")
    ours = names.tokens[lo : head.hi]
    differ = np.flatnonzero(ours != head.tokens[: len(ours)])
    common = int(differ[0]) if len(differ) else len(ours)
    if not common:
        raise ObjectRefused("tokens", "it is of other tokens")
    if common == len(head.tokens) and header["through"] != names.prefix(head.hi):
        raise ObjectRefused("tokens", "its digest is of other tokens")
    return common


def encode(head: ObjectHead, pages: Iterable[memoryview | bytes]) -> Iterable[bytes | memoryview]:
    """The bytes of an object, in pieces. ``pages``: its pages, in pieces that may not change until the next is asked
    for."""
    before = head.encode()
    yield before
    running, left = PagesChecksum(before), head.pages * head.page_bytes
    for piece in pages:
        running.update(piece)
        left -= len(piece)
        yield piece
    assert left == 0, "an object has other pages than its table"
    yield running.digest()


def check_pages(head: bytes, pages: Iterable[memoryview | bytes], given: bytes) -> None:
    """Raise ObjectRefused unless the ``pages`` behind ``head`` (as ``ObjectHead.encode``) are those whose checksum is
    ``given``."""
    running = PagesChecksum(head)
    for piece in pages:
        running.update(piece)
    if running.digest() != given:
        raise ObjectRefused("checksum", "its pages are damaged")


def decode(data: bytes) -> tuple[ObjectHead, memoryview]:
    """An object that is whole in memory: its head, and the bytes of its pages. Raises ObjectRefused."""
    head = decode_head(data, len(data))
    start = head_bytes(data[: PREFIX.size], len(data))
    pages = memoryview(data)[start:-CHECKSUM_BYTES]
    check_pages(data[:start], [pages], data[-CHECKSUM_BYTES:])
    return head, pages
