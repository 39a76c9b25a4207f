"""Device functions: per-vector asymmetric quantisation with bit packing by planes, as ``reference.py``."""

import numpy as np
import triton
import triton.language as tl

from sglang_diffkv.kernels.quantize import reference
from sglang_diffkv.kernels.triton_table import padded

HALF_MAX = tl.constexpr(65504.0)
UNITS = tl.constexpr(reference.UNITS * 1.0)
LEAST, LARGEST = tl.constexpr(reference.LEAST), tl.constexpr(reference.LARGEST)
LEAST_GAIN = tl.constexpr(reference.LEAST_GAIN)
ROUND = tl.constexpr(8388608.0)
"""Adding and subtracting 2^23 rounds a float32 in [0, 2^22] to the nearest integer, ties to even."""
MIDDLE, MIDDLE_BITS = tl.constexpr(12582912.0), tl.constexpr(0x4B400000)
"""1.5 * 2^23 does so from -2^22 to 2^22. The lower bits of a sum with it are the integer."""

grain_of, widths_of = map(triton.constexpr_function, (reference.grain, reference.slices))
"""At compile time, where a function must not call a plain one. So are those that follow."""
cuts_of = triton.constexpr_function(reference.cuts)
FIRST = tl.constexpr(reference.FIRST)


@triton.constexpr_function
def count_cuts(bits, source_bits):
    """Cuts that an end of a vector's range may have."""
    return len(cuts_of(bits, source_bits))


@triton.constexpr_function
def cut_of(bits, source_bits, number):
    """One of them, in units."""
    return cuts_of(bits, source_bits)[number] * 1.0


@triton.constexpr_function
def first_cut_of(bits, source_bits):
    """As ``reference.first_cut``."""
    among = cuts_of(bits, source_bits)
    return FIRST.value[bits] if len(among) > 1 else among[0]


@triton.constexpr_function
def most_gain_of(bits, source_bits):
    """As ``reference.most_gain``."""
    return UNITS.value / (UNITS.value - 2 * cuts_of(bits, source_bits)[-1])


@triton.constexpr_function
def inverse(number):
    """1 / number, as float32 has it."""
    return float(np.float32(1) / np.float32(number))


@triton.constexpr_function
def slices_of(bits):
    """Number of slices of a code; the raw tier's numbers are one."""
    return len(widths_of(bits))


@triton.constexpr_function
def slice_of(bits, number):
    """A slice's width, its lowest bit in the code, and its first chunk."""
    width = widths_of(bits)[number]
    return width, bits % width, (bits - bits % (2 * width)) // grain_of(bits)


@triton.constexpr_function
def chunks_of(bits):
    """Chunks of a packed vector: 1 where the bits divide 8."""
    return bits // grain_of(bits)


@triton.constexpr_function
def chunk_bytes(dim, bits):
    """Bytes of a chunk of a packed vector, all of it where the bits divide 8."""
    return dim * grain_of(bits) // 8


