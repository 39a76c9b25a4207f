"""Passes whose stored tokens are read back for an attention library, against the references, which attend to pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from sglang_diffkv.attention.wrappers import ExtendWrapper
from sglang_diffkv.kernels.extend_attention import triton as extend
from sglang_diffkv.kernels.rotate.fitted import NOT_FITTED, FittedTransform
from sglang_diffkv.kernels.rotate.reference import NO_ROTATION, Rotation
from sglang_diffkv.kernels.to_e4m3 import reference
from sglang_diffkv.layout.state import PageState
from sglang_diffkv.mem_pool.device import OpsOf
from sglang_diffkv.mem_pool.integrity import check_integrity
from sglang_diffkv.noise_shaping import NoiseShaping
from sglang_diffkv.ops import ReferenceOps, Scaling, flash, read_back
from sglang_diffkv.ops.prompt_scores import StoredSums
from sglang_diffkv.ops.read_back import heads_hold_all
from sglang_diffkv.ops.triton import TritonOps
from sglang_diffkv.policies.base import Policy
from sglang_diffkv.policies.budget import Budget
from sglang_diffkv.policies.uniform import UniformPolicy
from tests.kernels.library import Library
from tests.kernels.test_scaling import attend_in_any
from tests.kernels.triton_helpers import BF16, DEVICE, close, held_pages, make_format, make_manager
from tests.policies import diffkv_policy, snapkv_policy

LAYERS, HEADS, GROUP, DIM = 2, 2, 2, 64
SCALING = Scaling(0.1)
WINDOW = diffkv_policy(1e9, 0.0, 6)
SCORED = diffkv_policy(1.0, 0.0, 6, observe_every=1)
SAMPLED = diffkv_policy(1.0, 0.0, 6, observe_every=4)
BOTH = Rotation(True, True)


@pytest.fixture(autouse=True, params=[16, 128] if DEVICE == "cpu" else [128], ids=lambda queries: f"{queries} at once")
def queries_at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the scores of stored tokens: a pass of these tests has one tile or several. On a GPU as it is served."""
    monkeypatch.setattr(extend, "STORED_QUERIES", request.param)


@dataclass
class Passes:
    """What some passes over prompts gave: outputs, and the scores of what each row holds then, by head, with those that
    a row keeps of what it shares."""

    outs: list[torch.Tensor]
    scores: list[torch.Tensor]


class Prompts:
    """A manager and its extend wrapper, given random tokens.

    Attributes:
        outs: of each pass and layer.
    """

    def __init__(
        self, make_ops: OpsOf, tiers: str, policy: Policy, rotation: Rotation, means: torch.Tensor | None = None,
        scaling: Scaling = SCALING, sinks: torch.Tensor | None = None, fitted: FittedTransform = NOT_FITTED,
    ):  # fmt: skip
        fmt = make_format(tiers, DIM)
        self.manager = make_manager(fmt, layers=LAYERS, heads=HEADS, policy=policy, make_ops=make_ops, pages=600)
        means = None if means is None else means.to(DEVICE)
        self.wrapper = ExtendWrapper(self.manager.ops, rotation=rotation, key_means=means, fitted=fitted)
        self.scaling, self.sinks, self.generator = scaling, sinks, torch.Generator().manual_seed(2)
        self.outs: list[torch.Tensor] = []

    def extend(
        self, rows: list[int], counts: list[int], *, ending: tuple[int, ...] = (), compacting: tuple[int, ...] = ()
    ) -> None:
        manager, generator = self.manager, self.generator
        starts = [manager.rows.length(row) for row in rows]
        manager.plan_step(rows, counts, starts, ending=ending, compacting=compacting)
        launched = manager.launch_step()
        assert launched is not None
        numbers = [torch.tensor(x, device=DEVICE) for x in (rows, starts, counts)]
        as_computed = all(map(manager.rows.as_computed, rows))
        prompts = [start + 90 for start in starts]
        shared_scores = {rows.index(row): found for row, found in manager.prompts.shared_scores.items() if row in rows}
        shared = [manager.rows.shared(row) for row in rows]
        self.wrapper.plan(
            *numbers, starts, counts, prompts=prompts, shared=shared, shared_scores=shared_scores,
            as_computed=as_computed,
        )  # fmt: skip
        self.wrapper.begin()
        for layer in range(LAYERS):
            q, key, value = (
                torch.randn(sum(counts), heads, DIM, generator=generator).to(DEVICE, BF16)
                for heads in (HEADS * GROUP, HEADS, HEADS)
            )
            self.outs.append(self.wrapper.run(layer, q, key * 2 + 1, value, self.scaling, self.sinks).clone())
        manager.end_prompts(launched)
        check_integrity(manager)

    def scores(self, *rows: int) -> list[torch.Tensor]:
        """Of what rows share and judge, and what each row holds in the high tier."""
        state, view = self.manager.state, self.manager.state.tiers[0]
        found = [
            scores[~scores.isnan()] for scores in self.manager.prompts.shared_scores.values()
        ]  # a low tier has none
        for row in rows if view.scores is not None else ():
            pages = held_pages(state, torch.tensor([row], device=DEVICE), 0)
            position = view.positions[pages]
            found.append(view.scores[pages][(position >= 0) & (position < 200)])
        return found


