"""The shape of a prefix tree, for who looks at a running server: where its tokens lie, and whose they are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

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
    ``tenant_of``; a node's is that of all below it. Walks all nodes. ``pages_of`` tells the pages of each segment.
    """
    tenants: dict[Any, list[int]] = {}
    owners: dict[Segment, list[int]] = {}
    starts, lengths = [], []
    stack = [(node, 0, tenants.setdefault(compat.namespace_of(node.key), [0, 0, 0])) for node in root.children.values()]
    while stack:
        node, start, mine = stack.pop()
        length = len(node.key)
        starts.append(start)
        lengths.append(length)
        mine[0] += 1
        mine[1] += length
        owners.setdefault(node.segment, mine)
        for child in node.children.values():
            stack.append((child, start + length, mine))
    for mine, pages in zip(owners.values(), pages_of([*owners]), strict=True):
        mine[2] += pages
    by_tenant = {name: dict(zip(("nodes", "tokens", "pages"), counts)) for name, counts in tenants.items()}
    return {
        "by_depth": _by_depth(np.array(starts, np.int64), np.array(lengths, np.int64)),
        "by_tenant": _most(by_tenant),
    }


def _by_depth(starts: np.ndarray, lengths: np.ndarray) -> list[dict[str, int]]:
    """Of nodes' first positions and lengths, [n] each."""
    found, ends = [], starts + lengths
    for low, high in pairwise((*DEPTHS, np.iinfo(np.int64).max)):
        tokens = int((np.minimum(ends, high) - np.maximum(starts, low)).clip(0).sum())
        if tokens:
            nodes = int(((starts >= low) & (starts < high)).sum())
            found.append({"from": int(low), "nodes": nodes, "tokens": tokens})
    return found


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
