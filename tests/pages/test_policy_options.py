"""What DiffKV's policy does beyond the paper: sinks stay high, scores forget past a horizon, heads have thresholds of
their own."""

from __future__ import annotations

import dataclasses
from typing import get_args

import numpy as np
import pytest
import torch

from sglang_diffkv.config import load_config
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.kernels.decode_attention.reference import StepScores
from sglang_diffkv.mem_pool.integrity import check_integrity
from sglang_diffkv.policies.diffkv import DiffKVPolicy
from sglang_diffkv.policies.options import BudgetOptions, PolicyOptions
from sglang_diffkv.policies.registry import PolicyConfig
from tests.deciding import classify_prompt, moves_of
from tests.dense import Session, chunks_and_steps
from tests.helpers import PAIR, make_format, make_manager, tier_map, visible
from tests.policies import diffkv_policy


def session_of(policy: DiffKVPolicy, tiers: tuple[str, ...] = PAIR) -> Session:
    """Rows 1 and 2 with prompts of 42 and 3 tokens, compacted."""
    session = Session(make_manager(make_format(tiers), policy=policy), spread=4.0)
    session.extend({1: 42, 2: 3})
    for row in (1, 2):
        session.manager.prompts.end(row)
    return session


@pytest.mark.parametrize("tiers", [PAIR, ("K8V4",)], ids="-".join)
@pytest.mark.parametrize("alphas", [(1.0, 0.5), (1e9, 0.0), (1e9, 1e9)])
@pytest.mark.parametrize("sinks", [1, 6])
def test_sinks_stay_high(sinks, alphas, tiers):
    """Also in a row that is hardly longer than sinks and window; ``Session`` checks the searches of every step."""
    session = session_of(diffkv_policy(*alphas, 5, sinks), tiers)
    for _ in range(12):
        session.step([1, 2])
        check_integrity(session.manager)
    for row, length in ((1, 54), (2, 15)):
        tier = tier_map(session.state, row, length)
        assert (tier[..., :sinks] == 0).all() and (tier[..., -5:] == 0).all()
        middle = tier[..., sinks:-5]
        if alphas == (1e9, 1e9):
            assert (middle == len(tiers)).all()
        elif alphas[0] == 1e9:
            assert (middle == len(tiers) - 1).all()


def scores_of(session: Session, row: int, below: int) -> np.ndarray:
    """Scores of the tokens at positions [0, below), by layer, head and position."""
    seen = visible(session.state, row)
    seen = seen.pick(seen.position < below)
    return seen.score[np.lexsort((seen.position, seen.head, seen.layer))].reshape(-1, below)


