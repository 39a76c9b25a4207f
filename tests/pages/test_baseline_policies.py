"""SnapKV's and H2O's policies: tiny cases by hand, a token by token transcription, and what compaction keeps."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sglang_diffkv.config import load_config
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.kernels.decode_attention.reference import StepScores
from sglang_diffkv.kernels.select.reference import select_count
from sglang_diffkv.mem_pool.integrity import check_integrity
from sglang_diffkv.policies.budget import Budget
from tests.deciding import classify_prompt, moves_of, step_moves
from tests.dense import Session
from tests.helpers import make_format, make_manager, tier_map
from tests.policies import h2o_policy, snapkv_policy

BUDGETS = [Budget(6), Budget(0, 0.5), Budget(9, 0.25), Budget(1000), Budget(0, 1.0), Budget(0, 0.01)]


def kept_count(budget: Budget, length: int, window: int) -> int:
    return min(length, max(budget.tokens, window, math.ceil(budget.fraction * length)))


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("window", [1, 4])
def test_budget_grows_by_at_most_one_token_a_step(budget, window):
    lengths = torch.arange(3000)
    kept = budget.kept(lengths, window)
    assert kept[:200].tolist() == [kept_count(budget, n, window) for n in range(200)]
    assert set(kept.diff().tolist()) <= {0, 1}


def test_a_selection_takes_the_first_of_equals():
    values = torch.tensor([[[1.0, 3.0, 3.0, 2.0, float("nan")], [0.0, 0.0, 0.0, 0.0, 0.0]]])
    cut, tie = select_count(values, torch.tensor([[2, 3]]))
    assert cut.tolist() == [[3.0, 0.0]] and tie.tolist() == [[2, 2]]


def test_snapkv_by_hand():
    """Window 2 and four tokens in all: the peak at position 1 brings its neighbours along, as pooling means to."""
    score = torch.tensor([0.1, 0.9, 0.2, 0.0, 0.3, 0.05, 0.5, 0.6])
    position = torch.arange(8)
    plain = classify_prompt(snapkv_policy(Budget(4), window=2, pool=1), score, position, 8, 1)
    assert plain.tolist() == [1, 0, 1, 1, 0, 1, 0, 0]
    pooled = classify_prompt(snapkv_policy(Budget(5), window=2, pool=3), score, position, 8, 1)
    assert pooled.tolist() == [0, 0, 0, 1, 1, 1, 0, 0]


def test_h2o_by_hand():
    """Sums, not means: position 0 received 5 x 0.2, position 3 only 2 x 0.4."""
    score, position = torch.tensor([0.2, 0.1, 0.1, 0.4, 0.0, 0.0]), torch.arange(6)
    policy = h2o_policy(Budget(3), window=2)
    assert classify_prompt(policy, score, position, 6, 1).tolist() == [0, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("kind", ["snapkv", "h2o"])
def test_prompt_classification(kind, budget):
    """Slots in any order, with empty ones among them, judged as if each head were alone."""
    window, pool = 4, 3
    policy = snapkv_policy(budget, window, pool) if kind == "snapkv" else h2o_policy(budget, window)
    for seed, length in enumerate([1, 4, 5, 60, 33]):
        random = np.random.default_rng(seed)
        score = random.exponential(1 / length, (2, 3, length)).astype(np.float32)
        position = random.permuted(np.broadcast_to(np.arange(length), score.shape), axis=2)
        position = np.where((position == length // 2) & (length > 5), -1, position)
        got = classify_prompt(policy, torch.tensor(score), torch.tensor(position), length, 1)
        for head in np.ndindex(2, 3):
            at = {int(p): float(s) for p, s in zip(position[head], score[head]) if p >= 0}
            assert int((got[head][position[head] >= 0] == 0).sum()) == kept_count(budget, len(at), window)
            recent = {p for p in at if p >= length - window}
            others = sorted(at.keys() - recent)
            if kind == "snapkv":
                line = {p: at[p] for p in others}
                value = {p: max(line.get(q, 0.0) for q in (p - 1, p, p + 1)) for p in others}
            else:
                value = {p: float(np.float32(at[p]) * np.float32(length - 1 - p)) for p in others}
            room = kept_count(budget, len(at), window) - len(recent)
            best = sorted(others, key=lambda p: -value[p])[:room]
            kept = {int(p) for p, t in zip(position[head], got[head].tolist()) if t == 0 and p >= 0}
            assert recent <= kept
            assert sorted(value[p] for p in kept - recent) == sorted(value[p] for p in best)
            assert (got[head][position[head] < 0] != 0).all()


def found(least: int) -> StepScores:
    slot = torch.full((3, 1, 1), least)
    return StepScores(slot + 1, torch.zeros(3, 1, 1), slot.unsqueeze(3), torch.zeros(3, 1, 1, 1))


def test_h2o_drops_when_the_budget_is_full():
    moves = moves_of(h2o_policy(Budget(8), window=2), found(5), torch.tensor([7, 8, 9]), 1)
    assert moves.drop.flatten().tolist() == [-1, -1, 5]
    half = moves_of(h2o_policy(Budget(0, 0.5), window=2), found(5), torch.tensor([20, 21, 22]), 1)
    assert half.drop.flatten().tolist() == [5, -1, 5]
    assert (moves.demote == -1).all() and (moves.replace == -1).all()


def test_snapkv_leaves_generated_tokens_alone():
    assert step_moves(snapkv_policy(Budget(8)), found(5), torch.tensor([7, 80, 900]), 1) is None


@pytest.mark.parametrize("budget", [Budget(12), Budget(0, 0.5), Budget(20, 0.6)])
@pytest.mark.parametrize("prompt", [5, 30])
def test_h2o_holds_its_budget_in_every_step(budget, prompt):
    manager = make_manager(make_format(("K8V4",)), policy=h2o_policy(budget, window=4))
    session = Session(manager, spread=3.0, seed=prompt)
    session.extend({1: prompt})
    session.end_prompt(1)
    for length in range(prompt + 1, prompt + 40):
        session.step([1])
        check_integrity(manager)
        tier = tier_map(manager.state, 1, length)
        assert np.unique((tier == 0).sum(2)).tolist() == [kept_count(budget, length, 4)]
        assert (tier[..., length - 4 :] == 0).all()


def test_h2o_drops_the_least_significant_token():
    manager = make_manager(make_format(("BF16",)), policy=h2o_policy(Budget(10), window=3))
    session = Session(manager, spread=3.0, seed=3)
    session.extend({1: 10})
    session.end_prompt(1)
    before = tier_map(manager.state, 1, 11)
    scores = session.decode([1])
    assert scores is not None
    session.end_decode([1], scores)
    gone = (tier_map(manager.state, 1, 11) != 0) & (before == 0)
    mean = session.dense[1].received / (10 - torch.arange(11)).clamp(min=1).view(-1, 1, 1)
    for layer, head in np.ndindex(2, 2):
        assert np.flatnonzero(gone[layer, head]).tolist() == [int(mean[: 11 - 3, layer, head].argmin())]


def test_snapkv_keeps_its_budget_and_all_that_follows():
    manager = make_manager(make_format(("K8V4",)), policy=snapkv_policy(Budget(12), window=4))
    session = Session(manager, spread=3.0)
    session.extend({1: 20})
    session.extend({1: 11})
    session.end_prompt(1)
    kept = tier_map(manager.state, 1, 31)
    assert np.unique((kept == 0).sum(2)).tolist() == [12]
    assert len({tuple(head) for head in kept.reshape(-1, 31)}) > 1, "heads choose tokens of their own"
    for _ in range(20):
        session.step([1])
    after = tier_map(manager.state, 1, 51)
    assert np.array_equal(after[..., :31], kept) and (after[..., 31:] == 0).all()
    check_integrity(manager)


def test_configuration_builds_the_policies():
    config = load_config('{"tiers": ["BF16"], "policy": {"name": "h2o", "budget": 512, "window": 256}}')
    assert config.build_policy() == h2o_policy(Budget(512), 256) and not config.lossless
    config = load_config('{"tiers": ["K8V4"], "policy": {"name": "snapkv", "fraction": 0.5, "pool": 5}}')
    assert config.build_policy() == snapkv_policy(Budget(0, 0.5), 32, 5)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ('{"name": "h2o"}', "budget"),
        ('{"name": "h2o", "budget": 64}', "above window 64"),
        ('{"name": "snapkv", "fraction": 1.5}', "fraction"),
        ('{"name": "snapkv", "fraction": 0.5, "pool": 4}', "pool 4 is even"),
        ('{"name": "h2o", "fraction": 0.5, "pool": 3}', "pool"),
    ],
)
def test_impossible_settings_are_refused_by_name(policy, message):
    with pytest.raises(ConfigError, match=message):
        load_config(f'{{"tiers": ["K8V4"], "policy": {policy}}}')
    with pytest.raises(ConfigError, match="one tier"):
        load_config('{"policy": {"name": "h2o", "budget": 512}}')


@pytest.mark.parametrize("policy", [snapkv_policy(Budget(12), window=4), h2o_policy(Budget(12), window=4)])
def test_a_copy_keeps_what_compaction_in_place_keeps(policy):
    """The prefix cache's exact prompts are cut when they are copied: a head's tokens are ranked together, in whatever
    pages and parts they lie."""
    manager = make_manager(make_format(("K8V4",), page_tokens=4), policy=policy)
    session = Session(manager, spread=3.0)
    session.extend({1: 31})
    manager.space.extend(2, (40,))
    with manager.launching():
        manager.ops.copy_compact(2, [(1, 0, 9), (1, 9, 31)], 31, policy, None)
    copied = tier_map(manager.state, 2, 31)
    session.end_prompt(1)
    assert np.array_equal(copied, tier_map(manager.state, 1, 31))
    assert np.unique((copied == 0).sum(2)).tolist() == [12]
