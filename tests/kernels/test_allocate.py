"""The circular free page list: spans, wrap-around, exhaustion, reference counts."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from sglang_diffkv.kernels.allocate.reference import add_own_pages, recycle, reserve, take
from sglang_diffkv.kernels.prefix_sum.reference import exclusive_prefix_sum
from sglang_diffkv.layout.state import PageState
from sglang_diffkv.mem_pool.integrity import check_integrity
from sglang_diffkv.policies.uniform import UniformPolicy
from tests.checks import check_row
from tests.dense import Session
from tests.helpers import begin_step, faults, make_format, make_manager, page_bytes, visible
from tests.policies import diffkv_policy


def make_state(pages: int = 13, rows: int = 4) -> PageState:
    return PageState.create(
        make_format(), num_pages=pages, num_rows=rows, num_layers=2, num_heads=2, max_blocks=4, num_blocks=17
    )


def free_ids(state: PageState) -> list[int]:
    taken, put = state.counters.tolist()
    return [int(state.ring[i % state.num_pages]) for i in range(taken, put)]


@pytest.mark.parametrize(
    "demand", [[], [0], [5], [0, 0, 0], [0, 3, 0, 0, 2, 0], [1] * 9, [2, 0, 7, 1]], ids=lambda x: str(len(x))
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_prefix_sum(demand, dtype):
    offset, total = exclusive_prefix_sum(torch.tensor(demand, dtype=dtype))
    assert offset.tolist() == [sum(demand[:i]) for i in range(len(demand))]
    assert int(total) == sum(demand) and offset.dtype == total.dtype == torch.int64


def test_take_gives_disjoint_spans_in_ring_order():
    state = make_state()
    page, short = take(state, torch.tensor([0, 3, 0, 1, 2, 0]), 3)
    assert not short.any()
    assert page.tolist() == [[-1] * 3, [0, 1, 2], [-1] * 3, [3, -1, -1], [4, 5, -1], [-1] * 3]
    assert state.refcount.tolist() == [1] * 6 + [0] * 8
    assert state.counters.tolist() == [6, 13]


def test_taking_nothing_changes_nothing():
    state = make_state()
    page, short = take(state, torch.zeros(5, dtype=torch.int64), 2)
    assert (page == -1).all() and not short.any()
    recycle(state, torch.tensor([3, 13, -1]), torch.tensor([False, True, True]))
    assert state.counters.tolist() == [0, 13] and not state.refcount.any()


@pytest.mark.parametrize("pages", [1, 2, 13, 64])
def test_ring_wraps_around_many_times(pages):
    """Random takes and returns against a plain multiset: no page is ever given twice or lost."""
    chance, state = random.Random(pages), make_state(pages)
    held: list[int] = []
    while state.counters[0] < 40 * pages:
        free = pages - len(held)
        demand = [chance.randint(0, 3) for _ in range(6)]
        page, short = take(state, torch.tensor(demand), 3)
        given = [p for p in page.flatten().tolist() if p not in (-1, state.scratch_page)]
        assert len(given) == min(free, sum(demand)) and not set(given) & set(held)
        assert short.any().item() == (sum(demand) > free)
        held += given
        chance.shuffle(held)
        count = chance.randint(0, len(held))
        back, held = held[:count], held[count:]
        recycle(state, torch.tensor(back, dtype=torch.int64), torch.ones(len(back), dtype=torch.bool))
        assert sorted(free_ids(state) + held) == list(range(pages))
        assert state.refcount.nonzero().flatten().tolist() == sorted(held)


def test_short_heads_get_the_scratch_page():
    state = make_state(pages=4)
    page, short = take(state, torch.tensor([2, 0, 1, 3, 0, 2]), 3)
    scratch = state.scratch_page
    assert page.tolist() == [
        [0, 1, -1], [-1] * 3, [2, -1, -1], [3, scratch, scratch], [-1] * 3, [scratch, scratch, -1],
    ]  # fmt: skip
    assert short.tolist() == [False, False, False, True, False, True]
    assert state.counters.tolist() == [4, 4] and int(state.refcount[scratch]) == 0
    page, short = take(state, torch.tensor([0, 1]), 1)
    assert page.tolist() == [[-1], [scratch]] and short.tolist() == [False, True]


def test_recycle_waits_for_the_last_reference():
    state = make_state()
    take(state, torch.tensor([4]), 4)
    state.refcount[torch.tensor([1, 2])] += torch.tensor([1, 2], dtype=torch.int32)
    recycle(state, torch.tensor([0, 1, 2, 3]), torch.tensor([True, True, True, False]))
    assert free_ids(state)[-1] == 0 and state.refcount[:4].tolist() == [0, 1, 2, 1]
    recycle(state, torch.tensor([2, 1, 2, 3]), torch.tensor([True] * 4))
    assert free_ids(state)[-4:] == [0, 2, 1, 3], "in the order in which they are named"
    assert Counter(free_ids(state)) == Counter(range(13))
    assert not state.refcount.any()


def test_new_pages_are_empty_whatever_they_held():
    state = make_state()
    state.pages.view(torch.int16).fill_(0x7FFF)
    add_own_pages(state, torch.tensor([2, 1]), 0, torch.tensor([[[1, 0], [2, 0]], [[0, 1], [0, 0]]]), 2)
    for row in (1, 2):
        assert not len(visible(state, row).position)
    assert state.entries[2, :, :, 0].tolist() == [[1, 0], [2, 0]]
    assert state.entries[1, :, :, 0].tolist() == [[0, 1], [0, 0]]
    assert not state.entries[..., 1].any() and not state.fault.any()
    assert (state.tiers[0].positions[:4] == -1).all()
    assert (state.tiers[0].positions[4:] != -1).all()


def test_reserve_fills_holes_only_with_single_tokens():
    manager = make_manager(policy=UniformPolicy())
    begin_step(manager, [1, 2], [8, 8], [0, 0])
    manager.state.hole[1:3] = torch.tensor([[3, -1], [0, 7]], dtype=torch.int32)
    before = manager.device.free_pages()
    reserve(manager.state, torch.tensor([2, 1]), torch.tensor([1, 2]), 2)
    assert manager.state.write_slot[2].tolist() == [[3, 8], [0, 7]]
    assert manager.state.own_tokens[2, :, :, 0].tolist() == [[8, 9], [8, 8]]
    assert (manager.state.hole[2] == -1).all()
    assert manager.state.write_slot[1].tolist() == [[8, 8], [8, 8]]
    assert manager.state.hole[1].tolist() == [[3, -1], [0, 7]]
    assert before - manager.device.free_pages() == 1 + 4


def test_exhaustion_in_extend_harms_nobody_else():
    session = Session(make_manager(pages=40, policy=UniformPolicy()))
    session.extend({1: 30, 2: 21}, scores=False)
    pages = sorted({*visible(session.state, 1).page.tolist(), *visible(session.state, 2).page.tolist()})
    assert len(pages) == 16 + 12
    before = page_bytes(session.state, pages)
    session.extend({3: 33, 4: 5}, check=False, scores=False)
    assert faults(session.manager, [1, 2, 3, 4]) == [3, 4]
    for _ in range(2):
        session.manager.counts.take_snapshot()
        session.manager.counts.refresh()
        assert session.manager.counts.faults == 2, "each faulted request counts once"
    assert session.manager.device.free_pages() == 0
    assert page_bytes(session.state, pages) == before
    session.release(3)
    session.release(4)
    check_integrity(session.manager)
    assert session.manager.device.free_pages() == 12 and not faults(session.manager, [3, 4])
    session.extend({3: 20}, scores=False)
    for row in (1, 2, 3):
        check_row(session, row)
    check_integrity(session.manager)


@pytest.mark.parametrize("pages", [50, 53, 57, 61])
def test_exhaustion_in_decode_and_compaction_harms_nobody_else(pages):
    """Rows 1 and 2 decode until the ring is empty and long past it; rows 3 and 5 and a segment stand by."""
    session = Session(make_manager(pages=pages, policy=diffkv_policy(1.0, 0.1, window=4)), spread=4.0)
    session.extend({3: 25})
    session.manager.prompts.end(3)
    segment = session.share(3, 0, 25)
    session.attach(5, [(segment, 0, 19)])
    session.extend({1: 13, 2: 9})
    standing = sorted({*visible(session.state, 3).page.tolist(), *visible(session.state, 5).page.tolist()})
    before = page_bytes(session.state, standing)
    lost: list[int] = []
    for _ in range(60):
        session.step([1, 2], check=not lost)
        lost = faults(session.manager, [1, 2])
        assert page_bytes(session.state, standing) == before
    assert lost == [1, 2] and faults(session.manager, [3, 5]) == []
    session.release(1)
    session.step([2], check=False)
    session.release(2)
    check_integrity(session.manager)
    for _ in range(3):
        session.step([3, 5])
    for row in (3, 5):
        check_row(session, row)
    check_integrity(session.manager)
    session.manager.clear()
    assert session.manager.device.free_pages() == pages


def test_exhaustion_in_prompt_compaction_harms_nobody_else():
    """The low page that compaction needs is not there: the row faults, the others keep every byte."""
    session = Session(make_manager(pages=12 + 16, policy=diffkv_policy(1.0, 0.0, window=7)), spread=4.0)
    session.extend({2: 20})
    session.extend({1: 30})
    assert session.manager.device.free_pages() == 0
    others = sorted(set(visible(session.state, 2).page.tolist()))
    before = page_bytes(session.state, others)
    session.extend({4: 8}, check=False)
    session.manager.prompts.end(4)
    assert faults(session.manager, [1, 2, 4]) == [4] and page_bytes(session.state, others) == before
    session.release(4)
    session.manager.prompts.end(1)
    assert page_bytes(session.state, others) == before
    check_row(session, 2)
    session.release(1)
    check_integrity(session.manager)


def test_a_row_without_any_page_attends_to_nothing():
    session = Session(make_manager(pages=16, policy=diffkv_policy(1.0, 0.2, window=2)))
    session.extend({1: 32})
    session.extend({2: 1}, check=False)
    session.manager.prompts.end(2)
    for _ in range(6):
        session.step([2, 1], check=False)
    assert not len(visible(session.state, 2).position)
    assert faults(session.manager, [1, 2]) == [1, 2]
