"""Per-vector asymmetric quantisation with bit packing (DiffKV, section 4; LeanKV, section 4).

``Q = round((x - z) / s)``, with ``s`` and ``z`` kept in fp16 and used in their rounded form on both sides. At 6 to 8
bits ``z = min(x)`` and ``s = (max(x) - min(x)) / (2^bits - 1)``, as in the papers. With fewer the outermost codes may
stand for numbers inside the extremes, and what lies beyond is clipped: a smaller step gains more than the extremes
lose. A rotated token that goes down to a lower tier is looked at closely: how far inside each end lies is chosen for
each vector, among ``CUTS``, by the sum of squared errors. A new token has no time for that, and for numbers that are
not rotated it would be wrong (``source_of``): ``NEW_CUT`` is for all vectors.

That alone would make every vector shorter. Attention sums over many tokens: errors that differ from token to token
average out there, an error that all have in common does not. So the step is then made wider by a *gain*. With it a
vector and its stored form are equally long in the vector's direction, both taken from the middle of the chosen range:
``sum u w = sum u u``.

Ends and gain are found from whole numbers, ``UNITS`` to a vector's range. So any order of summing finds the same.

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

UNITS = 1024
"""Of a vector's range. Where the codes have an odd number of units, no code lies midway between two units, and no unit
midway between two codes. Squared errors of 256 elements add up to less than 2^24: float32 has them exactly."""
CUTS = {
    1: (320,), 2: (52, 104, 156, 208), 3: (0, 46, 92, 138), 4: (0, 30, 60, 90), 5: (0, 20, 40, 60),
    **dict.fromkeys(range(6, 9), (0,)),
}  # fmt: skip
"""By bits, how many units the outermost codes may lie inside an extreme, before the gain: even numbers,
equally far apart."""
NEW = 0
"""Bits that numbers were stored in before which were not stored."""
NEW_CUT = {1: 320, 2: 128, 3: 64, **dict.fromkeys(range(4, 9), 0)}
"""By bits, of both ends of what is stored for the first time."""
FIRST = {2: 156, 3: 46, 4: 30, 5: 20}
"""Of ``CUTS``, the upper end's while the lower end's is looked for, by bits that have a choice."""
LEAST_GAIN = 0.5
"""Of a vector that clipping made longer; the most is ``most_gain``."""
LEAST, LARGEST = 1e-35, 1e38
"""Vectors of a range that is not between these are not clipped: float32 ends soon after, and soon before for units of
the range. fp16 has 0 for its steps there long since."""


def cuts(bits: int, source_bits: int = NEW) -> tuple[int, ...]:
    """Of an end, for numbers that were stored in ``source_bits``. Codes of the same width are not clipped again."""
    if source_bits == NEW:
        return (NEW_CUT[bits],)
    return (0,) if bits == source_bits else CUTS[bits]


def source_of(bits: int, stored_bits: int, *, turned: bool) -> int:
    """``source_bits`` of what was stored in ``stored_bits`` and goes down to ``bits``. Only rotated numbers choose:
    of others a few may be far from the rest, and clipping them would be an error that all tokens have in common."""
    return stored_bits if turned or bits == stored_bits else NEW


def first_cut(bits: int, source_bits: int = NEW) -> int:
    """The upper end's, while the lower end's is looked for."""
    among = cuts(bits, source_bits)
    return FIRST[bits] if len(among) > 1 else among[0]


def most_gain(bits: int, source_bits: int = NEW) -> float:
    """With which the narrowest range reaches the extremes."""
    return UNITS / (UNITS - 2 * cuts(bits, source_bits)[-1])


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


def quantize(x: torch.Tensor, bits: int, source_bits: int = NEW) -> tuple[torch.Tensor, torch.Tensor]:
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
    clipped = cuts(bits, source_bits) != (0,)
    divisor = torch.full_like(low, levels)  # a number would be multiplied by its reciprocal on a GPU
    if clipped:
        units, known = in_units(x, low, high)
        below, above = chosen_ends(units, bits, source_bits)
        share = (UNITS - below - above) / UNITS
        scale = ((high - low) * share / divisor).clamp(max=limit).half()
        bottom, top = low.clamp(-limit, limit), high.clamp(-limit, limit)
        aside = (top - bottom) * (below - above) / (2 * UNITS)
        start = (bottom + top) / 2 + aside - scale.float() * levels / 2
        zero = start.clamp(-limit, limit).half()
    else:
        scale = ((high - low) / divisor).clamp(max=limit).half()
        zero = low.clamp(-limit, limit).half()
    step = scale.float()
    # Numbers are multiplied by one reciprocal a vector: on a GPU a division takes as long as 16 products.
    codes = torch.where(step > 0, (x - zero.float()) * (1 / step), torch.zeros_like(x))
    codes = codes.round().clamp(0, levels)
    if clipped:
        away = units - (UNITS + below - above) / 2
        square, product = ((away * y).long().sum(-1, keepdim=True).float() for y in (away, 2 * codes - levels))
        equal = (high - low) * (square / product) * (2 / UNITS)
        equal = torch.where(known & (product > 0), equal, step)
        equal = equal.clamp(min=step * LEAST_GAIN, max=step * most_gain(bits, source_bits))
        scale = equal.clamp(max=limit).half()
        zero = ((low + high) / 2 + aside - scale.float() * levels / 2).clamp(-limit, limit).half()
    return pack(codes.to(torch.uint8), bits), torch.cat([scale, zero], dim=-1)


def in_units(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements [..., dim] float32 as whole numbers of ``UNITS`` from ``low`` to ``high`` [..., 1]; all 0 where there is
    no range, or one that is not between ``LEAST`` and ``LARGEST``. Which [..., 1] have one."""
    span = high - low
    known = (span > LEAST) & (span < LARGEST)
    unit = 1 / torch.where(known, span, torch.ones_like(span)) * UNITS
    return torch.where(known, (x - low) * unit, torch.zeros_like(x)).round(), known


