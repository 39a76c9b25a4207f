"""Kernels on pages of every format against the references: tiers with and without scores, and positions, and ranges of
them in the page table, of 16 and 32 bits up to the largest that fit. Unused memory holds NaN."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import sglang_diffkv
from sglang_diffkv.config import load_config
from sglang_diffkv.kernels import launch
from sglang_diffkv.kernels.decode_attention.triton_workspace import DecodeConfig
from sglang_diffkv.layout.page_format import EMPTY
from sglang_diffkv.layout.state import PageState
from sglang_diffkv.ops import Scaling
from sglang_diffkv.ops.base import Step
from sglang_diffkv.ops.decisions import compacts
from sglang_diffkv.ops.reference import ReferenceOps
from sglang_diffkv.ops.triton import TritonOps
from sglang_diffkv.policies.base import Policy
from sglang_diffkv.policies.uniform import UniformPolicy
from tests.kernels.test_triton_compact_step import pack
from tests.kernels.test_triton_copy_compact import tokens_of
from tests.kernels.triton_helpers import (
    BF16,
    DEVICE,
    THREE,
    add_prompt,
    clone_state,
    close,
    make_format,
    make_manager,
)
from tests.policies import diffkv_policy, duo_policy

GROUP, SCALING = 2, Scaling(0.05)
ROWS, COUNTS, NEW = [1, 2, 3], [61, 23, 30], [6, 3, 2]
LAST = 65534
"""The largest position of 16 bits."""

CASES = [
    # tiers, policy, tiers with scores, bytes of a position, the largest position
    ("K8V4 K4V2", diffkv_policy(1.0, 0.0, 6, 2), 1, 2, LAST),
    pytest.param("K8V4 K4V2", diffkv_policy(1.0, 0.2, 6), 2, 2, LAST, marks=pytest.mark.full),
    pytest.param("K8V4 K4V2", diffkv_policy(1e9, 0.0, 6), 0, 2, LAST, marks=pytest.mark.full),
    ("K8V4 K4V2", diffkv_policy(1.0, 0.0, 6, 2), 1, 4, 70_000),
    pytest.param("K8V4 K4V2", diffkv_policy(1.0, 0.0, 6, 2), 1, 2, 32_800, marks=pytest.mark.full),
    (THREE, diffkv_policy(1.5, 0.0, 6, alpha_between=(0.5,)), 2, 2, LAST),
    pytest.param("K6V3 K3V2", diffkv_policy(1.0, 0.2, 6), 2, 2, LAST, marks=pytest.mark.full),
    pytest.param(
        "K7V6 K5V7 K3V5", diffkv_policy(1.5, 0.0, 6, alpha_between=(0.5,)), 2, 2, LAST, marks=pytest.mark.full
    ),
    ("BF16 K4V2", duo_policy(((True, False),), 6, 2, keep_low=True), 0, 2, LAST),
    pytest.param("BF16", UniformPolicy(), 0, 2, LAST, marks=pytest.mark.full),
]


def raise_positions(state: PageState, by: int) -> None:
    """As if as many tokens had been before, and had gone."""
    for view in state.tiers:
        position = view.positions[:]
        view.positions[:] = torch.where(position < 0, EMPTY, position + by)


def same_tokens(state: PageState, twin: PageState, rows: list[int]) -> None:
    """Equal positions in equal order, codes of the high tier, and in lower tiers up to roundings; scores nearly."""
    for row in rows:
        for tier in range(len(state.tiers)):
            got, expected = tokens_of(state, row, tier), tokens_of(twin, row, tier)
            assert torch.equal(got[0], expected[0]), f"positions of row {row} in tier {tier}"
            assert len(got) == len(expected)
            for one, other in zip(got[1:], expected[1:], strict=True):
                if one.dtype == torch.uint8:
                    assert (one.int() - other.int()).abs().sum() <= 0.02 * one.numel()
                else:
                    torch.testing.assert_close(one.float(), other.float(), rtol=3e-2, atol=1e-3)


def take_scores(state: PageState, twin: PageState) -> None:
    """The references' scores of the twin, so that both decide by the same."""
    for view, ref in zip(state.tiers, twin.tiers, strict=True):
        if view.scores is not None and ref.scores is not None:
            view.scores.copy_(ref.scores)


@pytest.mark.parametrize(("tiers", "policy", "scored", "position_bytes", "last"), CASES)
def test_kernels_are_the_references(tiers: str, policy: Policy, scored: int, position_bytes: int, last: int) -> None:
    check_kernels(tiers, policy, scored, position_bytes, last)


