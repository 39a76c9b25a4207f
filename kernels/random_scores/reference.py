"""Scores drawn at random. A hash of seed, layer, KV head and position draws them, so a run can be repeated, and a token
has the same score wherever and whenever it is asked for."""

from __future__ import annotations

import torch

MASK = 0xFFFFFFFF
FIRST, SECOND = 0x7FEB352D, 0x846CA68B
"""Multipliers of a 32-bit mixer (C. Wellons, "Prospecting for Hash Functions", 2018: lowbias32)."""
BITS = 24
"""Of a score, as many as float32 has."""


def mixed(x: torch.Tensor) -> torch.Tensor:
    """A one-to-one map of 32-bit numbers, in int64, each bit of which depends on all of the input."""
    x = ((x ^ (x >> 16)) * FIRST) & MASK
    x = ((x ^ (x >> 15)) * SECOND) & MASK
    return x ^ (x >> 16)


def random_scores(values: torch.Tensor, seed: int, first_layer: int = 0, first_head: int = 0) -> None:
    """Each finite value [L, H, n] becomes a number in [0, 1) that depends on seed, layer, head and position alone.

    Args:
        values: float32, contiguous, by position. seed: 32 bits of it count.
        first_layer, first_head: numbers of the first ones, in the model.
    """
    layers, heads, length = values.shape
    layer, head, position = (torch.arange(n, device=values.device) for n in (layers, heads, length))
    of_layer = mixed(mixed(torch.tensor(seed & MASK, device=values.device)) ^ (layer + first_layer))
    of_head = mixed(of_layer.unsqueeze(1) ^ (head + first_head))
    drawn = mixed(of_head.unsqueeze(2) ^ position) >> (32 - BITS)
    values.copy_(torch.where(values.isfinite(), drawn.float() / (1 << BITS), values))
