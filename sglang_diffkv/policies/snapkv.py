"""SnapKV's static budgets (Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", 2024).

At the end of the prompt each head retains its newest tokens, the observation window, and of the others those that
received most attention from the window's queries. Scores are max-pooled over neighbours, so that a retained token keeps
its surroundings. Every head keeps equally many; generated tokens all stay.

Scores are the paper's and its code's: the mean attention over the queries of the window, and the mean over the query
heads of a KV head.

What differs from the paper:

- each KV head chooses once, where the paper's code repeats keys and values and chooses for each query head;
- a prefix that comes from the prefix cache was scored when it was cached; the budget then counts the request's
  own prompt tokens only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field, field_validator

from sglang_diffkv.bounds import Pool, Window
from sglang_diffkv.policies.base import Observation, Policy, TopCount
from sglang_diffkv.policies.budget import Budget
from sglang_diffkv.policies.options import BudgetOptions, odd


@dataclass(frozen=True)
class SnapKVPolicy(Policy):
    """Prompt tokens past ``budget`` are pruned; ``pool`` (odd) is the width of the pooling, 1 for none."""

    budget: Budget
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


class SnapKVPolicyConfig(BudgetOptions):
    """A static budget for each head, applied once at the end of the prompt."""

    name: Literal["snapkv"] = "snapkv"
    window: Window = Field(default=32, description="newest prompt tokens: they stay, and score the others")
    pool: Pool = Field(default=7, description="width of the max-pooling of scores, odd")

    @field_validator("pool")
    @classmethod
    def _odd(cls, pool: int) -> int:
        return odd(pool)

    def build(self) -> SnapKVPolicy:
        return SnapKVPolicy(self.kept, self.window, self.pool)
