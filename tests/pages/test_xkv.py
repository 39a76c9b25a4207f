"""XKV: sizes by layer against the paper's Algorithm 1 as a loop, what heads keep of them, by both sets of kernels, and
lives of pages under the policy."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_diffkv.config import load_config
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.kernels.importance.reference import importance
from sglang_diffkv.layout.ranks import Ranks
from sglang_diffkv.mem_pool.integrity import check_integrity
from sglang_diffkv.ops.decisions import REFERENCE, WholeHeadKernels
from sglang_diffkv.ops.triton import WHOLE_HEADS
from sglang_diffkv.policies.base import prunes
from sglang_diffkv.policies.xkv import XKVPolicy
from tests.deciding import classify_prompt
from tests.dense import Session
from tests.helpers import make_format, make_manager, tier_map
from tests.kernels.triton_helpers import DEVICE
from tests.policies import xkv_policy
from tests.ranks import with_one_sum

Weights = list[list[Fraction]]
"""By layer, of any order."""


def algorithm_1(
    weights: Weights, *, total: int | None = None, retention: Fraction | None = None, grain: int = 0
) -> list[int]:
    """The paper's Algorithm 1, line by line: an allocation list and, for each layer, what its next token would add.

    Given is the total size, or the retention that is to be reached, mean over the layers that have any importance.
    ``grain``: the weights are divided by their sums already, and what is retained is counted in units of 1 / ``grain``,
    rounded down; 0: neither.
    """
    sums = [Fraction(1) if grain else sum(w, Fraction(0)) for w in weights]
    ranked = [
        [x / s if s else Fraction(0) for x in sorted(w, reverse=True)] for w, s in zip(weights, sums, strict=True)
    ]

    def counted(part: Fraction) -> Fraction:
        return Fraction(int(part * grain)) if grain else part

    everything = sum((counted(x) for line in ranked for x in line), Fraction(0))
    allocated = [0] * len(weights)
    waiting = [line[0] if line else Fraction(-1) for line in ranked]
    retained = Fraction(0)

    def goes_on() -> bool:
        return sum(allocated) < total if total is not None else retained < retention * everything

    while goes_on():
        layer = waiting.index(max(waiting))
        retained += counted(waiting[layer])
        allocated[layer] += 1
        at = allocated[layer]
        waiting[layer] = ranked[layer][at] if at < len(ranked[layer]) else Fraction(-1)
    return allocated


def test_the_loop_by_hand() -> None:
    """Layer 0 has half of its importance in one token, layer 1 is even; of equal gains the first layer's is taken."""
    weights = [[Fraction(x) for x in line] for line in ([4, 1, 1, 2], [3, 3, 3, 3])]
    assert algorithm_1(weights, total=3) == [2, 1]
    assert algorithm_1(weights, total=5) == [2, 3]
    assert algorithm_1(weights, retention=Fraction(1, 2)) == [2, 1]


