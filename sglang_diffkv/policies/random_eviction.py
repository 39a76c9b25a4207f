"""Eviction at random: the control with which methods are compared that score tokens.

At the end of the prompt each head keeps its newest and first tokens and, of the others, as many drawn at random as the
budget has left. Every head keeps equally many, of its own draw; generated tokens all stay. The draw follows from
``seed``, layer, head and position. So a run can be repeated, and every prompt loses the same positions at one length.

A prefix that comes from the prefix cache was cut when it was cached. The budget then counts the request's own prompt
tokens only. Where there are more tensor-parallel ranks than KV heads, ranks that have the same head draw for it
separately.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from pydantic import Field

from sglang_diffkv.bounds import Seed
from sglang_diffkv.policies.base import Policy, Random, TopCount
from sglang_diffkv.policies.budget import Budget
from sglang_diffkv.policies.options import SinkBudgetOptions


@dataclass(frozen=True)
class RandomPolicy(Policy):
    """Each head keeps ``budget`` prompt tokens, its newest ``window`` and first ``sinks`` among them."""

    budget: Budget
    window: int = field()
    sinks: int = field()
    source: Random

    @property
    def kept_share(self) -> float | None:
        return self.budget.share

    @property
    def score_source(self) -> Random:
        return self.source

    @property
    def prompt(self) -> TopCount:
        return TopCount(self.budget)

    def of_rank(self, rank: int, ranks: int, heads: int) -> RandomPolicy:
        """Each rank draws for heads of its own."""
        return replace(self, source=replace(self.source, first_head=rank * heads))


class RandomPolicyConfig(SinkBudgetOptions):
    """Tokens drawn at random, once at the end of the prompt."""

    name: Literal["random"] = "random"
    seed: Seed = Field(default=0, description="of the draw; 0 is a seed like any other")

    def build(self) -> RandomPolicy:
        return RandomPolicy(self.kept, self.window, self.sinks, Random(self.seed))
