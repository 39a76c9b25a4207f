"""What kernels are told of a method: cuts by layer and KV head, and the decision that follows from them.

``triton_tokens.prompt_decision`` and ``compact_step/triton_decide.py`` take the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Cuts:
    """What becomes of a prompt's tokens.

    Without ``values`` a token is judged by itself: with a score at or above ``high * (1 / (position + 1))`` it stays in
    the high tier, at or above ``low * (1 / (position + 1))`` it stays, in the lowest tier at least.

    With ``values`` heads were judged as a whole: a token is above a cut if its value is greater, or equal and its
    position at most the cut's ``tie``.

    The newest ``window`` and first ``sinks`` tokens stay as they are. With a single tier ``low`` alone decides.
    """

    high: torch.Tensor  # [L, H] float32
    low: torch.Tensor  # [L, H] float32
    window: int
    sinks: int = 0
    values: torch.Tensor | None = None  # [L, H, n] float32 by position, contiguous
    tie_high: torch.Tensor | None = None  # [L, H] int32
    tie_low: torch.Tensor | None = None  # [L, H] int32

    def check(self, layers: int, heads: int) -> None:
        """The shapes and types that kernels rely on."""
        for cut in (self.high, self.low):
            assert cut.shape == (layers, heads) and cut.dtype == torch.float32 and cut.is_contiguous()
        if self.values is not None:
            assert self.values.shape[:2] == (layers, heads) and self.values.dtype == torch.float32
            assert self.values.is_contiguous()
            for tie in (self.tie_high, self.tie_low):
                assert tie is not None and tie.shape == (layers, heads)
                assert tie.dtype == torch.int32 and tie.is_contiguous()


@dataclass(frozen=True)
class StepCuts:
    """Of a generation step: thresholds in units of ``1 / length``, or, ``of_sum``, of the sum of a head's scores."""

    high: torch.Tensor  # [L, H] float32
    low: torch.Tensor  # [L, H] float32
    of_sum: bool = False


@dataclass(frozen=True)
class StepBudget:
    """Of a generation step: a head keeps ``fraction`` of its tokens, rounded up, but at least ``tokens``."""

    tokens: torch.Tensor  # [L, H] int32
    fraction: torch.Tensor  # [L, H] float64

    def kept(self, length: torch.Tensor) -> torch.Tensor:
        """[B] int64 to [B, L, H] int64."""
        length = length.view(-1, 1, 1)
        share = (length.double() * self.fraction).ceil().long()
        return torch.minimum(length, torch.maximum(share, self.tokens.long()))


StepRule = StepCuts | StepBudget


def prompt_tiers(cuts: Cuts, score: torch.Tensor, position: torch.Tensor, seq_len: int, num_tiers: int) -> torch.Tensor:
    """Tier of each prompt token, ``num_tiers`` to prune it. score, position: [L, H, ...]; a position of -1 names no
    token, and what becomes of it means nothing."""
    high, low = _above(cuts, score, position)
    lower = torch.where(low, num_tiers - 1, num_tiers)
    tier = torch.where(high, 0, lower) if num_tiers > 1 else lower
    return torch.where((position >= seq_len - cuts.window) | (position < cuts.sinks), 0, tier)


def _above(cuts: Cuts, score: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each token is above the upper and the lower cut."""

    def of_heads(x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape, *[1] * (score.dim() - 2))

    if cuts.values is None:
        mean = 1.0 / (position + 1).clamp(min=1)
        return score >= of_heads(cuts.high) * mean, score >= of_heads(cuts.low) * mean
    assert cuts.tie_high is not None and cuts.tie_low is not None
    value = cuts.values.gather(2, position.clamp(min=0).long().flatten(2)).view(position.shape)
    found = []
    for cut, tie in ((cuts.high, cuts.tie_high), (cuts.low, cuts.tie_low)):
        found.append((value > of_heads(cut)) | ((value == of_heads(cut)) & (position <= of_heads(tie))))
    return found[0], found[1]
