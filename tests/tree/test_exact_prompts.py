"""Single lives of requests under exact fidelity: ends that come early, shortages, prompts that meet."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_diffkv.kernels.table import row_table
from sglang_diffkv.mem_pool.usage import UsageMeter
from tests.helpers import faults
from tests.tree.stand_in import offer
from tests.tree.tree_world import World


def test_a_request_that_ends_at_once_leaves_its_prompt_exact() -> None:
    """Its first token ends it, but under overlap scheduling the next step is launched already."""
    world = World(2000)
    req = world.start(world.tokens(100))
    world.plan(req)
    world.launch(req)
    world.decode(req)
    world.leave(req)
    assert [(x.lo, x.hi, x.as_computed) for x in world.segments()] == [(0, 100, True), (100, 101, False)]
    assert world.low_tokens(world.segments()[0]) == 0


def test_room_for_a_copy_is_judged_with_the_prompt_counted() -> None:
    """Eviction asks the device for its counts while the prompt is planned and not launched."""
    world = World(400, alpha_high=0.0)
    first = world.tokens(100)
    for tokens in (first, first[:60] + world.tokens(40), world.tokens(60)):
        world.leave(world.prompt(tokens), insert=False)
    world.manager.counts.settle()
    world.leave(world.prompt(world.tokens(60)), insert=False)
    req = world.start(world.tokens(120))
    world.allocator.ledger.promise(req.rid, 120)
    world.tree.make_pages(0, partly=True)
    world.allocator.ledger.promise(req.rid, 0)
    world.plan(req)
    world.launch(req)
    assert not faults(world.manager, [req.kv.req_pool_idx])


@pytest.mark.parametrize("longest, shared, new", [(4096, 3000, 1000), (32768, 24000, 8000)])
def test_a_long_prompt_after_a_long_prefix_joins(longest: int, shared: int, new: int) -> None:
    world = World(3 * longest, longest=longest, page_tokens=8 if longest < 10000 else 32)
    prefix = world.tokens(shared)
    world.leave(world.prompt([*prefix, 1]), insert=False)
    world.manager.counts.settle()
    req = world.prompt(prefix + world.tokens(new))
    assert sum(x.hi - x.lo for x in world.segments()) == shared + new + 1
    world.leave(req)


def test_of_two_equal_prompts_both_replies_join() -> None:
    world = World(2000)
    tokens = world.tokens(100)
    both = [world.start(tokens) for _ in range(2)]
    for req in both:
        world.plan(req)
        world.launch(req)
    for req in both:
        offer(world.tree, req)
    assert [world.requests.exact.joins(req.kv.req_pool_idx) for req in both] == [True, True]
    for req in both:
        world.decode(req)
        world.leave(req)


def test_without_names_a_request_keeps_its_lock_and_nothing_is_evicted() -> None:
    world = World(4000)
    for _ in range(5):
        world.leave(world.prompt(world.tokens(100)), insert=False)
    req = world.start(world.tokens(100))
    world.plan(req)
    world.launch(req)
    world.allocator.free_pages = world.allocator.free_pages[:50]
    offer(world.tree, req)
    assert len(world.tree.evictable_leaves) == 5
    assert req.kv.cache_protected_len == 100


def test_pages_by_owner_are_those_that_tables_list() -> None:
    world = World(2000)
    prefix = world.tokens(100)
    world.leave(world.prompt([*prefix, 1]))
    running = [world.start([*prefix[:70], *world.tokens(60)]) for _ in range(2)]
    for req in running:
        world.plan(req)
        world.launch(req)
        offer(world.tree, req)
    manager, state = world.manager, world.manager.state

    def listed(rows: list[int]) -> set[int]:
        pages = set()
        for row in rows:
            for tier in range(2):
                count = int(state.entries[row, 0, 0, tier])
                page, _, _ = row_table(state, torch.tensor([row]), tier, max(count, 1))
                pages.update(page[0, 0, 0, :count].tolist())
        return pages

    requests, tree = listed([*manager.rows]), listed([x.row for x in manager.held_segments])
    expected = {"private": len(requests - tree), "shared": len(requests & tree), "cached": len(tree - requests)}
    assert all(expected.values())
    assert UsageMeter(manager).read().owners == {**expected, "free": manager.device.free_pages()}
    for req in running:
        world.leave(req)


def test_a_copy_s_scores_are_dropped_with_the_prompt() -> None:
    world = World(1000)
    prefix = world.tokens(100)
    world.leave(world.prompt([*prefix, 1]), insert=False)
    world.allocator.ledger.promise("other", 860)  # no room for a copy
    req = world.start(prefix + world.tokens(30))
    assert world.manager.prompts.shared_scores
    world.plan(req)
    world.launch(req)
    assert not world.manager.prompts.shared_scores
    assert world.requests.exact.outcomes["no room"] == 1
    assert not world.requests.exact.joins(req.kv.req_pool_idx)


def test_scores_of_a_long_prefix_are_not_kept() -> None:
    world = World(400)
    prefix = world.tokens(100)
    assert world.manager.geometry.scored_tokens < len(prefix)
    world.leave(world.prompt([*prefix, 1]), insert=False)
    req = world.start(prefix + world.tokens(30))
    assert not world.manager.prompts.shared_scores
    world.plan(req)
    world.launch(req)
    assert world.requests.exact.outcomes["copied"] == 2, "the copy goes by what is known of the prefix"


def test_a_reply_leaves_the_pages_of_its_prompt_s_copy() -> None:
    """Generated tokens lie between the copied prompt's; the tree has the prompt, so it keeps the reply densely."""
    world = World(2000)
    req = world.prompt(world.tokens(100))
    for _ in range(10):
        world.decode(req)
    row, state = req.kv.req_pool_idx, world.manager.state
    world.decode(req)
    free = world.manager.device.free_pages()
    private = int(state.entries[row].sum())
    world.leave(req)
    reply = world.segments()[1]
    assert (reply.lo, reply.hi) == (100, 111)
    world.manager.counts.settle()
    assert reply.pages == 2, "11 tokens of 8 a page"
    assert world.manager.device.free_pages() == free + private - 2
    assert not world.manager.segments.fragmented


