"""How much of a layer's importance each token has, for methods that share a budget among layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

SUM_BITS = 36
"""A token's weight in its layer's sum is an integer, relative to the layer's largest value, so that the sum does not
depend on order. Of 2^20 tokens, 2^56 at most."""
MOST_SCALE = 2.0**90
"""Of weights, so that sums of values that are hardly numbers are sums all the same."""


@dataclass(frozen=True)
class Shared:
    """A layer's heads lie on several ranks, as many on each.

    Attributes:
        add: replaces a tensor by its sum over all ranks, the same bits on each, behind what is launched.
        room: [2, L, n] float32, contiguous.
    """

    ranks: int
    add: Callable[[torch.Tensor], None]
    room: torch.Tensor


def mean_over_ranks(mean: torch.Tensor, shared: Shared) -> torch.Tensor:
    """Replace means over a rank's heads, [L, n] float32 with NaN where none is known, by those over all ranks' heads. A
    rank without one at a position counts as 0 there, as a head does. Returns what is known on any: [L] int64."""
    total, known = shared.room
    torch.eq(mean, mean, out=known)
    torch.nan_to_num(mean, nan=0.0, out=total)
    shared.add(shared.room)
    known.clamp_(max=1.0)
    torch.div(total, total.new_full((), shared.ranks), out=total)  # by a number a GPU multiplies by its reciprocal
    torch.div(total, known, out=mean)  # NaN where both are 0
    return known.sum(1, dtype=torch.float64).long()


def importance(values: torch.Tensor, out: torch.Tensor, shared: Shared | None = None) -> torch.Tensor:
    """Write each token's part of the sum over its layer of the values' mean over KV heads.

    Args:
        values: [L, H, n] float32, not negative; NaN where there is no token and inf for one that stays in any case.
        out: [L, 1, n] float32, contiguous: sums to 1 over each layer, or to about 0 where all values are; NaN for
            positions without a finite value. A head without one there counts as 0.
        shared: of heads on several ranks, whose mean it is then; None for one rank.

    Returns:
        [L] int64, positions with a finite value.
    """
    finite = values.isfinite()
    total = values.new_zeros(values.shape[0], values.shape[2])
    for head in range(values.shape[1]):
        total = total + torch.where(finite[:, head], values[:, head], 0.0)
    mean, known = total / values.shape[1], finite.any(1)
    tokens = known.sum(1)
    if shared is not None:
        mean = torch.where(known, mean, float("nan"))
        tokens = mean_over_ranks(mean, shared)
        known = ~mean.isnan()
        mean = mean.nan_to_num(nan=0.0)
    top = mean.amax(1, keepdim=True) if values.shape[2] else mean.new_zeros(len(mean), 1)
    scale = torch.where(top > 0, float(1 << SUM_BITS) / top, 0.0).clamp(max=MOST_SCALE)
    weight = mean * scale
    everything = weight.floor().long().sum(1, keepdim=True)
    part = weight / everything.clamp(min=1).float()
    out.copy_(torch.where(known, part, float("nan")).unsqueeze(1))
    return tokens
