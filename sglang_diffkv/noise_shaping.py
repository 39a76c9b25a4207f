"""A matrix for each layer and KV head that keys, or values, are multiplied by before they are stored, so that the error
of their codes lies where attention hardly looks.

The codes of a vector have one step, so their error has the same size in every direction. Attention sees it through
queries, as ``q . e``, and through the weights behind attention. Both look much more in some directions than in others.
With any matrix ``T`` that has an inverse, ``T k`` may be stored and ``T^-T q`` attend: attention stays what it is, and
the error counts as ``|T^-T q|^2 |T k|^2 / dim`` on average. With ``Q`` and ``K``, the second moments of queries and of
keys, that is least where ``T^-T Q T^-1 = T K T`` (``balanced``). The loss then is ``(tr (K^1/2 Q K^1/2)^1/2)^2``
instead of ``tr Q tr K``. For values the weights behind attention stand for queries. (SmoothQuant, Xiao et al., ICML
2023, does so with a diagonal matrix for weights, FlatQuant, Sun et al., ICML 2025, with learnt ones.)

A stored vector is codes times a scale, plus a zero point that all its numbers share. What they share costs no codes. So
a reflection behind ``T`` turns the direction in which ``T k`` varies most to the one of equal numbers
(``with_free_direction``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sglang_diffkv.errors import ConfigError
from sglang_diffkv.files import check_file, named
from sglang_diffkv.kernels.rotate.fitted import FittedTransform
from sglang_diffkv.kernels.rotate.reference import NO_ROTATION, Rotation, rotated
from sglang_diffkv.key_means import SINKS

MOST_BYTES = 1 << 31
"""Of a file."""
MOST_STRETCH = 32.0
"""By which a matrix stretches one direction more than another, at most: each by up to its root, or by one over it."""
FREE_STRETCH = 2.0
"""By which a matrix makes the direction of the zero point longer than ``balanced`` does. The error of codes counts less
there; much more would be lost to the rounding of products to bfloat16."""
SLACK = 1e-3
"""For rounding, in what fitted matrices keep to."""
SHRINKAGE = 0.01
"""Share of a second moment that is the same in every direction, since it is known from one text."""


class Moments:
    """Second moments of what attention reads and stores of one sequence, by layer and KV head."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[torch.Tensor, ...]] = {}
        """Layer -> of queries, keys and values, [H, D, D] float64 on the host."""

    def add(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, weights: torch.Tensor
    ) -> None:
        """Note one layer's.

        Args:
            query: [N, Hq, D], as attention gets it. key: [N, H, D]. value: [N, H, Dv].
            weights: [H, N], how much attention sees of an error of each token. Half of what is stored counts by them,
                the first tokens included; half counts each token behind ``SINKS`` alike.
        """
        queries = query[SINKS:].unflatten(1, (key.shape[1], -1)).transpose(0, 1).flatten(1, 2).double()  # [H, N * G, D]
        keys, values = (x.transpose(0, 1).double() for x in (key, value))
        keys = keys - keys[:, SINKS:].mean(1, keepdim=True)
        found = [queries.mT @ queries]
        for x in (keys, values):
            seen = (x * weights.double().unsqueeze(2)).mT @ x
            found.append(_of_size_1(x[:, SINKS:].mT @ x[:, SINKS:]) + _of_size_1(seen))
        self._found[layer] = tuple(x.cpu() for x in found)

    def fit(self, outputs: Mapping[int, torch.Tensor]) -> NoiseShaping:
        """The matrices. Raises ValueError where nothing was noted, or layers differ in heads.

        Args:
            outputs: by layer, ``output_products`` of the weights behind attention. Where a layer has none, values are
                left as they are.
        """
        if len({tuple(y.shape for y in x) for x in self._found.values()}) != 1:
            raise ValueError("layers of one shape are needed")
        layers = sorted(self._found)
        keys = torch.stack([fitted_to(*self._found[x][:2]) for x in layers]).float()
        if set(layers) - set(outputs):
            return NoiseShaping(keys)
        return NoiseShaping(keys, torch.stack([fitted_to(outputs[x], self._found[x][2]) for x in layers]).float())


