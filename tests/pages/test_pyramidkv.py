"""PyramidKV: budgets by layer against the authors' arithmetic, what heads keep of them, and lives of pages."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_diffkv.config import load_config
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.mem_pool.integrity import check_integrity
from sglang_diffkv.ops.triton import WHOLE_HEADS
from sglang_diffkv.policies.budget import Budget, PyramidBudget
from tests.deciding import classify_prompt
from tests.dense import Session
from tests.helpers import make_format, make_manager, tier_map
from tests.kernels.triton_helpers import DEVICE
from tests.policies import pyramidkv_policy, snapkv_policy


def by_layer(mean: int, length: int, window: int, layers: int, beta: int) -> list[Fraction]:
    """Tokens beyond the window that each layer keeps, as the authors compute them, on an exact line."""
    outside = length - window
    if outside <= mean:
        return [Fraction(outside)] * layers
    least = mean // beta
    most = 2 * mean - least
    if most >= outside:
        most = outside
        least = 2 * mean - most
    if length < 2 * mean or layers == 1:
        return [Fraction(mean)] * layers
    return [most - Fraction((most - least) * layer, layers - 1) for layer in range(layers)]


def test_budgets_of_a_model_of_32_layers() -> None:
    """2,048 tokens a layer, a window of 8 among them: from 3,978 beyond the window to 102, 2,040 on average."""
    kept = PyramidBudget(2048).kept(torch.full((32, 1), 100_000), 8).flatten() - 8
    assert kept[0] == 3978 and kept[-1] == 102 and (kept.diff() < 0).all()
    assert float(kept.double().mean()) == 2040.0


@settings(deadline=None)
@given(
    st.integers(0, 300),
    st.floats(0, 1),
    st.integers(0, 700),
    st.integers(1, 20),
    st.integers(1, 48),
    st.integers(1, 40),
)
def test_budgets_are_those_of_the_authors(
    tokens: int, fraction: float, length: int, window: int, layers: int, beta: int
) -> None:
    budget = PyramidBudget(tokens, fraction, beta=beta)
    kept = budget.kept(torch.full((layers, 3), length), window)
    assert (kept == kept[:, :1]).all() and (kept <= length).all() and (kept >= min(length, window)).all()
    if length <= window:
        return
    mean = int(Budget(tokens, fraction).kept(torch.tensor(length), window)) - window
    expected = by_layer(mean, length, window, layers, beta)
    assert all(abs(int(n) - window - x) <= Fraction(1, 2) for n, x in zip(kept[:, 0], expected, strict=True))
    assert abs(Fraction(int(kept[:, 0].sum()), layers) - window - mean) <= Fraction(1, 2)


@pytest.mark.parametrize("length", [9, 60, 130])
def test_heads_keep_what_snapkv_would_of_their_layer_s_budget(length: int) -> None:
    score = torch.rand(4, 2, length, generator=torch.Generator().manual_seed(length))
    position = torch.arange(length).expand(4, 2, -1)
    policy = pyramidkv_policy(PyramidBudget(30), window=8, pool=3)
    tier = classify_prompt(policy, score, position, length, 1)
    if DEVICE == "cpu":  # the numbers lie in the CPU's memory
        assert torch.equal(tier, classify_prompt(policy, score, position, length, 1, kernels=WHOLE_HEADS))
    for layer, beyond in enumerate(by_layer(22, length, 8, 4, 20)):
        budget = Budget(8 + int((tier[layer, 0, :-8] == 0).sum()))
        assert abs(budget.tokens - 8 - beyond) <= Fraction(1, 2)
        alone = snapkv_policy(budget, window=8, pool=3)
        expected = classify_prompt(alone, score[layer, None], position[layer, None], length, 1)[0]
        assert torch.equal(tier[layer], expected)


def session_of_41_tokens() -> Session:
    policy = pyramidkv_policy(PyramidBudget(14), window=4)
    session = Session(make_manager(make_format(("K8V4",), page_tokens=4), policy=policy), spread=3.0)
    session.extend({1: 30})
    session.extend({1: 11})
    return session


def test_a_copy_keeps_what_compaction_in_place_keeps() -> None:
    session = session_of_41_tokens()
    manager = session.manager
    manager.space.extend(2, (50,))
    with manager.launching():
        manager.ops.copy_compact(2, [(1, 0, 9), (1, 9, 41)], 41, manager.policy, None)
    copied = tier_map(manager.state, 2, 41)
    session.end_prompt(1)
    assert np.array_equal(copied, tier_map(manager.state, 1, 41))


def test_prompts_are_cut_once_and_generated_tokens_stay() -> None:
    session = session_of_41_tokens()
    manager = session.manager
    session.end_prompt(1)
    kept = tier_map(manager.state, 1, 41)
    assert (kept == 0).sum(2).tolist() == [[24, 24], [4, 4]], "10 beyond the window on average, none in the last layer"
    for _ in range(12):
        session.step([1])
    after = tier_map(manager.state, 1, 53)
    assert np.array_equal(after[..., :41], kept) and (after[..., 41:] == 0).all()
    check_integrity(manager)


def test_configuration() -> None:
    config = load_config('{"tiers": ["BF16"], "policy": {"name": "pyramidkv", "budget": 512}}')
    assert config.build_policy() == pyramidkv_policy(PyramidBudget(512), 8, 7) and not config.lossless
    config = load_config('{"tiers": ["K8V4"], "policy": {"name": "pyramidkv", "fraction": 0.2, "beta": 10, "pool": 5}}')
    assert config.build_policy() == pyramidkv_policy(PyramidBudget(0, 0.2, beta=10), 8, 5)
    for policy, message in (("", "budget"), (', "budget": 8', "above window 8"), (', "budget": 9, "beta": 0', "beta")):
        with pytest.raises(ConfigError, match=message):
            load_config(f'{{"tiers": ["K8V4"], "policy": {{"name": "pyramidkv"{policy}}}}}')
    with pytest.raises(ConfigError, match="one tier"):
        load_config('{"policy": {"name": "pyramidkv", "budget": 512}}')
