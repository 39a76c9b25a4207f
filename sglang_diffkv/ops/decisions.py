"""From a policy's rules to the tensors of cuts that kernels take. Nothing waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from sglang_diffkv.errors import UnsupportedError
from sglang_diffkv.kernels.cuts import Cuts, StepBudget, StepCuts
from sglang_diffkv.kernels.cuts import StepRule as StepTensors
from sglang_diffkv.kernels.gather_scores import reference as gather_reference
from sglang_diffkv.kernels.importance import reference as importance_reference
from sglang_diffkv.kernels.importance.reference import Shared
from sglang_diffkv.kernels.key_norms import reference as key_norms_reference
from sglang_diffkv.kernels.parts import Part
from sglang_diffkv.kernels.random_scores import reference as random_scores_reference
from sglang_diffkv.kernels.redundancy import reference as redundancy_reference
from sglang_diffkv.kernels.select import reference as select_reference
from sglang_diffkv.kernels.window_scores import reference as window_scores_reference
from sglang_diffkv.layout.ranks import Ranks
from sglang_diffkv.layout.spans import retained_tokens
from sglang_diffkv.layout.state import NO_LIMIT, PageState
from sglang_diffkv.layout.transfer import to_device
from sglang_diffkv.policies.base import (
    Across,
    AcrossLayers,
    Count,
    HeadValues,
    KeyNorm,
    LayerValues,
    LeastMass,
    Pointwise,
    Policy,
    Random,
    Redundancy,
    Share,
    TopCount,
    TopMass,
    WholeHead,
)
from sglang_diffkv.policies.budget import Budget, Limits
from sglang_diffkv.policies.diffkv import KEEP
from sglang_diffkv.policies.uniform import UniformPolicy

ALIGNED = 64
"""Numbers to which rooms of the memory are aligned: kernels are compiled for aligned ones."""

Selected = tuple[torch.Tensor, torch.Tensor]
"""Cut [L, H] float32 and tie [L, H] int32."""


def compacts(state: PageState, policy: Policy) -> bool:
    """Whether prompts are compacted: by the policy, or since a layer's window leaves tokens behind."""
    return policy.compresses or state.slides


def untouched_tokens(state: PageState, policy: Policy) -> int:
    """The longest prompt in which nothing is to be decided."""
    limits = [retained_tokens(attention_span) for attention_span in state.attention_spans if attention_span]
    return min(limits + [policy.window] * policy.compresses, default=NO_LIMIT)


def used_by_heads(state: PageState, policy: Policy) -> torch.Tensor | None:
    """[L, H, T] int32, 1 where a head may have tokens of a tier; None where all may."""
    tiers = len(state.fmt.tiers)
    used = [policy.used_tiers(tiers, layer) for layer in range(state.num_layers)]
    if all(len(x) == tiers for x in used):
        return None
    found = [[[int(tier in layer) for tier in range(tiers)]] * state.num_heads for layer in used]
    return torch.tensor(found, dtype=torch.int32, device=state.device)


def tail_tokens(state: PageState, policy: Policy) -> int:
    """Tokens at the end of a prompt that are in the high tier as the newest ones alone, and go down one by one as
    others follow. None where layers slide: what the prefix cache has of a prompt must end with what they hold."""
    if policy.generation is None or policy.running is not None or state.slides:
        return 0
    return policy.window


@dataclass(frozen=True)
class WholeHeadKernels:
    """The ops that score whole heads; each has the arguments of its reference."""

    gather: Callable[..., torch.Tensor]
    key_norms: Callable[..., torch.Tensor]
    random: Callable[..., None]
    smooth: Callable[..., torch.Tensor]
    count: Callable[..., Selected]
    mass: Callable[..., Selected]
    least: Callable[..., list[Selected]]
    above: Callable[..., torch.Tensor]
    importance: Callable[..., torch.Tensor]
    redundancy: Callable[..., torch.Tensor]
    by_queries: Callable[..., None]


REFERENCE = WholeHeadKernels(
    gather_reference.gather_scores,
    key_norms_reference.key_norms,
    random_scores_reference.random_scores,
    gather_reference.smooth,
    select_reference.select_count,
    select_reference.select_mass,
    select_reference.select_least,
    select_reference.count_above,
    importance_reference.importance,
    redundancy_reference.redundancy,
    window_scores_reference.window_scores,
)


