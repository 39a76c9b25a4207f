"""What a snapshot of the device's counts says of rows and of segments that are not counted yet."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sglang_diffkv.kernels.count_rows.reference import ENTRIES
from sglang_diffkv.layout.geometry import Segment
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
    counts.count_later(segment)
    counts.settle()
    assert sum(segment.held) == before
    hi, segment.hi = segment.hi, segment.hi - 7
    counts.count_later(segment)
    counts.settle()
    assert sum(segment.held) == before - 7
    segment.hi = hi


def test_who_waits_once_a_step_is_launched_counts_what_it_takes() -> None:
    """Before the launch its pages were a bound, or none where it decodes."""
    world = World(400, exact=False)
    req = world.prompt(world.tokens(16))
    manager, row, device = world.manager, req.kv.req_pool_idx, world.manager.device
    for start in range(16, 26):
        manager.plan_step([row], [1], [start])
        manager.counts.settle()
        before = device.free_pages()
        assert manager.counts.settled and manager.counts.free() == before
        manager.launch_step()
        manager.ops.reserve(torch.tensor([row]), torch.tensor([1]), 1)
        assert not manager.counts.settled
        manager.counts.settle()
        assert manager.counts.free() == device.free_pages() <= before
    assert device.free_pages() < before or start % 8, "no step took a page"


def test_a_planned_step_that_is_cancelled_takes_nothing() -> None:
    world = World(400, exact=False)
    row = world.prompt(world.tokens(16)).kv.req_pool_idx
    manager, free = world.manager, world.manager.device.free_pages()
    manager.plan_step([row], [20], [16])
    manager.counts.settle()
    assert manager.counts.free() < free
    manager.cancel_step()
    assert not manager.counts.settled
    manager.counts.settle()
    assert manager.counts.free() == free


def shared(world: World, count: int) -> Segment:
    """A prompt's segment that nobody reads; all is counted."""
    world.leave(world.prompt(world.tokens(count)), insert=False)
    world.manager.counts.settle()
    (segment,) = world.manager.segments.cached
    return segment


@pytest.mark.parametrize(("exclusive", "counted"), [(True, True), (False, True), (True, False)])
def test_what_is_known_stays_settled(exclusive: bool, counted: bool) -> None:
    """A counted segment that nobody reads returns as many pages as it counts; any other perhaps more, or fewer."""
    world = World(900, exact=False)
    counts, segments, device = world.manager.counts, world.manager.segments, world.manager.device
    segment, before = shared(world, 60), device.free_pages()
    world.tree.uncount(segment)
    if not counted:
        counts.count_later(segment)
        counts.expect(segment, device.pages_of(segment.row))
    assert counts.settled and counts.free() == before
    segments.release(segment, exclusive=exclusive)
    assert counts.settled == (exclusive and counted)
    assert counts.free() == (device.free_pages() if exclusive else before)
    counts.settle()
    assert counts.free() == device.free_pages() > before


@pytest.mark.parametrize("how", ["trim", "cut", "join"])
def test_what_a_change_returns_or_takes_only_the_device_knows(how: str) -> None:
    world = World(900, exact=False)
    counts, segments, device = world.manager.counts, world.manager.segments, world.manager.device
    segment, free = shared(world, 60), device.free_pages()
    counts.tell_counted(lambda segment: None)
    if how == "trim":
        segments.trim(segment, segment.hi - 20, wait=False)
    elif how == "cut":
        segments.cut_front(segment, 20)
    else:
        segment = segments.join([(segment, segment.lo, segment.hi)])
    assert not segment.pages and not segment.held and not counts.settled
    counts.expect(segment, device.pages_of(segment.row))
    assert segment.pages and not counts.settled
    counts.settle()
    assert counts.free() == device.free_pages() != free and sum(segment.held) == segment.hi - segment.lo


def test_pages_that_are_expected_count_once() -> None:
    """What the segment holds is unknown until a snapshot counts it, which finds as many pages."""
    world = World(900, exact=False)
    counts, segments, ledger = world.manager.counts, world.manager.segments, world.requests.ledger
    segment = shared(world, 60)
    pages, held, most = segment.pages, segment.held, world.manager.geometry.most_pages(segment.hi)
    part = [(segment, segment.lo, segment.hi)]
    assert ledger.tree_pages == pages and segments.dense_pages(part) < most
    counts.expect(segment, pages + 1)
    assert segment.pages == pages, "it was counted already"
    world.tree.uncount(segment)
    counts.count_later(segment)
    for _ in range(2):
        counts.expect(segment, pages)
        assert (segment.pages, segment.held, ledger.tree_pages) == (pages, (), pages)
        assert segment.row in counts.uncounted and counts.settled and segments.dense_pages(part) == most
    counts.meet()
    assert segment.row in counts.uncounted, "nothing runs, and it was counted"
    counts.settle()
    assert (segment.pages, segment.held, ledger.tree_pages) == (pages, held, pages) and not counts.uncounted
    world.tree.uncount(segment)
    segments.release(segment, exclusive=True)
    counts.expect(segment, pages)
    assert not segment.pages and ledger.tree_pages == 0, "it is gone"


def test_a_snapshot_on_its_way_does_not_count_what_has_come_since() -> None:
    """Another segment has the row that it counted, and the host knows the pages of this one."""
    world = World(900, exact=False)
    counts, segment = world.manager.counts, shared(world, 60)
    pages, row = segment.pages, segment.row
    counts.tell_counted(lambda segment: None)
    counts.count_later(segment)
    counts.take_snapshot()
    counts.count_later(other := replace(segment))
    counts.expect(segment, pages)
    counts.know(segment, pages, pages, (1, 1))
    assert not segment.pages and not segment.held, "it is not this one that is uncounted"
    counts.expect(other, pages - 1)
    assert not counts.settled, "a snapshot is on its way"
    counts.refresh()
    assert counts.uncounted == {row: other} and (other.pages, other.held) == (pages - 1, ())
    counts.settle()
    assert other.held and not counts.uncounted
