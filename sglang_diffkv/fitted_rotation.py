"""Files of rotations that were fitted to a model elsewhere: an orthogonal matrix for each layer, or each KV head of it.

Two forms are read. A ``.safetensors`` file has them as ``rotation``, [layers, dim, dim] or [layers, KV heads, dim,
dim]. A ``.pt`` file is as OSCAR writes it (Offline Spectral Covariance-Aware Rotation, 2026): a dictionary whose
``layers`` have a ``rotation`` for each number, [dim, dim] or [KV heads, dim, dim]. Of the latter only tensors, numbers
and texts are unpickled. Vectors are rows: ``x @ rotation``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from sglang_diffkv.errors import ConfigError
from sglang_diffkv.files import check_file, named

NAME = "rotation"
MOST_BYTES = 1 << 29
"""Of a file."""
MOST_ERROR = 1e-2
"""By which the product of a matrix and its transpose may differ from the identity: bfloat16 rounds by half as much."""


def read_rotation(field: str, path: str, layers: int, kv_heads: int, dim: int) -> torch.Tensor:
    """[layers, 1 or kv_heads, dim, dim] float32, of all ranks' heads. ``field``: of the configuration, for messages.
    Raises ConfigError."""
    wanted = f"[{layers}, {dim}, {dim}] or [{layers}, {kv_heads}, {dim}, {dim}]"
    try:
        check_file(path, MOST_BYTES)
        found = _of_safetensors(path) if path.endswith(".safetensors") else _of_pickle(path)
        if found.dim() == 3:
            found = found.unsqueeze(1)
        if not found.is_floating_point() or list(found.shape) not in ([layers, x, dim, dim] for x in (1, kv_heads)):
            raise ConfigError(f"is of {list(found.shape)}, this model takes {wanted}: fit it to this model")
        found = found.float()
        if not found.isfinite().all():
            raise ConfigError("holds numbers that are not finite: fit it again")
        error = torch.matmul(found, found.transpose(2, 3)).sub_(torch.eye(dim)).abs().max()
        if error > MOST_ERROR:
            raise ConfigError(f"holds a matrix that is no rotation (off by {error:.2g}): attention would change")
        return found
    except ConfigError as error:
        raise ConfigError(f"{field}: {named(path)} {error}") from None


def _of_safetensors(path: str) -> torch.Tensor:
    try:
        with safe_open(path, "pt") as file:
            return file.get_tensor(NAME)
    except (OSError, SafetensorError):
        raise ConfigError(f'has no tensor "{NAME}" as safetensors store it') from None


def _of_pickle(path: str) -> torch.Tensor:
    """Of a file of ``torch.save``, in which nothing but data is read."""
    try:
        read: Any = torch.load(Path(path), map_location="cpu", weights_only=True)
        layers = dict(read["layers"])
        return torch.stack([dict(layers[number])[NAME].float() for number in sorted(layers)])
    except Exception:  # a damaged file makes the reader fail in any way
        raise ConfigError(
            f'is neither safetensors with "{NAME}" nor a .pt file of layers with a "{NAME}" each, as OSCAR writes it'
        ) from None


def of_rank(rotation: torch.Tensor, rank: int, ranks: int, heads: int) -> torch.Tensor:
    """That of the ``heads`` KV heads that one of so many tensor-parallel ranks has."""
    if rotation.shape[1] == 1:
        return rotation
    first = rank * rotation.shape[1] // ranks
    return rotation[:, first : first + heads].contiguous()
