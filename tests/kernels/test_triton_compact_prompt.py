"""Prompt compaction in Triton against its reference."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_diffkv.kernels.append.reference import read_tokens
from sglang_diffkv.kernels.compact_prompt.reference import compact_prompt as reference
from sglang_diffkv.kernels.compact_prompt.reference import compact_prompts as specification
from sglang_diffkv.kernels.compact_prompt.triton import PromptWorkspace, compact_prompts, prepare_compact
from sglang_diffkv.kernels.compact_prompt.triton_lower import PARTS
from sglang_diffkv.kernels.cuts import Cuts
from sglang_diffkv.kernels.table import layer_table, max_entries, own_slot_location
from sglang_diffkv.layout.state import PageState
from sglang_diffkv.mem_pool.integrity import check_integrity
from sglang_diffkv.ops.decisions import Decisions
from sglang_diffkv.policies.diffkv import DiffKVPolicy
from tests.kernels.triton_helpers import (
    DEVICE,
    FOUR,
    THREE,
    add_prompt,
    clone_state,
    make_format,
    make_manager,
    scaled,
    with_between,
)
from tests.policies import diffkv_policy

FULL = pytest.mark.full


def cuts_of(policy: DiffKVPolicy, state: PageState) -> Cuts:
    cuts = Decisions().of_row(state, 1, 0, policy)
    assert cuts is not None
    return cuts


def ends_of(*ends: tuple[int, int]) -> torch.Tensor:
    """[2, B]: rows, and tokens of their sequences."""
    return torch.tensor(ends, device=DEVICE).t().contiguous()


def tokens_of(state, row, layer, tier):
    """Position to (key, value, score) of a row's tokens of one tier, for every head."""
    rows = torch.tensor([row], device=DEVICE)
    view = state.tiers[tier]
    page, lo, hi = (x[0] for x in layer_table(state, rows, tier, layer, max_entries(state, rows, tier, layer)))
    found = []
    for head in range(state.num_heads):
        slot = torch.arange(view.layout.tokens, device=DEVICE).expand(page.shape[1], -1)
        at = page[head].unsqueeze(1).expand_as(slot)
        position = view.positions[at, slot]
        held = (position >= lo[head].unsqueeze(1)) & (position < hi[head].unsqueeze(1))
        key, value = read_tokens(view, at, slot)
        order = position[held].argsort()
        found.append([x[held][order] for x in (position, key, value, view.scores[at, slot])])
    return found


@pytest.mark.cover(1)
@pytest.mark.parametrize(("sinks", "scales"), [(0, False), (6, False), (0, True)])
@pytest.mark.parametrize("alphas", [(1.0, 0.2), (3.0, 0.0), (0.0, 0.0), (9e9, 9e9), (9e9, 0.0)])
@pytest.mark.parametrize(
    "tiers",
    ["K8V4 K4V2", "K8V4 K4V6 K4V2", "K8V6 K6V6", "BF16 K8V4", "K8V4", FOUR, pytest.param(THREE, marks=FULL)],
)
def test_matches_reference(tiers, alphas, sinks, scales):
    policy = with_between(diffkv_policy(*alphas, window=5, sinks=sinks), len(tiers.split()))
    manager = make_manager(make_format(tiers, 96, 64, page_tokens=4), pages=120, window=5)
    generator = torch.Generator().manual_seed(3)
    state = manager.state
    policy = scaled(policy, state, generator) if scales else policy
    state.counters += 97  # the ring wraps
    add_prompt(manager, 1, 47, generator, compact=False)
    twin, cuts = clone_state(state), cuts_of(policy, state)
    workspace = PromptWorkspace.create(state)
    compact_prompts(state, *ends_of((1, 47)), workspace, cuts)
    reference(twin, 1, 47, cuts)
    check_integrity(manager)
    for name in ("entries", "own_tokens", "hole", "fault"):
        assert torch.equal(getattr(state, name), getattr(twin, name)), name
    assert torch.equal(state.counters[1] - state.counters[0], twin.counters[1] - twin.counters[0])
    for layer in range(2):
        for tier in range(len(state.tiers)):
            for got, expected in zip(tokens_of(state, 1, layer, tier), tokens_of(twin, 1, layer, tier), strict=True):
                assert torch.equal(got[0], expected[0]) and torch.equal(got[3], expected[3])
                for a, b in zip(got[1:3], expected[1:3], strict=True):
                    # a GPU may round a scale or a zero point to the neighbouring fp16 number
                    torch.testing.assert_close(a, b, rtol=1e-3, atol=5e-3)


