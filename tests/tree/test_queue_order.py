"""SGLang orders its queue by what requests would find in the prefix cache, and touches what its head will find."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_policy import CacheAwarePolicy, SchedulePolicy
from sglang.srt.mem_cache import evict_policy
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_diffkv.srt.hooks import table as hooks
from sglang_diffkv.srt.tree.host_tier import WRITE_BACK
from sglang_diffkv.srt.tree.private_space import HighSpace
from tests.tree.listener import host_tier_of
from tests.tree.stand_in import Fields
from tests.tree.tree_world import World


def waiting(name: str, tokens: list[int], **fields: Any) -> Fields:
    """What SGLang reads of a request in its queue."""
    return Fields(
        rid=name,
        origin_input_ids=array("q", tokens),
        output_ids=array("q"),
        sampling_params=SimpleNamespace(max_new_tokens=9),
        kv=SimpleNamespace(cache_protected_len=0),
        arrival_processed_tokens=0,
        _compute_max_prefix_len=lambda length: length - 1,
        **{"extra_key": None, "cache_salt": None, **fields},
    )


def policy_of(world: World, name: str) -> SchedulePolicy:
    return SchedulePolicy(
        name,
        world.tree,
        enable_hierarchical_cache=False,
        enable_priority_scheduling=False,
        schedule_low_priority_values_first=False,
    )


def ordered(world: World, queue: list[Fields], name: str = "lpm") -> list[str]:
    """SGLang's order of a queue, by the policy of this name."""
    policy, queue = policy_of(world, name), list(queue)
    last = policy._compute_prefix_matches(queue, CacheAwarePolicy(name))
    if name == "lpm":
        policy._sort_by_longest_prefix(queue, last)
    elif name == "hrrn":
        policy._sort_by_hrrn(queue, last, 100)
    else:
        policy._sort_by_dfs_weight(queue, world.tree)
    world.check()
    return [req.rid for req in queue]


def served(world: World, tokens: list[int], **named: Any) -> list[int]:
    world.leave(world.prompt(list(tokens), **named), insert=False)
    return tokens


@pytest.mark.parametrize("exact", [True, False])
def test_the_longest_prefix_goes_first_and_equal_new_ones_one_by_one(exact: bool) -> None:
    world = World(1200, exact=exact)
    short, long = served(world, world.tokens(60)), served(world, world.tokens(120))
    new, more = world.tokens(90), world.tokens(3)
    queue = [
        waiting("new", new),
        waiting("new again", new + more),
        waiting("short", short + more),
        waiting("long", long + more),
    ]
    assert ordered(world, queue) == ["long", "short", "new", "new again"]
    assert queue[1].num_matched_prefix_tokens == 0, "what is only in the queue was taken for cached"


def test_a_namespace_that_no_client_can_name_has_an_order_too() -> None:
    world = World(1200, high_rows=True)
    tokens = served(world, world.tokens(100), extra_key=HighSpace(None))
    queue = [waiting("usual", [*tokens, 1]), waiting("high", [*tokens, 1], extra_key=HighSpace(None))]
    assert ordered(world, queue) == ["high", "usual"]


@pytest.mark.parametrize("name", ["lpm", *(x.value for x in CacheAwarePolicy if x.value == "hrrn")])
def test_what_the_host_has_counts(name: str) -> None:
    """As with SGLang's own hierarchical cache: a prefix that would come back goes before a shorter one on the GPU.
    Nothing comes back for the order's sake, and nothing that was counted is left when the request is admitted."""
    world = World(600, exact=False, host_pages=400, write_policy=WRITE_BACK)
    long, short = served(world, world.tokens(150)), world.tokens(60)
    world.tree.make_pages(world.manager.geometry.num_pages, partly=True)
    assert not world.manager.segments.cached
    served(world, short)
    world.requests.scheduling_begins([])
    queue = [waiting("short", [*short, 1]), waiting("long", [*long, 1])]
    assert ordered(world, queue, name) == ["long", "short"]
    kept = len(long) - world.manager.prompts.tail
    assert queue[1].num_matched_prefix_tokens == kept == queue[1].host_hit_length
    host = host_tier_of(world.tree)
    assert host is not None and host.report()["hits"] == 0 and len(world.segments()) == 1
    seen: list[int] = []
    hooks.init_next_round_input(lambda req, tree: seen.append(req.host_hit_length), queue[1], world.tree)
    assert seen == [0], "SGLang would load what has no buffers"
    world.listener.check()


@pytest.mark.parametrize("gone", [False, True])
def test_by_weight_nobody_leaves_the_queue(gone: bool) -> None:
    """SGLang drops who is not found below the root. A later request's match may evict what an earlier one has found."""
    world = World(1200, exact=False)
    shared = served(world, world.tokens(60))
    alone = served(world, world.tokens(80))
    queue = [waiting("new", world.tokens(50)), waiting("alone", [*alone, 1])]
    queue += [waiting(name, [*shared, 1 + at]) for at, name in enumerate(["a", "b"])]
    if gone:
        match, of_others = world.tree.match_prefix, iter([False, False, False, True])

        def evicting(params: Any) -> Any:
            if next(of_others):
                world.tree.evict_branch(queue[1].last_node)
            return match(params)

        world.tree.match_prefix = evicting
    found = ordered(world, queue, "dfs-weight")
    assert sorted(found) == sorted(req.rid for req in queue)
    assert found[:2] == ["a", "b"], "the heaviest branch is not first"
    assert gone == (world.tree.resolve_node_handle(queue[1].last_node) is not queue[1].last_node)


def touch(world: World, tokens: list[int]) -> None:
    world.tree.touch_prefix(RadixKey(array("q", [*tokens, 1])))


def test_what_a_waiting_request_will_find_stays() -> None:
    world = World(800, exact=False)
    first, second = (served(world, world.tokens(120)) for _ in range(2))
    world.manager.counts.settle()
    touch(world, first)
    world.tree.evict(EvictParams(num_tokens=40))
    world.check()
    assert len(world.leaf(first).key) == 120 - world.manager.prompts.tail > len(world.leaf(second).key)


@pytest.mark.parametrize("eviction", ["lru", "tlru"][: 1 + hasattr(evict_policy, "TLRUStrategy")])
def test_so_does_what_the_host_has_of_it(eviction: str) -> None:
    world = World(600, exact=False, host_pages=400, write_policy=WRITE_BACK, eviction=eviction)
    first, second = (served(world, world.tokens(120)) for _ in range(2))
    world.tree.make_pages(world.manager.geometry.num_pages, partly=True)
    touch(world, first)
    host = host_tier_of(world.tree)
    assert host is not None
    host._make_room(host.host.free + 1)
    assert {int(node.tokens[0]) for node in host.index.nodes()} == {first[0]} != {second[0]}
    host.check_integrity()
    world.listener.check()
