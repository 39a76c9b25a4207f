"""Exclusive prefix sum over page demands: it gives every head its disjoint span of the ring."""

from __future__ import annotations

import torch


def exclusive_prefix_sum(demand: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N] integer demands to ([N] int64 offsets, [] int64 total)."""
    ends = demand.long().cumsum(0)
    total = ends[-1] if ends.numel() else torch.zeros((), dtype=torch.int64, device=demand.device)
    return ends - demand, total
