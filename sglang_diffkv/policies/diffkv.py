"""DiffKV's request- and length-adaptive policy (DiffKV, SOSP 2025, section 4 and Algorithm 1).

The significance of a token is the mean attention it received from later tokens, maximum over the query
heads of its KV head. It is compared with ``alpha / i``, where ``1 / i`` is the mean attention that ``i`` tokens
share.

Beyond the paper:

- the first tokens can be kept high: models put much attention on them whatever they say, and are lost without them
  (Xiao et al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024);
- scores can forget: past ``horizon`` later tokens the mean in the generation phase is an exponential one, of weight
  ``1 / horizon`` for the newest token's attention, as with the forgetting factor of sums in Jo and Shin, "A2SF:
  Accumulative Attention Scoring with Forgetting Factor for Token Pruning in Transformer Decoder", 2024. The prompt
  phase stays a mean over all later prompt tokens, which then counts as that of ``horizon - 1`` tokens at most;
- both thresholds can be multiplied for each layer and KV head by ``head_scale``, since heads differ in what they lose
  (Feng et al., "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference", 2024,
  give heads budgets of their own; here a head's share follows from its thresholds, as in the paper).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from sglang_diffkv.kernels.compact_step.reference import StepPlan
from sglang_diffkv.kernels.decode_attention.reference import StepScores


@dataclass(frozen=True)
class DiffKVPolicy:
    """Thresholds ``alpha_high`` and ``alpha_low`` in units of the mean attention; newest ``window`` and first
    ``sinks`` tokens stay high. ``horizon``: later tokens after which scores forget, 0 for never.
    ``head_scale``: [layers][KV heads] positive factors of both thresholds, None for 1 everywhere.

    With a single tier there is no low one, so a token at or above ``alpha_low`` stays and the rest go.
    """

    alpha_high: float = 1.0
    alpha_low: float = 0.0
    window: int = 256
    sinks: int = 0
    horizon: int = 0
    compresses: bool = True
    head_scale: tuple[tuple[float, ...], ...] | None = field(default=None, repr=False)

    def of_rank(self, rank: int, ranks: int, heads: int) -> DiffKVPolicy:
        """With the factors of the ``heads`` KV heads that a tensor-parallel rank has; of more ranks than heads several
        have the same one, as SGLang deals them out."""
        if self.head_scale is None:
            return self
        first = rank * len(self.head_scale[0]) // ranks
        return replace(self, head_scale=tuple(layer[first : first + heads] for layer in self.head_scale))

    @cached_property
    def _scale(self) -> torch.Tensor:
        return torch.tensor(self.head_scale, dtype=torch.float32)  # [L, H]

    def _alphas(self, dims: int, device: torch.device) -> tuple[Any, Any]:
        """``alpha_high`` and ``alpha_low``, or [L, H] and ``dims`` of size 1 float32 where heads have factors."""
        if self.head_scale is None:
            return self.alpha_high, self.alpha_low
        scale = self._scale.to(device)
        scale = scale.view(*scale.shape, *[1] * dims)
        return self.alpha_high * scale, self.alpha_low * scale

    @property
    def judges_low(self) -> bool:
        """A token of the low tier is only ever asked whether it is to be pruned."""
        return self.alpha_low > 0

    def classify_prompt(
        self, score: torch.Tensor, position: torch.Tensor, seq_len: int, num_tiers: int
    ) -> torch.Tensor:
        """Prompt phase: the token at 0-based ``position`` is compared with ``alpha / (position + 1)``. Where heads have
        factors, the first two dimensions are layers and heads."""
        alpha_high, alpha_low = self._alphas(score.dim() - 2, score.device)
        mean = 1.0 / (position + 1).clamp(min=1)
        low = torch.where(score >= alpha_low * mean, num_tiers - 1, num_tiers)
        tier = torch.where(score >= alpha_high * mean, 0, low) if num_tiers > 1 else low
        return torch.where((position >= seq_len - self.window) | (position < self.sinks), 0, tier)

    def plan_step(self, scores: StepScores, seq_lens: torch.Tensor, num_tiers: int) -> StepPlan:
        """Generation phase (Algorithm 1), for all layers and heads. The searches pass over window and sinks."""
        n = seq_lens.view(-1, 1, 1).float()
        alpha_high, alpha_low = self._alphas(0, seq_lens.device)
        low = alpha_low / n
        high = alpha_high / n if num_tiers > 1 else low
        candidate, least = scores.candidate_slot, scores.least_slot[..., 0]
        candidate_score, least_score = scores.candidate_score, scores.least_score[..., 0]
        present = candidate >= 0
        stays = present & (candidate_score >= high)
        goes_low = present & ~stays & (candidate_score >= low)
        victim_low = stays & (least >= 0) & (least_score < high) & (least_score >= low)
        victim_out = stays & (least >= 0) & (least_score < low)
        none = torch.full_like(candidate, -1)
        demote = torch.where(goes_low, candidate, torch.where(victim_low, least, none))
        drop = torch.where(present & ~stays & ~goes_low, candidate, torch.where(victim_out, least, none))
        replace = none
        if num_tiers > 1:
            worst = scores.least_slot[..., 1]
            evicts = goes_low & (worst >= 0) & (scores.least_score[..., 1] < low)
            replace = torch.where(evicts, worst, none)
        return StepPlan(demote, drop, replace)


KEEP = DiffKVPolicy(alpha_high=0.0, alpha_low=0.0, window=0)
"""Every token stays in its tier: for copies."""
