"""A vector for each layer and KV head that is taken off every key before it is stored.

``q . (k - m)`` is ``q . k`` less a number that is the same for all keys of a query, which softmax does not see:
attention and scores stay what they are. Keys of a head have much in common, and what is left without it takes a smaller
range of codes. (SageAttention, Zhang et al., ICLR 2025, takes the mean off a pass's keys before it quantises them. A
cache needs one vector for all requests, so it is measured once: by a server at its start, or by
``python -m sglang_diffkv.calibrate.means``.)
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

AUTO = "auto"
"""Asks a server to measure them itself. A file of that name is ``./auto``."""
NAME = "key_means"
DTYPES = ("F32", "BF16", "F16")
"""As safetensors calls them."""
MOST_BYTES = 1 << 26
"""Of a file."""
SINKS = 4
"""First tokens of a sequence, whose keys are unlike all others."""


class KeySums:
    """Sums of what keys are, by layer, of as many sequences as are added."""

    def __init__(self) -> None:
        self._sums: dict[int, torch.Tensor] = {}
        """Layer -> [H, D] float64, on the device of its keys."""
        self._counts: dict[int, int] = {}

    def add(self, layer: int, keys: torch.Tensor) -> None:
        """Count one sequence's ``keys`` [N, H, D] of a layer, without its first ``SINKS`` tokens."""
        found = keys[SINKS:].double().sum(0)
        self._sums[layer] = self._sums[layer] + found if layer in self._sums else found
        self._counts[layer] = self._counts.get(layer, 0) + max(keys.shape[0] - SINKS, 0)

    @property
    def tokens(self) -> int:
        """Tokens that count, of each layer."""
        return max(self._counts.values(), default=0)

    def means(self) -> torch.Tensor:
        """[layers, H, D] float32 on the host, layers in the order of their numbers. Raises ValueError where nothing
        counts, or layers differ in heads or tokens."""
        shapes = {tuple(x.shape) for x in self._sums.values()}
        if len(shapes) > 1:
            raise ValueError(f"layers have keys of {sorted(shapes)}: one shape for all is needed")
        if not self.tokens or len(set(self._counts.values())) > 1:
            raise ValueError(f"layers have keys of {sorted(set(self._counts.values()))} tokens that count")
        return torch.stack([self._sums[layer].cpu() for layer in sorted(self._sums)]).div(self.tokens).float()


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
    if why := impossible(means):
        raise ConfigError(f"{what} holds {why}: {again}")
    return means.float()


def impossible(means: torch.Tensor) -> str:
    """What no key's mean is, of what ``means`` hold; empty if they can be taken off keys."""
    if not means.isfinite().all():
        return "numbers that are not finite"
    if means.abs().max() > MOST_KEY_MEAN:
        return f"numbers beyond {MOST_KEY_MEAN:,.0f}, which no key's mean is"
    return ""


def of_rank(means: torch.Tensor, rank: int, ranks: int, heads: int) -> torch.Tensor:
    """Those of the ``heads`` KV heads that one of so many tensor-parallel ranks has."""
    first = rank * means.shape[1] // ranks
    return means[:, first : first + heads]
