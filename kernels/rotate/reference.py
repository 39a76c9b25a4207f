"""Hadamard rotation of queries and keys (as in QuaRot, 2024, for the key cache).

``(q R) . (k R) = q . k`` for an orthogonal ``R``, so attention and its scores stay what they are, while a key's few
large elements spread over all: its range shrinks, and with it the step of its quantisation.
"""

from __future__ import annotations

from functools import cache

import torch


def block_size(dim: int) -> int:
    """The largest power of two that divides ``dim``: 64, 128 and 256 are one block, 96 is three of 32."""
    return dim & -dim


@cache
def hadamard(size: int, device: torch.device) -> torch.Tensor:
    """Sylvester's matrix [size, size] float32, entries ``(-1)^popcount(i & j) / sqrt(size)``; its own inverse."""
    matrix = torch.ones(1, 1, device=device)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix * size**-0.5


def rotate(q: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both tensors [tokens, heads, head_dim], rotated along the last dimension; computed in float32, in their dtype."""
    size = block_size(q.shape[-1])
    matrix = hadamard(size, q.device)

    def turn(x: torch.Tensor) -> torch.Tensor:
        return (x.float().unflatten(-1, (-1, size)) @ matrix).flatten(-2).to(x.dtype)

    return turn(q), turn(key)
