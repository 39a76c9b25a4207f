"""Three and four tiers: what becomes of prompts' and generated tokens, against plain transcriptions of the rules."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_diffkv.config import DiffKVConfig, load_config
from sglang_diffkv.errors import ConfigError, UnsupportedError
from sglang_diffkv.kernels.decode_attention.reference import StepScores
from sglang_diffkv.layout.page_format import PageFormat
from sglang_diffkv.policies.budget import Budget
from sglang_diffkv.policies.diffkv import DiffKVPolicy
from tests.deciding import classify_prompt as classify
from tests.deciding import moves_of
from tests.helpers import make_format, make_manager
from tests.pages.paper import classify_prompt, step_of_tiers
from tests.policies import between_in, diffkv_policy, snapkv_policy

THREE, FOUR = ["BF16", "K8V4", "K4V2"], ["K8V8", "K8V4", "K4V4", "K4V2"]
ALPHAS = st.lists(st.sampled_from([0.0, 0.02, 0.5, 0.5, 1.0, 1.5, 3.0, 1e9]), min_size=3, max_size=4)


def policy_of(alphas: list[float], window: int, sinks: int = 0, scale: float = 1.0) -> DiffKVPolicy:
    high, *between, low = alphas
    head_scale = None if scale == 1.0 else ((scale,),)
    return diffkv_policy(high, low, window, sinks, head_scale=head_scale, alpha_between=tuple(between))


@given(
    alphas=ALPHAS,
    length=st.integers(1, 90),
    window=st.integers(0, 70),
    sinks=st.integers(0, 40),
    scale=st.sampled_from([0.5, 1.0, 4.0]),
    seed=st.integers(0, 999),
)
def test_a_prompt_is_sorted_by_all_thresholds(alphas, length, window, sinks, scale, seed):
    alphas, random = sorted(alphas, reverse=True), np.random.default_rng(seed)
    position = torch.arange(length)
    score = torch.tensor(random.exponential(1.5, length) / (np.arange(length) + 1), dtype=torch.float32)
    got = classify(policy_of(alphas, window, sinks, scale), score, position, length, len(alphas))
    high, *between, low = (np.float32(scale) * np.float32(alpha) for alpha in alphas)
    for at in range(length):
        value = np.float32(score[at])
        assert got[at] == classify_prompt(value, at, length, len(alphas), high, low, window, sinks, between)


def test_scores_at_a_threshold_stay():
    score = torch.tensor([x / 8 for x in (2, 1, 0.5, 0.25)])
    below = torch.nextafter(score, torch.zeros(()))
    policy = policy_of([2.0, 1.0, 0.5, 0.25], 0)
    at = torch.full((4,), 7)
    assert classify(policy, score, at, 100, 4).tolist() == [0, 1, 2, 3]
    assert classify(policy, below, at, 100, 4).tolist() == [1, 2, 3, 4]


@given(alphas=ALPHAS, length=st.integers(2, 300), seed=st.integers(0, 999))
def test_a_step_moves_what_the_rule_says(alphas, length, seed):
    """Moves of random scores, applied to plain sets, give what the rule gives."""
    alphas, random = sorted(alphas, reverse=True), np.random.default_rng(seed)
    tiers, heads = len(alphas), 12
    found = StepScores(
        torch.full((1, 1, heads), -1),
        torch.zeros(1, 1, heads),
        torch.full((1, 1, heads, tiers), -1),
        torch.full((1, 1, heads, tiers), float("inf")),
    )
    scores = iter(random.permutation(10_000) / 2500.0 / length)
    held, candidates = [], []
    for head in range(heads):
        sizes = [int(random.integers(0, 5)) for _ in range(tiers)]
        held.append([{100 * t + s: float(np.float32(next(scores))) for s in range(n)} for t, n in enumerate(sizes)])
        candidate = int(random.integers(sizes[0])) if sizes[0] and random.random() < 0.9 else None
        candidates.append(candidate)
        if candidate is not None:
            found.candidate_slot[0, 0, head] = candidate
            found.candidate_score[0, 0, head] = held[head][0][candidate]
        for tier, tokens in enumerate(held[head]):
            if tokens:
                found.least_slot[0, 0, head, tier] = least = min(tokens, key=tokens.__getitem__)
                found.least_score[0, 0, head, tier] = tokens[least]
    moves = moves_of(policy_of(alphas, 4), found, torch.tensor([length]), tiers)
    for head in range(heads):
        demote, drop, replace, tier = (int(x[0, 0, head]) for x in vars(moves).values())
        after = [dict(tokens) for tokens in held[head]]
        assert (demote < 0 or drop < 0) and (demote >= 0 or replace < 0)
        if replace >= 0:
            del after[tier][replace]
        if demote >= 0:
            after[tier][demote] = after[0].pop(demote)
        if drop >= 0:
            del after[0][drop]
        assert after == step_of_tiers(held[head], candidates[head], length, alphas)


@pytest.mark.parametrize("between", [((1.0, 0.0, 0.5),), ((1.0, 0.0, 0.5), 0.0), (0.5, (0.5, 0.0, 0.25))])
def test_each_layer_has_thresholds_of_its_own(between):
    """Decisions are those of a policy with the layer's thresholds."""
    random, tiers = torch.Generator().manual_seed(1), len(between) + 2
    policy = diffkv_policy(1.0, 0.0, 5, alpha_between=between)
    score, position = torch.rand(3, 2, 40, generator=random) * 0.1, torch.arange(40).expand(3, 2, -1)
    found = StepScores(
        torch.randint(-1, 9, (7, 3, 2), generator=random),
        torch.rand(7, 3, 2, generator=random) * 0.1,
        torch.randint(-1, 9, (7, 3, 2, tiers), generator=random),
        torch.rand(7, 3, 2, tiers, generator=random) * 0.1,
    )
    lengths = torch.arange(20, 27)
    tier, moves = classify(policy, score, position, 40, tiers), moves_of(policy, found, lengths, tiers)
    for layer in range(3):
        alone = diffkv_policy(1.0, 0.0, 5, alpha_between=between_in(policy, layer))
        assert torch.equal(tier[layer], classify(alone, score[[layer]], position[[layer]], 40, tiers)[0])
        assert set(tier[layer].flatten().tolist()) <= {0, *policy.prompt.used_tiers(tiers, layer)}
        here = StepScores(*(x[:, [layer]] for x in vars(found).values() if isinstance(x, torch.Tensor)))
        for name, value in vars(moves_of(alone, here, lengths, tiers)).items():
            assert torch.equal(getattr(moves, name)[:, [layer]], value), name
    assert policy.prompt.layers == 3 and policy.of_rank(1, 2, 1) == policy


