"""The divergence told by likeliest tokens: a lower bound of the whole one, with errors of a sample of windows."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sglang_diffkv.evaluate.distribution import compare, pack, unpack
from sglang_diffkv.evaluate.store import Answer
from sglang_diffkv.evaluate.summary import closeness
from sglang_diffkv.evaluate.task import Outcome

VOCABULARY, POSITIONS = 200, 12


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def told(logprobs: np.ndarray, k: int) -> str:
    """What a server tells of whole distributions [positions, vocabulary]."""
    order = np.argsort(-logprobs, axis=-1, kind="stable")[:, :k]
    return pack([[(float(row[i]), int(i)) for i in best] for row, best in zip(logprobs, order)])


def pair(noise: float) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    logits = 3 * generator.standard_normal((POSITIONS, VOCABULARY))
    return log_softmax(logits), log_softmax(logits + noise * generator.standard_normal(logits.shape))


def whole(p: np.ndarray, q: np.ndarray) -> float:
    return float((np.exp(p) * (p - q)).sum())


def test_what_is_packed_comes_back():
    ids, values = unpack(pack([[(-0.5, 3), (-1.25, 300_000)], [(-0.125, 0), (-8.0, 1)]]))
    assert ids.tolist() == [[3, 300_000], [0, 1]] and values.tolist() == [[-0.5, -1.25], [-0.125, -8.0]]


@pytest.mark.parametrize("noise", [0.02, 0.3, 2.0])
def test_it_is_a_lower_bound_and_all_tokens_give_the_whole_divergence(noise):
    p, q = pair(noise)
    full = whole(p, q)
    every = compare(told(p, VOCABULARY), told(q, VOCABULARY))
    assert every.divergence.sum() == pytest.approx(full, rel=1e-4) and len(every.divergence) == POSITIONS
    assert every.covered.sum() == pytest.approx(POSITIONS, rel=1e-5)
    for k in (1, 4, 32):
        part = compare(told(p, k), told(q, k))
        assert -1e-5 <= part.divergence.sum() <= full * (1 + 1e-4)
        assert part.covered.sum() < every.covered.sum()
    assert compare(told(p, 64), told(q, 64)).divergence.sum() > 0.5 * full, "most of it is in the likeliest tokens"


def test_the_bound_is_the_divergence_of_the_merged_distributions():
    first = pack([[(math.log(0.6), 1), (math.log(0.2), 2), (math.log(0.1), 3)]])
    other = pack([[(math.log(0.5), 1), (math.log(0.25), 4), (math.log(0.1), 2)]])
    found = compare(first, other)
    expected = 0.6 * math.log(0.6 / 0.5) + 0.2 * math.log(0.2 / 0.1) + 0.2 * math.log(0.2 / 0.4)
    assert found.divergence.item() == pytest.approx(expected, rel=1e-5)
    assert found.covered.item() == pytest.approx(0.8, rel=1e-5)
    assert compare(other, first).divergence.item() != pytest.approx(expected, rel=1e-2), (
        "it is taken in the first's view"
    )


def test_equal_distributions_are_not_apart():
    p, _ = pair(0.0)
    found = compare(told(p, 20), told(p, 20))
    assert (found.divergence.sum(), found.agreeing.sum()) == (0.0, POSITIONS)


def test_one_of_several_that_tie_is_enough_to_agree():
    tied = pack([[(-1.0, 5), (-1.0, 6), (-2.0, 7)]])
    assert compare(tied, pack([[(-1.0, 6), (-1.5, 5), (-2.0, 7)]])).agreeing.item()
    assert not compare(tied, pack([[(-1.0, 7), (-1.5, 5), (-2.0, 6)]])).agreeing.item()
    assert not compare(pack([[(-1.0, 5), (-1.1, 6)]]), pack([[(-1.0, 6), (-1.1, 5)]])).agreeing.item()


def window(tops: str, after: int = 0) -> Answer:
    outcome = Outcome(prompt_tokens=9, tops=tops, scored_after=after)
    return Answer(configuration="c", suite="s", id="i", task="t", outcome=outcome)


def test_errors_are_those_of_a_sample_of_windows():
    p, q = pair(0.5)
    cuts = [slice(0, 2), slice(2, 5), slice(5, 9)]
    found = closeness([window(told(p[x], VOCABULARY)) for x in cuts], [window(told(q[x], VOCABULARY)) for x in cuts])
    sums, sizes = [whole(p[x], q[x]) for x in cuts], [2, 3, 4]
    mean = sum(sums) / 9
    spread = sum((x - mean * size) ** 2 for x, size in zip(sums, sizes))
    assert found.divergence.mean == pytest.approx(mean, rel=1e-4) and found.divergence.n == 3
    assert found.divergence.error == pytest.approx(math.sqrt(spread * 3 / 2) / 9, rel=1e-3)
    agreeing = sum(a.argmax() == b.argmax() for a, b in zip(p[:9], q[:9]))
    assert found.agreement.mean == pytest.approx(agreeing / 9)


def test_answers_that_do_not_tell_distributions_have_none():
    assert closeness([window("")], [window("")]) is None and closeness([], []) is None


def test_groups_of_lengths_are_the_positions_between_their_bounds():
    p, q = pair(0.5)
    cuts = {253: slice(0, 7), 1021: slice(7, 12)}  # tokens before the first position: its positions
    first, other = ([window(told(x[cut], VOCABULARY), at) for at, cut in cuts.items()] for x in (p, q))
    found = closeness(first, other).by_length
    groups = [(0, 256, 3), (256, 512, 4), (512, 1024, 3), (1024, 2048, 2)]
    assert [(x.above, x.below, x.positions) for x in found] == groups
    for group, cut in zip(found, (slice(0, 3), slice(3, 7), slice(7, 10), slice(10, 12))):
        assert group.divergence.mean == pytest.approx(whole(p[cut], q[cut]) / group.positions, rel=1e-4)
    alike = [window(told(x, VOCABULARY), 600) for x in (p, q)]
    assert closeness(alike[:1], alike[1:]).by_length == (), "one group says nothing new"
