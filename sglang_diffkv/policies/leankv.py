"""LeanKV's unified compression (Zhang et al., "Unifying KV Cache Compression for Large Language Models with LeanKV",
2024, section 4), by the first authors of DiffKV and before it.

The significance of a token is the mean attention it received from later tokens, normalised so that a head's tokens sum
to 1. At the end of a prompt the tokens outside the window are sorted by it, least first. While the sum so far is below
``mass_low`` they are pruned, while it is below ``mass_high`` they go to the low tier. The others stay in the high one.
In the generation phase the token that leaves the window, and then the least significant one of its tier, are compared
with the same two numbers (Algorithm 1).

Where the paper leaves something open:

- the window's tokens count in the sum that significance is normalised by, as the text says "across all tokens";
- of query heads that share a KV head, the largest attention counts, as in DiffKV;
- while tokens are generated, the scores of all tokens that a head holds are summed in every step. So the scores of the
  low tier are kept up even where nothing is pruned. Pruned tokens have left the sum, and tokens of pages that the
  prefix cache shares count with the score that they were cached with;
- a prompt whose beginning comes from the prefix cache is normalised over its own tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from sglang_diffkv.bounds import Fraction, Window
from sglang_diffkv.policies.base import LeastMass, Policy, Share
from sglang_diffkv.policies.options import PolicyOptions


@dataclass(frozen=True)
class LeanKVPolicy(Policy):
    """``mass_high`` and ``mass_low``: shares of a head's significance (the paper's T_h and T_l). The newest ``window``
    tokens stay high.

    With a single tier there is no low one, so ``mass_low`` alone decides.
    """

    mass_high: float
    mass_low: float
    window: int = field()

    @property
    def least_window(self) -> int:
        return 1

    def with_window(self, window: int) -> LeanKVPolicy:
        return replace(self, window=window)

    @property
    def prompt(self) -> LeastMass:
        return LeastMass(out=self.mass_low, low=self.mass_high)

    @property
    def generation(self) -> Share:
        """Algorithm 1."""
        return Share(self.mass_high, self.mass_low)


class LeanKVPolicyConfig(PolicyOptions):
    """Shares of a head's significance."""

    most_tiers: ClassVar[int] = 2

    name: Literal["leankv"] = "leankv"
    mass_high: Fraction = Field(default=0.05, description="tokens that sum to less than this go low")
    mass_low: Fraction = Field(default=0.0, description="tokens that sum to less than this are pruned")
    window: Window = Field(default=64, description="newest tokens that always stay in the high tier")

    @model_validator(mode="after")
    def _ordered(self) -> LeanKVPolicyConfig:
        if self.mass_low > self.mass_high:
            raise ValueError(f"mass_low {self.mass_low} is above mass_high {self.mass_high}: allowed is at most that")
        return self

    def build(self) -> LeanKVPolicy:
        return LeanKVPolicy(self.mass_high, self.mass_low, self.window)