def fitted_to(reads: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """What vectors are multiplied by, all but the Hadamard matrix: ``with_free_direction`` of ``balanced``. Arguments
    and what is not finite: as there."""
    found = balanced(reads, stored)
    if not found.isfinite().all():
        return found
    try:
        return with_free_direction(found, stored)
    except torch.linalg.LinAlgError:
        return torch.full_like(found, float("nan"))


def balanced(reads: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """The symmetric ``T`` that makes ``T stored T`` and ``T^-1 reads T^-1`` proportional, with a determinant of 1, as
    far as ``MOST_STRETCH`` allows. Vectors are multiplied by it before they are stored.

    Args:
        reads, stored: [..., dim, dim] float64, second moments: of what reads, and of what is stored. Of numbers that
            are not finite, or that have no eigenvectors which LAPACK finds, come none that are finite.
    """
    if reads.isfinite().all() and stored.isfinite().all():
        try:
            return _balanced(_shrunk(reads), _shrunk(stored))
        except torch.linalg.LinAlgError:
            pass
    return torch.full_like(stored, float("nan"))


def _balanced(reads: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    root, inverse = _power(stored, 0.5), _power(stored, -0.5)
    sizes, directions = torch.linalg.eigh(inverse @ _power(root @ reads @ root, 0.5) @ inverse)
    stretch = sizes.clamp(min=torch.finfo(sizes.dtype).tiny).log() / 2
    most = math.log(MOST_STRETCH) / 2
    stretch = (stretch - stretch.mean(-1, keepdim=True)).clamp(-most, most)
    return (directions * stretch.exp().unsqueeze(-2)) @ directions.mT


def with_free_direction(matrix: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """``matrix`` with a reflection behind it. Once the Hadamard matrix has come behind that, the direction in which
    stored vectors vary most has equal numbers, ``FREE_STRETCH`` times as large.

    Args:
        matrix: [..., dim, dim] float64, symmetric. stored: second moments, as of ``balanced``.
    """
    most = torch.linalg.eigh(matrix @ _shrunk(stored) @ matrix).eigenvectors[..., -1]
    target = rotated(equal_numbers(matrix.shape[-1])).to(matrix.dtype)
    away = most * torch.where((most * target).sum(-1, keepdim=True) > 0, -1.0, 1.0)  # so that the difference is large
    stretch = (FREE_STRETCH - 1) * away.unsqueeze(-1) * away.unsqueeze(-2)
    return (matrix + matrix @ stretch) @ reflection(away, target)


def equal_numbers(dim: int) -> torch.Tensor:
    """[dim] float32 of length 1."""
    return torch.full((dim,), dim**-0.5)


def reflection(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The symmetric orthogonal [..., dim, dim] that turns vectors ``one`` [..., dim] of length 1 into ``other``."""
    apart = one - other
    size = apart.square().sum(-1, keepdim=True).clamp(min=torch.finfo(apart.dtype).tiny)
    half = (apart / size).unsqueeze(-1) * apart.unsqueeze(-2)
    return torch.eye(one.shape[-1], dtype=one.dtype) - 2 * half


def _of_size_1(moment: torch.Tensor) -> torch.Tensor:
    """With a mean of 1 on the diagonal, or all 0."""
    size = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    return torch.where(size == 0, torch.zeros_like(moment), moment / size)


def _shrunk(moment: torch.Tensor) -> torch.Tensor:
    """Nearer to the identity, and of size 1; the identity where all is 0."""
    moment = _of_size_1(moment)
    share = torch.where(moment.diagonal(dim1=-2, dim2=-1).sum(-1) > 0, SHRINKAGE, 1.0)[..., None, None]
    return (1 - share) * moment + share * torch.eye(moment.shape[-1], dtype=moment.dtype)


def _power(moment: torch.Tensor, exponent: float) -> torch.Tensor:
    sizes, directions = torch.linalg.eigh(moment)
    return (directions * sizes.clamp(min=SHRINKAGE * 1e-6).pow(exponent).unsqueeze(-2)) @ directions.mT


def output_products(weight: torch.Tensor, kv_heads: int, dim: int) -> torch.Tensor:
    """[H, Dv, Dv] float64 on the host, of the weights [hidden, Hq * Dv] that the outputs of query heads meet."""
    heads = weight.double().unflatten(1, (kv_heads, -1, dim)).permute(1, 0, 2, 3)  # [H, hidden, G, Dv]
    return torch.einsum("hogd,hoge->hde", heads, heads).cpu()


@dataclass(frozen=True)
class NoiseShaping:
    """Of all layers: keys [L, H, D, D] and values [L, H, Dv, Dv] float32 are multiplied by these matrices, as of
    ``fitted_to``. Without ``values`` those are left as they are."""

    keys: torch.Tensor
    values: torch.Tensor | None = None

    def transform(
        self, dtype: torch.dtype, device: torch.device | str, rotation: Rotation = NO_ROTATION, group: int = 1
    ) -> FittedTransform:
        """As attention applies it, the Hadamard matrix of ``rotation`` behind each: one product for both. Inverses are
        of the matrices as they are rounded to ``dtype``. ``group``: query heads of a KV head, each of which gets its
        copy of them."""
        keys, inverse = _with_inverse(self.keys, dtype, device, turned=rotation.keys)
        queries = inverse.mT.repeat_interleave(group, 1).contiguous()
        if self.values is None:
            return FittedTransform(keys, None, queries)
        values, outputs = _with_inverse(self.values, dtype, device, turned=rotation.values)
        return FittedTransform(keys, values, queries, outputs.repeat_interleave(group, 1))

    def left_of(self, rotation: Rotation) -> Rotation:
        """What of ``rotation`` is not in ``transform``."""
        return Rotation(values=rotation.values and self.values is None)

    def impossible(self) -> str:
        """What makes these matrices of no use, in words; empty if nothing does."""
        for found in (self.keys, self.values):
            if found is None:
                continue
            if not found.isfinite().all():
                return "numbers that are not finite"
            squares, root = torch.linalg.eigvalsh(found.double() @ found.double().mT), math.sqrt(MOST_STRETCH)
            least, most = 1 / root / (1 + SLACK), root * FREE_STRETCH * (1 + SLACK)
            if (squares > most**2).any() or (squares < least**2).any():
                return f"a matrix that makes a direction over {most:.2f} times as long, or under {least:.3f} times"
        return ""


def _with_inverse(
    matrix: torch.Tensor, dtype: torch.dtype, device: torch.device | str, *, turned: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """``matrix`` as ``fitted_to`` gives it, and what undoes it, with the Hadamard matrix behind it if ``turned``."""
    if turned:
        matrix = rotated(matrix)
    else:  # equal numbers are made without it
        equal = equal_numbers(matrix.shape[-1])
        matrix = matrix @ reflection(rotated(equal), equal)
    rounded = matrix.to(dtype)
    return rounded.to(device), torch.linalg.inv(rounded.double()).to(dtype).to(device)


def write_noise_shaping(path: Path, found: NoiseShaping, facts: Mapping[str, str]) -> None:
    """``facts``: how the matrices were fitted."""
    tensors = {"keys": found.keys} if found.values is None else {"keys": found.keys, "values": found.values}
    save_file({name: x.contiguous() for name, x in tensors.items()}, path, dict(facts))


def read_noise_shaping(path: str, layers: int, kv_heads: int, head_dim: int, v_head_dim: int) -> NoiseShaping:
    """What ``write_noise_shaping`` wrote. Raises ConfigError."""
    try:
        check_file(path, MOST_BYTES)
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name).float() for name in sorted(file.keys())}
        found = NoiseShaping(**tensors)
        wanted = {"keys": [layers, kv_heads, head_dim, head_dim], "values": [layers, kv_heads, v_head_dim, v_head_dim]}
        for name, x in tensors.items():
            if list(x.shape) != wanted[name]:
                raise ConfigError(f"has {name} of {list(x.shape)}, this model takes {wanted[name]}")
    except ConfigError as error:
        raise ConfigError(f"{named(path)} {error}") from None
    except (OSError, SafetensorError, TypeError):
        raise ConfigError(f"{named(path)} is no file of matrices") from None
    if why := found.impossible():
        raise ConfigError(f"{named(path)} holds {why}")
    return found
