"""H2O's heavy hitters (Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference", 2023).

A head keeps its newest tokens and, of the others, the heavy hitters: those that received most attention so far.
A prompt is cut to the budget at its end; from then on, whenever a new token brings a head over its budget, the
least significant token outside the window goes, for good. The paper gives half of the budget to the window.

What differs from the paper:

- in generation the least significant token is the one with the smallest *mean* attention from later tokens, as the
  attention kernel finds it; H2O compares *sums*, which favour old tokens. At the end of the prompt sums are used;
- scores are the maximum over the query heads of a KV head, a prompt's of each pass;
- a step is not given how many tokens a head holds. The count follows from the sequence's length as long as the row
  owns all its tokens. Where a prompt is shared through the prefix cache, its tokens stay as they were cached, and
  a head may exceed its budget by up to ``window`` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sglang_diffkv.policies.base import Count, Policy, TopCount
from sglang_diffkv.policies.budget import Budget
from sglang_diffkv.policies.options import BudgetOptions


@dataclass(frozen=True)
class H2OPolicy(Policy):
    """Each head keeps ``budget`` tokens of the sequence, its newest ``window`` among them."""

    budget: Budget
    window: int = field()

    @property
    def kept_share(self) -> float | None:
        return self.budget.share

    @property
    def prompt(self) -> TopCount:
        return TopCount(self.budget, quantity="sum")

    @property
    def generation(self) -> Count:
        return Count(self.budget)


class H2OPolicyConfig(BudgetOptions):
    """Heavy hitters and the newest tokens, kept to a budget at every step."""

    name: Literal["h2o"] = "h2o"

    def build(self) -> H2OPolicy:
        return H2OPolicy(self.kept, self.window)
