"""Copy-on-compress in Triton against its reference: two tiers and one, parts of a path, scores of the row's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sglang_diffkv.kernels.copy_compact import reference
from sglang_diffkv.kernels.copy_compact.triton import copy_compact
from sglang_diffkv.kernels.table import max_entries, row_table
from sglang_diffkv.kernels.triton_ring import Spans
from sglang_diffkv.layout.state import PageState
from sglang_diffkv.ops.decisions import Decisions
from sglang_diffkv.policies.diffkv import KEEP
from tests.kernels.triton_helpers import (
    DEVICE,
    FOUR,
    THREE,
    add_prompt,
    clone_state,
    close,
    make_format,
    make_manager,
    scaled,
)

COUNTS = ("entries", "kept_entry", "own_entry", "own_tokens", "hole", "fault", "counters", "refcount", "page_table")
TARGET = 5


def tokens_of(state: PageState, row: int, tier: int) -> list[torch.Tensor]:
    """What a row's table lists in a tier, page ids aside, in order: positions, codes, scores and metadata."""
    rows = torch.tensor([row], device=DEVICE)
    page, lo, hi = row_table(state, rows, tier, max_entries(state, rows, tier))
    view = state.tiers[tier]
    position = view.positions[page]
    live = (position >= lo.unsqueeze(4)) & (position < hi.unsqueeze(4))
    fields = [position, view.keys[page], view.values[page]]
    fields += [x[page] for x in (view.scores, view.key_meta, view.value_meta) if x is not None]
    return [x[live] for x in fields]


@pytest.mark.cover(1)
@pytest.mark.parametrize(("judging", "sinks", "scales"), [(False, 0, False), (True, 0, False), (True, 5, True)])
@pytest.mark.parametrize(
    "tiers, dim, v_dim",
    [
        ("K8V4 K4V2", 64, 64),
        ("BF16 K4V2", 96, 64),
        ("K8V4", 64, 128),
        ("K8V8 K4V1", 128, 128),
        pytest.param(THREE, 64, 96, marks=pytest.mark.full),
        (FOUR, 64, 64),
        ("K6V3 K3V2", 96, 256),
    ],
)
def test_copies_are_the_reference_s(tiers, dim, v_dim, judging, sinks, scales):
    manager = make_manager(make_format(tiers, dim, v_dim, page_tokens=4), pages=300, layers=2, heads=2)
    state, generator = manager.state, torch.Generator().manual_seed(3)
    state.counters += 277  # the ring wraps
    add_prompt(manager, 1, 45, generator)  # compressed: a reply's form
    add_prompt(manager, 2, 23, generator, compact=False)  # exact
    segments = [manager.segments.share(1, 0, 45)]
    manager.space.flush()
    assert segments[0] is not None
    shared_scores = None
    if judging:
        shared_scores = torch.rand(2, 2, 31, generator=generator).to(DEVICE) * 0.2
        shared_scores[:, :, 7:20] = float("nan")
    manager.space.extend(TARGET, (30,) * len(manager.fmt.tiers))
    manager.space.flush()
    twin = clone_state(state)
    policy = replace(manager.policy, sinks=sinks)
    policy = scaled(policy, state, generator) if scales else policy
    spans = Spans.create(state, 1)
    cuts = Decisions().of_parts(state, [], 48, policy, shared_scores)
    for source, lo, hi in ((segments[0].row, 3, 40), (2, 0, 23)):
        copy_compact(state, TARGET, source, lo, hi, 48, spans, cuts, shared_scores=shared_scores)
        reference.copy_compact(twin, TARGET, [(source, lo, hi)], 48, cuts, shared_scores)
        for name in COUNTS:
            assert torch.equal(getattr(state, name), getattr(twin, name)), name
        for tier in range(len(state.tiers)):
            for got, expected in zip(tokens_of(state, TARGET, tier), tokens_of(twin, TARGET, tier), strict=True):
                same = torch.equal(got.view(torch.uint8), expected.contiguous().view(torch.uint8))
                # PyTorch multiplies by the inverse on a GPU where Triton divides: an fp16 number may round otherwise.
                assert same or (got.is_cuda and got.dtype == torch.float16 and close(got, expected) <= 2**-9)
    assert int(state.own_tokens[TARGET].sum()) > 60
    for row in (segments[0].row, 2):
        for tier in range(len(state.tiers)):
            for got, expected in zip(tokens_of(state, row, tier), tokens_of(twin, row, tier), strict=True):
                assert torch.equal(got, expected), "a page that others read was written"


def test_an_empty_ring_raises_the_fault_and_writes_to_nobody() -> None:
    manager = make_manager(make_format("K8V4 K4V2", page_tokens=4), pages=40, layers=2, heads=2)
    state, generator = manager.state, torch.Generator().manual_seed(4)
    add_prompt(manager, 2, 23, generator, compact=False)
    manager.space.extend(TARGET, (30,) * len(manager.fmt.tiers))
    manager.space.flush()
    before = [x.clone() for tier in range(2) for x in tokens_of(state, 2, tier)]
    spans = Spans.create(state, 1)
    copy_compact(state, TARGET, 2, 0, 23, 23, spans, Decisions().of_parts(state, [(2, 0, 23)], 23, KEEP, None))
    copied = int(state.own_tokens[TARGET].sum())
    assert copied == 23 * 4 and int(state.fault[TARGET]) == 1
    after = [x for tier in range(2) for x in tokens_of(state, 2, tier)]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    assert state.counters.tolist() == [40, 40]
