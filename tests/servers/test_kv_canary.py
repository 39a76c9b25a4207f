"""Lines of SGLang's KV canary go by KV slot: they follow a request to new ones, and the tree tells all it holds."""

from __future__ import annotations

import torch

from sglang_diffkv.srt.pool import DiffKVPool
from sglang_diffkv.srt.startup.kv_canary import attach, walk_prefix_cache
from tests.tree.tree_world import World


def _walk(world: World, **flags: bool) -> list[tuple[int, int, int]]:
    found = walk_prefix_cache(None, radix_cache=world.tree, **flags)
    columns = (found.slot_indices, found.positions, found.prev_slot_indices)
    assert all(x.dtype == torch.int64 for x in columns)
    return sorted(zip(*(x.tolist() for x in columns), strict=True))


def test_the_walk_finds_every_kv_slot_behind_the_one_before_it() -> None:
    """Of two prompts that share their first 60 tokens, so that a node was split."""
    world = World(2000)
    first = world.tokens(100)
    second = first[:60] + world.tokens(50)
    expected = set()
    for tokens in (first, second):
        world.leave(world.prompt(tokens))
    for tokens in (first, second):
        kv_slots = world.start([*tokens, 1]).prefix_indices.tolist()
        assert len(kv_slots) == len(tokens)
        expected |= set(zip(kv_slots, range(len(kv_slots)), [-1, *kv_slots[:-1]], strict=True))
    assert _walk(world) == sorted(expected) and len(expected) == 150
    assert _walk(world, unlocked_only=True) == [], "both prompts are being read"


def test_lines_follow_a_request_to_the_kv_slots_of_its_copy() -> None:
    world = World(2000)
    pool = world.allocator._kvcache = DiffKVPool(2000, torch.bfloat16, [0], "cpu", False, 0, 0)
    pool.bind(world.manager, world.allocator.ledger.kv_slots)
    (group,) = attach(pool=pool, device=torch.device("cpu"), read_bytes=0, kv_token_id_vs_position_offset=0)
    assert group.k_head.shape == group.k_tail.shape == (world.allocator.ledger.kv_slots + 1, 32)
    for lines in (group.k_head, group.k_tail):
        lines.view(torch.int64)[:, 0] = torch.arange(len(lines))
    tokens = world.tokens(100)
    world.leave(world.prompt(tokens))
    world.leave(world.prompt([*tokens, *world.tokens(60)]))
    req = world.start([*tokens, *world.tokens(70)])
    row, before = req.kv.req_pool_idx, req.prefix_indices.tolist()
    world.plan(req)
    world.launch(req)
    world.tree.cache_unfinished_req(req)
    after = world.pool.req_to_token[row, : len(before)].tolist()
    assert len(before) == 100 and not set(before) & set(after), "the request runs on no copy"
    for lines in (group.k_head, group.k_tail):
        assert lines.view(torch.int64)[after, 0].tolist() == before
