"""Whose attention counts: scores of prompts observed by their last queries and reduced over query heads, against dense
attention."""

from __future__ import annotations

import pytest
import torch

from sglang_diffkv.attention.wrappers import ExtendWrapper
from sglang_diffkv.kernels.append.reference import append
from sglang_diffkv.kernels.decode_attention.reference import StepScores, decode_attention
from sglang_diffkv.kernels.extend_attention.reference import extend_attention
from sglang_diffkv.ops import ReferenceOps, Scaling, Step
from sglang_diffkv.policies.base import Observation
from sglang_diffkv.policies.budget import Budget
from sglang_diffkv.policies.diffkv import DiffKVPolicyConfig
from tests.helpers import begin_step, make_format, make_manager, visible
from tests.policies import diffkv_policy, snapkv_policy

LENGTH, GROUP, SCALE = 40, 3, 0.3


def observed(q: torch.Tensor, key: torch.Tensor, since: int, reduce: str, every: int = 0) -> torch.Tensor:
    """[H, tokens]: the mean attention of each token from later ones at ``since`` or behind, and of those before from
    each ``every``-th, which counts as so many; 0 where there are none."""
    heads = key.shape[1]
    logits = torch.einsum("ihgd,jhd->hgij", q.float().unflatten(1, (heads, GROUP)), key.float()) * SCALE
    position = torch.arange(len(q))
    prob = logits.masked_fill(position > position.unsqueeze(1), float("-inf")).softmax(3)  # [H, G, query, key]
    weight = (position >= since).float()
    if every:
        weight[:since][(position[:since] + 1) % every == 0] = every
    counts = (position.unsqueeze(1) > position) * weight.unsqueeze(1)
    mean = (prob * counts).sum(2) / counts.sum(0).clamp(min=1)
    return mean.mean(1) if reduce == "mean" else mean.amax(1)


