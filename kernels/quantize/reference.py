"""Per-vector asymmetric quantisation with bit packing (DiffKV, section 4; LeanKV, section 4).

``Q = round((x - z) / s)`` with ``z = min(x)`` and ``s = (max(x) - min(x)) / (2^bits - 1)``, both kept in
fp16 and used in their rounded form on both sides. At 1 and 2 bits, unlike in the papers, the outermost codes stand for
numbers inside the extremes (``COVERED``), and what lies beyond is clipped. With few codes a smaller step gains more
than the extremes lose. That alone would make every vector shorter. Attention sums over many tokens: errors that differ
from token to token average out there, an error that all have in common does not. So the step is then made wider by a
*gain*. With it a vector and its stored form are equally long in the vector's direction, both taken from the middle of
the vector's range: ``sum u w = sum u u``.

Packing is by planes: with ``b`` bits and ``d`` elements a vector takes ``d * b / 8`` bytes, and byte ``j``
holds element ``p * (d * b / 8) + j`` in its bits ``[p * b, (p + 1) * b)``. A plane is then a contiguous run of
elements, so a kernel multiplies each plane with a slice of the query and never permutes codes.
"""

from __future__ import annotations

import torch

COVERED = {8: 1.0, 4: 1.0, 2: 0.75, 1: 0.375}
"""Share of a vector's range, about its middle, between the numbers of its outermost codes before the gain, by bits."""
LEAST_GAIN = 0.5
"""Of a vector that clipping made longer; the most is where the outermost codes reach the extremes."""
LARGEST = 1e38
"""Sums of squares from here on are not compared: float32 ends soon after."""


def covered(bits: int, source_bits: int = 16) -> float:
    """``COVERED`` for numbers that were stored in ``source_bits``; codes of the same width are not clipped again."""
    return 1.0 if bits == source_bits else COVERED[bits]


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[..., dim] uint8 codes below ``2^bits`` to [..., dim * bits / 8] uint8."""
    planes = 8 // bits
    if codes.shape[-1] % planes:
        raise ValueError(f"{codes.shape[-1]} elements do not fill bytes of {planes} codes")
    parts = codes.unflatten(-1, (planes, -1)).unbind(-2)
    packed = parts[0].clone()
    for plane, part in enumerate(parts[1:], start=1):
        packed |= part << (plane * bits)
    return packed


def planes(packed: torch.Tensor, bits: int) -> list[torch.Tensor]:
    """[..., bytes] uint8 to ``8 / bits`` planes [..., bytes] uint8, in element order."""
    if bits == 8:
        return [packed]
    mask = (1 << bits) - 1
    count = 8 // bits
    cut = [(packed >> (p * bits)) & mask for p in range(count - 1)]
    return [*cut, packed >> ((count - 1) * bits)]


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """[..., dim * bits / 8] uint8 to [..., dim] uint8 codes."""
    return torch.cat(planes(packed, bits), dim=-1)


def quantize(x: torch.Tensor, bits: int, source_bits: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise vectors along the last dimension.

    Args:
        x: [..., dim], any float dtype. source_bits: of the codes that x was read from.

    Returns:
        packed codes [..., dim * bits / 8] uint8, metadata [..., 2] fp16 (scale, zero point).
    """
    x = x.float()
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    levels = (1 << bits) - 1
    limit = torch.finfo(torch.float16).max
    share = covered(bits, source_bits)
    divisor = torch.full_like(low, levels)  # a number would be multiplied by its reciprocal on a GPU
    scale = ((high - low) * share / divisor).clamp(max=limit).half()
    step, start = scale.float(), low.clamp(-limit, limit)
    if share < 1:
        start += (high.clamp(-limit, limit) - start - step * levels) / 2
        start = start.clamp(-limit, limit)
    zero = start.half()
    codes = torch.where(step > 0, (x - zero.float()) / step, torch.zeros_like(x))
    codes = codes.round().clamp(0, levels)
    if share < 1:
        middle = (low + high) / 2
        away, stored = x - middle, codes * step + zero.float() - middle
        square, product = (away * away).sum(-1, keepdim=True), (away * stored).sum(-1, keepdim=True)
        known = (product > 0) & (square < LARGEST)
        gain = torch.where(known, square / product, torch.ones_like(square)).clamp(LEAST_GAIN, 1.0 / share)
        scale = (step * gain).clamp(max=limit).half()
        zero = (middle - scale.float() * levels / 2).clamp(-limit, limit).half()
    return pack(codes.to(torch.uint8), bits), torch.cat([scale, zero], dim=-1)


def dequantize(packed: torch.Tensor, meta: torch.Tensor, bits: int) -> torch.Tensor:
    """Inverse of :func:`quantize`: [..., dim] float32."""
    scale, zero = meta.float().unbind(-1)
    return unpack(packed, bits).float() * scale.unsqueeze(-1) + zero.unsqueeze(-1)
