"""A vector for each layer and KV head that is taken off every key before it is stored.

``q . (k - m)`` is ``q . k`` less a number that is the same for all keys of a query, which softmax does not see:
attention and scores stay what they are. Keys of a head have much in common, and what is left without it takes a smaller
range of codes. (SageAttention, Zhang et al., ICLR 2025, takes the mean off a pass's keys before it quantises them; a
cache needs one vector for all requests, so it is measured once: ``python -m sglang_diffkv.calibrate.means``.)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sglang_diffkv.bounds import MOST_KEY_MEAN
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.files import check_file, named

NAME = "key_means"
DTYPES = ("F32", "BF16", "F16")
"""As safetensors calls them."""
MOST_BYTES = 1 << 26
"""Of a file."""


def write_key_means(path: Path, means: torch.Tensor, facts: Mapping[str, str]) -> None:
    """``means`` [layers, KV heads, head_dim], of keys as attention gets them. ``facts``: how they were measured."""
    save_file({NAME: means.float().contiguous()}, path, dict(facts))


def read_key_means(path: str, layers: int, kv_heads: int, head_dim: int) -> torch.Tensor:
    """[layers, KV heads, head_dim] float32, of all ranks' heads. Raises ConfigError."""
    what, wanted = f"key_means: {named(path)}", [layers, kv_heads, head_dim]
    again = "measure them with this model (python -m sglang_diffkv.calibrate.means)"
    try:
        check_file(path, MOST_BYTES)
        with safe_open(path, "pt") as file:
            found = file.get_slice(NAME)
            if (kind := found.get_dtype()) not in DTYPES:
                raise ConfigError(f"holds numbers of type {kind}, not {', '.join(DTYPES)}: {again}")
            if found.get_shape() != wanted:
                raise ConfigError(
                    f"is of {found.get_shape()} [layers, KV heads, head_dim], the model has {wanted}: {again}"
                )
            means = file.get_tensor(NAME)
    except ConfigError as error:
        raise ConfigError(f"{what} {error}") from None
    except (OSError, SafetensorError):
        raise ConfigError(f"{what} is not a file of key means: {again}") from None
    if not means.isfinite().all():
        raise ConfigError(f"{what} holds numbers that are not finite: {again}")
    if means.abs().max() > MOST_KEY_MEAN:
        raise ConfigError(f"{what} holds numbers beyond {MOST_KEY_MEAN:,.0f}, which no key's mean is: {again}")
    return means.float()


def of_rank(means: torch.Tensor, rank: int, ranks: int, heads: int) -> torch.Tensor:
    """Those of the ``heads`` KV heads that one of so many tensor-parallel ranks has."""
    first = rank * means.shape[1] // ranks
    return means[:, first : first + heads]
