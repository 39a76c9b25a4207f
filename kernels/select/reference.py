"""Which tokens are in front: a cut for each head, or one for all, by how many stay or what share of the values' sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch

WEIGHT_BITS = 24
"""A value's weight in a sum is an integer, relative to the largest of its head, so that sums do not depend on order."""
SHARE_BITS = 16
PART_BITS = 36
"""Bits of a weight in a sum over all heads, whose values are parts of 1: layers are at most 2^10."""
MOST_SCALE = 2.0**100
"""Of weights, so that sums of values that are hardly numbers are sums all the same."""


def share_of(total: torch.Tensor, share: float) -> torch.Tensor:
    """Least integer that is at least ``share``, to ``SHARE_BITS`` bits, of ``total`` (int64, below 2^47)."""
    return (total * round(share * (1 << SHARE_BITS)) + (1 << SHARE_BITS) - 1) >> SHARE_BITS


def select_count(values: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` largest values of each head, or of all heads together.

    Args:
        values: [L, H, n] float32, not negative, NaN where there is no token.
        count: [L, H] int64, or [1, 1] for all heads together.

    Returns:
        cut [L, H] float32 and tie [L, H] int32: the chosen are the values above the cut and those equal to it at
        positions up to ``tie``. Of equals the first are chosen; heads count in order. Where none is, inf and -1.
    """
    return _select(values, (~values.isnan()).long(), count)


def select_mass(values: torch.Tensor, share: float, *, together: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The fewest largest finite values of each head that sum to ``share`` of all of them; as ``select_count``.

    ``together``: of all heads together, whose values sum to 1 each, or to 0.
    """
    if together:
        weight = torch.where(values.isfinite(), values * float(1 << PART_BITS), 0.0).floor().long()
        return _select(values, weight, share_of(weight.sum(), share).view(1, 1))
    weight = _weights(values)
    return _select(values, weight, share_of(weight.sum(2), share))


def select_least(
    values: torch.Tensor, shares: Sequence[float], *, window: int, sinks: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each of ``shares``, all but the most smallest finite values of each head that sum to less than that share of
    all its finite values; as ``select_count``.

    The newest ``window`` and first ``sinks`` positions count in the sum and are not among the smallest: ``values``
    becomes infinite where they hold a token.
    """
    weight, length = _weights(values), values.shape[2]
    total = weight.sum(2)
    lasting = torch.ones(length, dtype=torch.bool, device=values.device)
    lasting[sinks : max(length - window, sinks)] = False
    values.masked_fill_(lasting & ~values.isnan(), float("inf"))
    weight = weight.masked_fill(lasting, 0)
    limits = [share_of(total, share) for share in shares]
    return [_select(values, weight, (weight.sum(2) - limit + 1).clamp(min=0)) for limit in limits]


def _weights(values: torch.Tensor) -> torch.Tensor:
    """[L, H, n] int64, each finite value's in a sum."""
    finite = values.isfinite()
    top = torch.where(finite, values, 0.0).amax(2, keepdim=True) if values.shape[2] else values.new_zeros(1)
    scale = torch.where(top > 0, float(1 << WEIGHT_BITS) / top, 0.0).clamp(max=MOST_SCALE)
    return torch.where(finite, values * scale, 0.0).floor().long()


def is_above(values: torch.Tensor, cut: torch.Tensor, tie: torch.Tensor) -> torch.Tensor:
    """[L, H, n] bool: the values that ``cut`` [L, H] and ``tie`` [L, H], as the selections give them, choose."""
    cut, tie = cut.unsqueeze(2), tie.unsqueeze(2)
    at = torch.arange(values.shape[2], device=values.device)
    return (values > cut) | ((values == cut) & (at <= tie))


def count_above(values: torch.Tensor, cut: torch.Tensor, tie: torch.Tensor) -> torch.Tensor:
    """[L, H] int64, how many of each head's."""
    return is_above(values, cut, tie).sum(2)


def _select(values: torch.Tensor, weight: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first values whose weights sum to ``wanted``, or to all there is."""
    groups = wanted.numel()
    if not values.shape[2]:
        return values.new_full(values.shape[:2], float("inf")), wanted.new_full(values.shape[:2], -1).int()
    line = values.nan_to_num(nan=float("-inf"), posinf=float("inf")).reshape(groups, -1)
    order = line.argsort(dim=1, descending=True, stable=True)
    ranked, heavy = line.gather(1, order), weight.reshape(groups, -1).gather(1, order)
    chosen = (heavy.cumsum(1) - heavy < wanted.reshape(groups, 1)) & (ranked > float("-inf"))
    any_chosen = chosen.any(1, keepdim=True)
    last = chosen.sum(1, keepdim=True).clamp(min=1) - 1
    cut = torch.where(any_chosen, ranked.gather(1, last), float("inf"))  # [groups, 1]
    at = torch.arange(values.shape[2], device=values.device)
    equal = torch.zeros_like(chosen).scatter_(1, order, chosen & (ranked == cut)).view(values.shape)
    tie = torch.where(equal, at, -1).amax(2).int()
    return cut.view(wanted.shape).expand(values.shape[:2]).contiguous(), tie
