"""Rotations that were fitted to a model: an orthogonal matrix for each layer, or for each KV head of a layer.

As with the Hadamard matrix of ``reference.py``, queries and keys are multiplied by the same one before keys are stored,
so attention and its scores stay what they are. What attention gives of rotated values is multiplied by the inverse.
The products are those of PyTorch: of a decode step they read little but the matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


def turned(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """``x @ matrix`` of each head's vectors, in the dtype of ``x``.

    Args:
        x: [tokens, heads, dim]; the heads of a KV head follow one another.
        matrix: [1, dim, dim] for all KV heads, or [H, dim, dim], one for each.
    """
    tokens, heads, dim = x.shape
    if matrix.shape[0] == 1:
        return torch.matmul(x, matrix[0])
    group = heads // matrix.shape[0]
    together = x.unflatten(1, (matrix.shape[0], group)).transpose(0, 1).reshape(matrix.shape[0], tokens * group, dim)
    out = torch.bmm(together, matrix).view(matrix.shape[0], tokens, group, dim)
    return out.transpose(0, 1).reshape(tokens, heads, dim)


@dataclass(frozen=True)
class FittedRotation:
    """Of all layers, in the dtype of the model: [L, 1, dim, dim] or [L, H, dim, dim]. None: keys, or values, are not
    rotated so."""

    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None

    def turn(
        self, layer: int, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A layer's new tokens as they are stored and attended with."""
        if self.keys is not None:
            q, key = turned(q, self.keys[layer]), turned(key, self.keys[layer])
        if self.values is not None:
            value = turned(value, self.values[layer])
        return q, key, value

    def turn_back(self, layer: int, out: torch.Tensor) -> torch.Tensor:
        """What attention to stored values gives, [tokens, Hq, v_head_dim], as the model expects it."""
        return out if self.values is None else turned(out, self.values[layer].transpose(1, 2))

    def of_means(self, means: torch.Tensor) -> torch.Tensor:
        """Key means, [L, H, head_dim] float32, of keys that are rotated."""
        return means if self.keys is None else torch.matmul(means.unsqueeze(2), self.keys.float()).squeeze(2)


NOT_FITTED = FittedRotation()
