"""A request's row as one run of bytes, from which another server makes the same row.

The parts of format 3. All numbers are little-endian:

| part | bytes | what it is |
|---|---|---|
| magic | 8 | ``DiffKVro`` |
| version | 4 | of the format: 3 |
| H | 4 | bytes of the header, at most 65,536 |
| n | 4 | pages |
| whole | 8 | bytes of the head: all before the pages |
| header | H | JSON in ASCII, keys in order, no spaces |
| numbers | 4 heads (3 T + 1) | int32: ``entries``, ``own_entry`` and ``own_tokens`` [heads, T], ``hole`` [heads] |
| ranges | 8 n | int32 [2, n]: position range of each page, by tier, head and entry |
| checksum | 16 | XXH3 (128 bits) of all before |

The numbers are those of ``PageState``. Heads count over layers, and T is the number of tiers. The pages follow at a
multiple of their size, as the device has them, in the order of the ranges: ``before`` of the header says how many pages
the head takes.

The header says what the row is:

- ``from``: the position from which on its tokens are here. The reader has those before.
- ``length`` of its sequence, and ``frozen``: its first tokens that it may not write any more. -1: it was not frozen.
- ``window`` of its own, 0 for the policy's, and ``high``: whether all its tokens stay in the high tier.
- ``pages``: the checksum of the pages. ``request``: the number under which the two servers speak of it, and a digest of
  its tokens. So no bytes of another request are taken for it, though it may have that number.
- The fields of ``Origin``: of what the pages are.

Where several ranks have sent one rank's heads, each has sent an object of its own, and ``join`` makes one row of them.

A reader takes nothing on trust. What is wrong raises ``ObjectRefused``. Checksums find damage, not forgery: who may
write to a server's memory may change its replies.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang_diffkv.layout.geometry import Geometry
from sglang_diffkv.layout.page_format import EMPTY
from sglang_diffkv.layout.state import NO_LIMIT
from sglang_diffkv.mem_pool.segment_object import (
    CHECKSUM_BYTES,
    MOST_HEADER,
    ObjectRefused,
    Origin,
    canonical,
    checksum,
    parse_header,
)

MAGIC, VERSION = b"DiffKVro", 3
PREFIX = struct.Struct("<8sIIIQ")


@dataclass(frozen=True)
class RowNumbers:
    """What a row's table and counts say, on the host.

    Attributes:
        entries, own_entry, own_tokens: [heads, T] int32, as of ``PageState``. hole: [heads] int32.
        low, high: [n] int32, position ranges of the pages, by tier, head and entry.
    """

    entries: np.ndarray
    own_entry: np.ndarray
    own_tokens: np.ndarray
    hole: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def of(cls, counts: np.ndarray, hole: np.ndarray, ranges: np.ndarray) -> RowNumbers:
        """``counts``: [3, heads, T]. ``ranges``: [2, n]."""
        return cls(counts[0], counts[1], counts[2], hole, ranges[0], ranges[1])

    @property
    def pages(self) -> int:
        return len(self.low)

    def places(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tier, head and entry of each page, [n] int64 each."""
        heads, tiers = self.entries.shape
        counts = self.entries.T.ravel().astype(np.int64)  # by tier, then head
        which = np.repeat(np.arange(tiers * heads), counts)
        entry = np.arange(len(which)) - np.repeat(counts.cumsum() - counts, counts)
        return which // heads, which % heads, entry