@dataclass(frozen=True)
class Scoring:
    """Of all tokens that a running request holds."""

    cuts: Cuts
    scores: torch.Tensor  # [L, H, n] float32 by position, NaN where there is no token; the next one there overwrites it


@dataclass
class Decisions:
    """Cuts of policies on one device.

    ``memory``: [k, cells] float32 for the values of whole heads, None to take it from PyTorch each time. There are two
    where they are smoothed, scored by layer or lowered, and a third where running requests are scored. They are of as
    many layers as are scored at a time (``PageState.groups``). ``second``: as much for running requests that are scored
    beside forward passes, which use the first. Cuts that do not change are made once, so that CUDA graphs may hold
    them. ``ranks`` have a layer's heads between them; ``exchanged``: [2 * cells of a layer] for what they exchange.
    ``spares_rows``: whether rows may keep all tokens, as ``PageState.row_sign`` says. ``own_windows``: whether rows may
    have windows of their own, as ``PageState.row_window`` says.
    """

    kernels: WholeHeadKernels = REFERENCE
    memory: torch.Tensor | None = None
    second: torch.Tensor | None = None
    ranks: Ranks = field(default_factory=Ranks)
    spares_rows: bool = False
    own_windows: bool = False
    exchanged: torch.Tensor | None = None
    pointwise: dict[object, Selected] = field(default_factory=dict)  # (rule, shape) -> high and low, [L, H] float32
    between: dict[object, torch.Tensor] = field(default_factory=dict)  # (rule, shape) -> [T - 2, L, H] float32
    budgets: dict[object, StepBudget] = field(default_factory=dict)
    limits: dict[object, Limits] = field(default_factory=dict)  # of budgets that differ between heads
    lasting: dict[object, torch.Tensor] = field(
        default_factory=dict
    )  # (window, sinks, attention spans) -> [L, 2] int32

    @classmethod
    def of(cls, kernels: WholeHeadKernels, state: PageState, policy: Policy, max_tokens: int) -> Decisions:
        """With what ``policy`` needs for sequences of up to ``max_tokens``."""
        decisions = cls(kernels)
        rule = policy.prompt
        if isinstance(rule, WholeHead):
            assert policy.layer_stride is None or isinstance(rule, TopCount), "heads of all layers are compared"
            layers = min(policy.layer_stride or state.num_layers, state.num_layers)
            cells = -(-layers * state.num_heads * max_tokens // ALIGNED) * ALIGNED
            lowered = isinstance(rule, TopCount) and rule.redundancy is not None
            rooms = 2 if rule.smooth > 1 or isinstance(rule, AcrossLayers) or lowered else 1
            rooms = rooms if policy.running is None else 3
            decisions.memory = torch.empty(rooms, cells, device=state.device)
            if policy.running is not None and policy.running.asynchronous:
                assert policy.layer_stride is None, "all layers are scored before any is moved"
                decisions.second = torch.empty(rooms, cells, device=state.device)
            for budget in (getattr(rule, name, None) for name in ("budget", "high")):
                if isinstance(budget, Budget):
                    decisions._limits(budget, state)
        elif rule is not None or state.slides:
            decisions._pointwise(rule or KEEP.prompt, state, policy)
        decisions.step(state, policy)
        return decisions

    def beside(self, state: PageState, at: int) -> Decisions:
        """The same in the second memory, of which positions from ``at`` on, a multiple of ``ALIGNED``, are free."""
        if self.second is None:
            return self
        return replace(self, memory=self.second[:, at * state.num_layers * state.num_heads :])

    def use_ranks(self, ranks: Ranks, state: PageState, policy: Policy, max_tokens: int) -> None:
        """Where layers share a size all heads' importance decides, whatever rank they are on."""
        self.ranks = ranks
        if self.memory is not None and isinstance(policy.prompt, AcrossLayers) and not ranks.alone:
            self.exchanged = torch.empty(2 * state.num_layers * max_tokens, device=state.device)

    def spare_rows(self, state: PageState) -> None:
        """Rows may keep all their tokens in the high tier from now on."""
        self.spares_rows = True
        if state.slides:
            self._pointwise(KEEP.prompt, state, UniformPolicy())

    def allow_windows(self) -> None:
        """Rows may have windows of their own from now on. Before kernels are compiled."""
        self.own_windows = True

    def search_rule(self, state: PageState, policy: Policy) -> dict[str, Any]:
        """``Policy.search_rule``, with the windows of rows where they may differ."""
        return {**policy.search_rule, "row_windows": state.row_window if self.own_windows else None}

    def lengths(self, state: PageState, rows: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
        """[B] as ``seq_lens``, by which a generation step divides its thresholds: negative for rows that keep all. No
        score is below a negative threshold, and no budget is reached."""
        if not self.spares_rows:
            return seq_lens
        return seq_lens * state.row_sign.index_select(0, rows)

    def spare_sums(self, state: PageState, rows: torch.Tensor, sums: torch.Tensor) -> None:
        """The same where thresholds are shares of heads' scores: ``sums`` [B, L, H] of rows that keep all turn
        negative."""
        if self.spares_rows:
            sums.mul_(state.row_sign.index_select(0, rows).view(-1, 1, 1))

    def nbytes(self) -> int:
        """Bytes of the tensors that are kept."""
        tensors = [*self.between.values(), *(x for pair in self.pointwise.values() for x in pair)]
        tensors += [*self.lasting.values()]
        tensors += [x for budget in self.budgets.values() for x in (budget.tokens, budget.fraction)]
        tensors += [x for pair in self.limits.values() for x in pair if isinstance(x, torch.Tensor)]
        tensors += [x for x in (self.memory, self.second, self.exchanged) if x is not None]
        return sum(x.nbytes for x in tensors)

    def of_row(self, state: PageState, row: int, seq_len: int, policy: Policy) -> Cuts | None:
        """For the own tokens of ``row``, a prompt or a part of one that ends at ``seq_len``; None if all stay."""
        return self._prompt(state, [(row, 0, seq_len)], seq_len, policy, None, own=True)

    def of_parts(
        self, state: PageState, parts: Sequence[Part], seq_len: int, policy: Policy, shared_scores: torch.Tensor | None
    ) -> Cuts:
        """For copies of ``parts``; ``shared_scores`` as for ``copy_compact``."""
        cuts = self._prompt(state, parts, seq_len, policy, shared_scores, own=False)
        return cuts or self._pointwise(KEEP.prompt, state, policy)

    def of_running(
        self, state: PageState, row: int, seq_len: int, policy: Policy, queries: torch.Tensor,
        scaling: tuple[float, float], *, first: bool, most: int,
    ) -> Scoring:  # fmt: skip
        """For all tokens that ``row`` holds, scored by its newest ``queries`` [L, w, Hq, D], see
        ``kernels/window_scores``. ``first``: it was not scored before. ``most``: tokens of a head, at most."""
        rule, running = policy.prompt, policy.running
        assert isinstance(rule, TopCount) and running is not None
        scale, cap = scaling
        shape, parts = (state.num_layers, state.num_heads, seq_len), [(row, 0, seq_len)]
        scores, values = self._room(state, 2, shape), self._room(state, 0, shape)
        stored = self.kernels.gather(state, parts, scores, seq_len, window=0)
        self.kernels.by_queries(state, row, seq_len, queries, values, scale, logit_cap=cap)
        torch.maximum(scores.mul_(0.0 if first else running.decay), values, out=scores)
        values.copy_(scores)
        newest = values[..., max(seq_len - policy.window, 0) :]
        newest.masked_fill_(~newest.isnan(), float("inf"))
        return Scoring(self._top_count(rule, state, parts, values, stored, policy, smooth=first, most=most), scores)

    def step(self, state: PageState, policy: Policy) -> StepTensors | None:
        """For generation steps; None if nothing happens in them."""
        rule = policy.generation
        if isinstance(rule, Count):
            return self._step_budget(rule.budget, policy.window + policy.sinks, state)
        if isinstance(rule, Share):
            return StepCuts(*self._thresholds(Pointwise(rule.high, rule.low), state), of_sum=True)
        return None if rule is None else StepCuts(*self._thresholds(rule, state), self._between(rule, state))

    def _pointwise(self, rule: Pointwise, state: PageState, policy: Policy) -> Cuts:
        """Of layers with a sliding window nothing stays but what is in it, except in copies as tokens are."""
        limits = (policy.window, policy.sinks)
        if not state.slides or policy is KEEP:
            return Cuts(*self._thresholds(rule, state), *limits, between=self._between(rule, state))
        slide = state.attention_spans
        between = self._between(rule, state, slide)
        lasting = self._lasting_of(limits, state)
        return Cuts(*self._thresholds(rule, state, slide), *limits, between=between, lasting=lasting)

    def _lasting_of(self, limits: tuple[int, int], state: PageState) -> torch.Tensor:
        key = (limits, state.attention_spans)
        if key not in self.lasting:
            each = [
                (retained_tokens(attention_span), 0) if attention_span else limits
                for attention_span in state.attention_spans
            ]
            self.lasting[key] = to_device(each, state.device).int()
        return self.lasting[key]

    def _thresholds(self, rule: Pointwise, state: PageState, slide: tuple[int, ...] = ()) -> Selected:
        """``slide``: of each layer, whether nothing stays; empty if that holds for none."""
        shape = (state.num_layers, state.num_heads, slide)
        if (rule, shape) not in self.pointwise:
            scale = _by_head(1.0 if rule.scale is None else rule.scale, state)
            high = scale * (_by_head(rule.high, state) if isinstance(rule.high, tuple) else rule.high)
            low = scale * (_by_head(rule.low, state) if isinstance(rule.low, tuple) else rule.low)
            self.pointwise[rule, shape] = _without(high, slide), _without(low, slide)
        return self.pointwise[rule, shape]

    def _between(self, rule: Pointwise, state: PageState, slide: tuple[int, ...] = ()) -> torch.Tensor | None:
        shape = (max(len(state.fmt.tiers) - 2, 0), state.num_layers, state.num_heads, slide)
        if not shape[0]:
            return None
        if (rule, shape) not in self.between:
            if len(rule.between) < shape[0]:
                raise UnsupportedError(
                    f"{shape[0] + 2} tiers need {shape[0]} thresholds between the first and the last"
                )
            scale = _by_head(1.0 if rule.scale is None else rule.scale, state)
            found = [_without(scale * _by_layer(threshold, state), slide) for threshold in rule.between[: shape[0]]]
            self.between[rule, shape] = torch.stack(found)
        return self.between[rule, shape]

    def _step_budget(self, budget: Budget, least: int, state: PageState) -> StepBudget:
        key = (budget, least, state.num_layers, state.num_heads)
        if key not in self.budgets:
            shape, device = (state.num_layers, state.num_heads), state.device
            assert not budget.beside, "a step is not given how many tokens lie outside the window"
            tokens, fraction = budget.limits(device)
            least_tokens = (torch.zeros(shape, dtype=torch.int64, device=device) + tokens).clamp(min=least).int()
            shares = torch.zeros(shape, dtype=torch.float64, device=device) + fraction
            self.budgets[key] = StepBudget(least_tokens, shares)
        return self.budgets[key]

    def _limits(self, budget: Budget, state: PageState) -> Limits:
        """Of a budget by layer or head, made once: a host that writes them to the device would wait for it."""
        key = (budget, state.num_layers, state.num_heads)
        if key not in self.limits:
            limits = budget.limits(state.device)
            for found in limits:
                if isinstance(found, torch.Tensor):
                    _check_shape(found, state)
            self.limits[key] = limits
        return self.limits[key]

    def _prompt(
        self, state: PageState, parts: Sequence[Part], seq_len: int, policy: Policy, shared_scores: torch.Tensor |
        None, *,
        own: bool,
    ) -> Cuts | None:  # fmt: skip
        rule, limits = policy.prompt, (policy.window, policy.sinks)
        if rule is None and state.slides:
            rule = KEEP.prompt
        if rule is None:
            return None
        if isinstance(rule, Pointwise):
            return self._pointwise(rule, state, policy)
        if state.slides:
            raise UnsupportedError(f"{type(rule).__name__} does not score layers with a sliding window")
        if len(state.fmt.tiers) > 2:
            raise UnsupportedError(f"{type(rule).__name__} sorts the tokens of a head into two tiers at most")
        heads = (state.num_layers, state.num_heads, seq_len)
        values = self._room(state, 0, heads)
        if isinstance(rule, LeastMass):
            self._scores(policy, state, parts, values, seq_len, shared_scores, own=own)
            shares = (rule.low, rule.out) if len(state.fmt.tiers) > 1 else (rule.out, rule.out)
            upper, lower = self.kernels.least(values, shares, window=policy.window, sinks=policy.sinks)
            return Cuts(upper[0], lower[0], *limits, values, upper[1], lower[1])
        stored = self._scores(policy, state, parts, values, seq_len, shared_scores, *limits, own=own)
        if isinstance(rule, TopCount):
            return self._top_count(rule, state, parts, values, stored, policy, smooth=True)
        if rule.smooth > 1:
            values = self._smoothed(state, values, rule)
        tiers = len(state.fmt.tiers)
        if isinstance(rule, AcrossLayers):
            low, high = self._across_layers(rule, state, values, tiers)
        else:
            kept = rule.share if isinstance(rule, TopMass) else rule.budget
            low = high = self._select(rule, state, values, stored, sum(limits), kept)
            if rule.high is not None and tiers > 1:
                high = self._select(rule, state, values, stored, sum(limits), rule.high)
        return Cuts(high[0], low[0], *limits, values, high[1], low[1])

    def _scores(
        self, policy: Policy, state: PageState, parts: Sequence[Part], values: torch.Tensor, seq_len: int,
        shared_scores: torch.Tensor | None, window: int = 0, sinks: int = 0, *, own: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Fill ``values`` with what the policy scores tokens by, and return how many each head has. Those of ``window``
        and ``sinks`` have an infinite one."""
        source, rule = policy.score_source, policy.prompt
        if isinstance(source, KeyNorm):
            return self.kernels.key_norms(state, parts, values, seq_len, window=window, sinks=sinks, own=own)
        assert isinstance(rule, WholeHead)
        given = {
            "window": window,
            "sinks": sinks,
            "sums": rule.quantity == "sum",
            "shared_scores": shared_scores,
            "own": own,
        }
        stored = self.kernels.gather(state, parts, values, seq_len, **given)
        if isinstance(source, Random):
            self.kernels.random(values, source.seed, state.first_layer, source.first_head)
        return stored

    def _top_count(
        self, rule: TopCount, state: PageState, parts: Sequence[Part], values: torch.Tensor, stored: torch.Tensor,
        policy: Policy, *, smooth: bool, most: int | None = None,
    ) -> Cuts:  # fmt: skip
        """``values`` in the first room; the second is used. ``most``: tokens of a head, at most, if it is known."""
        spare = 1
        if smooth and rule.smooth > 1:
            values, spare = self._smoothed(state, values, rule), 0
        if rule.redundancy is not None:
            self._lower(rule.redundancy, state, parts, values, self._room(state, spare, values.shape), most)
        limits = (policy.window, policy.sinks)
        low = high = self._select(rule, state, values, stored, sum(limits), rule.budget)
        if rule.high is not None and len(state.fmt.tiers) > 1:
            high = self._select(rule, state, values, stored, sum(limits), rule.high)
        return Cuts(high[0], low[0], *limits, values, high[1], low[1])

    def _lower(
        self, rule: Redundancy, state: PageState, parts: Sequence[Part], values: torch.Tensor, alike: torch.Tensor,
        most: int | None,
    ) -> None:  # fmt: skip
        """Take redundancy off the values, and their smallest, so that none is negative."""
        count = self.kernels.redundancy(
            state, parts, values, alike, threshold=rule.threshold, block=rule.block, most=most
        )
        alike.div_((count.clamp(min=1) * rule.temperature).unsqueeze(2)).masked_fill_(values.isnan(), -torch.inf)
        top = alike.amax(2, keepdim=True) if alike.shape[2] else alike
        alike.sub_(top.nan_to_num(neginf=0.0)).exp_()
        values.sub_(alike.div_(alike.sum(2, keepdim=True).clamp(min=1e-30)), alpha=rule.weight)
        torch.nan_to_num(values, nan=torch.inf, out=alike)
        least = alike.amin(2, keepdim=True) if values.shape[2] else values
        values.sub_(least.nan_to_num(posinf=0.0))

    def _select(
        self, rule: WholeHead, state: PageState, values: torch.Tensor, stored: torch.Tensor, least: int,
        kept: Budget | float,
    ) -> Selected:  # fmt: skip
        if not isinstance(kept, Budget):
            return self.kernels.mass(values, kept)
        lasting = self._lasting(values) if kept.beside else least
        count = kept.kept(stored, lasting, self._limits(kept, state))
        return self.kernels.count(values, count.sum().view(1, 1) if isinstance(rule, Across) else count)

    def _across_layers(
        self, rule: AcrossLayers, state: PageState, values: torch.Tensor, tiers: int
    ) -> tuple[Selected, Selected]:
        """Cuts of what is kept and of the high tier. Layers that are given their next token one after the other, the
        one that gains most first, have in the end the largest parts of all, so one selection finds what each gets."""
        parts = self._room(state, 0 if rule.smooth > 1 else 1, (state.num_layers, 1, values.shape[2]))
        tokens = self.kernels.importance(values, parts, self._shared(state, values.shape[2]))
        if rule.retention is None:
            total = (tokens.sum().double() * rule.keep).ceil().long()
            chosen = self.kernels.count(parts, total.view(1, 1))
        else:
            chosen = self.kernels.mass(parts, rule.retention, together=True)
        given, lasting = self.kernels.above(parts, *chosen), self._lasting(values)  # [L, 1] and [L, H]
        low = self.kernels.count(values, lasting + given)
        if rule.high is None or tiers == 1:
            return low, low
        return low, self.kernels.count(values, lasting + (given.double() * rule.high).ceil().long())

    def _shared(self, state: PageState, length: int) -> Shared | None:
        """How importance is exchanged; None where there is one rank or nothing to score."""
        if self.ranks.alone or not length:
            return None
        shape = (2, state.num_layers, length)
        if self.exchanged is None:
            room = torch.empty(shape, device=state.device)
        else:
            room = self.exchanged[: 2 * state.num_layers * length].view(shape)
        return Shared(self.ranks.size, self.ranks.add, room)

    def _lasting(self, values: torch.Tensor) -> torch.Tensor:
        """[L, H] int64, tokens that stay in any case, window and sinks."""
        layers, heads, length = values.shape
        cut = torch.full((layers, heads), float("inf"), device=values.device)
        return self.kernels.above(values, cut, torch.full_like(cut, length, dtype=torch.int32))

    def _room(self, state: PageState, number: int, shape: Sequence[int]) -> torch.Tensor:
        if self.memory is None:
            return torch.empty(*shape, device=state.device)
        return self.memory[number, : shape[0] * shape[1] * shape[2]].view(*shape)

    def _smoothed(self, state: PageState, values: torch.Tensor, rule: WholeHead) -> torch.Tensor:
        kind = {"average": rule.pooling == "average"}
        if self.memory is None:
            return self.kernels.smooth(values, rule.smooth, **kind)
        return self.kernels.smooth(values, rule.smooth, self._room(state, 1, values.shape), **kind)


def _without(cut: torch.Tensor, slide: tuple[int, ...]) -> torch.Tensor:
    """A cut [L, H], infinite in the layers that ``slide``, so that no score is enough."""
    if not slide:
        return cut
    gone = torch.tensor([bool(x) for x in slide], device=cut.device)
    return cut.masked_fill(gone.unsqueeze(1), float("inf")).contiguous()


def _check_shape(found: torch.Tensor, state: PageState) -> None:
    shape = (state.num_layers, state.num_heads)
    assert found.shape in (shape, (shape[0], 1)), f"values of {tuple(found.shape)} layers and heads for {shape}"


def _by_layer(value: float | LayerValues, state: PageState) -> torch.Tensor:
    """[L, 1] float32."""
    if not isinstance(value, tuple):
        return torch.full((state.num_layers, 1), value, device=state.device)
    assert len(value) == state.num_layers, f"values of {len(value)} layers for a model of {state.num_layers}"
    return torch.tensor(value, dtype=torch.float32, device=state.device).unsqueeze(1)


def _by_head(value: float | HeadValues, state: PageState) -> torch.Tensor:
    """[L, H] float32."""
    shape = (state.num_layers, state.num_heads)
    if not isinstance(value, tuple):
        return torch.full(shape, value, device=state.device)
    found = torch.tensor(value, dtype=torch.float32, device=state.device)
    assert found.shape == shape, f"values of {tuple(found.shape)} layers and heads for a model of {shape}"
    return found