def in_every_form(test: Callable[..., None]) -> Callable[..., None]:
    """A test of ``tiers`` with a ``policy``, ``rotated`` or not, with key ``means`` or without."""
    for mark in (
        pytest.mark.parametrize(
            ("tiers", "policy"),
            [("K8V4 K4V2", WINDOW), ("K8V4 K4V2", SCORED), ("K8V4 K4V2", SAMPLED), ("BF16", UniformPolicy())],
            ids=["window", "scored", "sampled", "raw"],
        ),
        pytest.mark.parametrize("rotated", ["none", "both", "keys"]),
        pytest.mark.parametrize("means", [False, True], ids=["", "means"]),
        pytest.mark.cover(1),
    ):
        test = mark(test)
    return test


def run(make_ops: OpsOf, *given: Any) -> Passes:
    """A prompt, part of it shared by another one beside the first's next chunk and a new one, then one chunk more of
    each, the new one's a single token. ``given`` to ``Prompts``."""
    prompts = Prompts(make_ops, *given)
    prompts.extend([1], [51], ending=(1,))
    segment = prompts.manager.segments.share(1, 0, 45)
    assert segment is not None
    prompts.manager.attach_prefix(2, [(segment, 0, 33)])
    prompts.manager.prompts.score_shared(2)
    prompts.extend([3, 1, 4, 2], [13, 20, 9, 41])
    prompts.extend([1, 4, 2], [7, 1, 3])
    shared_scores = prompts.manager.prompts.shared_scores.values()
    assert bool(shared_scores) == (prompts.manager.state.tiers[0].scores is not None)
    return Passes(prompts.outs, prompts.scores(1, 2, 3, 4))


def ops_of(policy: Policy, made: list[TritonOps], scaling: Scaling = SCALING) -> OpsOf:
    def make(state: PageState) -> TritonOps:
        library: Any = Library(scaling)
        made.append(TritonOps(state, policy, HEADS * GROUP, 400, library))
        return made[0]

    return make


def reference_of(policy: Policy) -> OpsOf:
    return lambda state: ReferenceOps(state, policy)


@in_every_form
def test_passes_give_what_the_references_give(tiers: str, policy: Policy, rotated: str, means: bool) -> None:
    rotation = Rotation.named(rotated)
    common = torch.randn(LAYERS, HEADS, DIM, generator=torch.Generator().manual_seed(7)) * 2 if means else None
    made: list[TritonOps] = []
    mine = run(ops_of(policy, made), tiers, policy, rotation, common)
    library: Any = made[0].ragged
    assert library.asked == [(51, 51)] * 2 + [(13 + 71 + 9 + 74, 83)] * 2 + [(78 + 10 + 77, 11)] * 2
    expected = run(reference_of(policy), tiers, policy, rotation, common)
    limit = 2e-2 if tiers == "BF16" and DEVICE == "cpu" else 1.2e-2  # the interpreter cuts off what it stores
    for got, known in zip(mine.outs, expected.outs, strict=True):
        assert close(got, known) < limit
    assert len(mine.scores) == len(expected.scores)
    for got, known in zip(mine.scores, expected.scores, strict=True):
        assert close(got, known) < 2e-2


def test_key_means_that_come_off_before_fitted_matrices() -> None:
    """Prefixes read back are of keys without them; as computed, attention is what it is without either."""
    common = torch.randn(LAYERS, HEADS, DIM, generator=torch.Generator().manual_seed(7)) * 2
    stretched = torch.linspace(0.5, 3, DIM).diag().expand(LAYERS, HEADS, DIM, DIM)
    fitted = NoiseShaping(stretched, stretched.flip(2, 3)).transform(BF16, DEVICE, BOTH, GROUP)
    for tiers, policy in (("K8V4 K4V2", WINDOW), ("BF16", UniformPolicy())):
        given = (tiers, policy, NO_ROTATION, common, SCALING, None, fitted)
        made: list[TritonOps] = []
        mine, expected = run(ops_of(policy, made), *given), run(reference_of(policy), *given)
        assert made[0].ragged is not None
        for got, known in zip(mine.outs, expected.outs, strict=True):
            assert close(got, known) < 2e-2
    plain = run(reference_of(policy), tiers, policy, NO_ROTATION)
    for got, known in zip(mine.outs, plain.outs, strict=True):
        assert close(got, known) < 3e-2