@triton.jit
def group_elements(W: tl.constexpr, WP: tl.constexpr, BITS: tl.constexpr):
    """Element of group ``r`` and byte ``j`` of a packed vector of chunks of ``W`` bytes: [1, groups, WP] int32. Where
    bits divide 8, groups are planes."""
    plane = tl.arange(0, 8 // grain_of(BITS))
    return (plane[:, None] * W + tl.arange(0, WP)[None, :])[None, :, :]


@triton.jit
def quantize_groups(x, inside, BITS: tl.constexpr, SOURCE_BITS: tl.constexpr = 0, wanted=None):
    """Quantise vectors laid out by groups.

    Args:
        x: [R, groups, WP] float32. inside: mask of the elements that exist, broadcastable to x. SOURCE_BITS: as of
            ``reference.quantize``. wanted: bool, None for true; if it is false, no codes are used, and none looked for.

    Returns:
        a tuple with each slice's bytes [R, chunks * WP] uint8; (scale, zero point) words [R] int32.
    """
    low = tl.min(tl.min(tl.where(inside, x, float("inf")), 2), 1)
    high = tl.max(tl.max(tl.where(inside, x, float("-inf")), 2), 1)
    levels: tl.constexpr = (1 << BITS) - 1
    clipped: tl.constexpr = count_cuts(BITS, SOURCE_BITS) > 1 or cut_of(BITS, SOURCE_BITS, 0) > 0
    start = tl.minimum(tl.maximum(low, -HALF_MAX), HALF_MAX)
    if clipped:
        span = high - low
        known = (span > LEAST) & (span < LARGEST)
        unit = reciprocal(tl.where(known, span, 1.0)) * UNITS
        # None is larger. It keeps a compiler from rounding product and sum at once, which the reference does not do.
        units = tl.minimum((x - low[:, None, None]) * unit[:, None, None], UNITS)
        units = (tl.where(inside & known[:, None, None], units, 0.0) + ROUND) - ROUND
        below, above = chosen_ends(units, inside, low, wanted, BITS, SOURCE_BITS)
        share = 1.0 - (below + above) * (1.0 / UNITS)
        scale = tl.minimum(tl.div_rn(span * share, levels * 1.0), HALF_MAX).to(tl.float16)
        top = tl.minimum(tl.maximum(high, -HALF_MAX), HALF_MAX)
        aside = (top - start) * (below - above) * (0.5 / UNITS)  # a power of two: rounded once, whatever is fused
        start = (start + top) / 2 + aside - scale.to(tl.float32) * (levels * 0.5)
        start = tl.minimum(tl.maximum(start, -HALF_MAX), HALF_MAX)
    else:
        scale = tl.minimum(tl.div_rn(high - low, levels * 1.0), HALF_MAX).to(tl.float16)
    zero = start.to(tl.float16)
    step = scale.to(tl.float32)[:, None, None]
    shifted = x - zero.to(tl.float32)[:, None, None]
    level = shifted * reciprocal(tl.where(step > 0, step, 1.0))
    level = tl.where(inside & (step > 0), tl.minimum(tl.maximum(level, 0.0), levels * 1.0), 0.0)
    level = (level + ROUND) - ROUND
    codes = whole(level)
    if clipped:
        away = units - ((below - above + UNITS) * 0.5)[:, None, None]
        square = whole_sum(away * away, inside)
        product = whole_sum(away * (2.0 * level - levels), inside)
        step = scale.to(tl.float32)
        known = known & (product > 0)
        equal = tl.where(known, span * tl.div_rn(square, tl.where(known, product, 1.0)) * (2.0 / UNITS), step)
        equal = tl.minimum(tl.maximum(equal, step * LEAST_GAIN), step * most_gain_of(BITS, SOURCE_BITS))
        scale = tl.minimum(equal, HALF_MAX).to(tl.float16)
        start = (low + high) / 2 + aside - scale.to(tl.float32) * (levels * 0.5)
        zero = tl.minimum(tl.maximum(start, -HALF_MAX), HALF_MAX).to(tl.float16)
    packed = packed_slices(codes, BITS)
    scale_bits = scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    zero_bits = zero.to(tl.int16, bitcast=True).to(tl.int32)
    return packed, scale_bits | (zero_bits << 16)


@triton.jit
def reciprocal(x):
    """1 / x, float32, rounded as a CPU rounds it."""
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def chosen_ends(units, inside, like, wanted, BITS: tl.constexpr, SOURCE_BITS: tl.constexpr):
    """Units, of the shape of ``like`` [R], that the outermost codes lie above the least and below the largest of
    elements in ``units`` [R, groups, WP]; nothing is looked for if ``wanted`` is false."""
    count: tl.constexpr = count_cuts(BITS, SOURCE_BITS)
    first: tl.constexpr = first_cut_of(BITS, SOURCE_BITS) * 1.0
    below = tl.full(like.shape, cut_of(BITS, SOURCE_BITS, 0), tl.float32)
    above = tl.full(like.shape, first, tl.float32)
    if count > 1:
        least = tl.full(like.shape, float("inf"), tl.float32)
        start: tl.constexpr = cut_of(BITS, SOURCE_BITS, 0)
        apart: tl.constexpr = cut_of(BITS, SOURCE_BITS, 1) - start
        known: tl.constexpr = (first_cut_of(BITS, SOURCE_BITS) - cut_of(BITS, SOURCE_BITS, 0)) // apart
        looks = 2 * count - 1  # of the upper end's, the first was looked at with each of the lower end's
        if wanted is not None:
            looks = tl.where(wanted, looks, 0)
        for number in tl.range(looks):  # one look in registers, not seven at once
            look = tl.full(like.shape, 0, tl.int32) + number
            upper = look >= count
            other = look - count
            cut = tl.where(upper, other + (other >= known).to(tl.int32), look).to(tl.float32) * apart + start
            found = squared_units(units, inside, tl.where(upper, below, cut), tl.where(upper, cut, above), BITS)
            better = found < least
            below = tl.where(better & (look < count), cut, below)
            above = tl.where(better & upper, cut, above)
            least = tl.minimum(found, least)
    return below, above


@triton.jit
def whole(x):
    """int32 of whole numbers between -2^22 and 2^22: an addition, where a conversion takes several times as long."""
    return (x + MIDDLE).to(tl.int32, bitcast=True) - MIDDLE_BITS


@triton.jit
def whole_sum(x, inside):
    """[R] float32, of whole numbers x [R, groups, WP] below 2^22."""
    return tl.sum(tl.sum(whole(tl.where(inside, x, 0.0)), 2), 1).to(tl.float32)


@triton.jit
def squared_units(units, inside, below, above, BITS: tl.constexpr):
    """[R] sums of squared errors of elements in ``units`` [R, groups, WP]. Whole numbers, so that it does not matter
    how they are summed, nor whether a product and a sum are rounded once or twice."""
    levels: tl.constexpr = (1 << BITS) - 1.0
    width = (UNITS - 1.0) - (below + above)
    there = units - below[:, None, None]
    level = tl.fma(there, tl.broadcast_to((levels * reciprocal(width))[:, None, None], there.shape), MIDDLE) - MIDDLE
    level = tl.minimum(tl.maximum(level, 0.0), levels)
    back = tl.fma(level, tl.broadcast_to((width * inverse(levels))[:, None, None], there.shape), MIDDLE) - MIDDLE
    error = tl.where(inside, there - back, 0.0)
    return tl.sum(tl.sum(error * error, 2), 1)


@triton.jit
def packed_slices(codes, BITS: tl.constexpr):
    """int32 codes [R, groups, WP] to a tuple with each slice's bytes, [R, chunks * WP] uint8."""
    if slices_of(BITS) == 1:
        return (tl.sum(codes << (tl.arange(0, 8 // BITS) * BITS)[None, :, None], 1).to(tl.uint8),)
    packed = ()
    for number in tl.static_range(slices_of(BITS)):
        packed = packed + (packed_slice(codes, BITS, number),)  # type: ignore[assignment]
    return packed


@triton.jit
def packed_slice(codes, BITS: tl.constexpr, NUMBER: tl.constexpr):
    """The bytes of one of several slices."""
    place: tl.constexpr = slice_of(BITS, NUMBER)
    WIDTH: tl.constexpr = place[0]
    digits = (codes >> place[1]) & ((1 << WIDTH) - 1)
    digits = tl.reshape(digits, [codes.shape[0], 8 // WIDTH, WIDTH // grain_of(BITS) * codes.shape[2]])
    return tl.sum(digits << (tl.arange(0, 8 // WIDTH) * WIDTH)[None, :, None], 1).to(tl.uint8)


@triton.jit
def slice_bytes(DIM: tl.constexpr, BITS: tl.constexpr, NUMBER: tl.constexpr):
    """Where the bytes of a slice, as ``packed_slices`` has them, lie in a packed vector, and which of them exist:
    [1, chunks * WP] each."""
    W: tl.constexpr = chunk_bytes(DIM, BITS)
    WP: tl.constexpr = padded(W)
    if slices_of(BITS) == 1:
        byte = tl.arange(0, WP)[None, :]
        return byte, byte < W
    place: tl.constexpr = slice_of(BITS, NUMBER)
    at = tl.arange(0, place[0] // grain_of(BITS) * WP)[None, :]
    return (at // WP + place[2]) * W + at % WP, at % WP < W


@triton.jit
def store_packed(
    page_ptr, slot, packed, keep, DIM: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr,
    SLOT_BITS: tl.constexpr = 0,
):  # fmt: skip
    """Write the slices of packed vectors, a tuple of [R, bytes] as of ``packed_slices``, to slots [R] of pages [R].
    ``SLOT_BITS``: of an element, as slots have room for; 0 for as many as it has."""
    apart: tl.constexpr = DIM * (SLOT_BITS if SLOT_BITS > 0 else BITS) // 8
    for number in tl.static_range(slices_of(BITS)):
        byte, exists = slice_bytes(DIM, BITS, number)
        mask = keep[:, None] & exists
        tl.store(page_ptr[:, None] + OFFSET + slot[:, None] * apart + byte, packed[number], mask=mask)


@triton.jit
def store_groups(
    page_ptr, slot, x, keep, DIM: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr, META: tl.constexpr,
):  # fmt: skip
    """Quantise vectors laid out by groups, x [R, groups, WP] float32, and write codes and metadata of one field. Other
    arguments as for ``store_vectors``."""
    W: tl.constexpr = chunk_bytes(DIM, BITS)
    packed, meta = quantize_groups(x, (tl.arange(0, padded(W)) < W)[None, None, :], BITS)
    store_packed(page_ptr, slot, packed, keep, DIM, BITS, OFFSET)
    tl.store((page_ptr + META).to(tl.pointer_type(tl.int32)) + slot, meta, mask=keep)


@triton.jit
def store_vectors(
    page_ptr, slot, x_ptr, keep, DIM: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr, META: tl.constexpr,
):  # fmt: skip
    """Quantise vectors and write codes and metadata of one field; 16 bits copies them.

    Args:
        page_ptr: [R] uint8 pointers to the pages. slot: [R]. keep: [R] mask.
        x_ptr: [R] pointers to the vectors, contiguous elements.
    """
    if BITS == 16:
        column = tl.arange(0, padded(DIM))
        inside = keep[:, None] & (column[None, :] < DIM)
        x = tl.load(x_ptr[:, None] + column[None, :], mask=inside)
        target = (page_ptr + OFFSET).to(tl.pointer_type(x_ptr.dtype.element_ty))
        tl.store(target[:, None] + slot[:, None] * DIM + column[None, :], x, mask=inside)
    else:
        W: tl.constexpr = chunk_bytes(DIM, BITS)
        WP: tl.constexpr = padded(W)
        element = group_elements(W, WP, BITS)
        byte = tl.arange(0, WP)
        inside = keep[:, None, None] & (byte < W)[None, None, :]
        x = tl.load(x_ptr[:, None, None] + element, mask=inside, other=0.0).to(tl.float32)
        store_groups(page_ptr, slot, x, keep, DIM, BITS, OFFSET, META)
