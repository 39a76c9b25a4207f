"""Per-vector asymmetric quantisation with bit packing (DiffKV, section 4; LeanKV, section 4).

``Q = round((x - z) / s)`` with ``z = min(x)`` and ``s = (max(x) - min(x)) / (2^bits - 1)``, both kept in
fp16 and used in their rounded form on both sides. At 1 to 3 bits, unlike in the papers, the outermost codes stand for
numbers inside the extremes (``COVERED``), and what lies beyond is clipped. With few codes a smaller step gains more
than the extremes lose. That alone would make every vector shorter. Attention sums over many tokens: errors that differ
from token to token average out there, an error that all have in common does not. So the step is then made wider by a
*gain*. With it a vector and its stored form are equally long in the vector's direction, both taken from the middle of
the vector's range: ``sum u w = sum u u``.

Packing is dense for any number of bits: with ``b`` bits and ``d`` elements a vector takes ``d * b / 8`` bytes.

- Where ``b`` divides 8, packing is by planes: byte ``j`` holds element ``p * (d * b / 8) + j`` in its bits
  ``[p * b, (p + 1) * b)``. A plane is then a contiguous run of elements, so a kernel multiplies each plane with a part
  of the query and never permutes codes.
- Any other code is cut into *slices* of 4, 2 and 1 bits, as ``b`` has them: 6 is 4 + 2, 7 is 4 + 2 + 1. The widest has
  the upper bits of the code. Each slice is packed by planes, as a code of its width, and the widest comes first.
- The *grain* is the width of the narrowest slice, and a *chunk* of a vector is the ``d * grain / 8`` bytes that this
  slice takes. A slice of ``w`` bits is ``w / grain`` chunks, a vector is ``b / grain``. The vector's elements are
  ``8 / grain`` groups, each as long as a chunk. A slice has the bits of group ``r`` in its chunk ``r mod (w / grain)``,
  and there in plane ``r div (w / grain)``. In each slice, byte ``j`` of that chunk belongs to element ``j`` of the
  group. So a kernel reads whole chunks and joins their bits where they are.
"""

from __future__ import annotations

import torch

COVERED = {1: 0.375, 2: 0.75, 3: 0.875, **dict.fromkeys(range(4, 9), 1.0)}
"""Share of a vector's range, about its middle, between the numbers of its outermost codes before the gain, by bits."""
LEAST_GAIN = 0.5
"""Of a vector that clipping made longer; the most is where the outermost codes reach the extremes."""
LARGEST = 1e38
"""Sums of squares from here on are not compared: float32 ends soon after."""


def covered(bits: int, source_bits: int = 16) -> float:
    """``COVERED`` for numbers that were stored in ``source_bits``; codes of the same width are not clipped again."""
    return 1.0 if bits == source_bits else COVERED[bits]


def grain(bits: int) -> int:
    """Width of the narrowest slice of a code."""
    return bits & -bits


def slices(bits: int) -> tuple[int, ...]:
    """Widths of the slices of a code, the widest first.

    One of ``w`` bits begins at bit ``bits % w`` of the code, and the others of the packed vector before it have
    ``bits - bits % (2 * w)`` bits together.
    """
    return tuple(width for width in (16, 8, 4, 2, 1) if bits & width)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[..., dim] uint8 codes below ``2^bits`` to [..., dim * bits / 8] uint8."""
    if grain(bits) == bits:
        return _packed_slice(codes, bits)
    cut = (_packed_slice((codes >> (bits % width)) & ((1 << width) - 1), width) for width in slices(bits))
    return torch.cat(list(cut), dim=-1)


def _packed_slice(codes: torch.Tensor, bits: int) -> torch.Tensor:
    planes = 8 // bits
    if codes.shape[-1] % planes:
        raise ValueError(f"{codes.shape[-1]} elements do not fill bytes of {planes} codes")
    parts = codes.unflatten(-1, (planes, -1)).unbind(-2)
    packed = parts[0].clone()
    for plane, part in enumerate(parts[1:], start=1):
        packed |= part << (plane * bits)
    return packed


def planes(packed: torch.Tensor, bits: int) -> list[torch.Tensor]:
    """[..., bytes] uint8 to the codes of runs of elements, in order: ``8 / grain`` of [..., bytes of a chunk] uint8."""
    if bits == 8:
        return [packed]
    if grain(bits) < bits:
        sizes = [packed.shape[-1] * width // bits for width in slices(bits)]
        parts = packed.split(sizes, dim=-1)
        cut = [unpack(part, width) << (bits % width) for part, width in zip(parts, slices(bits), strict=True)]
        return list(torch.stack(cut).sum(0, dtype=torch.uint8).chunk(8 // grain(bits), dim=-1))
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
