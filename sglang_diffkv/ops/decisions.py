"""From a policy's rules to the tensors of cuts that kernels take. Nothing waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from sglang_diffkv.errors import UnsupportedError
from sglang_diffkv.kernels.cuts import Cuts, StepBudget, StepCuts
from sglang_diffkv.kernels.cuts import StepRule as StepTensors
from sglang_diffkv.kernels.gather_scores import reference as gather_reference
from sglang_diffkv.kernels.parts import Part
from sglang_diffkv.kernels.select import reference as select_reference
from sglang_diffkv.mem_pool.state import PageState
from sglang_diffkv.policies.base import (
    Across,
    Count,
    HeadValues,
    LeastMass,
    Pointwise,
    Policy,
    Share,
    TopMass,
    WholeHead,
)
from sglang_diffkv.policies.budget import Budget
from sglang_diffkv.policies.diffkv import KEEP

Selected = tuple[torch.Tensor, torch.Tensor]
"""Cut [L, H] float32 and tie [L, H] int32."""


@dataclass(frozen=True)
class WholeHeadKernels:
    """The ops that judge whole heads; each has the arguments of its reference."""

    gather: Callable[..., torch.Tensor]
    smooth: Callable[..., torch.Tensor]
    count: Callable[..., Selected]
    mass: Callable[..., Selected]
    least: Callable[..., list[Selected]]


REFERENCE = WholeHeadKernels(
    gather_reference.gather_scores,
    gather_reference.smooth,
    select_reference.select_count,
    select_reference.select_mass,
    select_reference.select_least,
)


@dataclass
class Decisions:
    """Cuts of policies on one device.

    ``memory``: [k, cells] float32 for the values of whole heads, k of them where they are smoothed; None to take it
    from PyTorch each time. Cuts that do not change are made once, so that CUDA graphs may hold them.
    """

    kernels: WholeHeadKernels = REFERENCE
    memory: torch.Tensor | None = None
    pointwise: dict[object, Selected] = field(default_factory=dict)  # (rule, shape) -> high and low, [L, H] float32
    between: dict[object, torch.Tensor] = field(default_factory=dict)  # (rule, shape) -> [T - 2, L, H] float32
    budgets: dict[object, StepBudget] = field(default_factory=dict)

    @classmethod
    def of(cls, kernels: WholeHeadKernels, state: PageState, policy: Policy, max_tokens: int) -> Decisions:
        """With what ``policy`` needs for sequences of up to ``max_tokens``."""
        decisions = cls(kernels)
        rule = policy.prompt
        if isinstance(rule, WholeHead):
            cells = state.num_layers * state.num_heads * max_tokens
            decisions.memory = torch.empty(2 if rule.smooth > 1 else 1, cells, device=state.device)
        elif rule is not None:
            decisions._thresholds(rule, state)
            decisions._between(rule, state)
        decisions.step(state, policy)
        return decisions

    def nbytes(self) -> int:
        """Bytes of the tensors that are kept."""
        tensors = [*self.between.values(), *(x for pair in self.pointwise.values() for x in pair)]
        tensors += [x for budget in self.budgets.values() for x in (budget.tokens, budget.fraction)]
        return sum(x.nbytes for x in tensors) + (0 if self.memory is None else self.memory.nbytes)

    def of_row(self, state: PageState, row: int, seq_len: int, policy: Policy) -> Cuts | None:
        """For the own tokens of ``row``, a prompt or a part of one that ends at ``seq_len``; None if all stay."""
        return self._prompt(state, [(row, 0, seq_len)], seq_len, policy, None, own=True)

    def of_parts(
        self, state: PageState, parts: Sequence[Part], seq_len: int, policy: Policy, judged: torch.Tensor | None
    ) -> Cuts:
        """For copies of ``parts``; ``judged`` as for ``copy_compact``."""
        cuts = self._prompt(state, parts, seq_len, policy, judged, own=False)
        return cuts or self._pointwise(KEEP.prompt, state, policy)

    def step(self, state: PageState, policy: Policy) -> StepTensors | None:
        """For generation steps; None if nothing happens in them."""
        rule = policy.generation
        if isinstance(rule, Count):
            return self._step_budget(rule.budget, policy.window + policy.sinks, state)
        if isinstance(rule, Share):
            return StepCuts(*self._thresholds(Pointwise(rule.high, rule.low), state), of_sum=True)
        return None if rule is None else StepCuts(*self._thresholds(rule, state), self._between(rule, state))

    def _pointwise(self, rule: Pointwise, state: PageState, policy: Policy) -> Cuts:
        between = self._between(rule, state)
        return Cuts(*self._thresholds(rule, state), policy.window, policy.sinks, between=between)

    def _thresholds(self, rule: Pointwise, state: PageState) -> Selected:
        shape = (state.num_layers, state.num_heads)
        if (rule, shape) not in self.pointwise:
            scale = _by_head(1.0 if rule.scale is None else rule.scale, state)
            high = scale * (_by_head(rule.high, state) if isinstance(rule.high, tuple) else rule.high)
            low = scale * (_by_head(rule.low, state) if isinstance(rule.low, tuple) else rule.low)
            self.pointwise[rule, shape] = high, low
        return self.pointwise[rule, shape]

    def _between(self, rule: Pointwise, state: PageState) -> torch.Tensor | None:
        shape = (max(len(state.fmt.tiers) - 2, 0), state.num_layers, state.num_heads)
        if not shape[0]:
            return None
        if (rule, shape) not in self.between:
            if len(rule.between) < shape[0]:
                raise UnsupportedError(
                    f"{shape[0] + 2} tiers need {shape[0]} thresholds between the first and the last"
                )
            scale = _by_head(1.0 if rule.scale is None else rule.scale, state)
            self.between[rule, shape] = torch.stack([scale * threshold for threshold in rule.between[: shape[0]]])
        return self.between[rule, shape]

    def _step_budget(self, budget: Budget, least: int, state: PageState) -> StepBudget:
        key = (budget, least, state.num_layers, state.num_heads)
        if key not in self.budgets:
            shape, device = (state.num_layers, state.num_heads), state.device
            tokens = torch.full(shape, max(budget.tokens, least), dtype=torch.int32, device=device)
            fraction = torch.full(shape, budget.fraction, dtype=torch.float64, device=device)
            self.budgets[key] = StepBudget(tokens, fraction)
        return self.budgets[key]

    def _prompt(
        self, state: PageState, parts: Sequence[Part], seq_len: int, policy: Policy, judged: torch.Tensor | None, *,
        own: bool,
    ) -> Cuts | None:  # fmt: skip
        rule, limits = policy.prompt, (policy.window, policy.sinks)
        if rule is None:
            return None
        if isinstance(rule, Pointwise):
            return self._pointwise(rule, state, policy)
        if len(state.fmt.tiers) > 2:
            raise UnsupportedError(f"{type(rule).__name__} sorts the tokens of a head into two tiers at most")
        values = self._room(state, 0, seq_len)
        sums = rule.quantity == "sum"
        given = {"sums": sums, "judged": judged, "own": own}
        if isinstance(rule, LeastMass):
            self.kernels.gather(state, parts, values, seq_len, window=0, sinks=0, **given)
            shares = (rule.low, rule.out) if len(state.fmt.tiers) > 1 else (rule.out, rule.out)
            (high, tie_high), (low, tie_low) = self.kernels.least(
                values, shares, window=policy.window, sinks=policy.sinks
            )
            return Cuts(high, low, *limits, values, tie_high, tie_low)
        stored = self.kernels.gather(state, parts, values, seq_len, window=policy.window, sinks=policy.sinks, **given)
        if rule.smooth > 1:
            values = self._smoothed(state, values, rule.smooth)
        kept = rule.share if isinstance(rule, TopMass) else rule.budget
        low, tie_low = self._select(rule, values, stored, sum(limits), kept)
        high, tie_high = low, tie_low
        if rule.high is not None and len(state.fmt.tiers) > 1:
            high, tie_high = self._select(rule, values, stored, sum(limits), rule.high)
        return Cuts(high, low, *limits, values, tie_high, tie_low)

    def _select(
        self, rule: WholeHead, values: torch.Tensor, stored: torch.Tensor, least: int, kept: Budget | float
    ) -> Selected:
        if not isinstance(kept, Budget):
            return self.kernels.mass(values, kept)
        count = kept.kept(stored, least)
        return self.kernels.count(values, count.sum().view(1, 1) if isinstance(rule, Across) else count)

    def _room(self, state: PageState, number: int, length: int) -> torch.Tensor:
        shape = (state.num_layers, state.num_heads, length)
        if self.memory is None:
            return torch.empty(shape, device=state.device)
        return self.memory[number, : shape[0] * shape[1] * length].view(shape)

    def _smoothed(self, state: PageState, values: torch.Tensor, width: int) -> torch.Tensor:
        if self.memory is None:
            return self.kernels.smooth(values, width)
        return self.kernels.smooth(values, width, self._room(state, 1, values.shape[2]))


def _by_head(value: float | HeadValues, state: PageState) -> torch.Tensor:
    """[L, H] float32."""
    shape = (state.num_layers, state.num_heads)
    if not isinstance(value, tuple):
        return torch.full(shape, value, device=state.device)
    found = torch.tensor(value, dtype=torch.float32, device=state.device)
    assert found.shape == shape, f"values of {tuple(found.shape)} layers and heads for a model of {shape}"
    return found
