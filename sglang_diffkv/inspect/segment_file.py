"""A segment in a file: what it is of, and its pages by tier, layer and KV head. Of its prompt only the number of tokens
is shown."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sglang_diffkv.mem_pool import segment_object
from sglang_diffkv.mem_pool.segment_object import CHECKSUM_BYTES, PREFIX, ObjectHead, ObjectRefused

PIECE = 1 << 24
"""Bytes that are read at once."""


def read(path: Path) -> ObjectHead:
    """The head of an object whose checksums hold. Raises ObjectRefused and OSError."""
    with open(path, "rb") as file:
        whole = os.fstat(file.fileno()).st_size
        start = file.read(PREFIX.size)
        data = start + file.read(segment_object.head_bytes(start, whole) - len(start))
        head = segment_object.decode_head(data, whole)
        left = head.pages * head.page_bytes
        pieces = (file.read(min(PIECE, left - at)) for at in range(0, left, PIECE))
        running = segment_object.PagesChecksum(data)
        for piece in pieces:
            running.update(piece)
        if running.digest() != file.read(CHECKSUM_BYTES):
            raise ObjectRefused("checksum", "its pages are damaged")
    return head


def describe(head: ObjectHead) -> RenderableType:
    """For a terminal."""
    header, shape = head.header, head.header["shape"]
    table = Table.grid(padding=(0, 2))
    for name, text in _lines(head).items():
        table.add_row(name, text)
    parts: list[RenderableType] = [table]
    layers, heads, tiers = (shape.get(name) for name in ("layers", "kv_heads", "tiers"))
    if isinstance(layers, int) and isinstance(heads, int) and isinstance(tiers, list) and header:
        parts += [Text(""), _pages(head, layers, heads, [str(tier) for tier in tiers])]
    return Group(*parts)


def _lines(head: ObjectHead) -> dict[str, str]:
    header, shape = head.header, head.header["shape"]
    known: dict[str, Any] = {
        "positions": f"{head.lo} to {head.hi} ({len(head.tokens)} tokens) of a sequence of {header['end']}",
        "pages": f"{head.pages} of {head.page_bytes} bytes",
        "tiers": ", ".join(map(str, shape.get("tiers", []))),
        "heads": f"{shape.get('layers')} layers of {shape.get('kv_heads')} KV heads, rank {header.get('rank')}",
        "as computed": "yes" if header["as_computed"] else "no",
    }
    digests = ("model", "configuration", "namespace", "prefix", "through")
    return {**known, **{name: str(header.get(name)) for name in digests}, "checksums": "hold"}


def _pages(head: ObjectHead, layers: int, heads: int, tiers: list[str]) -> RenderableType:
    """Pages of each tier, for each layer (down) and KV head (across)."""
    tier, which = head.table[0].astype(np.int64), head.table[1].astype(np.int64)
    table = Table(box=None, padding=(0, 1))
    for name in ("layer", *(f"{tier} {x}" for tier in tiers for x in range(heads))):
        table.add_column(name, justify="right")
    for layer in range(layers):
        counts = [
            int(((tier == t) & (which == layer * heads + x)).sum()) for t in range(len(tiers)) for x in range(heads)
        ]
        table.add_row(str(layer), *map(str, counts))
    return Group(Text("pages by tier and KV head"), table)
