"""SnapKV's static budgets (Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", 2024).

At the end of the prompt each head keeps its newest tokens, the observation window, and of the others those with
the largest scores, after max-pooling over neighbours so that a kept token keeps its surroundings. Every head keeps
equally many; generated tokens all stay.

What differs from the paper, because of what a policy is given here:

- a token's score is its mean attention from *all* later tokens, not from the window's queries alone;
- the score is the maximum over the query heads of a KV head, and each KV head chooses once, where the paper's
  code repeats keys and values and chooses for each query head;
- a prefix that comes from the prefix cache was judged when it was cached; the budget then counts the request's
  own prompt tokens only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import max_pool1d

from sglang_diffkv.kernels.compact_step.reference import StepPlan
from sglang_diffkv.kernels.decode_attention.reference import StepScores
from sglang_diffkv.policies.budget import Budget, keep_best


@dataclass(frozen=True)
class SnapKVPolicy:
    """Prompt tokens past ``budget`` are pruned; ``pool`` (odd) is the width of the pooling, 1 for none."""

    budget: Budget
    window: int = 32
    pool: int = 7
    sinks: int = 0
    horizon: int = 0
    compresses: bool = True
    judges_low: bool = True

    def classify_prompt(
        self, score: torch.Tensor, position: torch.Tensor, seq_len: int, num_tiers: int
    ) -> torch.Tensor:
        """Tier 0 for what a head keeps, ``num_tiers`` for the rest; heads are all but the last dimension."""
        stored = position >= 0
        recent = position >= seq_len - self.window
        rank = self._pooled(score.masked_fill(recent | ~stored, 0.0), position)
        rank = rank.masked_fill(recent, float("inf")).masked_fill(~stored, float("-inf"))
        count = self.budget.kept(stored.sum(-1, keepdim=True), self.window)
        return torch.where(keep_best(rank, count), 0, num_tiers)

    def _pooled(self, score: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Largest score of each token's neighbourhood in the order of positions."""
        order = position.argsort(dim=-1)
        line = score.gather(-1, order).reshape(-1, 1, score.shape[-1])
        pooled = max_pool1d(line, self.pool, stride=1, padding=self.pool // 2).reshape(score.shape)
        return torch.empty_like(score).scatter_(-1, order, pooled)

    def plan_step(self, scores: StepScores, seq_lens: torch.Tensor, num_tiers: int) -> StepPlan:
        """Generation changes nothing."""
        nothing = torch.full_like(scores.candidate_slot, -1)
        return StepPlan(nothing, nothing, nothing)
