"""Uniform tier: every token at the one tier of the format. The baseline of every claim."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sglang_diffkv.policies.base import Policy
from sglang_diffkv.policies.options import PolicyOptions


@dataclass(frozen=True)
class UniformPolicy(Policy):
    """Keeps all tokens where they were written."""


class UniformPolicyConfig(PolicyOptions):
    """Every token at one tier."""

    name: Literal["uniform"] = "uniform"

    def build(self) -> UniformPolicy:
        return UniformPolicy()