def test_a_logit_cap_and_no_rotation() -> None:
    scaling, made = Scaling(0.1, 4.0), []
    mine = run(ops_of(SCORED, made, scaling), "K8V4 K4V2", SCORED, NO_ROTATION, None, scaling)
    expected = run(reference_of(SCORED), "K8V4 K4V2", SCORED, NO_ROTATION, None, scaling)
    assert made[0].ragged is not None
    for got, known in zip(mine.outs + mine.scores, expected.outs + expected.scores, strict=True):
        assert close(got, known) < 2e-2


@pytest.mark.parametrize("policy", [WINDOW, SAMPLED], ids=["window", "sampled"])
def test_heads_that_do_not_fit_together_attend_one_after_the_other(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_back, "MOST_BYTES", 180 * 2 * DIM * 2)
    means = torch.randn(LAYERS, HEADS, DIM, generator=torch.Generator().manual_seed(7)) * 2
    made: list[TritonOps] = []
    mine = run(ops_of(policy, made), "K8V4 K4V2", policy, BOTH, means)
    expected = run(reference_of(policy), "K8V4 K4V2", policy, BOTH, means)
    library: Any = made[0].ragged
    assert library.asked == [(51, 51)] * LAYERS + [(167, 83)] * LAYERS * HEADS + [(165, 11)] * LAYERS * HEADS
    assert library.heads == [HEADS] * LAYERS + [1] * 2 * LAYERS * HEADS
    for got, known in zip(mine.outs + mine.scores, expected.outs + expected.scores, strict=True):
        assert close(got, known) < 2e-2