def test_a_horizon_forgets():
    """Past the horizon the newest token's attention weighs ``1 / horizon``, before it as in the mean."""
    before, after = [], []
    for horizon in (0, 16, 100):
        session = session_of(diffkv_policy(1e-9, 0.0, 5, horizon=horizon))
        before.append(scores_of(session, 1, 42))
        session.step([1])
        after.append(scores_of(session, 1, 42))
    assert all(np.array_equal(before[0], x) for x in before), "the prompt's scores are means in any case"
    age = 42 - np.arange(42)
    assert np.array_equal(after[2], after[0]), "nothing is older than 100 tokens"
    assert np.array_equal(after[1][:, age <= 16], after[0][:, age <= 16])
    change, plain = after[1] - before[1], after[0] - before[0]
    np.testing.assert_allclose(change[:, age > 16] * 16, (plain * age)[:, age > 16], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("horizon", [1, 4, 30])
def test_scores_with_a_horizon_over_many_steps(horizon):
    """``Session`` compares each own token's score with the dense mean after every call."""
    policy = diffkv_policy(2.0, 0.3, window=6, horizon=horizon)
    session = Session(make_manager(policy=policy), group=4, spread=3.0)
    chunks_and_steps(session)


SCALE = ((0.5, 1.0), (3.0, 1.25))


def plain(policy: DiffKVPolicy, layer: int, head: int) -> DiffKVPolicy:
    """One head's thresholds, for a model of that head alone."""
    factor = SCALE[layer][head]
    return diffkv_policy(policy.alpha_high * factor, policy.alpha_low * factor, policy.window)


@pytest.mark.parametrize("num_tiers", [1, 2])
def test_each_head_has_thresholds_of_its_own(num_tiers):
    """Decisions are those of a policy with the head's thresholds; factors are exact in binary."""
    random = torch.Generator().manual_seed(1)
    policy = diffkv_policy(1.0, 0.5, 5, head_scale=SCALE)
    score = torch.rand(2, 2, 40, generator=random) * 0.2
    position = torch.arange(40).expand(2, 2, -1)
    found = StepScores(
        torch.randint(-1, 9, (7, 2, 2), generator=random),
        torch.rand(7, 2, 2, generator=random) * 0.1,
        torch.randint(-1, 9, (7, 2, 2, num_tiers), generator=random),
        torch.rand(7, 2, 2, num_tiers, generator=random) * 0.1,
    )
    lengths = torch.arange(20, 27)
    tier, moves = classify_prompt(policy, score, position, 40, num_tiers), moves_of(policy, found, lengths, num_tiers)
    for layer, head in np.ndindex(2, 2):
        alone, here = plain(policy, layer, head), (slice(None), slice(layer, layer + 1), slice(head, head + 1))
        expected = classify_prompt(alone, score[layer, head], position[layer, head], 40, num_tiers)
        assert torch.equal(tier[layer, head], expected)
        of_head = StepScores(*(x[here] for x in vars(found).values() if isinstance(x, torch.Tensor)))
        expected_moves = moves_of(alone, of_head, lengths, num_tiers)
        for name, value in vars(expected_moves).items():
            assert torch.equal(getattr(moves, name)[here], value), name


def test_heads_with_a_high_factor_have_fewer_high_tokens():
    session = session_of(diffkv_policy(1.0, 0.0, 5, head_scale=((0.0001, 1.0), (1.0, 10000.0))))
    for _ in range(8):
        session.step([1, 2])
    high = (tier_map(session.state, 1, 50) == 0).sum(2)
    assert high[0, 0] == 50 and high[1, 1] == 5 and (high[[0, 1], [1, 0]] > 5).all() and (high[0, 1] < 50)


def test_ranks_take_the_factors_of_their_heads():
    policy = diffkv_policy(1.0, 0.0, 256, head_scale=((1.0, 2.0, 3.0, 4.0), (5.0, 6.0, 7.0, 8.0)))
    assert [policy.of_rank(rank, 2, 2).head_scale for rank in range(2)] == [
        ((1.0, 2.0), (5.0, 6.0)),
        ((3.0, 4.0), (7.0, 8.0)),
    ]
    of_eight = [policy.of_rank(rank, 8, 1).head_scale[0] for rank in range(8)]
    assert of_eight == [(1.0,), (1.0,), (2.0,), (2.0,), (3.0,), (3.0,), (4.0,), (4.0,)]
    assert diffkv_policy(1.0, 0.0, 256).of_rank(1, 2, 2) == diffkv_policy(1.0, 0.0, 256)


def test_factors_of_another_model_are_refused():
    config = load_config('{"policy": {"name": "diffkv", "head_scale": [[1, 2], [3, 4]]}}')
    config.check_heads(2, 2)
    load_config("{}").check_heads(6, 2)
    with pytest.raises(ConfigError, match="head_scale is of 2 layers with 2 KV heads, the model has 6 with 2"):
        config.check_heads(6, 2)


@pytest.mark.parametrize("config", get_args(PolicyConfig), ids=lambda x: x.model_fields["name"].default)
def test_defaults_stand_in_the_configuration_alone(config: type[PolicyOptions]) -> None:
    needed = {"duo": {"pattern": [[0.5, 0.25]]}, "xkv": {"keep": 0.5}, "zipage": {"max_blocks": 3}}
    budget = {"fraction": 0.5} if issubclass(config, BudgetOptions) else {}
    rule = type(config(**budget, **needed.get(config.model_fields["name"].default, {})).build())
    fields = dataclasses.fields(rule)  # type: ignore[arg-type]
    given = [x.name for x in fields if x.default is not dataclasses.MISSING]
    assert not given, "a field that Policy has, too, says = field()"
