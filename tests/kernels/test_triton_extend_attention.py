"""The Triton extend attention and prompt scores against the reference."""

from __future__ import annotations

import pytest
import torch

from sglang_diffkv.kernels.append.reference import append
from sglang_diffkv.kernels.extend_attention.reference import extend_attention as reference
from sglang_diffkv.kernels.extend_attention.triton import extend_attention
from tests.helpers import begin_step
from tests.kernels.triton_helpers import (
    BF16,
    DEVICE,
    FOUR,
    THREE,
    add_prompt,
    clone_state,
    close,
    held_pages,
    make_format,
    make_manager,
    vectors,
)

CASES = [
    # tiers, head_dim, v_head_dim, query heads of a KV head, prefixes, new tokens, logit cap
    ("K8V4 K4V2", 64, 64, 4, (45, 0, 13), (9, 70, 1), 0.0),
    ("K8V4 K4V2", 96, 128, 3, (20, 33, 0), (5, 2, 11), 0.0),
    ("K8V2 K4V1", 128, 64, 1, (30, 0, 5), (3, 8, 20), 3.0),
    ("BF16 K8V4", 64, 64, 5, (40, 7, 0), (6, 18, 3), 0.0),
    ("K8V4", 64, 64, 7, (0, 0, 0), (21, 1, 13), 0.0),
    (FOUR, 64, 64, 2, (45, 0, 33), (9, 12, 1), 0.0),
    ("K6V3 K3V2", 256, 96, 2, (20, 33, 0), (5, 2, 11), 0.0),
    pytest.param(THREE, 64, 96, 3, (20, 53, 0), (5, 2, 11), 2.0, marks=pytest.mark.full),
]


WINDOWS = [
    (None, 0), ((0, 0, 0), 0), ((48, 30, 13), 0), ((54, 200, 9), 0),
    ((48, 30, 13), 4), ((54, 200, 9), 3), ((9, 66, 0), 2),
]  # fmt: skip
"""Position of each request from which on all observe: from the first on; from new tokens on; in the prefix; behind
all. And every Nth of those before."""