@dataclass(frozen=True)
class RowHead:
    """All of a row's object but its pages. ``header``: as the module says, with the fields of ``Origin``."""

    header: dict[str, Any]
    numbers: RowNumbers

    @property
    def length(self) -> int:
        return int(self.header["length"])

    @property
    def start(self) -> int:
        """Position of the first token that is here."""
        return int(self.header["from"])

    @property
    def facts(self) -> list[Any]:
        """What the rows of all ranks of a server have in common."""
        return [self.header[name] for name in ("length", "from", "frozen", "high", "window")]

    @property
    def frozen(self) -> int | None:
        frozen = int(self.header["frozen"])
        return None if frozen < 0 else frozen

    def encode(self) -> bytes:
        """The bytes before the pages."""
        header, x = canonical(self.header), self.numbers
        assert len(header) <= MOST_HEADER
        columns = (x.entries, x.own_entry, x.own_tokens, x.hole, x.low, x.high)
        body = b"".join(np.ascontiguousarray(column, dtype="<i4").tobytes() for column in columns)
        whole = PREFIX.size + len(header) + len(body) + CHECKSUM_BYTES
        head = PREFIX.pack(MAGIC, VERSION, len(header), x.pages, whole) + header + body
        return head + bytes(checksum(head).digest())


PARTED = "the ranks of the prefill server have sent different rows"
OF_A_PART = ("rank", "before", "pages")
"""Of a header: what is not the same in the objects of all ranks of one row."""


