"""Scores and searches of steps whose attention is known: the Triton kernel against its reference, and that against
decode attention."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_diffkv.kernels.decode_attention.reference import StepScores, decode_attention
from sglang_diffkv.kernels.decode_attention.triton import FoundTokens
from sglang_diffkv.kernels.decode_attention.triton_workspace import DecodeConfig
from sglang_diffkv.kernels.step_scores import reference, triton
from tests.kernels.triton_helpers import (
    BF16,
    DEVICE,
    FOUR,
    add_prompt,
    clone_state,
    held_pages,
    make_format,
    make_manager,
)
from tests.policies import diffkv_policy

WINDOW, TOKENS, LENGTHS = 8, 5, (61, 9, 33)
SEARCHED = WINDOW - 1
"""Of the prompts all but a window was sorted into tiers; one token leaves this smaller one."""
ALONE = diffkv_policy(1e9, 0.0, WINDOW)
CASES = [
    # tiers, head_dim, query heads of a KV head, page tokens, tile, most programs of a head, what differs
    ("K8V4 K4V2", 64, 4, 8, 16, 3, {}),
    ("K8V4 K4V2", 128, 7, 32, 32, 1, {"sinks": 53, "reduce": "mean"}),
    ("BF16 K8V4", 96, 3, 8, 16, 2, {"horizon": 5}),
    ("K8V4 K4V2", 64, 2, 8, 16, 2, {"every": 3}),
    ("K8V2 K4V1", 64, 1, 16, 16, 2, {"logit_cap": 2.0}),
    ("K6V3 K3V2", 96, 2, 8, 16, 2, {}),
    ("K8V4 K4V2", 64, 3, 8, 16, 2, {"row_windows": (SEARCHED + 1, -1, 5)}),
    pytest.param(FOUR, 256, 2, 8, 16, 2, {"sinks": 2}, marks=pytest.mark.full),
    pytest.param("K8V4", 64, 17, 8, 16, 2, {}, marks=pytest.mark.full),
]


def make(tiers, dim, page_tokens, policy=None):
    manager = make_manager(make_format(tiers, dim, page_tokens=page_tokens), window=WINDOW, policy=policy)
    generator = torch.Generator().manual_seed(dim + page_tokens)
    for row, count in zip((2, 5, 3), LENGTHS, strict=True):
        add_prompt(manager, row, count, generator)
    return manager, generator


def queries(state, group, generator):
    """[L, TOKENS, Hq, D] and their log-sum-exp, base 2, of whatever else they saw."""
    shape = (state.num_layers, TOKENS, state.num_heads * group)
    q = torch.randn(*shape, state.fmt.head_dim, generator=generator)
    return q.to(DEVICE, BF16), torch.randn(*shape, generator=generator).to(DEVICE) + 3.0


def both(manager, generator, group, tile=16, most=2, *, score_low=True, scored=True, layers=range(2), **rule):
    """What the kernel and the reference found, in this order, and their states. The last request is padding."""
    state = manager.state
    twin = clone_state(state)
    q, lse = queries(state, group, generator)
    chosen = torch.tensor([3, 0, 4, 1], device=DEVICE)
    rows = torch.tensor([2, 5, 3, 0], device=DEVICE)
    seq_lens = torch.tensor([*LENGTHS, 1], device=DEVICE)
    config = DecodeConfig(tile=tile, score_parts=most)
    found = FoundTokens.create(state, 4, config, score_low=score_low, scored=scored)
    found.packed[:, layers].random_(0, 100)
    expected = StepScores.create(state, 3, score_low, scored)
    valid = torch.tensor([3], dtype=torch.int32, device=DEVICE)
    scale = 0.3 / state.fmt.head_dim**0.5
    if not scored:
        q, lse = q[:0], lse[:0]
    triton.step_scores(
        state, layers, q, lse, chosen, rows, seq_lens, scale, found, valid, config,
        q_heads=state.num_heads * group, window=SEARCHED, **rule,
    )  # fmt: skip
    reference.step_scores(
        twin, layers, q, lse, chosen[:3], rows[:3], seq_lens[:3], scale, expected, window=SEARCHED, **rule
    )
    return found.unpack(), expected, state, twin


def check(got, expected, state, twin):
    rows = torch.tensor([2, 5, 3], device=DEVICE)
    for tier, (view, ref) in enumerate(zip(state.tiers, twin.tiers, strict=True)):
        if view.scores is None:
            continue
        held = torch.zeros_like(ref.scores, dtype=torch.bool)
        held[held_pages(twin, rows, tier)] = True
        held &= ref.positions[:] >= 0
        torch.testing.assert_close(view.scores[held], ref.scores[held], rtol=3e-2, atol=1e-5)
    assert torch.equal(got.candidate_slot[:3], expected.candidate_slot) and (got.candidate_slot[3:] == -1).all()
    present = expected.candidate_slot >= 0
    assert present.any()
    torch.testing.assert_close(
        got.candidate_score[:3][present], expected.candidate_score[present], rtol=3e-2, atol=1e-5
    )
    present = expected.least_slot >= 0
    assert torch.equal(got.least_slot[:3] >= 0, present) and (got.least_slot[3:] == -1).all()
    torch.testing.assert_close(got.least_score[:3][present], expected.least_score[present], rtol=3e-2, atol=1e-5)


@pytest.mark.parametrize(("tiers", "dim", "group", "page_tokens", "tile", "most", "rule"), CASES)
def test_the_kernel_is_its_reference(tiers, dim, group, page_tokens, tile, most, rule):
    manager, generator = make(tiers, dim, page_tokens)
    if windows := rule.get("row_windows"):
        manager.state.row_window[[2, 5, 3]] = torch.tensor(windows, dtype=torch.int32, device=DEVICE)
        rule = {**rule, "row_windows": manager.state.row_window}
    before = clone_state(manager.state)
    got, expected, state, twin = both(manager, generator, group, tile, most, **rule)
    check(got, expected, state, twin)
    mine, old = (x.pages.view(torch.int16) for x in (state, before))
    assert not torch.equal(mine, old), "scores have changed"


def test_lower_tiers_keep_their_scores_where_nothing_is_pruned():
    manager, generator = make("K8V4 K4V2", 64, 8, diffkv_policy(1.0, 0.0, WINDOW))
    got, expected, state, twin = both(manager, generator, 4, score_low=False)
    check(got, expected, state, twin)
    assert (got.least_slot[..., 1] == -1).all() and (got.least_slot[..., 0] >= 0).any()


def test_a_window_alone_needs_neither_queries_nor_scores():
    manager, generator = make("K8V4 K4V2", 64, 8, ALONE)
    bytes_before = manager.state.pages.view(torch.int16).clone()
    got, expected, state, twin = both(manager, generator, 4, scored=False)
    check(got, expected, state, twin)
    assert torch.equal(bytes_before, state.pages.view(torch.int16))


def test_other_layers_stay_as_they_are():
    manager, generator = make("K8V4 K4V2", 64, 8)
    before = clone_state(manager.state)
    got, expected, state, twin = both(manager, generator, 4, layers=range(1, 2))
    assert torch.equal(got.candidate_slot[:3, 1], expected.candidate_slot[:, 1])
    check(got, expected, state, twin)
    pages = state.page_table[:, 0].unique().long()
    pages = pages[pages > 0]
    assert len(pages) and torch.equal(state.pages[pages].view(torch.int16), before.pages[pages].view(torch.int16)), (
        "layer 0 was touched"
    )


def test_with_the_log_sum_exp_of_what_is_stored_it_is_decode_attention():
    """The reference: the same scores and searches as the attention that has this normaliser."""
    manager, generator = make("K8V4 K4V2", 64, 8)
    state, twin = manager.state, clone_state(manager.state)
    q, lse = queries(state, 4, generator)
    rows, seq_lens = torch.tensor([2, 5, 3], device=DEVICE), torch.tensor(LENGTHS, device=DEVICE)
    one, other = (StepScores.create(state, 3) for _ in range(2))
    for layer in range(2):
        _, norm = decode_attention(twin, layer, q[layer, :3], rows, seq_lens, 0.1, scores=one, window=SEARCHED)
        lse[layer, :3] = norm / math.log(2)
    reference.step_scores(
        state, range(2), q, lse, rows.new_tensor([0, 1, 2]), rows, seq_lens, 0.1, other, window=SEARCHED
    )
    check(other, one, state, twin)
