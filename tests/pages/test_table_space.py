"""Host-side bounds and blocks of the page table: what is refused leaves nothing behind."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest
import torch

from sglang_diffkv.layout.state import TABLE_BLOCK
from sglang_diffkv.mem_pool.integrity import check_integrity
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.mem_pool.table_space import TableFull
from sglang_diffkv.policies.uniform import UniformPolicy
from tests.checks import check_row
from tests.dense import Session
from tests.helpers import PAIR, begin_step, make_format, make_manager, tier_map, visible
from tests.policies import diffkv_policy


def snapshot(manager: PageManager) -> list[object]:
    """All that an operation could change, tensors by their bytes; not what stands in free table blocks."""
    space = manager.space
    manager.counts.settle()
    manager.launch_step()
    known = {name: x for name, x in sorted(vars(manager.state).items()) if isinstance(x, torch.Tensor)}
    tensors = [x.numpy().tobytes() for name, x in known.items() if name not in ("page_table", "range_lo", "range_hi")]
    host = [manager.rows.digest(), set(manager.segments.cached)]
    bounds = [space.bound(row) for row in range(manager.state.entries.shape[0])]
    return [*tensors, *host, bounds, sorted(space.free_blocks)]


@pytest.mark.parametrize("loose_bounds", [False, True])
def test_a_refused_step_changes_nothing(loose_bounds):
    manager = make_manager(blocks=9, loose_bounds=loose_bounds)
    session = Session(manager)
    session.extend({1: 20})
    before = snapshot(manager)
    with pytest.raises(TableFull, match="free blocks"):
        begin_step(manager, [2, 1, 3], [10, 1, 500], [0, 20, 0])
    assert snapshot(manager) == before
    check_integrity(manager)
    session.extend({2: 10, 1: 3})
    session.step([1, 2])
    check_integrity(manager)


def test_a_step_at_the_wrong_place_is_refused():
    manager = make_manager()
    Session(manager).extend({1: 20})
    before = snapshot(manager)
    for start in (0, 19, 21):
        with pytest.raises(ValueError, match="row 1 holds 20 tokens"):
            begin_step(manager, [2, 1], [3, 1], [0, start])
    assert snapshot(manager) == before


def test_a_row_is_limited_to_its_columns():
    manager = make_manager(make_format(page_tokens=4), max_tokens=60, pages=900)
    limit = manager.space.max_blocks * TABLE_BLOCK * 4
    with pytest.raises(TableFull, match="at most"):
        begin_step(manager, [1], [limit], [0])
    assert manager.space.blocks[1] == ([], []) and not manager.rows


@pytest.mark.parametrize("loose_bounds", [False, True])
def test_refused_parts_leave_the_row_empty(loose_bounds):
    session = Session(make_manager(loose_bounds=loose_bounds))
    session.extend({1: 40})
    segment = session.share(1, 0, 40)
    before = snapshot(session.manager)
    for parts in (
        [(segment, 1, 9)],
        [(segment, 0, 9), (segment, 10, 20)],
        [(segment, 0, 41)],
        [(segment, 0, 20), (segment, 20, 20)],
    ):
        with pytest.raises(ValueError, match="does not continue"):
            session.manager.attach_prefix(3, parts)
        assert snapshot(session.manager) == before
    session.attach(3, [(segment, 0, 40)])
    with pytest.raises(ValueError, match="not empty"):
        session.manager.attach_prefix(3, [(segment, 0, 40)])
    check_integrity(session.manager)


def test_an_attach_without_blocks_leaves_the_row_empty():
    session = Session(make_manager(make_format(page_tokens=4), blocks=6, policy=UniformPolicy()))
    session.extend({1: 50}, scores=False)
    segment = session.share(1, 0, 50)
    assert segment is None and not session.manager.prompts.can_publish(1)
    session.release(1)
    session.extend({1: 30}, scores=False)
    segment = session.share(1, 0, 30)
    session.manager.counts.settle()
    session.manager.space.append(2, 1)  # takes what the counted segment gave back
    before = snapshot(session.manager)
    with pytest.raises(TableFull, match="0 free blocks"):
        session.manager.attach_prefix(3, [(segment, 0, 10), (segment, 10, 30)])
    assert snapshot(session.manager) == before
    session.manager.space.release(2)
    check_integrity(session.manager)


@pytest.mark.parametrize("loose_bounds", [False, True])
def test_bounds_hold_when_pages_stay_part_filled(loose_bounds):
    """Every share leaves a part-filled page behind, which token counts alone do not show."""
    session = Session(make_manager(make_format(page_tokens=4), segments=40, loose_bounds=loose_bounds))
    session.extend({1: 1})
    for length in range(1, 30):
        assert session.share(1, length - 1, length) is not None
        session.step([1])
        check_integrity(session.manager)
    check_row(session, 1)


def test_share_takes_what_no_segment_holds():
    session = Session(make_manager(policy=diffkv_policy(1.0, 0.3, 4)), spread=3.0)
    session.manager.prompts.share_min_tokens = 20
    session.extend({1: 30})
    session.end_prompt(1)
    for _ in range(5):
        session.step([1])
    first = session.share(1, 0, 30)
    for _ in range(12):
        session.step([1])
    before = tier_map(session.state, 1, 47)
    second = session.share(1, 0, 47)
    pages = [set(visible(session.state, s.row).page.tolist()) for s in (first, second)]
    assert not pages[0] & pages[1]
    assert np.array_equal(tier_map(session.state, first.row, 30), before[..., :30])
    assert np.array_equal(tier_map(session.state, second.row, 47)[..., 30:], before[..., 30:])
    check_integrity(session.manager)


@pytest.mark.parametrize("min_tokens", [None, 1, 30, 31])
def test_a_prompt_is_sealed_from_the_given_length(min_tokens):
    session = Session(make_manager(policy=diffkv_policy(1.0, 0.3, 4)), spread=3.0)
    session.manager.prompts.share_min_tokens = min_tokens
    session.extend({1: 30})
    session.end_prompt(1)
    frozen = min_tokens is not None and min_tokens <= 30
    assert session.manager.rows.frozen(1) == (30 if frozen else None)
    prompt = tier_map(session.state, 1, 30)
    for _ in range(8):
        session.step([1])
        check_integrity(session.manager)
    assert np.array_equal(prompt, tier_map(session.state, 1, 38)[..., :30]) or not frozen
    check_row(session, 1)


def test_headroom_is_what_the_next_step_takes():
    session = Session(make_manager(policy=UniformPolicy()))
    assert session.manager.headroom() == 0
    session.extend({1: 15, 2: 16, 3: 1}, scores=False)
    for expected in (4, 4, 0):  # row 2 needs a page in each of four heads, then row 1, then nobody
        before = session.manager.device.free_pages()
        assert session.manager.headroom() == expected
        session.step([1, 2, 3])
        assert before - session.manager.device.free_pages() == expected


def test_a_hole_needs_no_page():
    """Every step prunes a token, so that full pages take the next one."""
    session = Session(make_manager(make_format(("K8V4",)), policy=diffkv_policy(0.0, 1e9, 15)))
    session.extend({1: 15})
    session.end_prompt(1)
    session.step([1])
    for _ in range(5):
        assert session.manager.headroom() == 0
        before = session.manager.device.free_pages()
        session.step([1])
        assert session.manager.device.free_pages() == before
        check_integrity(session.manager)


def test_counts_that_arrive_together_are_not_applied_twice():
    """Two snapshots on their way, as under overlap scheduling, with a step planned between them."""
    session = Session(make_manager())
    manager = session.manager
    session.extend({1: 21, 2: 5})
    session.end_prompt(1)
    session.end_prompt(2)
    session.step([1, 2])
    manager.counts.take_snapshot()
    manager.counts.take_snapshot()
    manager.plan_step([1], [1], [22])
    manager.counts.settle()
    counts = session.state.entries[1].amax((0, 1)).tolist()
    assert manager.space.bound(1) == (counts[0] + 1, counts[1] + 1)
    assert manager.space.bound(2) == tuple(session.state.entries[2].amax((0, 1)).tolist())


def test_a_last_chunk_of_one_token_is_counted():
    """It is part of a prompt, not a decode step, although it is one token: the page it takes must not be forgotten."""
    session = Session(make_manager(policy=diffkv_policy(1.0, 0.0, 100)))
    manager = session.manager
    rows = (1, 2, 3, 4, 5)
    session.extend(dict.fromkeys(rows, 16))
    manager.plan_step(list(rows), [1] * 5, [16] * 5)
    manager.launch_step()
    index = manager.to_device(rows)
    manager.ops.reserve(index, manager.to_device([1] * 5), 1)
    for row in rows:
        manager.prompts.end(row)
    assert manager.counts.free_bound() <= manager.device.free_pages()


@pytest.mark.parametrize("blocks", [0, 6, 9, 14])
def test_refused_rows_are_those_that_cannot_grow(blocks):
    """Without a block to spare, with some, and with more than all can take."""
    manager = make_manager(make_format(page_tokens=4), max_tokens=64, blocks=blocks, policy=UniformPolicy())
    space, limit = manager.space, manager.space.max_blocks * TABLE_BLOCK
    for row, tokens in ((1, 61), (2, 64), (3, limit)):
        with contextlib.suppress(TableFull):
            space.append(row, tokens)
    for new_tokens in (1, 4, 40):
        found = space.refused([1, 2, 3], new_tokens)
        for row in (1, 2, 3):
            try:
                space.append(row, new_tokens)
                assert row not in found
            except TableFull as error:
                assert found[row] == str(error) and error.row == row
        for row in (3, 2, 1):
            if row not in found:
                space.withdraw(row, new_tokens)


@pytest.mark.parametrize("blocks", [0, 6, 9, 14])
@pytest.mark.parametrize("tiers", [PAIR, ("K8V4",)])
def test_room_for_many_rows_is_room_for_each(tiers, blocks):
    """One call for all rows of a step, or one for each: the same blocks; where there is no room, none."""
    generator = random.Random(3)
    spaces = [
        make_manager(make_format(tiers, page_tokens=4), max_tokens=64, blocks=blocks, policy=UniformPolicy()).space
        for _ in range(2)
    ]
    full = 0
    for _ in range(60):
        rows = generator.sample(range(1, 7), generator.randrange(1, 6))
        counts = [generator.choice([1, 1, 1, 9, 40]) for _ in rows]
        before = [sorted(spaces[0].free_blocks), spaces[0].total.tolist(), spaces[0].base.tolist()]
        problem = ""
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            try:
                spaces[1].append(row, count)
            except TableFull as error:
                problem, full = f"{error.row} {error}", full + 1
                for done, taken in zip(rows[:i], counts[:i], strict=True):
                    spaces[1].withdraw(done, taken)
                break
        if problem:
            with pytest.raises(TableFull) as found:
                spaces[0].append_all(rows, counts)
            assert problem == f"{found.value.row} {found.value}"
            assert spaces[0].total.tolist() == before[1] and spaces[0].base.tolist() == before[2]
            row = generator.randrange(1, 7)
            for space in spaces:
                space.release(row)
        else:
            spaces[0].append_all(rows, counts)
        first, second = ([*map(len, sides)] for space in spaces for sides in ([x for y in space.blocks for x in y],))
        assert first == second and spaces[0].held.flatten().tolist() == first
        assert (spaces[0].total == spaces[1].total).all()
    assert full or not blocks


def test_a_counted_segment_keeps_the_blocks_of_its_entries():
    """A short prompt is all in the high tier: nothing of a block for low entries."""
    session = Session(make_manager(make_format(page_tokens=4), policy=diffkv_policy(1.0, 0.0, 200), segments=20))
    manager = session.manager
    session.extend({1: 50})
    assert len(manager.space.free_blocks) == manager.space.num_blocks - 3
    segment = session.share(1, 0, 50)
    assert segment is not None
    session.release(1)
    manager.counts.settle()
    assert [len(side) for side in manager.space.blocks[segment.row]] == [2, 0]
    check_integrity(manager)
    session.attach(2, [(segment, 0, 50)])
    check_row(session, 2)
    session.release(2)
    manager.segments.release(segment)
    check_integrity(manager)
    assert len(manager.space.free_blocks) == manager.space.num_blocks


def test_a_compressed_prompt_gives_back_the_blocks_of_its_high_tier():
    """Once it was counted, and not before its last chunk has run; decode goes on with blocks as it needs them."""
    manager = make_manager(make_format(page_tokens=4), policy=diffkv_policy(50.0, 0.0, window=8), pages=1500)
    session, space = Session(manager), manager.space
    session.extend({1: 200})
    manager.counts.settle()
    taken = space.num_blocks - len(space.free_blocks)
    assert taken >= 200 // 4 // TABLE_BLOCK
    session.end_prompt(1)
    session.step([1])
    manager.counts.settle()
    held = [len(blocks) for blocks in space.blocks[1]]
    assert held == [-(-n // TABLE_BLOCK) for n in space.bound(1)] and held[0] <= 2
    assert space.num_blocks - len(space.free_blocks) == sum(held) < taken
    for _ in range(40):
        session.step([1])
    manager.counts.settle()
    check_integrity(manager)
    session.release(1)
    assert len(space.free_blocks) == space.num_blocks
