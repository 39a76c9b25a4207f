"""Methods that judge a head as a whole: scores by position, and what compaction and copies make of the cuts, by the
references and in Triton."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from sglang_diffkv.kernels.compact_prompt.reference import compact_prompt as compact_reference
from sglang_diffkv.kernels.compact_prompt.triton import PromptWorkspace, compact_prompts
from sglang_diffkv.kernels.copy_compact.reference import copy_compact as copy_reference
from sglang_diffkv.kernels.copy_compact.triton import copy_compact
from sglang_diffkv.kernels.gather_scores import reference
from sglang_diffkv.kernels.gather_scores import triton as on_gpu
from sglang_diffkv.kernels.triton_ring import Spans
from sglang_diffkv.layout.state import PageState
from sglang_diffkv.mem_pool.integrity import check_integrity
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.ops.decisions import Decisions
from sglang_diffkv.ops.triton import WHOLE_HEADS
from sglang_diffkv.policies.base import Across, AcrossLayers, LeastMass, Policy, TopCount, TopMass, WholeHead
from sglang_diffkv.policies.budget import Budget, PyramidBudget
from tests.helpers import tier_map, visible
from tests.kernels.test_triton_compact_prompt import ends_of, tokens_of
from tests.kernels.triton_helpers import DEVICE, add_prompt, clone_state, held_pages, make_format, make_manager

NAN = float("nan")


@dataclass(frozen=True)
class Whole(Policy):
    """A policy of one rule."""

    rule: WholeHead
    window: int = 5
    sinks: int = 0

    @property
    def prompt(self) -> WholeHead:
        return self.rule


def two_parts(tiers: str, dim: int = 64, v_dim: int = 64) -> tuple[PageManager, list[tuple[int, int, int]]]:
    """Row 2 with an exact prompt of its own from position 38 on, after a compressed prefix that it shares; and the
    parts of its path."""
    manager = make_manager(make_format(tiers, dim, v_dim, page_tokens=4), pages=300)
    generator = torch.Generator().manual_seed(dim)
    manager.state.counters += 271  # the ring wraps
    add_prompt(manager, 1, 45, generator)
    segment = manager.segments.share(1, 0, 45)
    assert segment is not None
    manager.attach_prefix(2, [(segment, 0, 38)])
    add_prompt(manager, 2, 23, generator, compact=False)
    return manager, [(segment.row, 3, 38), (2, 38, 61)]


def gathered(manager: PageManager, parts: list[tuple[int, int, int]], own: bool, length: int) -> np.ndarray:
    """Scores by position, of what a scan of the pages finds."""
    state = manager.state
    out = np.full((state.num_layers, state.num_heads, length), np.nan, dtype=np.float32)
    for row, lo, hi in parts:
        seen = visible(state, row)
        seen = seen.pick((seen.position >= lo) & (seen.position < min(hi, length)) & (seen.own | (not own)))
        out[seen.layer, seen.head, seen.position] = seen.score
    return out


@pytest.mark.skipif(DEVICE != "cpu", reason="the scan of pages reads the CPU's memory")
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("tiers", ["K8V4 K4V2", "K8V4"])
def test_values_are_what_a_scan_of_the_pages_finds(tiers, own):
    manager, parts = two_parts(tiers)
    parts = [(2, 0, 61)] if own else parts
    expected = gathered(manager, parts, own, 61)
    shared_scores = torch.full((2, 2, 20), NAN)
    shared_scores[..., 6:9] = 7.0
    known = np.arange(61)[None, None] * np.ones_like(expected)
    with_judged = np.where((known >= 6) & (known < 9) & ~np.isnan(expected), 7.0, expected)
    for scores, here in ((None, expected), (shared_scores, with_judged)):
        values = torch.empty(2, 2, 61)
        stored = reference.gather_scores(manager.state, parts, values, 61, window=0, shared_scores=scores, own=own)
        np.testing.assert_array_equal(values.numpy(), here)
        assert np.array_equal(stored.numpy(), (~np.isnan(expected)).sum(2))
        reference.gather_scores(
            manager.state, parts, values, 61, window=4, sinks=5, sums=True, shared_scores=scores, own=own
        )
        sums = here * (60 - np.arange(61)).astype(np.float32)
        sums[..., 57:] = np.where(np.isnan(sums[..., 57:]), np.nan, np.inf)
        sums[..., :5] = np.where(np.isnan(sums[..., :5]), np.nan, np.inf)
        np.testing.assert_array_equal(values.numpy(), sums.astype(np.float32))
    assert np.isnan(expected).any() and (expected > 0).any()


@pytest.mark.parametrize(("tiers", "dim", "v_dim"), [("K8V4 K4V2", 64, 96), ("BF16", 96, 64), ("K8V2 K4V1", 128, 64)])
@pytest.mark.parametrize("sums", [False, True])
def test_triton_gathers_what_the_reference_does(tiers, dim, v_dim, sums):
    manager, parts = two_parts(tiers, dim, v_dim)
    shared_scores = torch.rand(2, 2, 20, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    shared_scores[..., 6:9] = NAN
    for given, own, scores in ((parts, False, None), (parts, False, shared_scores), ([(2, 0, 61)], True, None)):
        values = torch.empty(2, 2, 2, 61, device=DEVICE)
        more = {"window": 6, "sinks": 4, "sums": sums, "shared_scores": scores, "own": own}
        got = on_gpu.gather_scores(manager.state, given, values[0], 61, **more)
        expected = reference.gather_scores(manager.state, given, values[1], 61, **more)
        assert torch.equal(got, expected) and int(got.min()) > 0
        assert torch.equal(values[0].nan_to_num(nan=-1.0), values[1].nan_to_num(nan=-1.0))


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("width", [1, 3, 7])
@pytest.mark.parametrize("length", [1, 5, 1500])
def test_smoothing(width, length, average):
    """Of means: positions that have no finite value, and those beyond the ends, count as 0."""
    values = torch.rand(1, 2, length, generator=torch.Generator().manual_seed(length))
    values[values < 0.2] = NAN
    values[..., -2:] = float("inf")
    expected = values.clone()
    for head, at in np.ndindex(2, length):
        if values[0, head, at].isfinite():
            near = values[0, head, max(at - width // 2, 0) : at + width // 2 + 1]
            near = near[near.isfinite()]
            expected[0, head, at] = near.double().sum() / width if average else near.max()
    got = reference.smooth(values, width, average=average)
    torch.testing.assert_close(got, expected, rtol=1e-6 if average else 0, atol=0, equal_nan=True)
    mine = on_gpu.smooth(values.to(DEVICE), width, average=average).cpu()
    assert torch.equal(mine.nan_to_num(nan=-1.0), got.nan_to_num(nan=-1.0))


RULES: list[WholeHead] = [
    TopCount(Budget(20)),
    TopCount(Budget(0, 0.5), Budget(12), quantity="sum", smooth=5),
    TopCount(Budget(1000), Budget(9)),
    TopMass(0.6, 0.3),
    TopMass(0.99, quantity="sum"),
    LeastMass(0.1, 0.4),
    Across(Budget(0, 0.6), Budget(0, 0.2), smooth=3),
    TopCount(Budget(fraction=(0.1, 0.7), beside=True), smooth=3, pooling="average"),
    TopCount(PyramidBudget(20, beta=4), smooth=3),
    TopCount(Budget(((7, 20), (9, 3))), Budget((6, 5))),
    AcrossLayers(0.4, high=0.5, smooth=7, pooling="average"),
    AcrossLayers(retention=0.7),
]
COPIED = [
    pytest.param(rule, marks=() if isinstance(rule, LeastMass | AcrossLayers) else pytest.mark.full) for rule in RULES
]
"""Copies take the cuts that compaction in place takes: few rules show that."""


def assert_same_tokens(state: PageState, twin: PageState, row: int, *, exact: bool) -> None:
    for layer in range(state.num_layers):
        for tier in range(len(state.tiers)):
            for got, expected in zip(
                tokens_of(state, row, layer, tier), tokens_of(twin, row, layer, tier), strict=True
            ):
                assert torch.equal(got[0], expected[0]) and torch.equal(got[3], expected[3])
                for a, b in zip(got[1:3], expected[1:3], strict=True):
                    torch.testing.assert_close(a, b, rtol=0 if exact else 1e-3, atol=0 if exact else 5e-3)


def with_ties(state: PageState) -> None:
    """Scores of which many are equal, and many 0."""
    rows = torch.arange(state.entries.shape[0], device=state.device)
    for tier, view in enumerate(state.tiers):
        pages = held_pages(state, rows, tier)
        scores = view.scores[pages]
        view.scores[pages] = torch.where(scores < 0.05, 0.0, (scores * 8).round() / 8)


@pytest.mark.cover(1)
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("tiers", "dim", "v_dim"), [("K8V4 K4V2", 64, 96), ("K8V4", 96, 64), ("BF16 K4V2", 128, 64)])
def test_compaction_matches_reference(tiers, dim, v_dim, ties, rule):
    manager, _ = two_parts(tiers, dim, v_dim)
    state, policy = manager.state, Whole(rule, sinks=2)
    if ties:
        with_ties(state)
    twin = clone_state(state)
    cuts = Decisions.of(WHOLE_HEADS, state, policy, 100).of_row(state, 2, 61, policy)
    expected = Decisions().of_row(twin, 2, 61, policy)
    assert cuts is not None and expected is not None
    compact_prompts(state, *ends_of((2, 61)), PromptWorkspace.create(state), cuts)
    compact_reference(twin, 2, 61, expected)
    check_integrity(manager)
    for name in ("entries", "own_tokens", "hole", "fault"):
        assert torch.equal(getattr(state, name), getattr(twin, name)), name
    assert_same_tokens(state, twin, 2, exact=False)


@pytest.mark.parametrize("rule", COPIED, ids=str)
@pytest.mark.parametrize("judging", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize(
    ("tiers", "dim", "v_dim"),
    [
        ("K8V4 K4V2", 64, 96),
        pytest.param("K8V4", 96, 64, marks=pytest.mark.full),
        pytest.param("BF16 K4V2", 128, 64, marks=pytest.mark.full),
    ],
)
def test_copies_match_reference(tiers, dim, v_dim, judging, rule):
    """Of a path of two parts, the first with tokens in both tiers, each head chooses once."""
    manager, parts = two_parts(tiers, dim, v_dim)
    state, policy = manager.state, Whole(rule)
    shared_scores = (
        torch.rand(2, 2, 30, generator=torch.Generator().manual_seed(5)).to(DEVICE) * 0.1 if judging else None
    )
    manager.space.extend(5, (30,) * len(manager.fmt.tiers))
    manager.space.flush()
    twin = clone_state(state)
    cuts = Decisions.of(WHOLE_HEADS, state, policy, 100).of_parts(state, parts, 61, policy, shared_scores)
    spans = Spans.create(state, 1)
    for source, lo, hi in parts:
        copy_compact(state, 5, source, lo, hi, 61, spans, cuts, shared_scores=shared_scores)
    copy_reference(twin, 5, parts, 61, Decisions().of_parts(twin, parts, 61, policy, shared_scores), shared_scores)
    for name in ("entries", "own_tokens", "fault"):
        assert torch.equal(getattr(state, name), getattr(twin, name)), name
    assert_same_tokens(state, twin, 5, exact=False)
    assert int(state.own_tokens[5].sum()) > 0


@pytest.mark.skipif(DEVICE != "cpu", reason="the map of tiers reads the CPU's memory")
@pytest.mark.parametrize("rule", [TopCount(Budget(16), Budget(11)), TopMass(0.5), Across(Budget(16))], ids=str)
def test_what_stays_are_the_first_tokens_of_a_head(rule):
    """By an oracle of its own: the largest scores of each head or of all, behind window and sinks."""
    manager = make_manager(make_format("K8V4 K4V2", page_tokens=4), pages=300)
    add_prompt(manager, 1, 47, torch.Generator().manual_seed(3), compact=False)
    state, policy = manager.state, Whole(rule, window=5, sinks=3)
    score = gathered(manager, [(1, 0, 47)], True, 47)
    cuts = Decisions().of_row(state, 1, 47, policy)
    assert cuts is not None
    compact_reference(state, 1, 47, cuts)
    tier = tier_map(state, 1, 47)
    middle, lasting = score[..., 3:-5], np.r_[0:3, 42:47]
    assert (tier[..., lasting] == 0).all()
    if isinstance(rule, Across):
        kept = tier[..., 3:-5] < 2
        assert kept.sum() == 4 * (16 - 8) and len(np.unique(kept.sum(2))) > 1
        assert middle[kept].min() >= middle[~kept].max()
        return
    for head in np.ndindex(2, 2):
        kept = tier[head][3:-5] < 2
        assert middle[head][kept].min() >= middle[head][~kept].max()
        if isinstance(rule, TopCount):
            assert kept.sum() == 8 and (tier[head] == 0).sum() == 11
        else:
            total = middle[head].sum()
            assert middle[head][kept].sum() >= 0.5 * total > middle[head][kept].sum() - middle[head][kept].min()