@pytest.mark.parametrize("reduce", ["max", "mean"])
@pytest.mark.parametrize(
    ("chunks", "since", "every"),
    [
        ((40,), 0, 0), ((40,), 33, 0), ((17, 23), 33, 0), ((17, 16, 7), 35, 0), ((40,), 90, 0), ((40,), 0, 4),
        ((40,), 33, 4), ((40,), 90, 3), ((17, 23), 33, 40),
    ],
)  # fmt: skip
def test_scores_are_means_over_those_who_observe(chunks, since, every, reduce):
    """In one pass, or in chunks whose first hold nobody who observes."""
    manager = make_manager(make_format(("BF16",)), layers=1)
    state, random = manager.state, torch.Generator().manual_seed(len(chunks))
    q = torch.randn(LENGTH, 2 * GROUP, 64, generator=random).bfloat16()
    key, value = (torch.randn(LENGTH, 2, 64, generator=random).bfloat16() for _ in range(2))
    start, row = 0, torch.tensor([1])
    for count in chunks:
        end = start + count
        begin_step(manager, [1], [count], [start])
        at = torch.arange(count)
        append(state, 0, key[start:end], value[start:end], torch.ones_like(at), at, at + start)
        step = Step.extend(row, torch.tensor([start]), torch.tensor([count]), [start], [count], [since])
        assert (step.observe_from is None) == (since == 0)
        extend_attention(
            state, 0, q[start:end], key[start:end], value[start:end], step.rows, step.extend_lens, step.prefix_lens,
            SCALE, update_scores=True, observe_from=step.observe_from, observe_every=every, reduce=reduce,
        )  # fmt: skip
        start = end
    seen = visible(state, 1)
    scores = torch.zeros(2, LENGTH)
    scores[seen.head, seen.position] = torch.from_numpy(seen.score)
    torch.testing.assert_close(scores, observed(q, key, since, reduce, every), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("chunks", [(40,), (17, 23), (13, 20, 7), (30, 9, 1)])
def test_sampled_observers_are_the_prompt_s_in_any_chunks(chunks):
    """The mean over observers does not depend on how the prompt is cut; with a query head for each KV head nor does the
    maximum over heads."""
    manager = make_manager(make_format(("BF16",)), layers=1)
    state, random = manager.state, torch.Generator().manual_seed(5)
    q = torch.randn(LENGTH, 2 * GROUP, 64, generator=random).bfloat16()
    key, value = (torch.randn(LENGTH, 2, 64, generator=random).bfloat16() for _ in range(2))
    start = 0
    for count in chunks:
        end = start + count
        begin_step(manager, [1], [count], [start])
        at = torch.arange(count)
        append(state, 0, key[start:end], value[start:end], torch.ones_like(at), at, at + start)
        lens = (torch.tensor([1]), torch.tensor([count]), torch.tensor([start]))
        extend_attention(
            state, 0, q[start:end], key[start:end], value[start:end], *lens, SCALE, update_scores=True,
            observe_from=torch.tensor([31]), observe_every=4, reduce="mean",
        )  # fmt: skip
        start = end
    seen = visible(state, 1)
    scores = torch.zeros(2, LENGTH)
    scores[seen.head, seen.position] = torch.from_numpy(seen.score)
    torch.testing.assert_close(scores, observed(q, key, 31, "mean", 4), rtol=1e-4, atol=1e-6)


def test_sampling_is_an_option_of_long_prompts():
    assert diffkv_policy(1.0, 0.0, 256).observation == Observation()
    sampled = DiffKVPolicyConfig(observe_every=4).build()
    assert sampled.observation == Observation(queries=256, every=4, sparsest=64)
    assert sampled.observation.since([200, 1000]) == [0, 744]
    assert DiffKVPolicyConfig(window=3).build().observation.every == 3, "where it is not given, at most the window"
    written = DiffKVPolicyConfig(window=3).model_dump_json(exclude_none=True)
    assert DiffKVPolicyConfig.model_validate_json(written) == DiffKVPolicyConfig(window=3), "as processes hand it on"
    with pytest.raises(ValueError, match="observe_every 4 is above window 3"):
        DiffKVPolicyConfig(observe_every=4, window=3)


def test_of_longer_prompts_fewer_are_sampled():
    of = DiffKVPolicyConfig().build().observation
    assert of.every_of([1, 2048, 2049, 4096, 4097, 30_000, 131_072]) == [4, 4, 8, 8, 16, 64, 64]
    assert DiffKVPolicyConfig(window=12).build().observation.every_of([4097, 30_000]) == [8, 8], "at most the window"
    assert DiffKVPolicyConfig(observe_every=3).build().observation.every_of([1536, 1537, 10**6]) == [3, 6, 48]
    assert Observation().every_of([10**6]) == [0] and Observation(queries=8).every_of([10**6]) == [0]


@pytest.mark.parametrize("chunks", [(40, 12), (16, 24, 12)])
def test_requests_of_a_pass_are_sampled_each_in_its_own_way(chunks):
    """One behind another, against dense attention."""
    manager = make_manager(make_format(("BF16",)), layers=1)
    state, random = manager.state, torch.Generator().manual_seed(8)
    total, start = sum(chunks), 0
    tokens = [
        [torch.randn(total, heads, 64, generator=random).bfloat16() for heads in (2 * GROUP, 2, 2)] for _ in range(2)
    ]
    since, every = [total - 6, total - 9], [4, 8]
    for count in chunks:
        begin_step(manager, [1, 2], [count] * 2, [start] * 2)
        at = torch.arange(start, start + count)
        q, key, value = (torch.cat([x[at] for x in same]) for same in zip(*tokens, strict=True))
        for number in (0, 1):
            part = slice(number * count, (number + 1) * count)
            append(state, 0, key[part], value[part], torch.full_like(at, number + 1), at - start, at)
        lens = [torch.tensor([x] * 2) for x in (start, count)]
        step = Step.extend(torch.tensor([1, 2]), *lens, [start] * 2, [count] * 2, since, every)
        extend_attention(
            state, 0, q, key, value, step.rows, step.extend_lens, step.prefix_lens, SCALE, update_scores=True,
            **step.observers(Observation(queries=6, every=4, reduce="mean")),
        )  # fmt: skip
        start += count
    for number, (q, key, _) in enumerate(tokens):
        seen = visible(state, number + 1)
        scores = torch.zeros(2, total)
        scores[seen.head, seen.position] = torch.from_numpy(seen.score)
        expected = observed(q, key, since[number], "mean", every[number])
        torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-6)


def test_generated_tokens_observe_as_the_policy_says():
    def every(**more):
        return DiffKVPolicyConfig(**more).build().search_rule["every"]

    assert every() == every(observe_every=4) == 1 and every(generated_every=8) == 8
    usual = (diffkv_policy(1.0, 0.0, 256), snapkv_policy(Budget(20), window=8))
    assert [policy.search_rule["every"] for policy in usual] == [1, 1]
    with pytest.raises(ValueError, match="less than or equal to 64"):
        DiffKVPolicyConfig(generated_every=65, window=64)
    with pytest.raises(ValueError, match="generated_every 9 is above window 8:"):
        DiffKVPolicyConfig(observe_every=1, generated_every=9, window=8)
    with pytest.raises(ValueError, match="generated_every 9 is above pressure_window 8:"):
        DiffKVPolicyConfig(generated_every=9, pressure_window=8)
    assert every(generated_every=64, pressure_window=None) == 64


