"""Hadamard rotation of queries and keys, and of values (as in QuaRot, 2024).

``(q R) . (k R) = q . k`` for an orthogonal ``R``, so attention and its scores stay what they are, while a key's few
large elements spread over all: its range shrinks, and with it the step of its quantisation. A sum of rotated values is
the rotated sum, and ``R`` is its own inverse: what attention gives is rotated once more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Rotation:
    """What is rotated before it is stored."""

    keys: bool = False
    values: bool = False

    @classmethod
    def named(cls, name: str) -> Rotation:
        """``none``, ``keys``, ``values`` or ``both``."""
        return {"none": cls(), "keys": cls(True), "values": cls(values=True), "both": cls(True, True)}[name]

    def of(
        self, turn: Callable[..., tuple[torch.Tensor, ...]], q: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A step's tensors as they are stored and attended with; ``turn`` is a ``rotate``."""
        if self.keys and self.values and q.shape[2] == value.shape[2]:
            q, key, value = turn(q, key, value)
            return q, key, value
        if self.keys:
            q, key = turn(q, key)
        if self.values:
            (value,) = turn(value)
        return q, key, value


NO_ROTATION = Rotation()


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


def rotated(x: torch.Tensor) -> torch.Tensor:
    """A tensor [..., dim] rotated along its last dimension, in float32."""
    size = block_size(x.shape[-1])
    return (x.float().unflatten(-1, (-1, size)) @ hadamard(size, x.device)).flatten(-2)


def rotate(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors [tokens, heads, dim], ``rotated``, in their dtype."""
    return tuple(rotated(x).to(x.dtype) for x in tensors)