def check_kernels(tiers: str, policy: Policy, scored: int, position_bytes: int, last: int) -> None:
    """Raise AssertionError if kernels differ from the references, from the appending of tokens on."""
    fmt = make_format(tiers, 64, 96, page_tokens=8, position_bytes=position_bytes)
    manager = make_manager(fmt, policy=policy, pages=600, layers=1)
    state, generator = manager.state, torch.Generator().manual_seed(5)
    assert [view.scores is not None for view in state.tiers] == [x < scored for x in range(len(state.tiers))]
    add_prompt(manager, 1, COUNTS[0], generator)
    add_prompt(manager, 2, COUNTS[1], generator, compact=False)
    add_prompt(manager, 3, COUNTS[2], generator)
    assert manager.segments.share(3, 0, COUNTS[2]) is not None
    for row in (*ROWS, 5, 6):
        manager.space.extend(row, (24,) * len(state.tiers))
    manager.space.flush()
    base = last - COUNTS[0] - NEW[0]  # of the decode step's token of row 1
    raise_positions(state, base)
    twin = clone_state(state)
    config = DecodeConfig(tile=16, programs=5, ahead=4, score_parts=2, score_tokens=16)
    ops, ref = TritonOps(state, policy, 2 * GROUP, 400, config=config), ReferenceOps(twin, policy)
    rows = torch.tensor(ROWS, device=DEVICE)

    def drawn(count: int) -> list[torch.Tensor]:
        sizes = ((2 * GROUP, 64), (2, 64), (2, 96))
        return [torch.randn(count, *size, generator=generator).to(DEVICE, BF16) for size in sizes]

    before, new = [base + x for x in COUNTS], torch.tensor(NEW, device=DEVICE)
    shared_scores = {2: torch.full((1, 2, before[2]), float("nan"), device=DEVICE)} if scored else {}
    step = Step.extend(rows, torch.tensor(before, device=DEVICE), new, before, NEW)
    step.shared_scores = shared_scores
    twin_step = Step.extend(rows, torch.tensor(before, device=DEVICE), new, before, NEW)
    twin_step.shared_scores = {number: x.clone() for number, x in shared_scores.items()}
    ops.begin(step, decode=False)
    ref.begin(twin_step, decode=False)
    q, key, value = drawn(sum(NEW))
    ops.append(0, key, value, step)
    ref.append(0, key, value, twin_step)
    out = ops.extend(0, q, key, value, step, SCALING)
    assert close(out, ref.extend(0, q, key, value, twin_step, SCALING)) < 6e-3
    same_tokens(state, twin, ROWS)
    for number, x in shared_scores.items():
        torch.testing.assert_close(x, twin_step.shared_scores[number], rtol=3e-2, atol=2e-4, equal_nan=True)
    take_scores(state, twin)

    after = [x + y for x, y in zip(before, NEW, strict=True)]
    if compacts(state, policy):
        ops.compact_prompts([(2, after[1])], policy)
        ref.compact_prompts([(2, after[1])], policy)
    same_tokens(state, twin, ROWS)

    lengths = torch.tensor(after, device=DEVICE) + 1
    step, twin_step = ops.decode_step(rows, lengths), ref.decode_step(rows, lengths)
    assert int(lengths[0]) - 1 == last
    ops.begin(step, decode=True)
    ref.begin(twin_step, decode=True)
    q, key, value = drawn(len(ROWS))
    ops.append(0, key, value, step)
    ref.append(0, key, value, twin_step)
    out = ops.decode(0, q, step, SCALING)
    assert close(out, ref.decode(0, q, twin_step, SCALING)) < 6e-3
    same_tokens(state, twin, ROWS)
    if step.found is not None:
        got, expected = step.found.unpack(), twin_step.found
        assert torch.equal(got.candidate_slot, expected.candidate_slot) and (got.candidate_slot >= 0).any()
        assert torch.equal(got.least_slot >= 0, expected.least_slot >= 0)
        if not scored:
            assert not (got.least_slot >= 0).any() and not got.candidate_score[got.candidate_slot >= 0].any()
        pack(expected, step.found)
        step.found.packed[..., :-1] = 2**63 - 1
        ops.compact_step(rows, lengths, step.found, step.num_valid)
        ref.compact_step(rows, lengths, twin_step.found)
        assert torch.equal(state.hole[rows], twin.hole[rows])
    same_tokens(state, twin, ROWS)

    known = torch.rand(1, 2, base + 20, generator=generator).to(DEVICE) * 2 / base if scored else None
    parts = [(1, base, base + 30), (1, base + 30, last + 1)]
    ops.copy_compact(5, parts, last + 1, policy, known)
    ref.copy_compact(5, parts, last + 1, policy, known)
    same_tokens(state, twin, [5])
    for some in (ops, ref):
        some.attach(6, 1, base + 7, last)
        some.trim(6, last - 9)
    same_tokens(state, twin, [6])
    lo, hi = (torch.tensor([x] * 3, device=DEVICE) for x in (base + 8, last - 11))
    asked = torch.tensor([1, 5, 6], device=DEVICE)
    for name in ("range_lo", "range_hi"):
        assert getattr(state, name).dtype == {2: torch.int16, 4: torch.int32}[position_bytes]
    counted = ops.measure(asked, lo, hi)
    assert torch.equal(counted, ref.measure(asked, lo, hi)) and counted.any()


def test_a_number_of_bits_is_only_a_configuration() -> None:
    """No source file knows of these tiers, and every kernel serves them."""
    config, package = load_config('{"tiers": ["K7V5", "K5V6"]}'), Path(sglang_diffkv.__file__).parent
    for root in (package, Path(launch.__file__).parent):
        for path in root.rglob("*.py"):
            assert not re.search(r"K7V5|K5V6", path.read_text()), path
    check_kernels(" ".join(config.tiers), diffkv_policy(1.0, 0.2, 6), 2, 2, LAST)
