"""The shape of a prefix tree, for who looks at a running server: where its tokens lie, and whose they are."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sglang_diffkv.layout.geometry import Segment
from sglang_diffkv.srt.versions import compat

DEPTHS = (0, 256, 1024, 4096, 16384, 65536, 262144)
"""Positions at which the groups of depths begin."""
MOST_TENANTS = 32
DIGITS = 12


def shape(root: Any, pages_of: Callable[[Sequence[Segment]], Sequence[int]]) -> dict[str, object]:
    """What lies below the node ``root``, counted in sequence tokens, nodes and pages.

    ``by_depth`` has a group of positions each: nodes that begin there, and tokens. ``by_tenant`` has a tenant each, the
    ``MOST_TENANTS`` with most tokens, and all others as one with the name ``others``. A tenant is named by
    ``tenant_of``. Walks all nodes. ``pages_of`` tells the pages of each segment.
    """
    depths = [{"from": start, "nodes": 0, "tokens": 0} for start in DEPTHS]
    tenants: dict[Any, dict[str, int]] = {}
    owners: dict[Segment, dict[str, int]] = {}
    stack = [(node, 0) for node in root.children.values()]
    while stack:
        node, start = stack.pop()
        end = start + len(node.key)
        depths[bisect_right(DEPTHS, start) - 1]["nodes"] += 1
        _spread(depths, start, end)
        mine = tenants.setdefault(compat.namespace_of(node.key), {"nodes": 0, "tokens": 0, "pages": 0})
        mine["nodes"] += 1
        mine["tokens"] += end - start
        owners.setdefault(node.segment, mine)
        stack.extend((child, end) for child in node.children.values())
    for mine, pages in zip(owners.values(), pages_of([*owners]), strict=True):
        mine["pages"] += pages
    return {"by_depth": [x for x in depths if x["tokens"]], "by_tenant": _most(tenants)}


def _spread(depths: list[dict[str, int]], start: int, end: int) -> None:
    """Add the positions [start, end) to their groups."""
    for group in range(bisect_right(DEPTHS, start) - 1, len(DEPTHS)):
        if DEPTHS[group] >= end:
            return
        last = DEPTHS[group + 1] if group + 1 < len(DEPTHS) else end
        depths[group]["tokens"] += min(end, last) - max(start, DEPTHS[group])


def _most(tenants: Mapping[Any, dict[str, int]]) -> list[dict[str, object]]:
    ordered = sorted(tenants.items(), key=lambda found: -found[1]["tokens"])
    named: list[dict[str, object]] = [{"tenant": tenant_of(name), **counts} for name, counts in ordered[:MOST_TENANTS]]
    rest = [counts for _, counts in ordered[MOST_TENANTS:]]
    if rest:
        sums = {name: sum(x[name] for x in rest) for name in rest[0]}
        named.append({"tenant": "others", "tenants": len(rest), **sums})
    return named


def tenant_of(namespace: tuple[str, ...]) -> str | None:
    """How a namespace is named: by the first ``DIGITS`` digits of its SHA-256 in hexadecimal form, so that a client's
    name cannot be one of ours. Who knows an ``extra_key`` finds its digits. None for requests without one."""
    if not any(namespace):
        return None
    text = "\0".join(namespace).rstrip("\0")
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS]
