"""Eviction at random: which prompt tokens stay, by both sets of ops, on every rank, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sglang_diffkv.config import load_config
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.kernels.random_scores.reference import random_scores
from sglang_diffkv.policies.base import Random
from sglang_diffkv.policies.budget import Budget
from sglang_diffkv.policies.random_eviction import RandomPolicy
from tests.helpers import tier_map
from tests.kernels.triton_helpers import DEVICE
from tests.pages.cut_prompts import check_cut, check_triton_cut, session_of


def drawn(policy: RandomPolicy, length: int) -> np.ndarray:
    """[L, H, length]: what stays of each head's tokens."""
    values = torch.zeros(2, 2, length)
    random_scores(values, policy.source.seed, 0, policy.source.first_head)
    values[..., : policy.sinks] = values[..., length - policy.window :] = math.inf
    budget = policy.budget
    kept = max(budget.tokens, math.ceil(budget.fraction * length), policy.window + policy.sinks)
    order = values.argsort(dim=2, descending=True, stable=True)[..., :kept]
    return np.asarray(torch.zeros(2, 2, length, dtype=torch.bool).scatter_(2, order, True))


@pytest.mark.parametrize(("budget", "window", "sinks"), [(Budget(13), 5, 3), (Budget(0, 0.4), 4, 0), (Budget(2), 9, 4)])
@pytest.mark.parametrize(("tier", "dtype"), [("K8V4", torch.bfloat16), ("BF16", torch.float16)], ids=str)
def test_what_is_drawn_stays(tier, dtype, budget, window, sinks):
    policy, length = RandomPolicy(budget, window, sinks, Random(5)), 37
    session, expected = session_of(policy, tier, length, dtype), drawn(policy, length)
    check_cut(session, policy, length, expected)


@pytest.mark.skipif(DEVICE != "cpu", reason="the map of tiers reads the CPU's memory")
def test_triton_cuts_prompts_and_copies():
    policy = RandomPolicy(Budget(11), 4, 2, Random(1 << 31))
    session = session_of(policy, "K8V4", 31)
    expected = drawn(policy, 31)
    check_triton_cut(session, policy, 31, expected)


def test_a_draw_can_be_repeated_and_seeds_and_ranks_differ():
    policy = RandomPolicy(Budget(0, 0.4), 4, 2, Random(0))
    found = []
    for chosen in (policy, policy, policy.of_rank(1, 2, 2), RandomPolicy(Budget(0, 0.4), 4, 2, Random(1))):
        session = session_of(chosen, "K8V4", 50)
        session.end_prompt(1)
        found.append(tier_map(session.manager.state, 1, 50) == 0)
    first, again, other_rank, other_seed = found
    assert np.array_equal(first, again)
    heads = {head.tobytes() for run in (first, other_rank, other_seed) for head in run.reshape(4, 50)}
    assert len(heads) == 12, "heads of every layer, rank and seed have draws of their own"
    assert policy.of_rank(0, 2, 2) == policy and policy.of_rank(3, 4, 2).source == Random(0, first_head=6)


def test_configuration():
    config = load_config('{"tiers": ["BF16"], "policy": {"name": "random", "budget": 512, "window": 32, "seed": 7}}')
    assert config.build_policy() == RandomPolicy(Budget(512), 32, 4, Random(7)) and not config.lossless
    assert config.page_format(128, 128, 4096).scored == 0, "no page has room for scores"
    for policy, message in (
        ("", "budget"),
        (', "budget": 68', "above window 64 and sinks 4 together"),
        (', "budget": 512, "seed": -1', "seed"),
        (', "budget": 512, "pool": 3', "pool"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(f'{{"tiers": ["K8V4"], "policy": {{"name": "random"{policy}}}}}')
    with pytest.raises(ConfigError, match="policy random keeps tokens at one tier"):
        load_config('{"policy": {"name": "random", "budget": 512}}')