@pytest.mark.parametrize(("every", "horizon"), [(1, 0), (3, 0), (4, 12), (4, 2)])
def test_each_so_manieth_generated_token_counts_as_so_many(every, horizon):
    """Against the weighted mean of what each step's attention gives by itself: of a token's later ones up to the newest
    that observes, each that does stands for those since the one before it."""
    manager = make_manager(make_format(), layers=1)
    state, random = manager.state, torch.Generator().manual_seed(6)
    row, last = torch.tensor([1]), LENGTH + 17
    key, value = (torch.randn(LENGTH, 2, 64, generator=random).bfloat16() for _ in range(2))
    begin_step(manager, [1], [LENGTH], [0])
    append(state, 0, key, value, torch.ones(LENGTH, dtype=torch.int64), *(torch.arange(LENGTH),) * 2)

    def scores():
        seen = visible(state, 1)
        found = torch.zeros(2, LENGTH)
        found[seen.head, seen.position] = torch.from_numpy(seen.score)
        return found

    def attend(query, newest, **rule):
        decode_attention(
            state, 0, query, row, torch.tensor([newest + 1]), SCALE, scores=StepScores.create(state, 1), **rule
        )

    queries = [torch.randn(1, 2 * GROUP, 64, generator=random).bfloat16() for _ in range(LENGTH, last)]
    alone = []
    for newest, query in enumerate(queries, LENGTH):
        attend(query, newest, horizon=1)  # scores are this step's attention
        alone.append(scores())
    expected = before = alone[-1].clone()
    age = torch.arange(LENGTH)
    for newest, query in enumerate(queries, LENGTH):
        attend(query, newest, every=every, horizon=horizon)
        if (newest + 1) % every == 0:
            counted = (newest - age).clamp(min=1, max=horizon or None).float()
            weight = (every / counted).clamp(max=1)
            expected = (1 - weight) * expected + weight * alone[newest - LENGTH]
    torch.testing.assert_close(scores(), expected, rtol=1e-4, atol=1e-6)
    assert not torch.equal(scores(), before)


def test_the_last_queries_of_a_prompt_observe():
    assert Observation().since([3, 9]) is None
    assert Observation(queries=8).since([5, 50, 33]) == [0, 42, 25]


@pytest.mark.parametrize("chunks", [(40,), (17, 15, 8), (17, 18, 5), (30, 9, 1)])
def test_a_window_of_queries_is_the_prompt_s_in_any_chunks(chunks):
    """Queries before the window leave no trace; those of it may lie in several chunks."""
    manager = make_manager(make_format(("BF16",)), layers=1)
    state, random = manager.state, torch.Generator().manual_seed(4)
    q = torch.randn(LENGTH, 2 * GROUP, 64, generator=random).bfloat16()
    key, value = (torch.randn(LENGTH, 2, 64, generator=random).bfloat16() for _ in range(2))
    start, row = 0, torch.tensor([1])
    extend = ExtendWrapper(ReferenceOps(state, snapkv_policy(Budget(20), window=8)))
    for count in chunks:
        end = start + count
        manager.space.append(1, count)
        manager.space.flush()
        extend.plan(row, torch.tensor([start]), torch.tensor([count]), [start], [count], prompts=[LENGTH])
        extend.begin()
        extend.run(0, q[start:end], key[start:end], value[start:end], Scaling(SCALE))
        start = end
    seen = visible(state, 1)
    scores = torch.zeros(2, LENGTH)
    scores[seen.head, seen.position] = torch.from_numpy(seen.score)
    torch.testing.assert_close(scores, observed(q, key, LENGTH - 8, "mean"), rtol=1e-4, atol=1e-6)


def test_chunks_that_all_observe_give_the_mean_of_maxima():
    """Over several passes the maximum over query heads is taken of each: at least the maximum of the means."""
    manager = make_manager(make_format(("BF16",)), layers=1)
    state, random = manager.state, torch.Generator().manual_seed(9)
    q = torch.randn(LENGTH, 2 * GROUP, 64, generator=random).bfloat16()
    key, value = (torch.randn(LENGTH, 2, 64, generator=random).bfloat16() for _ in range(2))
    for start, end in ((0, 25), (25, LENGTH)):
        begin_step(manager, [1], [end - start], [start])
        at = torch.arange(end - start)
        append(state, 0, key[start:end], value[start:end], torch.ones_like(at), at, at + start)
        lens = (torch.tensor([1]), torch.tensor([end - start]), torch.tensor([start]))
        part = (q[start:end], key[start:end], value[start:end])
        extend_attention(state, 0, *part, *lens, SCALE, update_scores=True, observe_from=torch.tensor([20]))
    seen = visible(state, 1)
    scores = torch.zeros(2, LENGTH)
    scores[seen.head, seen.position] = torch.from_numpy(seen.score)
    least = observed(q, key, 20, "max")
    assert (scores >= least * (1 - 1e-4)).all() and (scores[:, 25:] - least[:, 25:]).abs().max() < 1e-5
    assert (scores[:, :25] - least[:, :25]).max() > 1e-4
