"""Key norms (Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression", EMNLP 2024).

Keys with a small L2 norm receive much attention in decoder models. So at the end of the prompt each head keeps the
tokens whose keys have the smallest norms, and no attention is measured. Every head keeps equally many; generated tokens
all stay.

What differs from the authors' code:

- the newest tokens and the first ones stay in any case, within the budget;
- all layers are cut; the code leaves the first two as they are;
- norms are those of stored keys, so of quantised ones where the tier is quantised;
- a prompt is cut once, at its end; the code also cuts while it generates;
- a prefix that comes from the prefix cache was cut when it was cached. The budget then counts the request's own prompt
  tokens only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sglang_diffkv.policies.base import KeyNorm, Policy, TopCount
from sglang_diffkv.policies.budget import Budget
from sglang_diffkv.policies.options import SinkBudgetOptions


@dataclass(frozen=True)
class KnormPolicy(Policy):
    """Each head keeps ``budget`` prompt tokens, its newest ``window`` and first ``sinks`` among them."""

    budget: Budget
    window: int = field()
    sinks: int = field()

    @property
    def kept_share(self) -> float | None:
        return self.budget.share

    @property
    def score_source(self) -> KeyNorm:
        return KeyNorm()

    @property
    def prompt(self) -> TopCount:
        return TopCount(self.budget)


class KnormPolicyConfig(SinkBudgetOptions):
    """The smallest key norms, chosen once at the end of the prompt."""

    name: Literal["knorm"] = "knorm"

    def build(self) -> KnormPolicy:
        return KnormPolicy(self.kept, self.window, self.sinks)
