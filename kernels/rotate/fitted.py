"""Matrices that were fitted to a model: of each layer, or of each KV head of a layer. Keys and values are multiplied by
them before they are stored.

Rotations are orthogonal. As with the Hadamard matrix of ``reference.py``, queries and keys are multiplied by the same
one, so attention and its scores stay what they are. What attention gives of rotated values is multiplied by the
inverse. Any other matrix will do as well that has an inverse: queries are then multiplied by the inverse's transpose
(``sglang_diffkv/noise_shaping.py``). The products are those of PyTorch: of a decode step they read little but the
matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


def turned(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """``x @ matrix`` of each head's vectors, in the dtype of ``x``.

    Args:
        x: [tokens, heads, dim]; the heads of a KV head follow one another.
        matrix: [1, dim, dim] for all heads, or [H, dim, dim], one for each KV head. With as many as there are heads
            the product is one launch, which reads and writes them where they lie.
    """
    tokens, heads, dim = x.shape
    if matrix.shape[0] == 1:
        return torch.matmul(x, matrix[0])
    group = heads // matrix.shape[0]
    if group == 1:
        out = x.new_empty(tokens, heads, dim)
        torch.bmm(x.transpose(0, 1), matrix, out=out.transpose(0, 1))
        return out
    together = x.unflatten(1, (matrix.shape[0], group)).transpose(0, 1).reshape(matrix.shape[0], tokens * group, dim)
    out = torch.bmm(together, matrix).view(matrix.shape[0], tokens, group, dim)
    return out.transpose(0, 1).reshape(tokens, heads, dim)


@dataclass(frozen=True)
class FittedTransform:
    """Of all layers, in the dtype of the model: [L, 1, dim, dim] or [L, H, dim, dim]. Those of queries and outputs
    may be repeated for each query head, [L, Hq, dim, dim].

    Attributes:
        keys, values: what they are multiplied by; None if by nothing.
        queries: what undoes ``keys``, the transpose of its inverse. None: ``keys`` is a rotation, which is its own.
        outputs: the inverse of ``values``, for what attention gives. None: ``values`` is a rotation.
    """

    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None
    queries: torch.Tensor | None = None
    outputs: torch.Tensor | None = None

    @property
    def stretches_keys(self) -> bool:
        """Whether keys are multiplied by what is no rotation."""
        return self.keys is not None and self.queries is not None

    def turn(
        self, layer: int, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A layer's new tokens as they are stored and attended with."""
        if self.keys is not None:
            undone = self.keys if self.queries is None else self.queries
            q, key = turned(q, undone[layer]), turned(key, self.keys[layer])
        if self.values is not None:
            value = turned(value, self.values[layer])
        return q, key, value

    def turn_back(self, layer: int, out: torch.Tensor) -> torch.Tensor:
        """What attention to stored values gives, [tokens, Hq, v_head_dim], as the model expects it."""
        if self.values is None:
            return out
        return turned(out, self.values[layer].transpose(1, 2) if self.outputs is None else self.outputs[layer])

    def of_means(self, means: torch.Tensor) -> torch.Tensor:
        """Key means, [L, H, head_dim] float32, of keys that are multiplied."""
        return means if self.keys is None else torch.matmul(means.unsqueeze(2), self.keys.float()).squeeze(2)


NOT_FITTED = FittedTransform()
