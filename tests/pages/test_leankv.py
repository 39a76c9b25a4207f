"""LeanKV's policy: the paper's text in numpy beside it, tiny cases by hand, and what compaction keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_diffkv.config import load_config
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.kernels.decode_attention.reference import StepScores
from sglang_diffkv.kernels.sum_scores.reference import sum_scores
from sglang_diffkv.mem_pool.integrity import check_integrity
from sglang_diffkv.policies.base import prunes
from tests.deciding import classify_prompt, moves_of
from tests.dense import Session
from tests.helpers import make_format, make_manager, tier_map
from tests.policies import leankv_policy

HIGH, LOW, PRUNED = 0, 1, 2


def of_the_paper(score: np.ndarray, window: int, mass_high: float, mass_low: float) -> np.ndarray:
    """Section 4, prompt phase, of one head's tokens in order; sums are exact enough where numbers are multiples of a
    power of two."""
    significance = score.astype(np.float64) / (score.astype(np.float64).sum() or 1.0)
    tier = np.full(len(score), HIGH)
    older = np.arange(max(len(score) - window, 0))
    ascending = sorted(older, key=lambda i: (significance[i], -i))
    cumulative = np.cumsum(significance[ascending])
    tier[[i for i, c in zip(ascending, cumulative) if c < mass_high]] = LOW
    tier[[i for i, c in zip(ascending, cumulative) if c < mass_low]] = PRUNED
    return tier


def test_by_hand():
    """Of a sum of 16 the window has 2. Ascending, the others sum to 0, 1, 3, 6, 14."""
    score = torch.tensor([8.0, 2.0, 0.0, 1.0, 3.0, 2.0, 0.0])
    position = torch.arange(7)

    def tiers(mass_high: float, mass_low: float, count: int = 2) -> list[int]:
        return classify_prompt(leankv_policy(mass_high, mass_low, 2), score, position, 7, count).tolist()

    assert tiers(0.0, 0.0) == [0] * 7, "below nothing there is nothing"
    assert tiers(3 / 16, 0.0) == [0, 0, 1, 1, 0, 0, 0], "3 is not below 3"
    assert tiers(4 / 16, 1 / 16) == [0, 1, 2, 1, 0, 0, 0]
    assert tiers(1.0, 0.0) == [1, 1, 1, 1, 1, 0, 0]
    assert tiers(1.0, 0.5) == [1, 2, 2, 2, 2, 0, 0]
    assert tiers(0.5, 3 / 16, count=1) == [0, 0, 1, 1, 0, 0, 0], "with one tier mass_low alone decides"


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=120),
    st.integers(1, 12),
    st.sampled_from([0.0, 0.005, 0.05, 0.1, 0.2, 1.0]),
    st.sampled_from([0.0, 0.001, 0.01, 0.2]),
)
def test_a_prompt_is_sorted_as_the_paper_says(numbers, window, mass_high, mass_low):
    """Multiples of 1/64 in steps of which no share falls on a sum: equal decisions, of equal tokens the first stays."""
    mass_low = min(mass_low, mass_high)
    score = np.array(numbers, dtype=np.float32) / 64
    total = float(score.sum())
    sums = np.cumsum(np.sort(score[: max(len(score) - window, 0)]))
    for mass in (mass_high, mass_low):
        if mass and np.any(np.abs(sums - mass * total) < 1e-3 * max(total, 1e-9)):
            return  # shares are good to 16 bits
    if not total:
        return
    policy = leankv_policy(mass_high, mass_low, window)
    got = classify_prompt(policy, torch.tensor(score), torch.arange(len(score)), len(score), 2)
    assert got.tolist() == of_the_paper(score, window, mass_high, mass_low).tolist()


def found(candidate: float, least_high: float, least_low: float) -> StepScores:
    one = torch.ones(1, 1, 1, dtype=torch.int64)
    return StepScores(
        one * 3,
        torch.full((1, 1, 1), candidate),
        torch.tensor([[[[7, 5]]]]),
        torch.tensor([[[[least_high, least_low]]]]),
    )


@pytest.mark.parametrize(
    ("candidate", "least_high", "least_low", "moves"),
    [
        (0.3, 0.3, 0.0, (-1, -1, -1)),  # both are significant
        (0.2, 0.19, 0.0, (7, -1, -1)),  # the candidate stays and the least of the high tier goes down
        (0.2, 0.01, 0.0, (-1, 7, -1)),  # or out
        (0.19, 0.3, 0.02, (3, -1, -1)),  # the candidate goes down
        (0.19, 0.3, 0.01, (3, -1, 5)),  # in the place of the least of the low tier, which goes
        (0.01, 0.3, 0.3, (-1, 3, -1)),  # the candidate goes out
    ],
)
def test_algorithm_1(candidate, least_high, least_low, moves):
    """Of a sum of 2: thresholds are 0.2 and 0.02, whatever the length."""
    got = moves_of(
        leankv_policy(0.1, 0.01, 4), found(candidate, least_high, least_low), torch.tensor([900]), 2,
        torch.full((1, 1, 1), 2.0),
    )  # fmt: skip
    assert (int(got.demote), int(got.drop), int(got.replace)) == moves


def test_scores_of_the_low_tier_are_kept_up_though_nothing_is_pruned():
    policy = leankv_policy(0.1, 0.0)
    assert policy.scores_low and not prunes(policy, 2)
    assert prunes(leankv_policy(0.1, 0.001), 2)


@pytest.mark.parametrize(("mass_high", "mass_low"), [(0.2, 0.0), (0.4, 0.1)])
def test_a_head_s_tokens_are_those_that_the_sums_leave(mass_high, mass_low):
    """A prompt and then steps: after the prompt each head's tiers are the paper's; in each step a head moves one token
    at most, and what is high outside the window was at some time above the threshold."""
    manager = make_manager(make_format(("K8V4", "K4V2"), page_tokens=4), policy=leankv_policy(mass_high, mass_low, 4))
    session = Session(manager, spread=3.0, seed=5)
    session.extend({1: 50})
    score = session.dense[1].received / (49 - torch.arange(50)).clamp(min=1).view(-1, 1, 1)
    session.end_prompt(1)
    tier = tier_map(manager.state, 1, 50)
    for layer, head in np.ndindex(2, 2):
        expected = of_the_paper(score[:, layer, head].numpy(), 4, mass_high, mass_low)
        differs = np.flatnonzero(tier[layer, head] != expected)
        assert len(differs) <= 1, "but for a token whose sum is that of a share"
    assert (tier == LOW).any() and (tier == PRUNED).any() == (mass_low > 0)
    for length in range(51, 63):
        before = tier_map(manager.state, 1, length - 1)
        session.step([1])
        check_integrity(manager)
        after = tier_map(manager.state, 1, length)
        assert ((before != after[..., : length - 1]).sum(2) <= 2).all()
        assert (after[..., length - 4 :] == HIGH).all()
    assert (after[..., 50:58] == LOW).any(), "generated tokens go down too"
    sums = sum_scores(manager.state, torch.tensor([1]))
    assert (sums > 0).all()


def test_a_copy_keeps_what_compaction_in_place_keeps():
    manager = make_manager(make_format(("K8V4", "K4V2"), page_tokens=4), policy=leankv_policy(0.3, 0.02, 4))
    session = Session(manager, spread=3.0)
    session.extend({1: 41})
    manager.space.extend(2, (50, 50))
    with manager.launching():
        manager.ops.copy_compact(2, [(1, 0, 9), (1, 9, 41)], 41, manager.policy, None)
    copied = tier_map(manager.state, 2, 41)
    session.end_prompt(1)
    assert np.array_equal(copied, tier_map(manager.state, 1, 41))
    assert len(np.unique(copied)) == 3


def test_configuration():
    config = load_config('{"policy": {"name": "leankv", "mass_high": 0.1, "mass_low": 0.005}}')
    assert config.build_policy() == leankv_policy(0.1, 0.005, 64) and config.tiers == ("K8V4", "K4V2")
    config = load_config('{"tiers": ["K4V2", "K4V1"], "policy": {"name": "leankv", "mass_high": 0.2}}')
    assert config.build_policy() == leankv_policy(0.2, 0.0, 64)
    with pytest.raises(ConfigError, match=r"mass_low 0\.2 is above mass_high 0\.1"):
        load_config('{"policy": {"name": "leankv", "mass_high": 0.1, "mass_low": 0.2}}')
