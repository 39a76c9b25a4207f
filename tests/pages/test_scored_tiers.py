"""Tokens have scores only in tiers where a decision may depend on them, and then nothing is decided otherwise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from sglang_diffkv.config import load_config
from sglang_diffkv.kernels.append.reference import read_tokens
from sglang_diffkv.layout.geometry import Geometry
from sglang_diffkv.layout.page_format import MOST_TIERS
from sglang_diffkv.mem_pool.integrity import check_integrity
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.ops import Scaling, reference, triton
from sglang_diffkv.ops.base import Step
from sglang_diffkv.policies.base import NEVER, Policy
from sglang_diffkv.policies.diffkv import DiffKVPolicyConfig
from sglang_diffkv.policies.h2o import H2OPolicyConfig
from sglang_diffkv.policies.knorm import KnormPolicyConfig
from sglang_diffkv.policies.random_eviction import RandomPolicyConfig
from sglang_diffkv.policies.snapkv import SnapKVPolicyConfig
from sglang_diffkv.policies.uniform import UniformPolicy
from sglang_diffkv.policies.xkv import XKVPolicyConfig
from sglang_diffkv.policies.zipage import ZipagePolicyConfig
from tests.dense import Session
from tests.helpers import PAIR, make_format, make_manager, visible
from tests.policies import diffkv_policy, duo_policy, leankv_policy, streaming_policy

ALONE = diffkv_policy(1e9, 0.0, 5, 2)
THREE, FOUR = ("BF16", "K8V4", "K4V2"), ("K8V8", "K8V4", "K4V4", "K4V2")
NOBODY = (0, 0, 0, 0)
ALL = (1, 2, 3, 4)


@pytest.mark.parametrize(
    ("policy", "scored"),
    [
        (DiffKVPolicyConfig().build(), (0, 1, 1, 1)),
        (diffkv_policy(3.0, 0.0, 256, alpha_between=(1.0, 0.5)), (0, 1, 2, 3)),
        (diffkv_policy(3.0, 0.0, 256, alpha_between=(1.0, 0.0)), (0, 1, 2, 2)),
        (diffkv_policy(3.0, 0.0, 256, alpha_between=((3.0, 0.0),)), (0, 1, 1, 2)),
        (diffkv_policy(3.0, 0.0, 256, alpha_between=((3.0, 1.0),)), (0, 1, 2, 2)),
        (diffkv_policy(3.0, 0.0, 256, alpha_between=(3.0, (0.0, 1.0))), (0, 1, 1, 3)),
        (diffkv_policy(3.0, 0.0, 256, alpha_between=((0.0, 1.0), 0.0)), (0, 1, 2, 2)),
        (diffkv_policy(3.0, 0.1, 256, alpha_between=((3.0, 0.1),)), ALL),
        (diffkv_policy(1.0, 0.1, 256), ALL),
        (ALONE, NOBODY),
        (diffkv_policy(math.inf, 0.0, 256), NOBODY),
        (diffkv_policy(0.0, 0.0, 256), NOBODY),
        (diffkv_policy(1e9, 0.1, 256), ALL),
        (diffkv_policy(1e9, 1e9, 256), NOBODY),
        (diffkv_policy(NEVER / 2, 0.0, 256), (0, 1, 1, 1)),
        (diffkv_policy(1e9, 0.0, 256, alpha_between=(1.0,)), (0, 0, 2, 2)),
        (diffkv_policy(1e9, 0.0, 256, head_scale=((1.0, 1e-6),)), (0, 1, 1, 1)),
        (diffkv_policy(1e9, 0.0, 256, head_scale=((1.0, 0.5),)), NOBODY),
        (streaming_policy(), NOBODY),
        (KnormPolicyConfig(budget=100).build(), NOBODY),
        (RandomPolicyConfig(budget=100).build(), NOBODY),
        (duo_policy(((True, False),)), NOBODY),
        (duo_policy(((True, False),), keep_low=True), NOBODY),
        (UniformPolicy(), NOBODY),
        (leankv_policy(), ALL),
        (H2OPolicyConfig(budget=100).build(), ALL),
        (SnapKVPolicyConfig(budget=100).build(), ALL),
        (XKVPolicyConfig(keep=0.5).build(), ALL),
        (ZipagePolicyConfig(max_blocks=3).build(), ALL),
    ],
)
def test_tiers_whose_scores_may_matter(policy: Policy, scored: tuple[int, ...]) -> None:
    assert tuple(policy.scored_tiers(tiers) for tiers in range(1, MOST_TIERS + 1)) == scored


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (diffkv_policy(1.0, 0.0, 256), 1),
        (diffkv_policy(3.0, 0.1, 256), 2),
        (ALONE, 0),
        (UniformPolicy(), 0),
        (streaming_policy(), 0),
        (leankv_policy(), 2),
        (XKVPolicyConfig(keep=0.5).build(), 2),
        (ZipagePolicyConfig(max_blocks=3).build(), 0),
    ],
)
def test_tiers_whose_scores_steps_keep_up(policy: Policy, kept: int) -> None:
    assert policy.step_tiers(2) == kept


def test_the_configuration_s_pages() -> None:
    """One place decides, by policy and longest sequence."""
    fmt = load_config("{}").page_format(128, 128, 65535)
    assert (fmt.scored, fmt.position_bytes) == (1, 2)
    fmt = load_config('{"policy": {"name": "diffkv", "alpha_low": 0.1}}').page_format(128, 128, 65536)
    assert (fmt.scored, fmt.position_bytes) == (2, 4)
    assert load_config('{"tiers": ["BF16"]}').page_format(128, 128, 9).scored == 0


def test_pages_without_scores_that_are_read_are_refused() -> None:
    geometry = Geometry(make_format(PAIR, scored=1), 1, 1, 9, num_rows=2, num_segments=2, max_tokens=20)
    with pytest.raises(AssertionError, match="lack scores"):
        PageManager(geometry, diffkv_policy(1.0, 0.1, 256))
    with pytest.raises(AssertionError, match="too short"):
        Geometry(make_format(PAIR), 1, 1, 9, num_rows=2, num_segments=2, max_tokens=65536)


def scored_everywhere(policy: Policy) -> Policy:
    """The same policy, but all tiers' scores are there."""
    kind = type(policy)
    other = type(kind.__name__, (kind,), {"scored_tiers": lambda self, tiers: tiers})
    return other(**vars(policy))


