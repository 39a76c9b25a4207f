"""A number of tokens a KV head keeps, which may follow the length of the sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

Limits = tuple[Any, Any]
"""Tokens and fraction: numbers, or tensors that broadcast to [layers, KV heads]."""


@dataclass(frozen=True)
class Budget:
    """A head keeps ``fraction`` of its tokens, but at least ``tokens`` of them. Each is one number for all heads, one
    for each layer, or [layers][KV heads].

    ``beside``: both are of the tokens outside window and sinks, which stay beside them. Otherwise they are among them.
    """

    tokens: int | tuple[Any, ...] = 0
    fraction: float | tuple[Any, ...] = 0.0
    beside: bool = False

    @property
    def share(self) -> float | None:
        """The mean fraction, if nothing else decides."""
        return _mean(self.fraction) or None if self.tokens == 0 else None

    def limits(self, device: torch.device) -> Limits:
        """``tokens`` and ``fraction`` as ``kept`` takes them, on the device of its lengths."""
        return _by_head(self.tokens, torch.int64, device), _by_head(self.fraction, torch.float64, device)

    def kept(self, length: torch.Tensor, window: int | torch.Tensor, limits: Limits | None = None) -> torch.Tensor:
        """Tokens that a head keeps of ``length`` (int64; any shape, [layers, KV heads] where heads differ), never fewer
        than the ``window`` that stays in any case. ``limits``: what ``limits`` gives, if it was asked before."""
        tokens, fraction = limits or self.limits(length.device)
        scored = (length - window).clamp(min=0) if self.beside else length
        share = (scored.double() * fraction).ceil().long().clamp(min=tokens)
        share = share + window if self.beside else share.clamp(min=window)
        return torch.minimum(length, share)


@dataclass(frozen=True)
class PyramidBudget(Budget):
    """By layer: the budget is the mean over layers, from which they fall in equal steps from the first to the last.

    Beyond the window, of which each layer has all, the last layer keeps 1 / ``beta`` of the mean, rounded down, and the
    first what makes up for it. Where a sequence has fewer tokens than the first layer may keep, it keeps all and the
    last one more; where it has hardly twice the mean, all layers keep the mean.
    """

    beta: int = 20

    def kept(self, length: torch.Tensor, window: int | torch.Tensor, limits: Limits | None = None) -> torch.Tensor:
        mean = (super().kept(length, window, limits) - window).clamp(min=0)
        outside, layers = (length - window).clamp(min=0), length.shape[0]
        least = torch.div(mean, self.beta, rounding_mode="floor")
        most = torch.minimum(2 * mean - least, outside)
        slope, steps = 2 * (most - mean), max(layers - 1, 1)
        layer = torch.arange(layers, device=length.device).unsqueeze(1)
        fallen = torch.div(2 * layer * slope + steps, 2 * steps, rounding_mode="floor")  # to the nearest token
        sloped = most - fallen
        even = (length < 2 * mean) | (layers == 1)
        return torch.minimum(length, torch.where(even, mean, sloped) + window)


def _mean(value: Any) -> float:
    return sum(map(_mean, value)) / len(value) if isinstance(value, tuple) else float(value)


def _by_head(value: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """A number as it is; a list by layer as [L, 1], by layer and head as [L, H]."""
    if not isinstance(value, tuple):
        return value
    found = torch.tensor(value, dtype=dtype, device=device)
    return found.unsqueeze(1) if found.dim() == 1 else found
