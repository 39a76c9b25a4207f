"""Reserve, decide and compact in Triton against the references, over decode steps with everything switched on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_diffkv.kernels.allocate.reference import reserve as reserve_reference
from sglang_diffkv.kernels.allocate.triton import reserve
from sglang_diffkv.kernels.append.reference import append, read_tokens
from sglang_diffkv.kernels.compact_step.reference import compact_step as compact_reference
from sglang_diffkv.kernels.compact_step.reference import step_moves
from sglang_diffkv.kernels.compact_step.triton import CompactWorkspace, compact_step
from sglang_diffkv.kernels.decode_attention.reference import StepScores
from sglang_diffkv.kernels.decode_attention.triton import FoundTokens
from sglang_diffkv.kernels.decode_attention.triton_workspace import DecodeConfig
from sglang_diffkv.kernels.table import max_entries, row_table
from sglang_diffkv.layout.state import PageState
from sglang_diffkv.mem_pool.integrity import check_integrity
from sglang_diffkv.ops.decisions import Decisions
from sglang_diffkv.policies.budget import Budget
from sglang_diffkv.policies.leankv import LeanKVPolicy
from tests.kernels.triton_helpers import (
    DEVICE,
    FOUR,
    THREE,
    add_prompt,
    clone_state,
    held_pages,
    make_format,
    make_manager,
    scaled,
    vectors,
)
from tests.policies import h2o_policy, leankv_policy

COUNTS = ("entries", "own_tokens", "hole", "write_slot", "fault", "counters")


def assert_same(state: PageState, twin: PageState, rows: torch.Tensor) -> None:
    """Equal, up to roundings of requantised tokens."""
    for name in COUNTS:
        assert torch.equal(
            getattr(state, name)[rows] if name != "counters" else state.counters,
            getattr(twin, name)[rows] if name != "counters" else twin.counters,
        ), name
    for tier in range(len(state.tiers)):
        width = max_entries(twin, rows, tier)
        (page, lo, hi), (ref_page, ref_lo, ref_hi) = (
            row_table(state, rows, tier, width),
            row_table(twin, rows, tier, width),
        )
        assert torch.equal(page, ref_page) and torch.equal(lo, ref_lo) and torch.equal(hi, ref_hi)
        view, ref = state.tiers[tier], twin.tiers[tier]
        used = (hi > 0).unsqueeze(4)
        position = view.positions[page]
        assert torch.equal(position * used, ref.positions[ref_page] * used)
        held = used & (position >= 0)
        slot = torch.arange(view.layout.tokens, device=DEVICE).expand(held.shape)
        at, ref_at = page.unsqueeze(4).expand(held.shape), ref_page.unsqueeze(4).expand(held.shape)
        for got, expected in zip(read_tokens(view, at, slot), read_tokens(ref, ref_at, slot), strict=True):
            torch.testing.assert_close(got[held], expected[held], rtol=1e-3, atol=1e-3)
        assert torch.equal(view.scores[at, slot][held], ref.scores[ref_at, slot][held])


def pack(scores: StepScores, found: FoundTokens) -> None:
    """Reference searches as the kernels hand them over, in the last part."""
    slots = torch.cat([scores.candidate_slot.unsqueeze(3), scores.least_slot], 3)
    value = torch.cat([scores.candidate_score.unsqueeze(3), scores.least_score], 3)
    bits = value.float().view(torch.int32).long()
    packed = torch.where(slots >= 0, (bits << 32) | slots.clamp(min=0), 2**63 - 1)
    found.packed[: slots.shape[0], ..., -1] = packed


def searches(state: PageState, rows: torch.Tensor, length: int, window: int, generator: torch.Generator) -> StepScores:
    """Random scores for the slots that a search would find."""
    result = StepScores.create(state, rows.shape[0])
    for tier in range(len(state.tiers)):
        used = state.own_tokens[rows, :, :, tier]
        pick = (torch.rand(used.shape, generator=generator).to(DEVICE) * used).long()
        present = used > window if tier == 0 else used > 0
        if tier == 0:
            other = (pick + 1) % used.clamp(min=1)
            gap = state.hole[rows]
            usable = present & (pick != gap) & (other != gap)
            newest = state.write_slot[rows]
            usable &= (pick != newest) & (other != newest)
            result.candidate_slot = torch.where(usable, pick, -1)
            result.candidate_score = torch.rand(used.shape, generator=generator).to(DEVICE) * 2.4 / length
            result.least_slot[..., 0] = torch.where(usable, other, -1)
        else:
            result.least_slot[..., tier] = torch.where(present, pick, -1)
        result.least_score[..., tier] = torch.rand(used.shape, generator=generator).to(DEVICE) * 1.8 / length
    return result


@pytest.mark.parametrize(
    ("tiers", "scales"),
    [
        ("K8V4 K4V2", False), ("BF16 K8V4", False), ("K8V4", False), ("K8V2 K4V1", False), ("K8V4 K4V2", True),
        ("K8V4", True), ("K8V4", Budget(20, 0.5)), ("K8V4 K4V2", Budget(12)),
        pytest.param(THREE, True, marks=pytest.mark.full), (FOUR, False),
        ("K8V4 K4V2", leankv_policy(0.05, 0.01, 4)), ("K8V4", leankv_policy(0.05, 0.02, 4)),
    ],
)  # fmt: skip
def test_steps_match_references(tiers, scales):
    """``scales``: DiffKV's thresholds, with a factor of each head; or a budget, or LeanKV's shares."""
    steps_match(tiers, scales, 14)


@pytest.mark.parametrize(
    ("tiers", "scales"),
    [("K8V4 K4V2", True), ("K8V4", Budget(20, 0.5)), (THREE, False), ("K8V4", leankv_policy(0.05, 0.02, 4))],
)
def test_a_row_that_keeps_all_beside_others(tiers, scales):
    """No token of row 1 moves, whatever its score, by the kernels that move those of row 3."""
    steps_match(tiers, scales, 4, keeps=True)


def steps_match(tiers: str, scales: Any, steps: int, *, keeps: bool = False) -> None:
    manager = make_manager(make_format(tiers, 96, 64, page_tokens=4), pages=150, window=4)
    generator = torch.Generator().manual_seed(1)
    add_prompt(manager, 1, 37, generator)
    add_prompt(manager, 2, 30, generator, compact=False)
    manager.release(2)
    add_prompt(manager, 3, 9, generator)
    state = manager.state
    twin = clone_state(state)
    rows = torch.tensor([3, 1, 0], device=DEVICE)
    valid = torch.tensor([2], dtype=torch.int32, device=DEVICE)
    workspace = CompactWorkspace.create(state, 3)
    found = FoundTokens.create(state, 3, DecodeConfig(score_parts=5))
    policy = scaled(manager.policy, state, generator) if scales is True else manager.policy
    if isinstance(scales, Budget):
        policy = h2o_policy(scales, window=4)
    if isinstance(scales, LeanKVPolicy):
        policy = scales
    decisions = Decisions()
    rule = decisions.step(state, policy)
    assert rule is not None
    if keeps:
        decisions.spare_rows(state)
        state.row_sign[1] = -1
    lower = state.own_tokens[1, :, :, 1:].clone()
    for step in range(steps):
        for row in (1, 3):
            manager.space.append(row, 1)
            manager.rows.grow(row, 1, in_prompt=False)
        manager.space.flush()
        new = torch.ones(3, dtype=torch.int64, device=DEVICE)
        reserve(state, rows, new, workspace.spans, valid)
        reserve_reference(twin, rows[:2], new[:2], 1)
        seq_lens = torch.tensor([10 + step, 38 + step, 1], device=DEVICE)
        for layer in range(2):
            key, value = vectors(state, 2, generator)
            for one in (state, twin):
                append(one, layer, key, value, rows[:2], torch.zeros_like(rows[:2]), seq_lens[:2] - 1)
        assert_same(state, twin, rows[:2])
        scores = searches(twin, rows[:2], int(seq_lens[1]), 4, generator)
        found.packed.fill_(2**63 - 1)
        pack(scores, found)
        sums = None
        if isinstance(scales, LeanKVPolicy):
            workspace.sums[:2] = torch.rand(2, 2, 2, generator=generator).to(DEVICE)
            decisions.spare_sums(state, rows, workspace.sums)
            sums = workspace.sums[:2].clone()
        lengths = decisions.lengths(state, rows, seq_lens)
        assert lengths.dtype == seq_lens.dtype and (lengths < 0).tolist() == [False, keeps, False]
        compact_step(state, rows, lengths, found, workspace, valid, rule)
        compact_reference(twin, rows[:2], step_moves(rule, scores, lengths[:2], len(state.tiers), sums))
        assert_same(state, twin, rows[:2])
        state.row_sign[1] = 1  # the row had a compressed prompt, which the check of structures does not expect
        check_integrity(manager)
        state.row_sign[1] = -1 if keeps else 1
        assert not keeps or (torch.equal(state.own_tokens[1, :, :, 1:], lower) and bool((state.hole[1] < 0).all()))
    assert not state.fault.any()


def test_prompt_pages_and_an_empty_ring():
    manager = make_manager(make_format("K8V4 K4V2", page_tokens=4), pages=41, layers=3, heads=2)
    state = manager.state
    state.counters += 29  # the ring wraps
    twin = clone_state(state)
    workspace = CompactWorkspace.create(state, 2)
    rows, valid = torch.tensor([1, 2], device=DEVICE), torch.tensor([2], dtype=torch.int32, device=DEVICE)
    for counts in ([9, 3], [5, 7], [30, 1]):
        for row, count in zip((1, 2), counts, strict=True):
            manager.space.append(row, count)
        manager.space.flush()
        twin.row_blocks.copy_(state.row_blocks)
        new = torch.tensor(counts, device=DEVICE)
        reserve(state, rows, new, workspace.spans, valid)
        reserve_reference(twin, rows, new, max(counts))
        assert torch.equal(state.counters, twin.counters)
        for name in ("entries", "write_slot", "refcount", "page_table", "range_hi", "fault"):
            assert torch.equal(getattr(state, name), getattr(twin, name)), name
    assert state.fault[1] == 1 and int(state.refcount[:-1].sum()) == 41
    ids = held_pages(state, rows, 0)
    assert ids.numel() == 41 and ids.max() < 41
    assert (state.tiers[0].positions[ids] == -1).all()