def chosen_ends(units: torch.Tensor, bits: int, source_bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Units [..., 1] float32 that the outermost codes lie above the least, and below the largest, of elements ``units``
    [..., dim]. First the lower end is looked for, then the upper; of equal errors the first counts."""
    among, first = cuts(bits, source_bits), first_cut(bits, source_bits)
    like = units[..., :1]
    below, above = torch.full_like(like, among[0]), torch.full_like(like, first)
    if len(among) == 1:
        return below, above
    least = _squared_units(units, below, above, bits)
    for cut in among[1:]:
        tried = torch.full_like(like, cut)
        found = _squared_units(units, tried, above, bits)
        below, least = torch.where(found < least, tried, below), torch.minimum(found, least)
    for cut in among:
        if cut != first:
            tried = torch.full_like(like, cut)
            found = _squared_units(units, below, tried, bits)
            above, least = torch.where(found < least, tried, above), torch.minimum(found, least)
    return below, above


def _squared_units(units: torch.Tensor, below: torch.Tensor, above: torch.Tensor, bits: int) -> torch.Tensor:
    """[..., 1] sums of squared errors of elements in ``units`` [..., dim], whole numbers from 0."""
    width = UNITS - 1 - below - above
    levels = torch.full_like(width, (1 << bits) - 1)
    codes = ((units - below) * (levels * (1 / width))).clamp(min=0).minimum(levels).round()
    error = units - below - (codes * (width * (1 / levels))).round()
    return (error * error).sum(-1, keepdim=True)


def dequantize(packed: torch.Tensor, meta: torch.Tensor, bits: int) -> torch.Tensor:
    """Inverse of :func:`quantize`: [..., dim] float32."""
    scale, zero = meta.float().unbind(-1)
    return unpack(packed, bits).float() * scale.unsqueeze(-1) + zero.unsqueeze(-1)
