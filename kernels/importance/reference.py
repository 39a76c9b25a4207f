"""How much of a layer's importance each token has, for methods that share a budget among layers."""

from __future__ import annotations

import torch

SUM_BITS = 36
"""A token's weight in its layer's sum is an integer, relative to the layer's largest value, so that the sum does not
depend on order. Of 2^20 tokens, 2^56 at most."""
MOST_SCALE = 2.0**90
"""Of weights, so that sums of values that are hardly numbers are sums all the same."""


def importance(values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write each token's part of the sum over its layer of the values' mean over KV heads.

    Args:
        values: [L, H, n] float32, not negative; NaN where there is no token and inf for one that stays in any case.
        out: [L, 1, n] float32, contiguous: sums to 1 over each layer, or to about 0 where all values are; NaN for
            positions without a finite value. A head without one there counts as 0.

    Returns:
        [L] int64, positions with a finite value.
    """
    finite = values.isfinite()
    total = values.new_zeros(values.shape[0], values.shape[2])
    for head in range(values.shape[1]):
        total = total + torch.where(finite[:, head], values[:, head], 0.0)
    mean, known = total / values.shape[1], finite.any(1)
    top = mean.amax(1, keepdim=True) if values.shape[2] else mean.new_zeros(len(mean), 1)
    scale = torch.where(top > 0, float(1 << SUM_BITS) / top, 0.0).clamp(max=MOST_SCALE)
    weight = mean * scale
    everything = weight.floor().long().sum(1, keepdim=True)
    part = weight / everything.clamp(min=1).float()
    out.copy_(torch.where(known, part, float("nan")).unsqueeze(1))
    return known.sum(1)