@pytest.mark.cover(2)
@pytest.mark.parametrize("reduce", ["max", "mean"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("tiers", "dim", "v_dim", "group", "prefix", "new", "cap"), CASES)
def test_matches_reference(tiers, dim, v_dim, group, prefix, new, cap, window, reduce):
    since, every = window
    manager = make_manager(make_format(tiers, dim, v_dim), window=4, heads=1, layers=1)
    generator = torch.Generator().manual_seed(dim + group)
    state, owners, layer = manager.state, [2, 6, 3], 0
    for row, count in zip(owners, prefix, strict=True):
        add_prompt(manager, row, count, generator, compact=row != 3)
    begin_step(manager, owners, list(new), list(prefix))
    rows, extend_lens, prefix_lens = (torch.tensor(x, device=DEVICE) for x in (owners, new, prefix))
    starts = extend_lens.cumsum(0) - extend_lens
    count = sum(new)
    key, value = vectors(state, count, generator)
    q = torch.randn(count, state.num_heads * group, dim, generator=generator).to(DEVICE, BF16)
    owner = rows.repeat_interleave(extend_lens)
    offset = torch.arange(count, device=DEVICE) - starts.repeat_interleave(extend_lens)
    append(state, layer, key, value, owner, offset, offset + prefix_lens.repeat_interleave(extend_lens))
    twin = clone_state(state)
    scale = 0.5 / dim**0.5
    observation = {
        "reduce": reduce,
        "observe_from": None if since is None else torch.tensor(since, device=DEVICE),
        "observe_every": every,
    }
    out, lse = extend_attention(
        state, layer, q, key, value, rows, starts, extend_lens, prefix_lens, max(new), max(prefix), scale,
        update_scores=True, logit_cap=cap, **observation,
    )  # fmt: skip
    expected = reference(
        twin, layer, q, key, value, rows, extend_lens, prefix_lens, scale, update_scores=True, logit_cap=cap,
        **observation,
    )  # fmt: skip
    assert lse.isfinite().all()
    assert close(out, expected) < 6e-3
    for tier, (view, ref) in enumerate(zip(state.tiers, twin.tiers, strict=True)):
        pages = held_pages(twin, rows, tier)
        held = (ref.positions[pages] >= 0) & (ref.positions[pages] < 200)
        if held.any():
            assert close(view.scores[pages][held], ref.scores[pages][held]) < 1e-2
            torch.testing.assert_close(view.scores[pages][held], ref.scores[pages][held], rtol=3e-2, atol=2e-4)


def test_part_from_another_kernel():
    manager = make_manager(make_format("K8V4 K4V2"), window=4, heads=1, layers=1)
    generator = torch.Generator().manual_seed(0)
    add_prompt(manager, 1, 30, generator)
    begin_step(manager, [1], [6], [30])
    state, one = manager.state, torch.tensor([1], device=DEVICE)
    key, value = vectors(state, 6, generator)
    q = torch.randn(6, 2, 64, generator=generator).to(DEVICE, BF16)
    new, prefix, start = one * 6, one * 30, one * 0
    arguments = (state, 0, q, key, value, one, start, new, prefix, 6)
    expected, _ = extend_attention(*arguments, 30, 0.1)
    alone = extend_attention(*arguments, 0, 0.1)
    got, _ = extend_attention(*arguments, 30, 0.1, new_part=alone)
    assert close(got, expected) < 2e-3, "the other part was rounded"


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 4.0])], ids=["", "sinks"])
def test_a_prefix_rounds_no_more_than_new_tokens(sinks):
    """Tokens of a raw tier: over some in pages and some new the output errs as over new ones alone, which is rounded
    once, with attention sinks too."""
    sinks = None if sinks is None else sinks.to(DEVICE)
    manager = make_manager(make_format("BF16"), heads=1, layers=1)
    generator = torch.Generator().manual_seed(0)
    begin_step(manager, [1, 2], [90, 60], [0, 0])
    state = manager.state
    key, value = vectors(state, 90, generator)
    q = torch.randn(90, 4, 64, generator=generator).to(DEVICE, BF16)
    rows, all_at = (torch.tensor(x, device=DEVICE) for x in ([1], list(range(90))))
    zero, count = rows * 0, rows * 90
    append(state, 0, key, value, rows.expand(90), all_at, all_at)
    alone, _ = extend_attention(state, 0, q, key, value, rows, zero, count, zero, 90, 0, 0.1, sink_logits=sinks)
    rows = rows + 1
    append(state, 0, key[:60], value[:60], rows.expand(60), all_at[:60], all_at[:60])
    begin_step(manager, [2], [30], [60])
    append(state, 0, key[60:], value[60:], rows.expand(30), all_at[60:], all_at[:30])
    parts = (q[60:], key[60:], value[60:], rows, zero, zero + 30, zero + 60, 30, 60, 0.1)
    behind, _ = extend_attention(state, 0, *parts, sink_logits=sinks)
    logits = torch.einsum("qhd,kd->hqk", q.double(), key[:, 0].double()) * 0.1
    logits.masked_fill_(torch.ones(90, 90, dtype=torch.bool, device=DEVICE).triu(1), -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.double().view(4, 1, 1).expand(4, 90, 1)], 2)
    exact = torch.einsum("hqk,kd->qhd", logits.softmax(2)[..., :90], value[:, 0].double())[60:]
    errors = [float((out.double() - exact).norm() / exact.norm()) for out in (alone[60:], behind)]
    limit = 4e-3 if sinks is None else 2.5e-3  # the interpreter cuts off where it rounds; sinks are joined by torch
    assert errors[1] < 1.1 * errors[0] < limit


def test_part_from_another_kernel_without_a_prefix():
    """It is the result, and what the scores are computed from; queries may be a slice of a projection."""
    manager = make_manager(make_format("K8V4 K4V2"), window=4, heads=1, layers=1)
    generator = torch.Generator().manual_seed(0)
    begin_step(manager, [1], [20], [0])
    state, one = manager.state, torch.tensor([1], device=DEVICE)
    key, value = vectors(state, 20, generator)
    q = torch.randn(20, 2, 64, generator=generator).to(DEVICE, BF16)
    positions = torch.arange(20, device=DEVICE)
    append(state, 0, key, value, one.expand(20), positions, positions)
    twin = clone_state(state)
    arguments = (key, value, one, one * 0, one * 20, one * 0, 20, 0, 0.1)
    part = extend_attention(state, 0, q, *arguments, update_scores=True)
    fused = torch.full((20, 5, 64), torch.nan, dtype=BF16, device=DEVICE)
    fused[:, 1:3] = q
    out, lse = extend_attention(twin, 0, fused[:, 1:3], *arguments, update_scores=True, new_part=part)
    assert torch.equal(out, part[0]) and torch.equal(lse, part[1])
    pages = held_pages(state, one, 0)
    held = (state.tiers[0].positions[pages] >= 0) & (state.tiers[0].positions[pages] < 20)
    scores, again = (x.tiers[0].scores[pages][held] for x in (state, twin))
    assert len(scores) == 20 and (scores > 0).sum() == 19 and torch.equal(scores, again), (
        "the last token has no later one"
    )