@pytest.mark.parametrize(
    ("between", "used"),
    [
        ([[1.0, 0.0, 0.5]], [(0, 2), (0, 1), (0, 1, 2)]),
        ([1.0], [(0, 2)] * 3),
        ([0.0], [(0, 1)] * 3),
        ([[1.0, 0.0, 0.5], 0.0], [(0, 2), (0, 1), (0, 1, 2)]),
        ([0.5, [0.5, 0.0, 0.25]], [(0, 1, 3), (0, 1, 2), (0, 1, 2, 3)]),
    ],
)
def test_tiers_that_a_layer_uses(between, used):
    policy = {"name": "diffkv", "alpha_high": 1.0, "alpha_between": between}
    found = config(tiers=THREE if len(between) == 1 else FOUR, policy=policy)
    assert [found.build_policy().prompt.used_tiers(len(found.tiers), layer) for layer in range(3)] == used
    assert load_config(found.as_text()) == found
    found.check_heads(3, 2)
    if any(isinstance(x, list) for x in between):
        with pytest.raises(ConfigError, match="alpha_between is of 3 layers, the model has 6 that are stored in pages"):
            found.check_heads(6, 2)


def test_steps_ask_for_no_pages_of_a_tier_that_a_layer_does_not_use():
    """As many as with the two tiers that each layer uses."""
    by_layer = diffkv_policy(1.0, 0.0, 8, alpha_between=((1.0, 0.0),))
    three = make_manager(make_format(THREE), policy=by_layer, layers=2)
    two = make_manager(make_format(THREE[:2]), policy=diffkv_policy(1.0, 0.0, 8), layers=2)
    every = make_manager(make_format(THREE), policy=diffkv_policy(1.0, 0.0, 8, alpha_between=(0.5,)), layers=2)
    assert three.counts.unknown == two.counts.unknown < every.counts.unknown
    assert three.ops.used[:, 0].tolist() == [[1, 0, 1], [1, 1, 0]] and two.ops.used is every.ops.used is None
    rows = torch.tensor([1])
    found = [x.ops.count_rows(rows, steps=2, low_grows=True)[0, 0] for x in (three, two, every)]
    assert found[0] == found[1] < found[2], "of rows without tokens"


