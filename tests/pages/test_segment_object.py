"""The format of a stored segment: what goes in comes out, and anything else is refused with a reason."""

from __future__ import annotations

import random
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from sglang_diffkv.inspect import cli
from sglang_diffkv.layout.geometry import Geometry
from sglang_diffkv.layout.page_format import PageFormat, Tier
from sglang_diffkv.mem_pool import segment_object
from sglang_diffkv.mem_pool.segment_object import (
    CHECKSUM_BYTES,
    MOST_HEADER,
    NOWHERE,
    PREFIX,
    ObjectHead,
    ObjectRefused,
    Origin,
    PagesChecksum,
    PrefixNames,
)

GEOMETRY = Geometry(PageFormat(64, 64, (Tier(8, 4), Tier(4, 2)), 8, 1, 2), 2, 2, 64, 4, 8, 300)
ORIGIN = Origin.of(GEOMETRY, torch.bfloat16, "1f" * 16, "2e" * 16)
SPACE = segment_object.namespace_digest(("tenant", None))
TOKENS = np.arange(5, 105, dtype=np.int64)
LO, HI = 40, 90


def sample(*, table: np.ndarray | None = None, **header: Any) -> ObjectHead:
    """The head of an object of some pages of three heads."""
    names = PrefixNames(ORIGIN.digest(SPACE), TOKENS)
    if table is None:
        table = np.array(
            [[0, 0, 0, 1], [0, 0, 3, 2], [40, 48, 40, 40], [48, 90, 90, 90], [40, 50, NOWHERE, 41], [47, 70, -1, 89]]
        )
    known = {
        "lo": LO, "hi": HI, "first": 0, "end": 120, "as_computed": False, "namespace": SPACE,
        "prefix": names.prefix(LO), "through": names.prefix(HI), **ORIGIN.fields(),
    }  # fmt: skip
    return ObjectHead({**known, **header}, TOKENS[LO:HI].astype(np.int32), table.astype(np.int32))


def pages_of(head: ObjectHead) -> bytes:
    return random.Random(1).randbytes(head.pages * GEOMETRY.fmt.page_bytes)


def whole(head: ObjectHead) -> bytes:
    return b"".join(segment_object.encode(head, [pages_of(head)]))


def take(
    data: bytes, tokens: np.ndarray = TOKENS, origin: Origin = ORIGIN, space: str = SPACE
) -> tuple[Any, bytes, int]:
    """As a server reads it."""
    head, pages = segment_object.decode(data)
    segment_object.check_origin(head, origin)
    segment_object.check_table(head, GEOMETRY)
    common = segment_object.check_tokens(head, PrefixNames(origin.digest(space), tokens), space)
    return head, bytes(pages), common


def refused(data: bytes, **named: Any) -> str:
    with pytest.raises(ObjectRefused) as found:
        take(data, **named)
    assert str(found.value)
    return found.value.reason


def test_what_goes_in_comes_out() -> None:
    head = sample()
    data = whole(head)
    found, pages, common = take(data)
    assert found.header == head.header and pages == pages_of(head) and common == HI - LO
    assert (found.table == head.table).all() and (found.tokens == head.tokens).all()
    assert len(data) == head.size == found.size and whole(found) == data
    shorter, other = TOKENS[:60], np.concatenate([TOKENS[:55], TOKENS[:50]])
    assert take(data, shorter)[2] == 20 and take(data, other)[2] == 15


def test_every_flipped_byte_is_found() -> None:
    head = sample()
    data = whole(head)
    ends = len(head.encode())
    for at in (*range(ends), *random.Random(2).sample(range(ends, len(data)), 300), len(data) - 1):
        changed = bytearray(data)
        changed[at] ^= 1 + at % 255
        assert refused(bytes(changed)) in ("format", "version", "size", "checksum")


def test_every_other_length_is_refused() -> None:
    data = whole(sample())
    for length in (*range(0, len(data) - 1, 7), len(data) - 1):
        assert refused(data[:length]) in ("format", "size")
    assert refused(data + b"\0") == "size"


@given(st.binary(max_size=400), st.booleans())
def test_random_bytes_are_refused(noise: bytes, begins: bool) -> None:
    refused(segment_object.MAGIC + struct.pack("<I", segment_object.VERSION) + noise if begins else noise)


def test_sizes_are_looked_at_before_anything_is_allocated() -> None:
    """A header of gigabytes, and as many tokens and pages."""
    for numbers in ((1 << 31, 1, 1), (10, (1 << 32) - 1, 1), (10, 1, (1 << 32) - 1), (MOST_HEADER + 1, 0, 0)):
        start = PREFIX.pack(segment_object.MAGIC, segment_object.VERSION, *numbers, 100_000)
        assert refused(start + bytes(100_000 - len(start))) == "size"


def sealed(head: ObjectHead, header: bytes | None = None) -> bytes:
    """An object with right checksums, whatever its header says."""
    text = segment_object.canonical(head.header) if header is None else header
    body = text + head.tokens.astype("<i4").tobytes() + head.table.astype("<i4").tobytes()
    pages = pages_of(head)
    size = PREFIX.size + len(body) + 2 * CHECKSUM_BYTES + len(pages)
    start = (
        PREFIX.pack(segment_object.MAGIC, segment_object.VERSION, len(text), len(head.tokens), head.pages, size) + body
    )
    start += segment_object.checksum(start).digest()
    return start + pages + pages_checksum(start, pages)