def join(parts: Sequence[RowHead], layers: int) -> tuple[RowHead, np.ndarray]:
    """The row of whose KV heads each part has the next ones, of every layer. Also [n] int64: for each page of the
    parts, in their order, its place in the row. The header is that of the first part. Raises ObjectRefused unless all
    parts say the same of what a row has once."""
    first = parts[0]
    for other in parts[1:]:
        for name in sorted({*first.header, *other.header}.difference(OF_A_PART)):
            one, another = first.header.get(name), other.header.get(name)
            if one != another:
                raise ObjectRefused("header", f"{PARTED}: {name} is {one} and {another}")
    entries, own_entry, own_tokens, hole = (
        _of_heads([getattr(part.numbers, name) for part in parts], layers)
        for name in ("entries", "own_entry", "own_tokens", "hole")
    )
    (heads, tiers), order, before = entries.shape, [], 0
    counts = entries.T.ravel().astype(np.int64)
    starts = (counts.cumsum() - counts).reshape(tiers, heads)
    for part in parts:
        tier, head, entry = part.numbers.places()
        own = len(part.numbers.hole) // layers
        order.append(starts[tier, head // own * (heads // layers) + before + head % own] + entry)
        before += own
    place = np.concatenate(order)
    low, high = np.empty(len(place), np.int32), np.empty(len(place), np.int32)
    low[place] = np.concatenate([part.numbers.low for part in parts])
    high[place] = np.concatenate([part.numbers.high for part in parts])
    return RowHead(first.header, RowNumbers(entries, own_entry, own_tokens, hole, low, high)), place


def _of_heads(columns: Sequence[np.ndarray], layers: int) -> np.ndarray:
    """[heads, ...] of all parts' [heads of a part, ...], by layer and then by part."""
    by_layer = [column.reshape(layers, -1, *column.shape[1:]) for column in columns]
    return np.concatenate(by_layer, axis=1).reshape(-1, *columns[0].shape[1:])


def head_size(geometry: Geometry, pages: int) -> int:
    """Bytes before the pages of an object of so many, at most."""
    numbers = geometry.heads * (3 * len(geometry.fmt.tiers) + 1)
    return PREFIX.size + MOST_HEADER + 4 * numbers + 8 * pages + CHECKSUM_BYTES


def said_size(start: bytes, room: int, geometry: Geometry) -> int:
    """Bytes of the head of an object that begins with ``start`` and has ``room`` bytes. Raises ObjectRefused."""
    if len(start) < PREFIX.size or not start.startswith(MAGIC):
        raise ObjectRefused("format", "it does not begin as a row's object does")
    _, version, header, pages, whole = PREFIX.unpack(start[: PREFIX.size])
    if version != VERSION:
        raise ObjectRefused("version", f"format {version}, and {VERSION} is read")
    numbers = 4 * geometry.heads * (3 * len(geometry.fmt.tiers) + 1) + 8 * pages
    size = -(-whole // geometry.fmt.page_bytes) * geometry.fmt.page_bytes
    if header > MOST_HEADER or whole != PREFIX.size + header + numbers + CHECKSUM_BYTES:
        raise ObjectRefused("size", "its head is not as long as it says")
    if size + pages * geometry.fmt.page_bytes > room:
        raise ObjectRefused("size", "it says that it is larger than its room")
    return int(whole)


def decode_head(data: bytes, geometry: Geometry) -> RowHead:
    """The head of an object, all of ``said_size``. Raises ObjectRefused. Whether it is for this request and this
    server, ``check_head`` says."""
    body, given = data[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:]
    if checksum(body).digest() != given:
        raise ObjectRefused("checksum", "it is damaged before its pages")
    _, _, length, pages, _ = PREFIX.unpack(data[: PREFIX.size])
    at, heads, tiers = PREFIX.size + length, geometry.heads, len(geometry.fmt.tiers)
    found = np.frombuffer(body, "<i4", heads * (3 * tiers + 1) + 2 * pages, at).copy()
    by_tier, hole, ranges = np.split(found, [3 * heads * tiers, heads * (3 * tiers + 1)])
    header = parse_header(body[PREFIX.size : at])
    return RowHead(header, RowNumbers.of(by_tier.reshape(3, heads, tiers), hole, ranges.reshape(2, pages)))


def check_head(
    head: RowHead, geometry: Geometry, origin: Origin, request: str, *, high: bool = False, windows: range = range(0)
) -> None:
    """Raise ObjectRefused unless an object is of this ``request``, of a server like this one, and makes a row that can
    be. ``high``: whether a row may keep all here. ``windows``: those that a row may have of its own."""
    header, x, fmt = head.header, head.numbers, geometry.fmt
    for name, value in origin.fields().items():
        if header.get(name) != value:
            raise ObjectRefused("origin", f"its {name} is {header.get(name)}, and this server's is {value}")
    ints = [header.get(name, "") for name in ("length", "frozen", "window", "before", "from")]
    if any(type(value) is not int for value in ints) or type(header.get("high")) is not bool:
        raise ObjectRefused("header", "its header lacks what the row is")
    if header.get("request") != request:
        raise ObjectRefused("tokens", "it is of another request")
    if header["high"] and not high:
        raise ObjectRefused("header", "it keeps all in the high tier, and no request here does (high_requests)")
    if header["window"] and header["window"] not in windows:
        raise ObjectRefused("header", f"its window is {header['window']}, which no request here has (request_window)")
    if not 0 < head.length <= geometry.max_tokens or not -1 <= header["frozen"] <= head.length:
        raise ObjectRefused("header", "its header says a length that no row here has")
    if not 0 <= head.start <= head.length or (head.frozen is not None and head.start > head.frozen):
        raise ObjectRefused("header", "it begins where no token of it is")
    tokens = np.array([layout.tokens for layout in fmt.layouts])
    counts = [x.entries, x.own_entry, x.own_tokens]
    if min(int(column.min(initial=0)) for column in counts) < 0 or int(x.entries.sum()) != x.pages:
        raise ObjectRefused("table", "its counts are not those of its pages")
    if not np.array_equal(-(-x.own_tokens // tokens), x.entries - x.own_entry):
        raise ObjectRefused("table", "a head's own pages and tokens disagree")
    if not ((x.hole >= EMPTY) & (x.hole < np.maximum(x.own_tokens[:, 0], 0))).all():
        raise ObjectRefused("table", "a hole is no slot of its head")
    if int(x.entries.max(initial=0)) > geometry.max_tokens:
        raise ObjectRefused("table", "a head has more pages than tokens")
    if not ((x.low >= 0) & (x.high >= 0) & (x.high <= NO_LIMIT)).all():
        raise ObjectRefused("table", "a page has no range of positions")