def stored_in_order(state: PageState, row: int) -> list[torch.Tensor]:
    """Positions in the own high-tier slots of each head, -1 where there is none, in the order of the slots."""
    used, view = state.own_tokens[row, :, :, 0], state.tiers[0]
    rows = torch.tensor([row], device=DEVICE)
    found = []
    for layer in range(state.num_layers):
        for head in range(state.num_heads):
            count = int(used[layer, head])
            each = torch.zeros(1, state.num_layers, state.num_heads, count, dtype=torch.int64, device=DEVICE)
            each[0, layer, head] = torch.arange(count, device=DEVICE)
            page, place = (x[0, layer, head] for x in own_slot_location(state, rows, 0, each))
            found.append(view.positions[page, place])
    return found


TAILED = st.tuples(st.integers(1, 60), st.integers(1, 12), st.integers(0, 3))
"""Tokens of a prompt, its window, and what its tail is shorter than that."""


@settings(max_examples=max(settings().max_examples // 2 - 5, 5), deadline=None)
@given(
    tiers=st.sampled_from(["K8V4 K4V2", "BF16 K8V4", "K8V4", FOUR]),
    alphas=st.sampled_from([(1.0, 0.2), (3.0, 0.0), (0.0, 0.0), (9e9, 9e9), (9e9, 0.0)]),
    prompts=st.lists(TAILED, min_size=1, max_size=3),
    before=st.integers(0, 9),
    first=st.integers(0, 30),
    seed=st.integers(0, 99),
)
def test_a_tail_begins_a_page_of_its_own(tiers, alphas, prompts, before, first, seed):
    """Rows behind a prefix of ``before`` tokens that is frozen, the first of them compacted after a chunk of ``first``:
    the tail is what it was, the tokens before it as without one, and a freeze parts them."""
    page_tokens, window = 4, max(window for _, window, _ in prompts)
    policy = with_between(diffkv_policy(*alphas, window=window), len(tiers.split()))
    manager = make_manager(make_format(tiers, page_tokens=page_tokens), pages=900, window=window)
    generator, state = torch.Generator().manual_seed(seed), manager.state
    state.counters += 890  # the ring wraps
    cuts, workspace = cuts_of(policy, state), PromptWorkspace.create(state)
    ends, tails = [], []
    for row, (count, _, less) in zip((4, 1, 6), prompts):
        held = 0
        if before:
            add_prompt(manager, row, before, generator, compact=False)
            manager.device.freeze({row: 0})
            held = before
        if row == 4 and first:
            add_prompt(manager, row, first, generator, compact=False)
            held += first
            compact_prompts(state, *ends_of((row, held)), workspace, cuts)
        add_prompt(manager, row, count, generator, compact=False)
        ends.append((row, held + count))
        tails.append(min(max(window - less, 0), held + count - before))
        manager.device.space.extend(row, (1, *(0 for _ in state.tiers[1:])))
    manager.device.space.flush()
    twin, plain = clone_state(state), clone_state(state)
    kept = torch.tensor(tails, device=DEVICE)
    compact_prompts(state, *ends_of(*ends), workspace, cuts, kept)
    specification(twin, *ends_of(*ends), cuts, kept)
    specification(plain, *ends_of(*ends), cuts)
    for name in ("entries", "own_tokens", "hole", "fault"):
        assert torch.equal(getattr(state, name), getattr(twin, name)), name
    assert state.counters.diff() == twin.counters.diff()
    for (row, end), tail in zip(ends, tails, strict=True):
        for got, expected, without in zip(*(stored_in_order(x, row) for x in (state, twin, plain)), strict=True):
            assert torch.equal(got, expected)
            front, back = without[: len(without) - tail], without[len(without) - tail :]
            gap = -len(front) % page_tokens if tail else 0
            assert torch.equal(got, torch.cat([front, front.new_full((gap,), -1), back]))
            assert torch.equal(back, torch.arange(end - tail, end, device=DEVICE).int())
        for layer, tier in itertools.product(range(2), range(len(state.tiers))):
            both = zip(*(tokens_of(x, row, layer, tier) for x in (state, twin, plain)), strict=True)
            for got, expected, without in both:
                assert all(torch.equal(a, b) for a, b in zip(expected, without, strict=True))
                assert torch.equal(got[0], expected[0]) and torch.equal(got[3], expected[3])
                for a, b in zip(got[1:3], expected[1:3], strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-3, atol=5e-3)
    manager.device.freeze({row: tail for (row, _), tail in zip(ends, tails, strict=True)})
    for (row, end), tail in zip(ends, tails, strict=True):
        assert (state.own_tokens[row, ..., 0] == tail).all() and not state.own_tokens[row, ..., 1:].any()
        for positions in stored_in_order(state, row):
            assert torch.equal(positions, torch.arange(end - tail, end, device=DEVICE).int())
    check_integrity(manager)


@pytest.mark.parametrize(("count", "window", "tail"), [(40, 8, 13), (41, 8, 9), (12, 3, 12), (33, 1, 16)])
def test_a_tail_longer_than_the_window_stays(count, window, tail):
    """Where the prefix cache takes whole pages only: what is over them is in the tail, and stays whatever its score."""
    policy = diffkv_policy(9e9, 0.0, window=window)
    manager = make_manager(make_format("K8V4 K4V2", page_tokens=4), pages=400, window=window)
    generator, state = torch.Generator().manual_seed(count), manager.state
    cuts, workspace, ends = cuts_of(policy, state), PromptWorkspace.create(state), [(2, count), (1, count)]
    for row, _ in ends:
        add_prompt(manager, row, count, generator, compact=False)
        manager.device.space.extend(row, (1, 0))
    manager.device.space.flush()
    twin, tails = clone_state(state), torch.tensor([tail, tail], device=DEVICE)
    compact_prompts(state, *ends_of(*ends), workspace, cuts, tails)
    specification(twin, *ends_of(*ends), cuts, tails)
    for name in ("entries", "own_tokens", "hole", "fault"):
        assert torch.equal(getattr(state, name), getattr(twin, name)), name
    assert (state.own_tokens[[2, 1], ..., 1] == count - tail).all()
    manager.device.freeze(dict.fromkeys((2, 1), tail))
    for row, end in ends:
        for positions in stored_in_order(state, row):
            assert torch.equal(positions, torch.arange(end - tail, end, device=DEVICE).int())
        for layer in range(state.num_layers):
            for got, expected in zip(tokens_of(state, row, layer, 0), tokens_of(twin, row, layer, 0), strict=True):
                assert len(got[0]) == tail and all(map(torch.equal, got, expected))
    check_integrity(manager)


@pytest.mark.parametrize("alphas", [(1.0, 0.2), (9e9, 0.0)])
def test_a_head_has_more_pages_than_programs(alphas):
    policy = diffkv_policy(*alphas, window=5)
    manager = make_manager(make_format("K8V4 K4V2", page_tokens=4), pages=120, layers=1, heads=1, window=5)
    count = 4 * PARTS * 2 + 30
    add_prompt(manager, 1, count, torch.Generator().manual_seed(3), compact=False)
    state = manager.state
    twin, cuts = clone_state(state), cuts_of(policy, state)
    compact_prompts(state, *ends_of((1, count)), PromptWorkspace.create(state), cuts)
    reference(twin, 1, count, cuts)
    check_integrity(manager)
    for tier in range(2):
        ((got, expected),) = zip(tokens_of(state, 1, 0, tier), tokens_of(twin, 1, 0, tier), strict=True)
        assert len(got[0]) and torch.equal(got[0], expected[0]) and torch.equal(got[3], expected[3])
        for a, b in zip(got[1:3], expected[1:3], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=5e-3)


@pytest.mark.parametrize("tiers", ["K8V4 K4V2", pytest.param(FOUR, marks=FULL)])
def test_a_second_chunk_joins_what_went_down(tiers):
    policy = with_between(diffkv_policy(1.0, 0.0, window=5), len(tiers.split()))
    manager = make_manager(make_format(tiers, page_tokens=4), pages=160, window=5)
    generator = torch.Generator().manual_seed(3)
    state, workspace = manager.state, PromptWorkspace.create(manager.state)
    for end, count in ((30, 30), (47, 17), (61, 14)):
        add_prompt(manager, 1, count, generator, compact=False)
        twin = clone_state(state)
        compact_prompts(state, *ends_of((1, end)), workspace, cuts_of(policy, state))
        reference(twin, 1, end, cuts_of(policy, twin))
        check_integrity(manager)
        for name in ("entries", "own_tokens", "hole", "fault"):
            assert torch.equal(getattr(state, name), getattr(twin, name)), name
        for layer in range(2):
            for tier in range(len(state.tiers)):
                for got, expected in zip(
                    tokens_of(state, 1, layer, tier), tokens_of(twin, 1, layer, tier), strict=True
                ):
                    assert torch.equal(got[0], expected[0]) and torch.equal(got[3], expected[3])
                    for a, b in zip(got[1:3], expected[1:3], strict=True):
                        torch.testing.assert_close(a, b, rtol=1e-3, atol=5e-3)
    assert state.own_tokens[1].all()


@pytest.mark.parametrize("tiers", ["K8V4 K4V2", THREE])
def test_without_spare_pages_nothing_is_demoted(tiers):
    manager = make_manager(make_format(tiers, page_tokens=4), pages=48, layers=2, heads=2)
    add_prompt(manager, 1, 48, torch.Generator().manual_seed(3), compact=False)
    assert manager.device.free_pages() == 0
    policy, state = with_between(diffkv_policy(9e9, 0.0, window=4), len(manager.fmt.tiers)), manager.state
    before = clone_state(state)
    compact_prompts(state, *ends_of((1, 48)), PromptWorkspace.create(state), cuts_of(policy, state))
    assert manager.device.free_pages() == 0 and not manager.state.own_tokens[..., 1:].any()
    check_integrity(manager)
    assert_high_tokens_as_in(before, state, row=1)


def test_a_row_with_a_fault_keeps_its_tokens_as_they_are():
    manager = make_manager(make_format("K8V4 K4V2", page_tokens=4), pages=80, layers=2, heads=2)
    add_prompt(manager, 1, 48, torch.Generator().manual_seed(3), compact=False)
    state, policy = manager.state, diffkv_policy(9e9, 0.0, window=4)
    state.fault[1] = 1
    before = clone_state(state)
    compact_prompts(state, *ends_of((1, 48)), PromptWorkspace.create(state), cuts_of(policy, state))
    assert_high_tokens_as_in(before, state, row=1)


@pytest.mark.parametrize("tiers", ["BF16 K8V4 K4V2", "K8V4 K4V6 K2V2"])
def test_tokens_for_a_tier_without_a_spare_page_stay_as_they_are(tiers):
    """Others go down beside them: the first heads have a spare page of the middle tier, no head one of the lowest."""
    manager = make_manager(make_format(tiers, page_tokens=4), pages=51, layers=2, heads=2)
    add_prompt(manager, 1, 48, torch.Generator().manual_seed(3), compact=False)
    assert manager.device.free_pages() == 3
    policy, state = with_between(diffkv_policy(9e9, 0.0, window=4), len(manager.fmt.tiers)), manager.state
    policy = replace(policy, alpha_high=3.0, alpha_between=(0.7,))
    before = clone_state(state)
    compact_prompts(state, *ends_of((1, 48)), PromptWorkspace.create(state), cuts_of(policy, state))
    check_integrity(manager)
    counts = state.own_tokens[1].flatten(0, 1)
    assert (counts.sum(1) == 48).all() and (counts[:3, 1] > 0).all() and not counts[3, 1] and not counts[:, 2].any()
    for layer in range(2):
        for got, old in zip(tokens_of(state, 1, layer, 0), tokens_of(before, 1, layer, 0), strict=True):
            kept = got[0].long()  # positions, which are places among the old ones
            assert len(kept) > 4 and all(torch.equal(a, b[kept]) for a, b in zip(got, old, strict=True))


def assert_high_tokens_as_in(before: PageState, state: PageState, row: int) -> None:
    """The high tier has the same tokens, bit for bit."""
    for layer in range(state.num_layers):
        for got, expected in zip(tokens_of(state, row, layer, 0), tokens_of(before, row, layer, 0), strict=True):
            assert len(got[0]) and all(map(torch.equal, got, expected))


@settings(max_examples=max(settings().max_examples // 5, 4), deadline=None)
@given(
    tiers=st.sampled_from(["K8V4 K4V2", "BF16 K8V4", "K8V4", FOUR]),
    alphas=st.sampled_from([(1.0, 0.2), (3.0, 0.0), (0.0, 0.0), (9e9, 9e9)]),
    lengths=st.lists(st.integers(1, 40), min_size=2, max_size=4),
    before=st.integers(0, 20),
    faulty=st.booleans(),
    seed=st.integers(0, 99),
)
def test_rows_together_are_each_as_alone(tiers, alphas, lengths, before, faulty, seed):
    """Against the reference and one after the other; the first row was compacted after a chunk, one may have a fault,
    and a row holds nothing."""
    policy = with_between(diffkv_policy(*alphas, window=5), len(tiers.split()))
    manager = make_manager(make_format(tiers, page_tokens=4), pages=700, window=5)
    generator, state = torch.Generator().manual_seed(seed), manager.state
    state.counters += 690  # the ring wraps
    cuts, workspace = cuts_of(policy, state), PromptWorkspace.create(state)
    rows = [4, 1, 6, 2][: len(lengths)]
    if before:
        add_prompt(manager, rows[0], before, generator, compact=False)
        compact_prompts(state, *ends_of((rows[0], before)), workspace, cuts)
    for row, count in zip(rows, lengths, strict=True):
        add_prompt(manager, row, count, generator, compact=False)
    ends = [(row, count + before * (row == rows[0])) for row, count in zip(rows, lengths, strict=True)]
    state.fault[rows[-1]] = int(faulty)
    twin, alone = clone_state(state), clone_state(state)
    compact_prompts(state, *ends_of((3, 0), *ends), workspace, cuts)
    for end in ends:
        compact_prompts(alone, *ends_of(end), workspace, cuts)
    sound = ends_of(*(ends[:-1] if faulty else ends))
    specification(twin, *sound, cuts)
    for name in ("entries", "own_tokens", "hole", "fault"):
        assert torch.equal(getattr(state, name), getattr(twin, name)), name
        assert torch.equal(getattr(state, name), getattr(alone, name)), name
    assert state.counters.diff() == twin.counters.diff() == alone.counters.diff()
    for row, layer, tier in itertools.product(rows, range(2), range(len(state.tiers))):
        for got, other, expected in zip(*(tokens_of(x, row, layer, tier) for x in (state, alone, twin)), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, other, strict=True))
            assert torch.equal(got[0], expected[0]) and torch.equal(got[3], expected[3])
            for a, b in zip(got[1:3], expected[1:3], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=5e-3)
    state.fault.zero_()
    check_integrity(manager)


def test_one_prepared_compaction_serves_any_rows() -> None:
    """Of any number, and by cuts of one form. So do those that one set of ops keeps, with tails and without."""
    manager = make_manager(make_format("K8V4 K4V2", page_tokens=4), pages=900, layers=2, heads=2)
    generator, state = torch.Generator().manual_seed(3), manager.state
    workspace = PromptWorkspace.create(state)
    policies = (diffkv_policy(1.0, 0.2, window=5), diffkv_policy(2.0, 0.0, window=9))
    again = prepare_compact(state, workspace, cuts_of(policies[0], state), tailed=False)
    for rows, counts, policy in (([1], [40], 0), ([2, 3, 4], [70, 33, 90], 0), ([5, 6], [50, 77], 1), ([7], [41], 0)):
        for row, count in zip(rows, counts, strict=True):
            add_prompt(manager, row, count, generator, compact=False)
        twin = clone_state(state)
        ends = ends_of(*zip(rows, counts, strict=True))
        again(*ends, cuts_of(policies[policy], state))
        specification(twin, *ends, cuts_of(policies[policy], twin))
        for name in ("entries", "own_tokens", "hole", "fault"):
            assert torch.equal(getattr(state, name), getattr(twin, name)), name
        check_integrity(manager)


def test_rows_together_share_few_spare_pages():
    """Those that get none keep their tokens in the high tier, and no page is lost."""
    manager = make_manager(make_format("K8V4 K4V2", page_tokens=4), pages=100, layers=2, heads=2)
    generator, state = torch.Generator().manual_seed(3), manager.state
    for row in (1, 2):
        add_prompt(manager, row, 48, generator, compact=False)
    assert manager.device.free_pages() == 4  # one for each head of one row
    policy = diffkv_policy(9e9, 0.0, window=4)
    compact_prompts(state, *ends_of((2, 48), (1, 48)), PromptWorkspace.create(state), cuts_of(policy, state))
    assert state.own_tokens[2, ..., 1].all() and not state.own_tokens[1, ..., 1].any()
    check_integrity(manager)


def test_without_a_spare_page_a_tail_begins_where_the_rest_ends():
    """No token and no page is lost, and a freeze then takes all."""
    manager = make_manager(make_format("K8V4 K4V2", page_tokens=4), pages=100, layers=2, heads=2)
    generator, state = torch.Generator().manual_seed(3), manager.state
    for row in (1, 2):
        add_prompt(manager, row, 48, generator, compact=False)
        manager.device.space.extend(row, (1, 0))
    manager.device.space.flush()
    policy = diffkv_policy(9e9, 0.0, window=5)
    tails = torch.tensor([5, 5], device=DEVICE)
    compact_prompts(state, *ends_of((2, 48), (1, 48)), PromptWorkspace.create(state), cuts_of(policy, state), tails)
    # four spare pages in all: the low tier of the first row has them
    assert state.own_tokens[2].unique().tolist() == [5, 43]
    assert (state.own_tokens[1, ..., 0] == 48).all()
    manager.device.freeze({1: 5, 2: 5})
    assert (state.own_tokens[2, ..., 0] == 5).all() and not state.own_tokens[1].any()
    check_integrity(manager)