@pytest.mark.parametrize("dim", [128, *(pytest.param(dim, marks=pytest.mark.full) for dim in (64, 96, 256))])
def test_pages_of_a_large_model(dim):
    """Pages of 32 tokens, low tiles of 64 with an odd number of tokens."""
    manager = make_manager(make_format("K8V4 K4V2", dim, page_tokens=32), window=16, heads=2, layers=1)
    generator, new, prefix = torch.Generator().manual_seed(1), (70, 1), (300, 0)
    add_prompt(manager, 1, 300, generator)
    begin_step(manager, [1, 2], list(new), list(prefix))
    state, twin = manager.state, clone_state(manager.state)
    rows, extend_lens, prefix_lens = (torch.tensor(x, device=DEVICE) for x in ((1, 2), new, prefix))
    key, value = vectors(state, 71, generator)
    q = torch.randn(71, 8, dim, generator=generator).to(DEVICE, BF16)
    starts = extend_lens.cumsum(0) - extend_lens
    out, _ = extend_attention(
        state, 0, q, key, value, rows, starts, extend_lens, prefix_lens, 70, 300, 0.1, update_scores=True
    )
    expected = reference(twin, 0, q, key, value, rows, extend_lens, prefix_lens, 0.1, update_scores=True)
    assert int(state.entries[1, ..., 1].max()) > 1, "the prefix has low pages"
    assert close(out, expected) < 6e-3
    for tier, (view, ref) in enumerate(zip(state.tiers, twin.tiers, strict=True)):
        pages = held_pages(twin, rows, tier)
        held = (ref.positions[pages] >= 0) & (ref.positions[pages] < 400)
        torch.testing.assert_close(view.scores[pages][held], ref.scores[pages][held], rtol=3e-2, atol=2e-4)


@pytest.mark.cover(1)
@pytest.mark.parametrize("since", [None, 70, 80, 88])
@pytest.mark.parametrize("tiers", ["K8V4 K4V2", "BF16 K8V4"])
def test_shared_tokens_are_judged_for_a_copy(tiers, since):
    """Two chunks of a prompt after a shared prefix: scores go to the request's own, pages stay as they are. Queries
    observe from the shared part on, from the first chunk, or from the second."""
    manager = make_manager(make_format(tiers), window=4, heads=2, layers=1)
    generator = torch.Generator().manual_seed(2)
    add_prompt(manager, 1, 85, generator)
    segment = manager.segments.share(1, 0, 85)
    assert segment is not None
    manager.attach_prefix(2, [(segment, 0, 77)])
    shared_scores = {1: torch.full((1, 2, 77), float("nan"), device=DEVICE)}
    expected = {1: shared_scores[1].clone()}
    at = 77
    for count in (9, 5):
        begin_step(manager, [3, 2], [4, count], [manager.rows.length(3), at])
        state = manager.state
        key, value = vectors(state, 4 + count, generator)
        q = torch.randn(4 + count, 4, 64, generator=generator).to(DEVICE, BF16)
        rows, extend_lens, prefix_lens = (
            torch.tensor(x, device=DEVICE) for x in ((3, 2), (4, count), (manager.rows.length(3) - 4, at))
        )
        starts = extend_lens.cumsum(0) - extend_lens
        owner = rows.repeat_interleave(extend_lens)
        offset = torch.arange(4 + count, device=DEVICE) - starts.repeat_interleave(extend_lens)
        append(state, 0, key, value, owner, offset, offset + prefix_lens.repeat_interleave(extend_lens))
        twin = clone_state(state)
        kept = state.tiers[0].scores[held_pages(state, torch.tensor([segment.row], device=DEVICE), 0)]
        settings = {"update_scores": True, "reduce": "max" if since is None else "mean"}
        if since is not None:
            settings["observe_from"] = torch.tensor([0, since], device=DEVICE)
        extend_attention(
            state, 0, q, key, value, rows, starts, extend_lens, prefix_lens, max(4, count), at, 0.1,
            shared_scores=shared_scores, **settings,
        )  # fmt: skip
        reference(twin, 0, q, key, value, rows, extend_lens, prefix_lens, 0.1, shared_scores=expected, **settings)
        torch.testing.assert_close(shared_scores[1], expected[1], rtol=3e-2, atol=2e-4, equal_nan=True)
        after = state.tiers[0].scores[held_pages(state, torch.tensor([segment.row], device=DEVICE), 0)]
        assert torch.equal(kept.view(torch.int32), after.view(torch.int32)), "a page that others read was written"
        at += count
    assert shared_scores[1].isfinite().float().mean() > 0.5
