"""Scores that come from elsewhere than attention: key norms and random ones, by the references and in Triton."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from sglang_diffkv.kernels.key_norms import reference as norms_reference
from sglang_diffkv.kernels.random_scores import reference as random_reference
from sglang_diffkv.ops.reference import ReferenceOps
from sglang_diffkv.ops.triton import TritonOps
from sglang_diffkv.policies.base import (
    Across,
    Attention,
    Count,
    KeyNorm,
    LeastMass,
    Policy,
    PromptRule,
    Random,
    ScoreSource,
    TopCount,
    TopMass,
    has_scores,
)
from sglang_diffkv.policies.budget import Budget
from tests.helpers import tier_map
from tests.kernels.test_running import keys_of
from tests.kernels.test_whole_heads import two_parts
from tests.kernels.triton_helpers import DEVICE, add_prompt, clone_state, make_format, make_manager

from sglang_diffkv.kernels.key_norms import triton as norms_triton  # isort: skip
from sglang_diffkv.kernels.random_scores import triton as random_triton  # isort: skip

NAN, INF = float("nan"), float("inf")
SHAPES = [("K8V4 K4V2", 64, 96), ("BF16", 96, 64), ("K8V2 K4V1", 128, 64), ("K8V8 K8V4 K4V4 K4V2", 64, 64)]


@pytest.mark.skipif(DEVICE != "cpu", reason="the scan of pages reads the CPU's memory")
@pytest.mark.parametrize("tiers", ["K8V4 K4V2", "BF16"])
def test_a_token_counts_the_more_the_shorter_its_key(tiers):
    manager, _ = two_parts(tiers)
    values = torch.empty(2, 2, 61)
    stored = norms_reference.key_norms(manager.state, [(2, 0, 61)], values, 61, window=4, sinks=3)
    expected = np.full(values.shape, np.nan)
    for (layer, head), keys in keys_of(manager, 2).items():
        assert int(stored[layer, head]) == len(keys)
        for position, key in keys.items():
            lasting = position >= 57 or position < 3
            expected[layer, head, position] = np.inf if lasting else 1 / np.linalg.norm(key)
    np.testing.assert_allclose(values.numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize(("tiers", "dim", "v_dim"), SHAPES)
def test_triton_norms_are_the_references(tiers, dim, v_dim):
    manager, parts = two_parts(tiers, dim, v_dim)
    for given, own, length in ((parts, False, 61), ([(2, 0, 61)], True, 61), (parts, False, 47)):
        values = torch.empty(2, 2, 2, length, device=DEVICE)
        got, expected = (
            op.key_norms(manager.state, given, out, 61, window=6, sinks=4, own=own)
            for op, out in ((norms_triton, values[0]), (norms_reference, values[1]))
        )
        assert torch.equal(got, expected) and int(got.min()) > 0
        torch.testing.assert_close(values[0], values[1], rtol=1e-5, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_every_type_and_of_zeros(dtype):
    manager = make_manager(make_format("BF16", 96, page_tokens=5), dtype=dtype, layers=3, heads=1)
    add_prompt(manager, 1, 13, torch.Generator().manual_seed(0), compact=False)
    view, state = manager.state.tiers[0], manager.state
    page = state.page_table[state.row_blocks[1, 0].long(), 1, 0, 0].long()
    view.keys[page, 2] = 0
    values = torch.empty(2, 3, 1, 13, device=DEVICE)
    for op, out in ((norms_triton, values[0]), (norms_reference, values[1])):
        op.key_norms(state, [(1, 0, 13)], out, 13, window=2)
    torch.testing.assert_close(values[0], values[1], rtol=1e-5, atol=0.0)
    assert values[..., :11].isfinite().all() and values[0, 1, 0, :11].argmax() == 2


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 1027), (3, 1, 40)])
@pytest.mark.parametrize("seed", [0, 7, (1 << 32) - 1])
def test_triton_draws_what_the_reference_does(shape, seed):
    values = torch.zeros(2, *shape, device=DEVICE)
    values[..., ::5], values[..., 3:9] = NAN, INF
    before = values.clone()
    for op, out in ((random_triton, values[0]), (random_reference, values[1])):
        op.random_scores(out, seed, 2, 5)
    assert torch.equal(values[0].nan_to_num(nan=-1.0), values[1].nan_to_num(nan=-1.0))
    assert torch.equal(values.isnan(), before.isnan()) and torch.equal(values.isinf(), before.isinf())
    drawn = values[values.isfinite()]
    assert ((drawn >= 0) & (drawn < 1)).all()


def test_a_draw_depends_on_seed_layer_head_and_position_alone():
    def drawn(layers: int, heads: int, length: int, *rest: int) -> torch.Tensor:
        values = torch.zeros(layers, heads, length)
        random_reference.random_scores(values, *rest)
        return values

    whole = drawn(4, 4, 5000, 3)
    assert torch.equal(whole[1:3, 2:, :70], drawn(2, 2, 70, 3, 1, 2)), "a rank's heads, a group's layers, a prefix"
    assert len({tuple(head.tolist()) for head in whole[:, :, :20].flatten(0, 1)}) == 16
    assert not torch.equal(whole, drawn(4, 4, 5000, 4))
    assert abs(float(whole.mean()) - 0.5) < 0.01 and abs(float(whole.var()) - 1 / 12) < 0.003
    pairs = whole.flatten(0, 1).double()
    assert np.abs(np.corrcoef(pairs.numpy()) - np.eye(16)).max() < 0.06
    assert abs(np.corrcoef(pairs[:, 1:].flatten(), pairs[:, :-1].flatten())[0, 1]) < 0.02


@dataclass(frozen=True)
class Scored(Policy):
    """A prompt rule by a source."""

    source: ScoreSource
    rule: PromptRule
    step: Count | None = None
    layer_stride: int | None = None
    window: int = 5
    sinks: int = 3

    @property
    def score_source(self) -> ScoreSource:
        return self.source

    @property
    def prompt(self) -> PromptRule:
        return self.rule

    @property
    def generation(self) -> Count | None:
        return self.step


@pytest.mark.skipif(DEVICE != "cpu", reason="the map of tiers reads the CPU's memory")
@pytest.mark.parametrize(
    ("source", "rule"),
    [
        (KeyNorm(), TopCount(Budget(0, 0.4), smooth=3)),
        (Random(3), TopCount(Budget(13))),
        (Random(3, first_head=2), Across(Budget(13))),
    ],
    ids=str,
)
def test_both_sets_of_ops_keep_the_same(source, rule):
    """In prompts and copies, and where layers are compacted one at a time."""
    strides = [None, 1] if isinstance(rule, TopCount) else [None]
    manager = make_manager(make_format("K8V4", page_tokens=8), policy=Scored(source, rule))
    assert manager.fmt.scored == 0
    add_prompt(manager, 1, 29, torch.Generator().manual_seed(1), compact=False)
    manager.space.extend(2, (32,))
    manager.space.flush()
    kept = []
    for stride in strides:
        policy = Scored(source, rule, layer_stride=stride)
        for make in (ReferenceOps, lambda state, policy: TritonOps(state, policy, 4, 400)):
            state = clone_state(manager.state)
            ops = make(state, policy)
            ops.copy_compact(2, [(1, 0, 17), (1, 17, 29)], 29, policy, None)
            ops.compact_prompts([(1, 29)], policy)
            kept += [tier_map(state, row, 29) == 0 for row in (1, 2)]
    assert all(np.array_equal(x, kept[0]) for x in kept)
    assert kept[0][..., :3].all() and kept[0][..., 24:].all() and not kept[0].all()
    assert len({head.tobytes() for head in kept[0].reshape(-1, 29)}) == 4, "heads choose tokens of their own"


def test_rules_whose_scores_a_source_lacks():
    count, budget = TopCount(Budget(9)), Budget(9)
    assert has_scores(Scored(Attention(), LeastMass(0.1, 0.2), Count(budget)))
    for source in (KeyNorm(), Random(0)):
        assert has_scores(Scored(source, count)) and has_scores(Scored(source, Across(budget)))
        for policy in (
            Scored(source, TopCount(budget, quantity="sum")),
            Scored(source, TopMass(0.5)),
            Scored(source, count, Count(budget)),
        ):
            assert not has_scores(policy)
            with pytest.raises(AssertionError, match="has no scores"):
                make_manager(make_format("K8V4"), policy=policy)
