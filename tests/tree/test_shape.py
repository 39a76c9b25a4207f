"""The shape of a prefix tree, as ``/server_info`` tells it: by depth and by tenant."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from sglang_diffkv.srt.tree import shape as shapes
from sglang_diffkv.srt.tree.shape import tenant_of
from tests.tree.tree_world import World


def depths(world: World) -> dict[int, tuple[int, int]]:
    found: Any = world.tree.report()["by_depth"]
    return {x["from"]: (x["nodes"], x["tokens"]) for x in found}


def below(node: Any) -> int:
    return sum(1 + below(child) for child in node.children.values())


def tenants(world: World) -> list[dict[str, Any]]:
    found: Any = world.tree.report()["by_tenant"]
    return found


def test_an_empty_tree_has_no_shape() -> None:
    world = World(2000, exact=False)
    assert depths(world) == {} and tenants(world) == []


def test_tokens_are_counted_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "DEPTHS", (0, 32, 64, 128))
    world = World(2000, exact=False)
    prefix = world.tokens(70)
    for end in (30, 60):
        world.leave(world.prompt([*prefix, *world.tokens(end)]))
    found = depths(world)
    assert sum(tokens for _, tokens in found.values()) == world.manager.segments.counts_of.tokens
    tokens = {start: count for start, (_, count) in found.items()}
    assert tokens == {0: 32, 32: 32, 64: 6 + 30 + 58, 128: 2}, "70 tokens, then 30 and 60"
    assert found[0][0] == 1 and found[32][0] == 0, "one node begins both"
    assert sum(nodes for nodes, _ in found.values()) == below(world.tree.root_node)


def test_tenants_are_named_by_digits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2000, exact=False)
    for key, count in (("others", 60), (None, 50), ("acme & sons", 40)):
        world.leave(world.prompt(world.tokens(count), **({} if key is None else {"extra_key": key})))
    found = tenants(world)
    assert [x["tokens"] for x in found] == [60, 50, 40] and found[1]["tenant"] is None
    assert found[0]["tenant"] == hashlib.sha256(b"others").hexdigest()[:12]
    assert sum(x["pages"] for x in found) == world.tree.report()["pages"]
    monkeypatch.setattr(shapes, "MOST_TENANTS", 1)
    first, rest = tenants(world)
    assert first["tokens"] == 60
    assert {name: rest[name] for name in ("tenant", "tenants", "tokens")} == {
        "tenant": "others",
        "tenants": 2,
        "tokens": 90,
    }


def test_a_salt_is_part_of_who_it_is() -> None:
    plain, salted, other = (tenant_of(x) for x in (("a", ""), ("a", "b"), ("ab", "")))
    assert len({plain, salted, other}) == 3 and tenant_of(("", "")) is None
    assert tenant_of(("\ud800", "")), "half of a surrogate pair"
