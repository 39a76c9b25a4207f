"""Uniform tier: every token at the one tier of the format. The baseline of every claim."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_diffkv.kernels.compact_step.reference import StepPlan
from sglang_diffkv.kernels.decode_attention.reference import StepScores


@dataclass(frozen=True)
class UniformPolicy:
    """Keeps all tokens where they were written."""

    window: int = 0
    sinks: int = 0
    horizon: int = 0
    compresses: bool = False
    judges_low: bool = False

    def classify_prompt(
        self, score: torch.Tensor, position: torch.Tensor, seq_len: int, num_tiers: int
    ) -> torch.Tensor:
        return torch.zeros_like(position)

    def plan_step(self, scores: StepScores, seq_lens: torch.Tensor, num_tiers: int) -> StepPlan:
        nothing = torch.full_like(scores.candidate_slot, -1)
        return StepPlan(nothing, nothing, nothing)
