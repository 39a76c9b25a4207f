"""H2O's heavy hitters (Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference", 2023).

A head keeps its newest tokens and, of the others, the heavy hitters: those that received most attention so far.
A prompt is cut to the budget at its end; from then on, whenever a new token brings a head over its budget, the
least significant token outside the window goes, for good. The paper gives half of the budget to the window.

What differs from the paper, because of what a policy is given here:

- in generation the least significant token is the one with the smallest *mean* attention from later tokens, as the
  attention kernel finds it; H2O compares *sums*, which favour old tokens. At the end of the prompt sums are used;
- scores are the maximum over the query heads of a KV head, a prompt's of each pass;
- a step is not given how many tokens a head holds. The count follows from the sequence's length as long as the row
  owns all its tokens. Where a prompt is shared through the prefix cache, its tokens stay as they were cached, and
  a head may exceed its budget by up to ``window`` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_diffkv.kernels.compact_step.reference import StepPlan
from sglang_diffkv.kernels.decode_attention.reference import StepScores
from sglang_diffkv.policies.budget import Budget, keep_best


@dataclass(frozen=True)
class H2OPolicy:
    """Each head keeps ``budget`` tokens of the sequence, its newest ``window`` among them."""

    budget: Budget
    window: int = 64
    sinks: int = 0
    horizon: int = 0
    compresses: bool = True
    judges_low: bool = True

    def classify_prompt(
        self, score: torch.Tensor, position: torch.Tensor, seq_len: int, num_tiers: int
    ) -> torch.Tensor:
        """Tier 0 for what a head keeps, ``num_tiers`` for the rest; heads are all but the last dimension."""
        stored = position >= 0
        received = score * (seq_len - 1 - position)
        rank = received.masked_fill(position >= seq_len - self.window, float("inf"))
        count = self.budget.kept(stored.sum(-1, keepdim=True), self.window)
        return torch.where(keep_best(rank.masked_fill(~stored, float("-inf")), count), 0, num_tiers)

    def plan_step(self, scores: StepScores, seq_lens: torch.Tensor, num_tiers: int) -> StepPlan:
        """Drop the least significant token where the budget has not grown with the sequence."""
        full = self.budget.kept(seq_lens, self.window) == self.budget.kept(seq_lens - 1, self.window)
        nothing = torch.full_like(scores.candidate_slot, -1)
        drop = torch.where(full.view(-1, 1, 1), scores.least_slot[..., 0], nothing)
        return StepPlan(nothing, drop, nothing)