def config(**fields: object) -> DiffKVConfig:
    return load_config(json.dumps(fields))


def diffkv(*between: object) -> dict[str, object]:
    return {"name": "diffkv", "alpha_high": 1.0, "alpha_between": between, "alpha_low": 0.1}


def test_configurations_of_more_tiers():
    assert config(tiers=THREE, policy=diffkv(0.5)).build_policy() == diffkv_policy(
        1.0, 0.1, 256, sinks=4, alpha_between=(0.5,), observe_every=4, pressure_window=64
    )
    assert config(tiers=FOUR, policy=diffkv(0.5, 0.5)).build_policy().alpha_between == (0.5, 0.5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tiers": THREE}, "alpha_between has 0 thresholds, 3 tiers take 1: alpha_high ends"),
        ({"tiers": FOUR, "policy": diffkv(0.5)}, "alpha_between has 1 thresholds, 4 tiers take 2"),
        ({"tiers": THREE[:2], "policy": diffkv(0.5)}, "alpha_between has 1 thresholds, 2 tiers take 0"),
        ({"tiers": FOUR, "policy": diffkv(0.3, 0.5)}, "must fall from alpha_high 1.0 to alpha_low 0.1"),
        ({"tiers": THREE, "policy": diffkv(1.5)}, "must fall"),
        ({"tiers": THREE, "policy": diffkv(0.05)}, "must fall"),
        ({"tiers": THREE, "policy": diffkv(-1.0)}, "alpha_between"),
        ({"tiers": THREE, "policy": diffkv([0.5, 0.05])}, r"alpha_between \[0.05\] in layer 1 must fall"),
        ({"tiers": FOUR, "policy": diffkv(0.3, [0.3, 0.5])}, r"alpha_between \[0.3, 0.5\] in layer 1 must fall"),
        ({"tiers": FOUR, "policy": diffkv([0.5], [0.5, 0.3])}, "lists of 1 and 2 layers: allowed is one length"),
        (
            {"tiers": THREE, "policy": diffkv([0.5, -1.0])},
            r"alpha_between\[0\]\[1\] is -1.0: allowed is a number from 0",
        ),
        ({"tiers": THREE, "policy": diffkv([])}, r"alpha_between\[0\] is an empty list: allowed is a list of 1"),
        ({"tiers": THREE, "policy": diffkv("1")}, r"alpha_between\[0\] is \"1\": allowed is a number"),
        ({"tiers": [*FOUR, "K4V1"]}, "tiers is a list of 5: allowed is a list of 1 to 4"),
        ({"tiers": ["K8V4", "BF16", "K4V2"], "policy": diffkv(0.5)}, "ever fewer bytes"),
        ({"tiers": THREE, "policy": {"name": "snapkv", "budget": 512}}, "at one tier, and tiers has 3"),
    ],
)
def test_what_does_not_fit_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        config(**fields)


def test_whole_heads_are_judged_for_two_tiers_at_most():
    policy = snapkv_policy(Budget(20), window=4)
    with pytest.raises(UnsupportedError, match="TopCount sorts the tokens of a head into two tiers at most"):
        classify(policy, torch.rand(30), torch.arange(30), 30, 3)


def test_pages_of_four_tiers():
    tiers = config(tiers=FOUR, policy=diffkv(0.5, 0.3)).parsed_tiers
    tokens = [layout.tokens for layout in PageFormat(128, 128, tiers).layouts]
    assert tokens[0] == 32 and tokens == sorted(set(tokens))