def averaged(score: np.ndarray, candidates: np.ndarray, pool: int) -> np.ndarray:
    """[L, H, n] float32: sums over neighbours, of candidates alone, in the order of positions, over the width."""
    line = np.where(candidates, score, 0.0).astype(np.float32)
    out = np.zeros_like(line)
    for layer, head, at in np.ndindex(*line.shape):
        total = np.float32(0)
        for near in range(at - pool // 2, at + pool // 2 + 1):
            total = np.float32(total + (line[layer, head, near] if 0 <= near < line.shape[2] else np.float32(0)))
        out[layer, head, at] = total / np.float32(pool)
    return out


def parts_of(pooled: np.ndarray, candidates: np.ndarray) -> Weights:
    """The parts of importance by layer, which ``tests/kernels/test_importance.py`` holds to float64."""
    values = torch.tensor(np.where(candidates, pooled, np.nan))
    parts = torch.empty(len(pooled), 1, pooled.shape[2])
    importance(values, parts)
    return [[Fraction(float(x)) for x in line[~line.isnan()]] for line in parts[:, 0]]


@st.composite
def prompts(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Scores [L, H, n] of a prompt, many equal or 0 or not; and which tokens are there at all, [L, H, n]."""
    layers, heads = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    length = draw(st.integers(1, 40))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["plain", "ties", "zeros", "copied layer"]))
    score = random.exponential(0.1, (layers, heads, length)).astype(np.float32)
    if kind == "ties":
        score = (random.integers(0, 4, score.shape) / 8).astype(np.float32)
    if kind == "zeros":
        score = np.where(random.random(score.shape) < 0.7, 0.0, score).astype(np.float32)
        score[0] = 0.0
    if kind == "copied layer":
        score[-1] = score[0]
    held = random.random(score.shape) < draw(st.sampled_from([1.0, 1.0, 0.7]))
    held[..., -1] = True
    return score, held


@settings(deadline=None, max_examples=max(settings().max_examples // 3, 10))  # the loop is in fractions
@given(
    prompts(),
    st.sampled_from([1, 4, 9]),
    st.sampled_from([1, 3, 7]),
    st.sampled_from([0.01, 0.2, 0.5, 1.0]),
    st.booleans(),
)
def test_layers_get_what_the_loop_gives_them_and_heads_keep_their_own(
    prompt: tuple[np.ndarray, np.ndarray], window: int, pool: int, size: float, by_retention: bool
) -> None:
    score, held = prompt
    layers, heads, length = score.shape
    policy = xkv_policy(window, pool, *((None, size) if by_retention else (size, None)))
    position = np.where(held, np.arange(length), -1)
    given = (policy, torch.tensor(score), torch.tensor(position), length, 1)
    tier = classify_prompt(*given)
    if DEVICE == "cpu":  # the numbers lie in the CPU's memory
        assert torch.equal(tier, classify_prompt(*given, kernels=WHOLE_HEADS))

    candidates = held & (np.arange(length) < length - window)
    pooled = averaged(score, candidates, pool)
    parts = parts_of(pooled, candidates)
    if by_retention:
        sizes = algorithm_1(parts, retention=Fraction(round(size * 2**16), 2**16), grain=2**36)
    else:
        sizes = algorithm_1(parts, total=math.ceil(size * sum(map(len, parts))), grain=2**36)
    for layer, head in np.ndindex(layers, heads):
        mine = np.flatnonzero(candidates[layer, head])
        best = mine[np.argsort(-pooled[layer, head, mine], kind="stable")][: sizes[layer]]
        kept = np.flatnonzero(tier[layer, head].numpy() == 0)
        lasting = np.flatnonzero(held[layer, head] & ~candidates[layer, head])
        assert kept.tolist() == sorted([*best, *lasting])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("size", [{"keep": 0.15}, {"keep": 0.6}, {"min_retention": 0.5}, {"min_retention": 0.9}])
def test_no_allocation_retains_more(seed: int, size: dict[str, float]) -> None:
    """From the scores on in float64, by numpy alone: the loop's sizes for scores without ties, in layers of which some
    are flat and some are not."""
    random = np.random.default_rng(seed)
    score = random.exponential(1.0, (5, 2, 61)) ** np.array([0.3, 1, 2, 3, 5])[:, None, None]
    policy = xkv_policy(window=8, pool=7, **size)
    tier = classify_prompt(policy, torch.tensor(score, dtype=torch.float32), torch.arange(61).expand(5, 2, -1), 61, 1)
    outside = score[..., :53]
    pooled = np.stack([[np.convolve(head, np.ones(7) / 7, mode="same") for head in layer] for layer in outside])
    weights = [[Fraction(float(x)) for x in layer] for layer in pooled.mean(1)]
    if "keep" in size:
        expected = algorithm_1(weights, total=math.ceil(size["keep"] * 5 * 53))
    else:
        expected = algorithm_1(weights, retention=Fraction(size["min_retention"]))
    kept = (tier[..., :53] == 0).sum(2)
    assert kept.tolist() == [[n, n] for n in expected] and len(set(expected)) > 2
    assert (tier[..., 53:] == 0).all()


def test_fixed_shares_by_layer_and_a_second_tier() -> None:
    """Each head keeps its layer's share of the 53 tokens outside the window, rounded up, and half of them high."""
    score = torch.rand(3, 2, 61, generator=torch.Generator().manual_seed(1))
    position = torch.arange(61).expand(3, 2, -1)
    fixed = xkv_policy(layer_fractions=(0.1, 0.0, 1.0), high=0.5)
    one = classify_prompt(fixed, score, position, 61, 1)
    assert [(one[layer] == 0).sum(1).tolist() for layer in range(3)] == [[14, 14], [8, 8], [61, 61]]
    two = classify_prompt(fixed, score, position, 61, 2)
    assert [(two[layer] == 0).sum(1).tolist() for layer in range(3)] == [[11, 11], [8, 8], [35, 35]]
    assert torch.equal(two < 2, one == 0)
    online = xkv_policy(keep=0.4, high=0.25)
    one, two = (classify_prompt(online, score, position, 61, tiers) for tiers in (1, 2))
    assert torch.equal(two < 2, one == 0)
    kept = (one == 0).sum(2) - 8
    assert torch.equal((two == 0).sum(2) - 8, (kept * 0.25).ceil().long()) and int(kept[:, 0].sum()) == math.ceil(63.6)


def test_a_layer_without_importance_gets_nothing_but_its_window() -> None:
    score = torch.rand(2, 1, 30, generator=torch.Generator().manual_seed(2))
    score[0] = 0.0
    tier = classify_prompt(xkv_policy(min_retention=0.5), score, torch.arange(30).expand(2, 1, -1), 30, 1)
    assert (tier[0] == 0).sum() == 8 and 8 < (tier[1] == 0).sum() < 30
    nothing = classify_prompt(xkv_policy(min_retention=0.5), score * 0, torch.arange(30).expand(2, 1, -1), 30, 1)
    assert ((nothing == 0).sum(2) == 8).all()


POLICIES = [xkv_policy(4, 3, keep=0.3), xkv_policy(4, 7, min_retention=0.6), xkv_policy(4, layer_fractions=(0.5, 0.1))]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_prompts_are_cut_once_and_generated_tokens_stay(policy: XKVPolicy) -> None:
    """A prompt in chunks is judged as a whole behind its last one."""
    manager = make_manager(make_format(("K8V4",)), policy=policy)
    session = Session(manager, spread=3.0)
    session.extend({1: 20})
    session.extend({1: 11})
    assert (tier_map(manager.state, 1, 31) == 0).all()
    session.end_prompt(1)
    kept = tier_map(manager.state, 1, 31)
    sizes = (kept == 0).sum(2)
    assert (sizes[:, 0] == sizes[:, 1]).all() and sizes.min() >= 4 and (kept[..., -4:] == 0).all()
    if policy.keep is not None:
        assert sizes[:, 0].sum() == 2 * 4 + math.ceil(0.3 * 54)
    for _ in range(20):
        session.step([1])
    after = tier_map(manager.state, 1, 51)
    assert np.array_equal(after[..., :31], kept) and (after[..., 31:] == 0).all()
    check_integrity(manager)
    assert prunes(policy, 1)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_copy_keeps_what_compaction_in_place_keeps(policy: XKVPolicy) -> None:
    manager = make_manager(make_format(("K8V4",), page_tokens=4), policy=policy)
    session = Session(manager, spread=3.0)
    session.extend({1: 31})
    manager.space.extend(2, (40,))
    with manager.launching():
        manager.ops.copy_compact(2, [(1, 0, 9), (1, 9, 31)], 31, policy, None)
    copied = tier_map(manager.state, 2, 31)
    session.end_prompt(1)
    assert np.array_equal(copied, tier_map(manager.state, 1, 31))


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_behind_a_shared_prefix_the_request_s_own_tokens_are_judged(policy: XKVPolicy) -> None:
    """The prefix stays as it was cut when it was cached, and so do the tokens of the request that brought it."""
    manager = make_manager(make_format(("K8V4",), page_tokens=4), policy=policy)
    session = Session(manager, spread=3.0)
    manager.prompts.share_min_tokens = 8
    session.extend({1: 40})
    session.end_prompt(1)
    prefix = tier_map(manager.state, 1, 40)
    segment = session.share(1, 0, 40)
    assert segment is not None
    session.attach(2, [(segment, 0, 33)])
    session.extend({2: 24})
    session.end_prompt(2)
    both = tier_map(manager.state, 2, 57)
    assert np.array_equal(both[..., :33], prefix[..., :33])
    own = (both[..., 33:] == 0).sum(2)
    assert (own[:, 0] == own[:, 1]).all() and (own < 24).any()
    if policy.keep is not None:
        assert own[:, 0].sum() == 2 * 4 + math.ceil(0.3 * 40)
    for _ in range(5):
        session.step([1, 2])
        check_integrity(manager)
    session.release(1)
    session.release(2)
    check_integrity(manager)


@pytest.mark.cover(2)
@pytest.mark.parametrize("kernels", [REFERENCE, WHOLE_HEADS], ids=["reference", "triton"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("policy", [xkv_policy(8, 7, keep=0.3, high=0.5), xkv_policy(8, 1, min_retention=0.7)], ids=str)
def test_ranks_keep_what_one_rank_with_all_heads_keeps(
    policy: XKVPolicy, ranks: int, kernels: WholeHeadKernels
) -> None:
    """Scores are multiples of the pooling's width and not large, so that sums are exact in any order. Some tokens are
    there on one rank and not on another."""
    if kernels is WHOLE_HEADS and DEVICE != "cpu":
        pytest.skip("the numbers lie in the CPU's memory")
    random = torch.Generator().manual_seed(3)
    score = torch.randint(0, 64, (3, 8, 90), generator=random).float()
    score = 7 * score ** torch.tensor([[1, 1, 2, 2, 1, 1, 1, 1], [1, 1, 1, 1, 2, 2, 2, 2], [1] * 8]).unsqueeze(2)
    position = torch.arange(90).expand(3, 8, -1).clone()
    position[:, 2, 5:15] = -1
    alone = classify_prompt(policy, score, position, 90, 2)
    scores, positions = score.chunk(ranks, 1), position.chunk(ranks, 1)

    def score(of: Ranks) -> torch.Tensor:
        return classify_prompt(policy, scores[of.rank], positions[of.rank], 90, 2, kernels=kernels, ranks=of)

    assert torch.equal(torch.cat(with_one_sum(score, ranks), 1), alone)
    apart = torch.cat([classify_prompt(policy, *part, 90, 2) for part in zip(scores, positions)], 1)
    assert not torch.equal(apart, alone), "each by itself would keep something else"


def test_configuration() -> None:
    config = load_config('{"tiers": ["BF16"], "policy": {"name": "xkv", "keep": 0.2}}')
    assert config.build_policy() == xkv_policy(8, 7, keep=0.2) and not config.lossless
    config = load_config('{"policy": {"name": "xkv", "min_retention": 0.9, "high": 0.5, "window": 16, "pool": 1}}')
    assert config.build_policy() == xkv_policy(16, 1, min_retention=0.9, high=0.5)
    config = load_config('{"tiers": ["K8V4"], "policy": {"name": "xkv", "layer_fractions": [0.5, 0.25]}}')
    assert config.build_policy() == xkv_policy(layer_fractions=(0.5, 0.25))


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("", "give one of keep, min_retention and layer_fractions .found: none"),
        (', "keep": 0.2, "min_retention": 0.9', "found: keep and min_retention"),
        (', "keep": 0.2, "layer_fractions": [0.1]', "found: keep and layer_fractions"),
        (', "keep": 0', "keep"),
        (', "min_retention": 1.5', "min_retention"),
        (', "layer_fractions": [0.1, 1.5]', "layer_fractions"),
        (', "layer_fractions": []', "layer_fractions"),
        (', "keep": 0.2, "pool": 4', "pool 4 is even"),
    ],
)
def test_impossible_settings_are_refused_by_name(policy: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(f'{{"tiers": ["K8V4"], "policy": {{"name": "xkv"{policy}}}}}')


def test_a_model_that_it_cannot_serve_is_refused() -> None:
    fixed = load_config('{"policy": {"name": "xkv", "layer_fractions": [0.5, 0.25]}}')
    fixed.check_heads(2, 8)
    with pytest.raises(ConfigError, match="layer_fractions is of 2 layers, the model has 32"):
        fixed.check_heads(32, 8)