def two_readers(world: World, prefix: list[int], own: int) -> list[Any]:
    """Two requests whose prompts have run: ``own`` tokens each behind a prefix that is in the tree."""
    both = [world.start(prefix + world.tokens(own)) for _ in range(2)]
    for req in both:
        world.plan(req)
        world.launch(req)
        offer(world.tree, req)
    return both


def test_the_last_reader_copies_what_it_shared() -> None:
    """Two requests read one prompt at the high tier; when one leaves, the other runs on a compressed copy, further
    tokens go down in place, and the tree's prompt may be evicted."""
    world = World(2000)
    prefix = world.tokens(104)
    world.leave(world.prompt([*prefix, 1]))
    stays, goes = two_readers(world, prefix, 40)
    row, evictable = stays.kv.req_pool_idx, world.allocator.ledger.evictable_pages
    assert world.manager.rows.shared(row) == 104
    for _ in range(5):
        world.decode(stays)
    world.requests.exact.copy_alone([stays])
    assert world.requests.exact.outcomes["copied later"] == 0
    world.leave(goes)
    world.requests.exact.copy_alone([stays])
    assert world.requests.exact.outcomes["copied later"] == 1
    assert not world.manager.rows.shared(row) and stays.kv.cache_protected_len == 0
    world.manager.counts.settle()
    assert world.allocator.ledger.protected() == 0
    assert world.allocator.ledger.evictable_pages > evictable
    held = world.manager.ops.measure(*(torch.tensor([x]) for x in (row, 0, 149)))[0, 0, 0]
    assert held[:2].tolist() == [8 + 5 + 0, 136], "the window and what was generated since the prompt stay high"
    world.check()
    world.decode(stays)
    world.leave(stays)
    assert not faults(world.manager, [row])


def test_a_last_reader_without_room_reads_on() -> None:
    world = World(300)
    prefix = world.tokens(104)
    world.leave(world.prompt([*prefix, 1]), insert=False)
    stays, goes = two_readers(world, prefix, 30)
    world.leave(goes, insert=False)
    world.allocator.ledger.promise("other", 150)
    world.requests.exact.copy_alone([stays])
    assert world.requests.exact.outcomes["copied later"] == 0
    assert world.manager.rows.shared(stays.kv.req_pool_idx) == 104
    world.allocator.ledger.promise("other", 0)
    world.leave(stays)
