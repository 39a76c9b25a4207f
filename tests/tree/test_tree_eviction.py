"""Which leaf of the prefix cache goes, and how much of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache import evict_policy
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_diffkv.srt.hooks import table
from tests.policies import diffkv_policy
from tests.tree.stand_in import offer
from tests.tree.tree_world import World


@pytest.mark.parametrize("exact", [True, False])
def test_a_long_leaf_loses_only_its_end(exact: bool) -> None:
    """Eviction cuts it by what is missing and keeps the rest, whose place in the order stays."""
    world = World(800, exact=exact)
    first, second = world.tokens(203), world.tokens(90)
    for tokens in (first, second):
        world.leave(world.prompt(tokens), insert=False)
    world.manager.counts.settle()
    used, before = world.leaf(first).last_access_time, world.allocator.ledger.available()
    evicted = world.tree.evict(EvictParams(num_tokens=20)).num_tokens_evicted
    assert world.allocator.ledger.available() == before + evicted
    assert 20 <= evicted < (28 if exact else 60)
    assert world.leaf(first).last_access_time == used
    kept = len(world.leaf(first).key)
    assert 100 < kept < 203 and (kept % 8 == 0 or not exact)
    world.check()
    world.tree.evict(EvictParams(num_tokens=20))
    assert len(world.leaf(first).key) < kept
    assert len(world.leaf(second).key) == 90 - world.manager.prompts.tail
    world.tree.evict(EvictParams(num_tokens=400))
    world.check()
    world.manager.counts.settle()
    assert world.allocator.ledger.available() >= 400
    req = world.prompt(first)
    world.leave(req)


@pytest.mark.parametrize("exact", [True, False])
def test_a_cut_that_waits_for_the_device_is_worth_it(exact: bool) -> None:
    """Of a compressed leaf so much goes at once that a full pool waits at few of its steps; one as computed, which
    nobody waits for, loses what is asked for."""
    world = World(1200, exact=exact, longest=420)
    world.tree.least_cut = 80
    tokens = world.tokens(403)
    world.leave(world.prompt(tokens), insert=False)
    world.manager.counts.settle()
    for cuts in range(1, 4):
        before = world.allocator.ledger.available()
        world.tree.evict(EvictParams(num_tokens=4))
        assert world.allocator.ledger.available() >= before + 4
        gone = 403 - world.manager.prompts.tail - len(world.leaf(tokens).key)
        assert gone <= cuts * 16 if exact else gone == cuts * 80
        world.check()


def test_less_is_cut_where_a_whole_cut_would_leave_too_little() -> None:
    """As on a GPU, where as many tokens are worth cutting as are worth keeping: a leaf between one and two of these
    keeps what is worth it, and the next cut takes it whole."""
    world = World(1200, exact=False, longest=420)
    world.tree.least_cut = world.tree.least_kept_waiting = 100
    tokens = world.tokens(150)
    world.leave(world.prompt(tokens), insert=False)
    world.manager.counts.settle()
    world.tree.evict(EvictParams(num_tokens=4))
    assert len(world.leaf(tokens).key) == 100
    world.tree.evict(EvictParams(num_tokens=4))
    assert not world.segments()
    world.check()


def test_what_no_match_may_end_in_is_not_kept() -> None:
    """A sliding layer holds the end of a compressed leaf alone, so the leaf goes as a whole; one that is as short as
    its window is cut like others."""
    for length, left in ((403, 0), (30, 14)):
        world = World(1200, exact=False, longest=420, attention_spans=(6,))
        tokens = world.tokens(length)
        world.leave(world.prompt(tokens), insert=False)
        world.manager.counts.settle()
        world.tree.least_cut, world.tree.least_kept_waiting = 16, 8
        world.tree.evict(EvictParams(num_tokens=4))
        assert (len(world.leaf(tokens).key) if world.segments() else 0) == left
        world.check()


def test_a_cut_leaf_is_not_cut_below_what_is_worth_keeping() -> None:
    world = World(800)
    world.leave(world.prompt(world.tokens(40)), insert=False)
    world.manager.counts.settle()
    world.tree.evict(EvictParams(num_tokens=20))
    assert not world.segments()
    world.check()


@pytest.mark.parametrize(
    "eviction, first",
    [("lru", "b"), ("lfu", "b"), ("fifo", "a"), ("mru", "a"), ("filo", "c"), ("priority", "b"), ("slru", "b")],
)
@pytest.mark.parametrize("exact", [True, False])
def test_every_eviction_policy_chooses_by_its_rule(eviction: str, first: str, exact: bool) -> None:
    """Of three prompts in order a, b, c the first is asked twice more at the end and has a priority; what is left of a
    leaf that was cut keeps its place."""
    world = World(2000, exact=exact, eviction=eviction)
    prompts = {name: world.tokens(100) for name in "abc"}
    for name in "abcaa":
        req = world.start(prompts[name], priority=3 if name == "a" else 0)
        world.plan(req)
        world.launch(req)
        offer(world.tree, req)
        world.leave(req, insert=False)
    world.manager.counts.settle()

    def left() -> dict[str, int]:
        found = dict.fromkeys("abc", 0)
        for node in world.tree.root_node.children.values():
            name = next(x for x in "abc" if prompts[x][0] == node.key.token_ids[0])
            found[name] = sum(len(x.key) for x in (node, *node.children.values()))
        return found

    assert left() == dict.fromkeys("abc", 100 - world.manager.prompts.tail)
    for _ in range(2):
        before = left()
        world.tree.evict(EvictParams(num_tokens=20))
        after = left()
        assert [name for name in "abc" if after[name] < before[name]] == [first]
        world.check()


@pytest.mark.skipif(not hasattr(evict_policy, "TLRUStrategy"), reason="SGLang before 0.5.21 has no T-LRU")
def test_what_a_long_chat_can_do_without_goes_before_what_is_older() -> None:
    """With T-LRU, 120 tokens may be computed again: the last turn of a chat of 200 is as good as gone, and so is a
    short prompt. A long prompt is not, though nobody has read it for longest. Once it is cut, a chat is no shorter."""
    world = World(2000, eviction="tlru", eviction_config={"threshold": 120, "next_prompt_estimate": 0})
    old, chat, short = world.tokens(200), world.tokens(100), world.tokens(60)
    for tokens in (old, chat, [*chat, *world.tokens(100)], short):
        world.leave(world.prompt(tokens))
    world.manager.counts.settle()
    tree = world.tree

    def left() -> dict[str, int]:
        names = {old[0]: "old", chat[0]: "chat", short[0]: "short"}
        tops = tree.root_node.children.values()
        return dict.fromkeys(names.values(), 0) | {names[x.key.token_ids[0]]: _tokens_from(x) for x in tops}

    order, before = ["none"], left()
    assert before == {"old": 200, "chat": 200, "short": 60}
    while order[-1] != "old":
        before = left()
        tree.evict(EvictParams(num_tokens=8))
        world.check()
        order += [name for name, count in left().items() if count < before[name]]
    assert set(order[1:-1]) == {"chat", "short"} and order.index("chat") < order.index("short"), order
    assert before == {"old": 200, "chat": 100, "short": 0}, "a chat that was cut was cut below its budget"


def _tokens_from(node: Any) -> int:
    return len(node.key) + sum(map(_tokens_from, node.children.values()))


def test_sglang_counts_the_tokens_of_every_eviction() -> None:
    """Whatever room was made for: high-tier tokens, pages, KV slots or segment rows."""
    world = World(2000, exact=False)
    for _ in range(8):
        world.leave(world.prompt(world.tokens(100)), insert=False)
    world.manager.counts.settle()
    counted, durations = [], []
    world.tree.metrics_collector = SimpleNamespace(
        increment_eviction_num_tokens=counted.append, observe_eviction_duration=durations.append
    )
    tree, kept = world.tree, world.tree.evictable_tokens()
    for make, room in (
        (tree.make_tokens, lambda: 20),
        (tree.make_pages, lambda: tree.ledger.uncommitted_pages() + 10),
        (tree.make_kv_slots, lambda: tree.ledger.uncommitted_kv_slots() + 100),
        (tree.make_segment_rows, lambda: world.manager.segments.rows_free + 1),
    ):
        before = sum(counted)
        assert make(room()) and sum(counted) > before, make.__name__
        assert sum(counted) == kept - tree.evictable_tokens()
    assert make(1) and len(counted) == len(durations) and all(x > 0 for x in counted), "nothing was evicted"
    world.check()


@pytest.mark.parametrize("cached", [False, True])
def test_a_step_leaves_pages_for_a_compression_to_borrow(monkeypatch: pytest.MonkeyPatch, cached: bool) -> None:
    """Prefixes go for them first. Then what runs is compressed, while it still can be."""
    world = World(800, exact=False, policy=diffkv_policy(1.0, 0.0, 8, pressure_window=4))
    if cached:
        world.leave(world.prompt(world.tokens(40)), insert=False)
    req, pressure, ledger = world.prompt(world.tokens(100)), world.manager.pressure, world.requests.ledger
    for _ in range(80):
        world.decode(req)
    world.manager.counts.settle()
    assert pressure is not None and bool(ledger.evictable_pages) == cached
    monkeypatch.setattr(table, "requests_of", lambda batch: world.requests)
    batch, fits = SimpleNamespace(reqs=[req]), lambda batch, selected=None: True
    ledger.set_aside("another", ledger.uncommitted_pages() - pressure.lent, 0)
    assert table.check_decode_mem(fits, batch) and not pressure.compressions
    before = ledger.evictable_pages
    ledger.set_aside("another", ledger.promised_pages() + 1, 0)
    assert table.check_decode_mem(fits, batch)
    assert (pressure.compressions == 0) == cached and (ledger.evictable_pages < before) == cached
    ledger.forget("another")
    world.leave(req)