@pytest.mark.parametrize("apart", [False, True], ids=["", "heads apart"])
def test_in_8_bits_it_is_the_same_but_for_rounding(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored tokens that were read back, new ones, and scores. Copies in 8 bits count as room."""
    monkeypatch.setattr(flash, "LEAST_WORK", 0)
    monkeypatch.setattr(flash, "LEAST_QUERIES", 0)
    monkeypatch.setattr(flash, "attention_function", lambda: attend_in_any)
    monkeypatch.setattr(flash, "to_e4m3", reference.to_e4m3)
    asked = []

    class Eight(flash.FlashPrefill):
        def run(self, q: torch.Tensor, key: torch.Tensor, *rest: Any, **more: Any) -> Any:
            asked.append((self._converts, key.shape[1]))
            return super().run(q, key, *rest, **more)

    if apart:
        monkeypatch.setattr(read_back, "MOST_BYTES", 180 * 2 * DIM * 3)
    made: list[TritonOps] = []

    def make(state: PageState) -> TritonOps:
        made.append(TritonOps(state, SCORED, HEADS * GROUP, 400, Eight(eight_bits=True)))
        return made[0]

    mine, expected = (run(ops, "K8V4 K4V2", SCORED, BOTH) for ops in (make, reference_of(SCORED)))
    assert {converts for converts, _ in asked} == {True} and (1 in {heads for _, heads in asked}) == apart
    for got, known in zip(mine.outs, expected.outs, strict=True):
        assert 2e-2 < close(got, known) < 0.3, "the largest error, of normal numbers"
    for got, known in zip(mine.scores, expected.scores, strict=True):  # a few tokens are placed otherwise
        assert abs(len(got) - len(known)) <= 0.1 * len(known) + 1
        assert abs(float(got.sum() / known.sum()) - 1) < 0.1


@pytest.mark.parametrize("why", ["too many", "dropped", "sinks", "sinks that nobody told of", "another scaling"])
def test_pages_are_attended_to_as_they_are(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all tokens of one head do not fit, where a head may have dropped some, with attention sinks, and where a
    layer's scaling is another than the library was planned for."""
    policy: Policy = SCORED
    sinks = torch.randn(HEADS * GROUP).to(DEVICE) if "sinks" in why else None
    made: list[TritonOps] = []
    make = ops_of(policy, made, Scaling(0.2) if why == "another scaling" else SCALING)
    if why == "too many":
        monkeypatch.setattr(read_back, "MOST_BYTES", 100 * 2 * DIM * 2)
    elif why == "dropped":
        policy = diffkv_policy(1.0, 0.2, 6)
        make = ops_of(policy, made)

    def told(state: PageState) -> TritonOps:
        ops = make(state)
        ops.has_sinks = why == "sinks"
        return ops

    mine = run(told, "K8V4 K4V2", policy, BOTH, None, SCALING, sinks)
    expected = run(reference_of(policy), "K8V4 K4V2", policy, BOTH, None, SCALING, sinks)
    library: Any = made[0].ragged
    if why == "another scaling":
        assert library is None
    else:
        assert (167, 83) not in library.asked
    for got, known in zip(mine.outs, expected.outs, strict=True):
        assert close(got, known) < 1.2e-2


def test_a_prompt_is_read_back_until_its_tokens_are_dropped() -> None:
    """A policy that prunes has pruned nothing of a prompt that it has not compacted."""
    policy = snapkv_policy(Budget(20), window=4)
    made: list[TritonOps] = []
    twins = [Prompts(make, "K8V4", policy, BOTH) for make in (ops_of(policy, made), reference_of(policy))]
    for twin in twins:
        twin.extend([1], [30])
        twin.extend([2, 1], [17, 21])
        twin.extend([1, 2], [5, 6], compacting=(2,))
        assert twin.manager.rows.as_computed(1) and not twin.manager.rows.as_computed(2)
        twin.extend([1], [4], ending=(1,))
        twin.extend([2, 3], [3, 8])
        segment = twin.manager.segments.share(1, 0, 60)
        assert segment is not None and not twin.manager.rows.as_computed(1)
        twin.manager.attach_prefix(4, [(segment, 0, 50)])
        twin.extend([4], [9])
    library: Any = made[0].ragged
    of_layers = [(30, 30), (17 + 51, 38), (56 + 23, 11), (60, 4), (11, 11), (9, 9)]  # the last two: new tokens alone
    assert library.asked == [asked for asked in of_layers for _ in range(LAYERS)]
    for got, known in zip(*(twin.outs for twin in twins), strict=True):
        assert close(got, known) < 1.5e-2
    for got, known in zip(*(twin.scores(1, 2, 3, 4) for twin in twins), strict=True):
        assert close(got, known) < 3e-2


def test_tokens_that_others_hold_take_no_scores_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a request that scores none of what it shares, sums begin behind that; where it has nothing else, there are
    none."""
    made: list[StoredSums | None] = []
    of = StoredSums.of
    monkeypatch.setattr(StoredSums, "of", lambda *step: made.append(of(*step)) or made[-1])
    twins = [Prompts(make, "K8V4 K4V2", SCORED, BOTH) for make in (ops_of(SCORED, []), reference_of(SCORED))]
    for twin in twins:
        twin.extend([1], [51], ending=(1,))
        segment = twin.manager.segments.share(1, 0, 45)
        assert segment is not None
        for row, end in ((2, 33), (3, 40)):
            twin.manager.attach_prefix(row, [(segment, 0, end)])
        twin.extend([2], [41])
        twin.extend([3, 4, 2], [9, 8, 20])
    assert [x is None for x in made] == [True] * LAYERS + [False] * LAYERS
    assert made[-1] is not None and made[-1].most == 41
    for got, known in zip(*(twin.outs for twin in twins), strict=True):
        assert close(got, known) < 1.2e-2
    for got, known in zip(*(twin.scores(2, 3, 4) for twin in twins), strict=True):
        assert close(got, known) < 2e-2


def test_a_segment_as_computed_leaves_its_reader_so() -> None:
    policy = snapkv_policy(Budget(20), window=4)
    prompts = Prompts(reference_of(policy), "K8V4", policy, BOTH)
    manager = prompts.manager
    prompts.extend([1], [30])
    manager.prompts.untouched.add(1)
    manager.prompts.end(1)
    segment = manager.prompts.publish(1, 0, 30)
    assert segment is not None and segment.as_computed
    manager.attach_prefix(2, [(segment, 0, 20)])
    assert manager.rows.as_computed(2)


def test_which_policies_hold_all() -> None:
    assert heads_hold_all(WINDOW, 2) and heads_hold_all(SCORED, 2) and heads_hold_all(UniformPolicy(), 1)
    assert not heads_hold_all(WINDOW, 1), "with one tier what leaves the window is dropped"
    assert not heads_hold_all(diffkv_policy(1.0, 0.1, 6), 2)
    assert not heads_hold_all(snapkv_policy(Budget(20), window=4), 2)
