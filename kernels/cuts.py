"""What kernels are told of a method: cuts by layer and KV head, and the decision that follows from them.

``triton_tokens.prompt_decision`` and ``compact_step/triton_decide.py`` take the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


def check_between(between: torch.Tensor | None, layers: int, heads: int, num_tiers: int) -> None:
    """Thresholds between the first and the last one, as kernels rely on them."""
    if num_tiers > 2:
        assert between is not None and between.shape == (num_tiers - 2, layers, heads)
        assert between.dtype == torch.float32 and between.is_contiguous()
    else:
        assert between is None


@dataclass(frozen=True)
class Cuts:
    """What becomes of a prompt's tokens.

    Without ``values`` a token is scored by itself: with a score at or above ``high * (1 / (position + 1))`` it stays in
    the high tier, at or above ``low * (1 / (position + 1))`` it stays, in the lowest tier at least. With more than two
    tiers the thresholds ``between`` say in which: each, from the high tier on, is what the next tier asks for.

    With ``values`` heads were scored as a whole, for two tiers at most: a token is above a cut if its value is greater,
    or equal and its position at most the cut's ``tie``.

    The newest ``window`` and first ``sinks`` tokens stay as they are; where layers differ, ``lasting`` says how many
    each has of both, and the two numbers mean nothing. With a single tier ``low`` alone decides.
    """

    high: torch.Tensor  # [L, H] float32
    low: torch.Tensor  # [L, H] float32
    window: int
    sinks: int = 0
    values: torch.Tensor | None = None  # [L, H, n] float32 by position, contiguous
    tie_high: torch.Tensor | None = None  # [L, H] int32
    tie_low: torch.Tensor | None = None  # [L, H] int32
    between: torch.Tensor | None = None  # [T - 2, L, H] float32, falling, none above high or below low
    lasting: torch.Tensor | None = None  # [L, 2] int32: each layer's window and sinks

    def check(self, layers: int, heads: int, num_tiers: int) -> None:
        """The shapes and types that kernels rely on."""
        for cut in (self.high, self.low):
            assert cut.shape == (layers, heads) and cut.dtype == torch.float32 and cut.is_contiguous()
        check_between(self.between, layers, heads, num_tiers)
        if self.lasting is not None:
            assert self.lasting.shape == (layers, 2) and self.lasting.dtype == torch.int32
            assert self.lasting.is_contiguous()
        assert self.values is None or num_tiers <= 2, "whole heads are scored for two tiers at most"
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
    between: torch.Tensor | None = None  # [T - 2, L, H] float32, as of ``Cuts``
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
    above = _above(cuts, score, position)
    tier = tier_of(above if num_tiers > 1 else above[-1:])
    window: int | torch.Tensor = cuts.window
    sinks: int | torch.Tensor = cuts.sinks
    if cuts.lasting is not None:
        window, sinks = (x.view(-1, *[1] * (position.dim() - 1)) for x in cuts.lasting.unbind(1))
    return torch.where((position >= seq_len - window) | (position < sinks), 0, tier)


def tier_of(above: Sequence[torch.Tensor]) -> torch.Tensor:
    """The first of the cuts that each token is above, int64; their number where it is above none."""
    tier = torch.full_like(above[0], len(above), dtype=torch.int64)
    for number in reversed(range(len(above))):
        tier = torch.where(above[number], number, tier)
    return tier


def _above(cuts: Cuts, score: torch.Tensor, position: torch.Tensor) -> list[torch.Tensor]:
    """Whether each token is above each cut, the upper one first."""

    def of_heads(x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape, *[1] * (score.dim() - 2))

    if cuts.values is None:
        mean = 1.0 / (position + 1).clamp(min=1)
        between = () if cuts.between is None else cuts.between
        return [score >= of_heads(cut) * mean for cut in (cuts.high, *between, cuts.low)]
    assert cuts.tie_high is not None and cuts.tie_low is not None
    value = cuts.values.gather(2, position.clamp(min=0).long().flatten(2)).view(position.shape)
    found = []
    for cut, tie in ((cuts.high, cuts.tie_high), (cuts.low, cuts.tie_low)):
        found.append((value > of_heads(cut)) | ((value == of_heads(cut)) & (position <= of_heads(tie))))
    return found
