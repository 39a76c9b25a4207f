"""PyramidKV's budgets by layer (Cai et al., "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information
Funneling", 2024).

Lower layers spread their attention over many tokens, higher ones over few, so at the end of the prompt lower layers
keep more: budgets fall in equal steps from the first layer to the last. Which tokens a head keeps is decided as in
SnapKV: those that received most attention from the prompt's last queries, the window, which stays, after max-pooling
over neighbours. Generated tokens all stay.

Numbers are those of the authors' code. With a mean of B tokens beyond the window, the last layer keeps B / beta of
them, rounded down, the first 2 B less that. Those between lie on a line. Where a prompt has fewer tokens outside the
window than the first layer may keep, that layer keeps them all and the last one 2 B less these. Where it has fewer than
2 B, window included, all layers keep B.

What differs from the authors' code:

- the line's points are rounded to the nearest token, so that the mean over layers is B to half a token. The authors'
  code rounds the step down, which gives a model of L layers up to (L - 1) / 2 tokens a layer more than asked for;
- window and pooling are those of the paper's experiments, 8 and a maximum over 7 neighbours; the code's defaults are
  others;
- each KV head chooses once, where the code repeats keys and values and chooses for each query head;
- a prefix that comes from the prefix cache was scored when it was cached; budgets then count the request's own prompt
  tokens only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field, field_validator

from sglang_diffkv.bounds import Beta, Pool, Window
from sglang_diffkv.policies.base import Observation, Policy, TopCount
from sglang_diffkv.policies.budget import PyramidBudget
from sglang_diffkv.policies.options import BudgetOptions, odd


@dataclass(frozen=True)
class PyramidKVPolicy(Policy):
    """Prompt tokens past the layer's budget are pruned; ``pool`` (odd) is the width of the pooling, 1 for none."""

    budget: PyramidBudget
    window: int = field()
    pool: int

    @property
    def kept_share(self) -> float | None:
        return self.budget.share

    @property
    def observation(self) -> Observation:
        return Observation(queries=self.window, reduce="mean")

    @property
    def prompt(self) -> TopCount:
        return TopCount(self.budget, smooth=self.pool)


class PyramidKVPolicyConfig(BudgetOptions):
    """A budget for each layer, falling from the first to the last, applied once at the end of the prompt."""

    name: Literal["pyramidkv"] = "pyramidkv"
    window: Window = Field(default=8, description="newest prompt tokens: they stay, and score the others")
    pool: Pool = Field(default=7, description="width of the max-pooling of scores, odd")
    beta: Beta = Field(default=20, description="by how much the last layer keeps less than the mean")

    @field_validator("pool")
    @classmethod
    def _odd(cls, pool: int) -> int:
        return odd(pool)

    def build(self) -> PyramidKVPolicy:
        return PyramidKVPolicy(PyramidBudget(self.budget, self.fraction, beta=self.beta), self.window, self.pool)
