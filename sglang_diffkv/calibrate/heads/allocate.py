"""Least total error within a number of bytes: a point of every head's curve of error against bytes.

Shoham and Gersho, "Efficient Bit Allocation for an Arbitrary Set of Quantizers", IEEE Transactions on Acoustics, Speech
and Signal Processing 36 (9), 1988. With one price ``lambda`` for a byte, every head takes the point of least
``error + lambda * bytes`` without regard to the others. No allocation has less error at as many bytes. Total bytes fall
as the price rises, so the price is found by bisection. Only points on the lower convex hull of a curve are ever taken
so, which with few heads leaves bytes over; single heads then move on while one of them gains by it.
"""

from __future__ import annotations

import torch

BISECTIONS = 100


def allocate(error: torch.Tensor, size: torch.Tensor, base: int) -> torch.Tensor:
    """The point of each head, [heads] int64, for which the sum of errors is least at no more bytes than at ``base``.

    Args:
        error, size: [heads, points] float64. base: the point that all heads have without this.
    """
    budget = size[:, base].sum()
    taken = spend(error, size, priced(error, size, float(budget)), float(budget))
    before, after = error[:, base].sum(), error.gather(1, taken.unsqueeze(1)).sum()
    return taken if after < before else torch.full_like(taken, base)


def priced(error: torch.Tensor, size: torch.Tensor, budget: float) -> torch.Tensor:
    """The points [heads] at the lowest price of a byte at which they fit in ``budget``, which must be possible."""

    def at(price: float) -> torch.Tensor:
        return (error + price * size).argmin(1)

    def fits(price: float) -> bool:
        return float(size.gather(1, at(price).unsqueeze(1)).sum()) <= budget

    if fits(0.0):
        return at(0.0)
    low, high = 0.0, max(float(error.max() / size.max()), 1e-30)
    while not fits(high):
        low, high = high, 2 * high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return at(high)


def spend(error: torch.Tensor, size: torch.Tensor, taken: torch.Tensor, budget: float) -> torch.Tensor:
    """``taken`` [heads] after moves of single heads, each the one that gains most for a byte of those that fit."""
    while True:
        at = taken.unsqueeze(1)
        gain = error.gather(1, at) - error  # [heads, points]
        more = size - size.gather(1, at)
        possible = (gain > 0) & (more <= budget - size.gather(1, at).sum())
        if not bool(possible.any()):
            return taken
        worth = (gain / more.clamp(min=1e-9)).masked_fill(~possible, -1.0)
        head, point = divmod(int(worth.argmax()), error.shape[1])
        taken = taken.clone()
        taken[head] = point