def pages_checksum(start: bytes, pages: bytes) -> bytes:
    """As the format says."""
    size = segment_object.PART_BYTES
    parts = [xxhash.xxh3_128(pages[at : at + size]).digest() for at in range(0, len(pages), size)]
    return bytes(xxhash.xxh3_128(start[-CHECKSUM_BYTES:] + b"".join(parts)).digest())


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 1000, 1234])
@pytest.mark.parametrize("step", [1, 7, 100, 350, 5000])
def test_pages_come_in_pieces_of_any_size(monkeypatch: pytest.MonkeyPatch, size: int, step: int) -> None:
    """Each 100 bytes have a checksum of their own, wherever pieces end."""
    monkeypatch.setattr(segment_object, "PART_BYTES", 100)
    pages, running = random.Random(size).randbytes(size), PagesChecksum(b"x" * 40)
    for at in range(0, size, step):
        running.update(pages[at : at + step])
    assert running.digest() == pages_checksum(b"x" * 40, pages)


def test_damage_is_found_in_each_part_and_so_are_parts_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_object, "PART_BYTES", 64)
    data, head = whole(sample()), sample()
    first, size = len(head.encode()), head.pages * head.page_bytes
    assert size > 128 and segment_object.decode(data)
    for at in range(first, first + size, 50):
        assert refused(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]) == "checksum"
    swapped = data[first + 64 : first + 128] + data[first : first + 64]
    assert swapped != data[first : first + 128]
    assert refused(data[:first] + swapped + data[first + 128 :]) == "checksum"


@pytest.mark.parametrize(
    "changed",
    [
        {"lo": 39}, {"lo": -1}, {"lo": 40.0}, {"lo": True}, {"hi": 40}, {"hi": "90"}, {"first": 41}, {"end": None},
        {"as_computed": 1}, {"namespace": 3}, {"prefix": None}, {"shape": []}, {"shape": {"page_bytes": 0}},
    ],
    ids=str,
)  # fmt: skip
def test_a_header_that_contradicts_itself_is_refused(changed: dict[str, Any]) -> None:
    assert refused(sealed(sample(**changed))) == "header"


@pytest.mark.parametrize(
    "text", [b"{}", b"[" * 60_000, b"null", b'{"lo":1,"lo":1}', b"\xff", b'{"a": 1}', b"9" * 9_000]
)
def test_a_header_that_is_none_is_refused(text: bytes) -> None:
    assert refused(sealed(sample(), text)) == "header"


def test_an_object_of_another_server_is_refused() -> None:
    data = whole(sample())
    others: dict[str, Any] = {"model": "a", "configuration": "b", "dtype": "float16", "rank": 1, "ranks": 2}
    shapes = (("page_bytes", 1), *ORIGIN.shape[1:])
    for other in (*(replace(ORIGIN, **{name: value}) for name, value in others.items()), replace(ORIGIN, shape=shapes)):
        assert refused(data, origin=other) == "origin"


def test_an_object_of_other_tokens_is_refused() -> None:
    data = whole(sample())
    assert refused(data, tokens=np.concatenate([TOKENS[:39], TOKENS[:61]])) == "tokens"
    assert refused(data, tokens=np.concatenate([TOKENS[:40], TOKENS[:60]])) == "tokens"
    assert refused(data, tokens=TOKENS[:40]) == refused(data, tokens=TOKENS[:10]) == "tokens"
    assert refused(data, space=segment_object.namespace_digest(("tenant-2", None))) == "tokens"
    assert refused(sealed(sample(through="0" * 32))) == "tokens"


@pytest.mark.parametrize(
    ("row", "column", "value"),
    [(0, 0, 2), (0, 0, -1), (1, 1, 4), (1, 0, -1), (1, 0, 3), (0, 0, 1), (2, 0, 39), (3, 1, 91), (3, 2, -1), (4, 0, 39),
     (4, 0, 48), (5, 0, 48), (5, 2, -2), (4, 2, 41), (2, 1, 51)],
)  # fmt: skip
def test_a_table_that_contradicts_itself_is_refused(row: int, column: int, value: int) -> None:
    table = sample().table.copy()
    table[row, column] = value
    assert refused(sealed(sample(table=table))) == "table"


def test_a_table_of_more_than_a_server_has_is_refused() -> None:
    assert refused(sealed(sample(end=301))) == "table"
    page = [0, 0, 40, 90, 40, 40]
    assert refused(sealed(sample(table=np.array([page] * 51).T))) == "table"
    take(sealed(sample(table=np.array([page] * 50).T)))


def test_names_keep_apart_what_differs() -> None:
    names = PrefixNames(ORIGIN.digest(SPACE), TOKENS)
    other = PrefixNames(ORIGIN.digest(segment_object.namespace_digest(("b", None))), TOKENS)
    found = [names.name(40, 90), names.name(41, 90), names.name(40, 89), other.name(40, 90), *names.keys(40)]
    assert len({*found, names.prefix(40), other.prefix(40)}) == 8
    assert all(len(name) == 32 and set(name) <= set("0123456789abcdef") for name in found)
    assert names.key_of(40, 90) == names.keys(40)[0] and names.key_of(40, 50) == names.keys(40)[1]
    assert names.keys(95) == [names.key(95, 1)] and names.keys(100) == []
    spaces = [("a", "b"), ("ab", None), (None, "ab"), ("a,b", None), (None, None), ("", None)]
    assert len({segment_object.namespace_digest(space) for space in spaces}) == len(spaces)


def test_inspect_shows_a_file_without_its_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, head = tmp_path / "a.segment", sample()
    path.write_bytes(whole(head))
    assert cli.main([str(path)]) == 0
    shown = capsys.readouterr().out
    assert "40 to 90 (50 tokens) of a sequence of 120" in shown and "K8V4 0" in shown and "hold" in shown
    assert ORIGIN.model in shown and f"4 of {GEOMETRY.fmt.page_bytes} bytes" in shown
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    assert cli.main([str(path)]) == 1 and "its pages are damaged" in capsys.readouterr().err
    assert cli.main([str(tmp_path / "none")]) == 1
