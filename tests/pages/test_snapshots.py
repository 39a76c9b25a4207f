"""What a snapshot of the device's counts says of rows and of segments that are not counted yet."""

from __future__ import annotations

import torch

from sglang_diffkv.kernels.count_rows.reference import ENTRIES
from tests.tree.tree_world import World


def test_a_snapshot_does_not_see_the_tokens_of_a_planned_step() -> None:
    """So the row's bound still has room for them. The step is launched behind the snapshot."""
    world = World(400, exact=False)
    row = world.prompt(world.tokens(16)).kv.req_pool_idx
    counts, space = world.manager.counts, world.manager.space
    counts.settle()
    before = space.bound(row)
    world.manager.plan_step([row], [1], [16])
    for _ in range(2):
        counts.take_snapshot()
        counts.refresh()
        assert space.bound(row) == tuple(n + 1 for n in before)
    world.manager.cancel_step()


def test_a_snapshot_of_no_rows_and_one_of_segments_alone() -> None:
    world = World(400, exact=False, share_min=8)
    counts = world.manager.counts
    counts.take_snapshot()
    assert counts._snapshots[-1].wait().shape[0] == 1 and counts._numbers[1].dtype == torch.int64
    counts.refresh()
    assert counts.free() == world.manager.geometry.num_pages
    prompts = [world.tokens(40) for _ in range(2)]
    for tokens in prompts:
        world.leave(world.prompt(tokens), insert=True)
    segments = [*counts.uncounted.values()]
    assert segments and not world.manager.rows
    counts.take_snapshot()
    assert counts._snapshots[-1].wait()[:-1, ENTRIES].all()
    counts.refresh()
    assert not counts.uncounted
    for segment in segments:
        assert segment.held[1] == world.low_tokens(segment) and sum(segment.held) == segment.hi - segment.lo


def test_a_segment_whose_positions_change_is_counted_anew() -> None:
    """Its row stays, so the rows of both snapshots are the same."""
    world = World(400, exact=False, share_min=8)
    world.leave(world.prompt(world.tokens(60)))
    counts, segments = world.manager.counts, world.segments()
    counts.settle()
    segment = max(segments, key=lambda x: x.hi - x.lo)
    before = sum(segment.held)
    world.tree.uncount(segment)
    world.manager.segments.count_again(segment)
    counts.settle()
    assert sum(segment.held) == before
    hi, segment.hi = segment.hi, segment.hi - 7
    counts.count_later(segment)
    counts.settle()
    assert sum(segment.held) == before - 7
    segment.hi = hi
