"""Base classes of what a user can set of a method: ``policy`` in the configuration."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sglang_diffkv.bounds import Fraction, Sinks, Tokens, Window
from sglang_diffkv.policies.base import Policy
from sglang_diffkv.policies.budget import Budget


class Strict(BaseModel):
    """Unknown fields and numbers that are none are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def odd(pool: int) -> int:
    """The width of a pooling, if it is possible."""
    if pool % 2 == 0:
        raise ValueError(
            f"pool {pool} is even: a neighbourhood has the token in its middle, so allowed are odd numbers"
        )
    return pool


class PolicyOptions(Strict):
    """A method's fields. Each class has a ``name``, a ``Literal`` by which the configuration tells methods apart."""

    most_tiers: ClassVar[int] = 1
    """Tiers that the method can use."""

    def check_tiers(self, tiers: int) -> None:
        """Raise ValueError if the method, as it is configured, lacks something for so many tiers."""

    def obstacle(self, layers: int, kv_heads: int) -> str:
        """Why it cannot serve a model of this shape, all ranks' heads together; empty if it can."""
        return ""

    def whole(self) -> dict[str, Any]:
        """Every field with what a server runs, as JSON data. What depends on the model or its memory is null."""
        return self.model_dump(mode="json")

    def build(self) -> Policy:
        raise NotImplementedError


class BudgetOptions(PolicyOptions):
    """The same number of tokens for every head: ``fraction`` of the sequence, but at least ``budget`` tokens."""

    budget: Tokens = Field(default=0, description="tokens that a head keeps in any case")
    fraction: Fraction = Field(default=0.0, description="share of its tokens that a head keeps")
    window: Window = Field(default=64, description="newest tokens that always stay, within the budget")

    @model_validator(mode="after")
    def _sensible(self) -> BudgetOptions:
        if not self.budget and not self.fraction:
            raise ValueError("give budget (tokens) or fraction (of the sequence)")
        if 0 < self.budget <= self.window:
            raise ValueError(f"budget {self.budget} must be above window {self.window}")
        return self

    @property
    def kept(self) -> Budget:
        return Budget(self.budget, self.fraction)


class SinkBudgetOptions(BudgetOptions):
    """The same, with first tokens that stay as the newest ones do."""

    sinks: Sinks = Field(default=4, description="first tokens that always stay, within the budget")

    @model_validator(mode="after")
    def _room_for_sinks(self) -> SinkBudgetOptions:
        if 0 < self.budget <= self.window + self.sinks:
            raise ValueError(f"budget {self.budget} must be above window {self.window} and sinks {self.sinks} together")
        return self
