"""The DiffKV policy against a token by token transcription of the paper, and what compaction makes of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_diffkv.kernels.append.reference import append
from sglang_diffkv.kernels.compact_step.reference import StepMoves, compact_step
from sglang_diffkv.kernels.decode_attention.reference import StepScores
from sglang_diffkv.mem_pool.integrity import check_integrity
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.policies.diffkv import DiffKVPolicy, filling_window
from sglang_diffkv.policies.uniform import UniformPolicy
from tests.deciding import classify_prompt as classify
from tests.deciding import moves_of, step_moves
from tests.helpers import PAIR, begin_step, make_format, make_manager, new_scores, tier_map, visible
from tests.pages.paper import Caches, algorithm_1, classify_prompt
from tests.policies import diffkv_policy

ALPHAS = [(1.0, 0.0), (1.0, 0.02), (3.0, 0.5), (1.0, 1.0), (0.0, 0.0), (5.0, 0.1), (1e9, 0.3), (1e9, 1e9)]


@pytest.mark.parametrize("num_tiers", [1, 2])
@pytest.mark.parametrize("alphas", ALPHAS)
def test_prompt_classification(alphas, num_tiers):
    cases = [(1, 4, 0), (4, 4, 2), (5, 4, 3), (60, 7, 0), (60, 7, 4), (33, 0, 33), (20, 64, 0)]
    for seed, (length, window, sinks) in enumerate(cases):
        score = np.random.default_rng(seed).exponential(1 / length, (2, 3, length)).astype(np.float32)
        score[..., ::5] = 0
        position = np.random.default_rng(seed).permuted(np.broadcast_to(np.arange(length), score.shape), axis=2)
        policy = diffkv_policy(*alphas, window, sinks)
        got = classify(policy, torch.tensor(score), torch.tensor(position).int(), length, num_tiers)
        for index in np.ndindex(score.shape):
            at = int(position[index])
            expected = classify_prompt(float(score[index]), at, length, num_tiers, *alphas, window, sinks)
            assert int(got[index]) == expected


@pytest.mark.parametrize("num_tiers", [1, 2])
def test_scores_at_a_threshold_stay(num_tiers):
    """Algorithm 1 compares with >=; powers of two make the thresholds exact."""
    policy = diffkv_policy(2.0, 0.5, 0)
    score = torch.tensor([2 / 8, np.nextafter(np.float32(2 / 8), 0), 0.5 / 8, np.nextafter(np.float32(0.5 / 8), 0)])
    got = classify(policy, score, torch.full((4,), 7), 100, num_tiers)
    assert got.tolist() == ([0, 1, 1, 2] if num_tiers == 2 else [0, 0, 0, 1])


@pytest.mark.parametrize("num_tiers", [1, 2])
@pytest.mark.parametrize("alphas", ALPHAS)
def test_plan_is_algorithm_1(alphas, num_tiers):
    """Plans of random scores, applied to plain sets, give what Algorithm 1 gives."""
    random = np.random.default_rng(int(alphas[0]) % 97 + num_tiers)
    batch, heads, policy = 40, 3, diffkv_policy(*alphas, 4)
    seq_lens = torch.tensor(random.integers(2, 200, batch))
    found = StepScores(
        torch.full((batch, 1, heads), -1),
        torch.zeros(batch, 1, heads),
        torch.full((batch, 1, heads, num_tiers), -1),
        torch.full((batch, 1, heads, num_tiers), float("inf")),
    )
    caches: dict[tuple[int, int], Caches] = {}
    for b, h in np.ndindex(batch, heads):
        scale = 2.0 / float(seq_lens[b])
        high = {s: float(np.float32(random.exponential(scale))) for s in range(int(random.integers(0, 6)))}
        low = {s: float(np.float32(random.exponential(scale))) for s in range(int(random.integers(0, 4)))}
        candidate = None if not high or random.random() < 0.2 else int(random.integers(len(high)))
        caches[b, h] = Caches(high, low if num_tiers > 1 else {}, candidate)
        if candidate is not None:
            found.candidate_slot[b, 0, h] = candidate
            found.candidate_score[b, 0, h] = high[candidate]
        for tier, cache in enumerate((high, low)[:num_tiers]):
            if cache:
                found.least_slot[b, 0, h, tier] = least = min(cache, key=cache.__getitem__)
                found.least_score[b, 0, h, tier] = cache[least]
    moves = moves_of(policy, found, seq_lens, num_tiers)
    for (b, h), cache in caches.items():
        expected = algorithm_1(cache, int(seq_lens[b]), *alphas, num_tiers)
        demote, drop, replace = (int(x[b, 0, h]) for x in (moves.demote, moves.drop, moves.replace))
        assert demote < 0 or drop < 0
        high, low = dict(cache.high), sorted(cache.low.values())
        if demote >= 0:
            if replace >= 0:
                low.remove(cache.low[replace])
            low.append(high.pop(demote))
        else:
            assert replace < 0
        high.pop(drop, None)
        assert sorted(high.values()) == sorted(expected.high.values())
        assert sorted(low) == sorted(expected.low.values())


@pytest.mark.parametrize(
    ("candidate", "least", "worst", "expected"),
    [
        (0.25, 0.25, 0.0, (-1, -1, -1)),  # both exactly at the upper threshold stay
        (0.25, 0.2, 0.0, (5, -1, -1)),
        (0.25, 0.0625, 0.0, (5, -1, -1)),  # exactly at the lower threshold goes down, not out
        (0.25, 0.06, 0.0, (-1, 5, -1)),
        (0.2, 0.06, 0.0625, (9, -1, -1)),
        (0.0625, 0.06, 0.06, (9, -1, 7)),
        (0.06, 0.05, 0.0, (-1, 9, -1)),
    ],
)
def test_plan_at_the_thresholds(candidate, least, worst, expected):
    """alpha / N is 0.25 and 0.0625; the candidate is slot 9, the least high token 5, the least low one 7."""
    found = StepScores(
        torch.full((1, 1, 1), 9),
        torch.full((1, 1, 1), candidate),
        torch.tensor([5, 7]).view(1, 1, 1, 2),
        torch.tensor([least, worst]).view(1, 1, 1, 2),
    )
    moves = moves_of(diffkv_policy(2.0, 0.5, 4), found, torch.tensor([8]), 2)
    assert (int(moves.demote), int(moves.drop), int(moves.replace)) == expected


def filled(policy: DiffKVPolicy, tiers: tuple[str, ...], length: int, row: int = 2) -> PageManager:
    """A manager whose one row has ``length`` tokens with random scores, if any, not yet compacted."""
    manager = make_manager(make_format(tiers, 64, 96), policy=policy)
    begin_step(manager, [row], [length], [0])
    generator = torch.Generator().manual_seed(length)
    for layer in range(2):
        key, value = (torch.randn(length, 2, dim, generator=generator) for dim in (64, 96))
        at = torch.arange(length)
        append(manager.state, layer, key, value, torch.full((length,), row), at, at)
    seen = visible(manager.state, row)
    scores = torch.rand(len(seen.page), generator=generator) ** 3 * 0.2
    view = manager.state.tiers[0]
    if view.scores is not None:
        view.scores[torch.tensor(seen.page).long(), torch.tensor(seen.slot)] = scores
    return manager


def codes(manager: PageManager, row: int) -> dict[tuple[int, int, int], bytes]:
    """(layer, head, position) to the bytes, score included, of each high token."""
    view, seen = manager.state.tiers[0], visible(manager.state, row)
    fields = [x for x in (view.keys, view.key_meta, view.values, view.value_meta, view.scores) if x is not None]
    out = {}
    for i in (seen.tier == 0).nonzero()[0]:
        at = int(seen.page[i]), int(seen.slot[i])
        where = int(seen.layer[i]), int(seen.head[i]), int(seen.position[i])
        out[where] = b"".join(f[at].reshape(-1).view(torch.uint8).numpy().tobytes() for f in fields)
    return out


@pytest.mark.parametrize("tiers", [PAIR, ("K8V4",), ("BF16", "K4V4")], ids="-".join)
@pytest.mark.parametrize(("length", "window"), [(61, 8), (8, 8), (5, 8), (9, 8), (40, 0), (64, 1)])
def test_prompt_compaction_moves_what_the_policy_says(tiers, length, window):
    policy = diffkv_policy(1.5, 0.3, window)
    manager = filled(policy, tiers, length)
    before, bytes_before = visible(manager.state, 2), codes(manager, 2)
    score = dict(zip(zip(before.layer, before.head, before.position), before.score))
    manager.prompts.end(2)
    check_integrity(manager)
    after, bytes_after = visible(manager.state, 2), codes(manager, 2)
    tier = tier_map(manager.state, 2, length)
    for where, value in score.items():
        at = int(where[2])
        expected = classify_prompt(float(value), at, length, len(tiers), 1.5, 0.3, window) if length > window else 0
        assert tier[where] == expected
        if expected == 0:
            assert bytes_after[where] == bytes_before[where]
    for layer, head, position, kept in zip(after.layer, after.head, after.position, after.score):
        assert score[layer, head, position] == kept
    seen = np.bincount(after.layer * 2 + after.head, weights=after.tier == 0, minlength=4)
    pages = -(-seen.astype(int) // manager.fmt.high.tokens)
    assert manager.state.entries[2, :, :, 0].flatten().tolist() == pages.tolist()


@pytest.mark.parametrize(
    ("alphas", "kinds"),
    [((1e9, 1e9), {0, 2}), ((1e9, 0.0), {0, 1}), ((0.0, 0.0), {0}), ((1e9, 0.7), {0, 1, 2})],
)
def test_all_of_a_head_may_leave(alphas, kinds):
    manager = filled(diffkv_policy(*alphas, 3), PAIR, 50)
    manager.prompts.end(2)
    check_integrity(manager)
    tier = tier_map(manager.state, 2, 50)
    assert (tier[..., 47:] == 0).all() and set(np.unique(tier).tolist()) == kinds


def test_uniform_policy_keeps_all():
    manager = make_manager(policy=UniformPolicy())
    begin_step(manager, [1], [20], [0])
    manager.prompts.end(1)
    assert new_scores(manager, 3) is None
    assert manager.state.own_tokens[1, :, :, 0].unique().tolist() == [20]
    assert step_moves(UniformPolicy(), StepScores.create(manager.state, 2), torch.tensor([3, 4]), 2) is None


def test_a_step_moves_one_token_and_no_other_byte():
    manager = filled(diffkv_policy(1.0, 0.0, 0), PAIR, 30)
    shape = (1, 2, 2)
    for step, (demote, drop, replace) in enumerate([(17, -1, -1), (-1, 3, -1), (5, -1, 0), (-1, -1, -1), (29, -1, -1)]):
        before, seen = codes(manager, 2), visible(manager.state, 2)
        moves = StepMoves(*(torch.full(shape, x) for x in (demote, drop, replace, 1)))
        compact_step(manager.state, torch.tensor([2]), moves)
        gone = {(la, h, max(demote, drop)) for la, h in np.ndindex(2, 2)} if max(demote, drop) >= 0 else set()
        after = codes(manager, 2)
        assert {w: x for w, x in before.items() if w not in gone} == after
        tier = tier_map(manager.state, 2, 30)
        if demote >= 0:
            assert (tier[..., demote] == 1).all() and (manager.state.hole[2] == demote).all()
        if replace >= 0:
            assert (tier[..., 17] == 2).all(), "the replaced low token is gone"
        lows = manager.state.own_tokens[2, :, :, 1].unique().tolist()
        assert lows == [[1], [1], [1], [1], [2]][step]
        assert len(visible(manager.state, 2).position) <= len(seen.position)
        manager.state.hole[2] = -1


@pytest.mark.parametrize("page_tokens", [16, 32])
def test_a_window_that_fills_its_pages(page_tokens: int) -> None:
    for window in range(1, 300):
        found = filling_window(window, page_tokens)
        if found < window:
            assert (found + 1) % page_tokens == 0 and window - found < page_tokens
        else:
            assert found == window and (window + 1 < page_tokens or not (window + 1) % page_tokens)


def test_a_window_that_leaves_a_page_nearly_empty_is_told() -> None:
    def hint(window: int, sinks: int, tiers: int = 2, alpha_high: float = 1e9) -> str:
        return diffkv_policy(alpha_high, 0.0, window, sinks=sinks).window_hint(tiers, 32)

    assert "window 255 fills its pages" in hint(256, 4) and "leaves 31 of 32 places" in hint(256, 4)
    assert "window 63 fills" in hint(64, 0)
    assert hint(252, 4) == hint(255, 4) == hint(280, 4) == hint(256, 4, tiers=1) == hint(20, 4) == ""
    assert hint(256, 4, alpha_high=3.0) == "", "scores fill the last page by chance"
