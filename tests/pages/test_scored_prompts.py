"""Prompts are scored only where a decision may depend on it, and then nothing is decided otherwise."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sglang_diffkv.ops import reference, triton
from sglang_diffkv.ops.base import Step
from sglang_diffkv.policies.base import NEVER, Policy
from sglang_diffkv.policies.diffkv import DiffKVPolicy
from sglang_diffkv.policies.duo import DuoPolicy
from sglang_diffkv.policies.h2o import H2OPolicyConfig
from sglang_diffkv.policies.leankv import LeanKVPolicy
from sglang_diffkv.policies.snapkv import SnapKVPolicyConfig
from sglang_diffkv.policies.streaming import StreamingPolicy
from sglang_diffkv.policies.uniform import UniformPolicy
from tests.dense import Session
from tests.helpers import PAIR, make_format, make_manager, tier_map, visible

ALONE = DiffKVPolicy(1e9, 0.0, 5, 2)


@pytest.mark.parametrize(
    ("policy", "scored"),
    [
        (DiffKVPolicy(), True),
        (ALONE, False),
        (DiffKVPolicy(math.inf, 0.0), False),
        (DiffKVPolicy(0.0, 0.0), False),
        (DiffKVPolicy(1e9, 0.1), True),
        (DiffKVPolicy(NEVER / 2, 0.0), True),
        (DiffKVPolicy(1e9, 0.0, alpha_between=(1.0,)), True),
        (DiffKVPolicy(1e9, 0.0, head_scale=((1.0, 1e-6),)), True),
        (DiffKVPolicy(1e9, 0.0, head_scale=((1.0, 0.5),)), False),
        (StreamingPolicy(), False),
        (DuoPolicy(((True, False),)), False),
        (UniformPolicy(), False),
        (LeanKVPolicy(), True),
        (H2OPolicyConfig(budget=100).build(), True),
        (SnapKVPolicyConfig(budget=100).build(), True),
    ],
)
def test_whether_scores_may_matter(policy: Policy, scored: bool) -> None:
    assert policy.scores_prompts == scored


def test_tokens_lie_where_they_would_with_scores() -> None:
    """Two chunks, a compaction, steps; the scores themselves are there in one of the two only."""
    found = []
    for scores in (False, True):
        manager = make_manager(make_format(PAIR), policy=ALONE)
        session = Session(manager, spread=4.0)
        session.extend({1: 40}, scores=scores)
        session.extend({1: 33}, scores=scores)
        prompt = visible(manager.state, 1)
        session.end_prompt(1)
        for _ in range(9):
            session.step([1], check=scores)
        found.append((tier_map(manager.state, 1, 82), bool((prompt.score != 0).any())))
    assert (found[0][0] == found[1][0]).all() and 0 < (found[0][0] == 1).mean() < 1
    assert [scored for _, scored in found] == [False, True]


@pytest.mark.parametrize("ops", [reference, triton], ids=["reference", "triton"])
@pytest.mark.parametrize("policy", [ALONE, DiffKVPolicy(3.0, 0.0, 5)], ids=["window alone", "thresholds"])
def test_ops_score_prompts_as_the_policy_says(ops: Any, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def extend_attention(*args: Any, update_scores: bool, **more: Any) -> tuple[torch.Tensor, None] | torch.Tensor:
        asked.append(update_scores)
        return (args[2], None) if ops is triton else args[2]

    monkeypatch.setattr(ops, "extend_attention", extend_attention)
    state = make_manager(make_format(PAIR), policy=policy).state
    some = ops.TritonOps(state, policy, 4, 400) if ops is triton else ops.ReferenceOps(False)
    q, key, value = (torch.zeros(3, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
    step = Step.extend(torch.tensor([1]), torch.tensor([0]), torch.tensor([3]), [0], [3])
    some.extend(state, 0, q, key, value, step, 0.1, policy, 0.0)
    assert asked == [policy.scores_prompts]