def held(manager: PageManager, row: int, length: int) -> np.ndarray:
    """[tokens, 5 + numbers] of what a row sees, by layer, head and position: these, tier, and keys and values."""
    seen, rows = visible(manager.state, row), []
    assert (seen.position < length).all()
    for tier, view in enumerate(manager.state.tiers):
        here = seen.pick(seen.tier == tier)
        vectors = read_tokens(view, torch.from_numpy(here.page).long(), torch.from_numpy(here.slot).long())
        rows.append(np.column_stack([here.layer, here.head, here.position, here.tier, *(x.numpy() for x in vectors)]))
    found = np.concatenate(rows)
    assert np.isfinite(found).all()
    return found[np.lexsort(found[:, 2::-1].T)]


@pytest.mark.parametrize(
    ("policy", "tiers", "by_triton"),
    [
        (diffkv_policy(1.0, 0.0, 5, 2), PAIR, False),
        (diffkv_policy(1.0, 0.0, 5, 2), PAIR, True),
        (diffkv_policy(2.0, 0.0, 5, alpha_between=(0.8,)), THREE, False),
        (diffkv_policy(2.0, 0.0, 5, alpha_between=(0.8,)), THREE, True),
        (diffkv_policy(2.0, 0.0, 5, alpha_between=(1.2, 0.8)), FOUR, False),
        (diffkv_policy(2.0, 0.0, 5, alpha_between=(0.0,)), THREE, False),
        (diffkv_policy(2.0, 0.0, 5, alpha_between=((2.0, 0.0),)), THREE, False),
        (diffkv_policy(2.0, 0.0, 5, alpha_between=((2.0, 0.0),)), THREE, True),
        (diffkv_policy(2.0, 0.0, 5, alpha_between=((0.8, 0.0),)), THREE, True),
        (diffkv_policy(2.0, 0.0, 5, alpha_between=(1.2, (0.8, 1.2))), FOUR, True),
        (ALONE, PAIR, False),
        (ALONE, PAIR, True),
        (diffkv_policy(1e9, 0.0, 5, alpha_between=(1e9,)), THREE, False),
        (diffkv_policy(1e9, 1e9, 5, 2), PAIR, False),
        (diffkv_policy(1.0, 0.0, 5), ("K8V4",), False),
        (streaming_policy(5, 3), ("BF16",), False),
        (duo_policy(((True, False), (False, True)), 5, 3, keep_low=True), ("BF16", "K4V2"), False),
        (UniformPolicy(), ("K8V4",), False),
    ],
    ids=str,
)
def test_tokens_lie_where_they_would_with_all_scores(policy: Policy, tiers: tuple[str, ...], by_triton: bool) -> None:
    """Two chunks, compacted in between, steps, copies of all and of a part, with and without what a request has seen
    of a prefix; whether the unused memory holds NaN or not."""
    found, scored = [], []
    for rule in (policy, scored_everywhere(policy)):
        manager = make_manager(
            make_format(tiers, page_tokens=4),
            policy=rule,
            make_ops=(lambda state, rule=rule: triton.TritonOps(state, rule, 4, 400)) if by_triton else None,
        )
        scored.append(min(manager.fmt.scored, len(tiers)))
        session = Session(manager, spread=4.0)
        session.extend({1: 40})
        manager.prompts.end_chunk(1)
        session.extend({1: 33})
        session.end_prompt(1)
        if not by_triton:  # whose searches have another form than the session's
            for _ in range(9):
                session.step([1])
        length = manager.rows.length(1)
        check_integrity(manager)
        shared_scores = torch.rand(2, 2, 30, generator=torch.Generator().manual_seed(3)) * 0.1
        shared_scores[:, :, ::3] = float("nan")
        for row, parts, seen in ((2, [(1, 0, length)], None), (3, [(1, 0, 25), (1, 25, length)], shared_scores)):
            manager.space.extend(row, (length,) * len(tiers))
            with manager.launching():
                manager.ops.copy_compact(row, parts, length, rule, seen)
        found.append([held(manager, row, length) for row in (1, 2, 3)])
    assert scored == [policy.scored_tiers(len(tiers)), len(tiers)]
    for mine, other in zip(*found, strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("ops", [reference, triton], ids=["reference", "triton"])
@pytest.mark.parametrize("policy", [ALONE, diffkv_policy(3.0, 0.0, 5)], ids=["window alone", "thresholds"])
def test_ops_score_prompts_as_the_policy_says(ops: Any, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def extend_attention(*args: Any, update_scores: bool, **more: Any) -> tuple[torch.Tensor, None] | torch.Tensor:
        asked.append(update_scores)
        return (args[2], None) if ops is triton else args[2]

    monkeypatch.setattr(ops, "extend_attention", extend_attention)
    state = make_manager(make_format(PAIR), policy=policy).state
    some = ops.TritonOps(state, policy, 4, 400) if ops is triton else ops.ReferenceOps(state, policy)
    q, key, value = (torch.zeros(3, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
    step = Step.extend(torch.tensor([1]), torch.tensor([0]), torch.tensor([3]), [0], [3])
    some.extend(0, q, key, value, step, Scaling(0.1))
    assert asked == [policy is not ALONE]
