"""Queries, keys and values in 8 bits of floating point, for attention in 8 bits."""

from __future__ import annotations

import torch

E4M3 = torch.float8_e4m3fn
"""Four bits of exponent and three of fraction: what attention in 8 bits takes on Hopper GPUs."""
LARGEST = torch.finfo(E4M3).max


def to_e4m3(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each tensor rounded to the nearest, contiguous. What is larger than 448 becomes 448; NaN stays so."""
    return tuple(x.float().clamp(-LARGEST, LARGEST).to(E4M3).contiguous() for x in tensors)
