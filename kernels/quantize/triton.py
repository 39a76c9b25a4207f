"""Device functions: per-vector asymmetric quantisation with bit packing by planes, as ``reference.py``."""

import triton
import triton.language as tl

from sglang_diffkv.kernels.quantize import reference
from sglang_diffkv.kernels.quantize.reference import covered

HALF_MAX = tl.constexpr(65504.0)
LARGEST, LEAST_GAIN = tl.constexpr(reference.LARGEST), tl.constexpr(reference.LEAST_GAIN)
ROUND = tl.constexpr(8388608.0)
"""Adding and subtracting 2^23 rounds a float32 in [0, 2^22] to the nearest integer, ties to even."""

covered_share = triton.constexpr_function(covered)
"""At compile time, where a function must not call a plain one."""


@triton.jit
def plane_elements(W: tl.constexpr, WP: tl.constexpr, BITS: tl.constexpr):
    """Element of plane ``p`` and byte ``j`` of a packed vector of ``W`` bytes: [1, planes, WP] int32."""
    plane = tl.arange(0, 8 // BITS)
    return (plane[:, None] * W + tl.arange(0, WP)[None, :])[None, :, :]


@triton.jit
def quantize_planes(x, inside, BITS: tl.constexpr, SOURCE_BITS: tl.constexpr = 16):
    """Quantise vectors laid out by planes.

    Args:
        x: [R, planes, WP] float32. inside: mask of the elements that exist, broadcastable to x.

    Returns:
        bytes [R, WP] uint8, (scale, zero point) words [R] int32.
    """
    low = tl.min(tl.min(tl.where(inside, x, float("inf")), 2), 1)
    high = tl.max(tl.max(tl.where(inside, x, float("-inf")), 2), 1)
    levels: tl.constexpr = (1 << BITS) - 1
    share: tl.constexpr = covered_share(BITS, SOURCE_BITS)
    scale = tl.minimum(tl.div_rn((high - low) * share, levels * 1.0), HALF_MAX).to(tl.float16)
    start = tl.minimum(tl.maximum(low, -HALF_MAX), HALF_MAX)
    if share < 1:
        top = tl.minimum(tl.maximum(high, -HALF_MAX), HALF_MAX)
        start += (top - start - scale.to(tl.float32) * levels) / 2
        start = tl.minimum(tl.maximum(start, -HALF_MAX), HALF_MAX)
    zero = start.to(tl.float16)
    step = scale.to(tl.float32)[:, None, None]
    shifted = x - zero.to(tl.float32)[:, None, None]
    level = tl.div_rn(shifted, tl.where(step > 0, step, 1.0))
    level = tl.where(inside & (step > 0), tl.minimum(tl.maximum(level, 0.0), levels * 1.0), 0.0)
    level = (level + ROUND) - ROUND
    codes = level.to(tl.int32)
    if share < 1:
        middle = (low + high) / 2
        away = tl.where(inside, x - middle[:, None, None], 0.0)
        stored = level * step + (zero.to(tl.float32) - middle)[:, None, None]
        square = tl.sum(tl.sum(away * away, 2), 1)
        product = tl.sum(tl.sum(away * stored, 2), 1)
        known = (product > 0) & (square < LARGEST)
        gain = tl.where(known, tl.div_rn(square, tl.where(known, product, 1.0)), 1.0)
        gain = tl.minimum(tl.maximum(gain, LEAST_GAIN), 1.0 / share)
        scale = tl.minimum(scale.to(tl.float32) * gain, HALF_MAX).to(tl.float16)
        start = middle - scale.to(tl.float32) * levels / 2
        zero = tl.minimum(tl.maximum(start, -HALF_MAX), HALF_MAX).to(tl.float16)
    packed = tl.sum(codes << (tl.arange(0, 8 // BITS) * BITS)[None, :, None], 1).to(tl.uint8)
    scale_bits = scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    zero_bits = zero.to(tl.int16, bitcast=True).to(tl.int32)
    return packed, scale_bits | (zero_bits << 16)


@triton.jit
def store_planes(
    page_ptr, slot, x, keep, DIM: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr, META: tl.constexpr,
    WP: tl.constexpr,
):  # fmt: skip
    """Quantise vectors laid out by planes, x [R, planes, WP] float32, and write codes and metadata of one field. Other
    arguments as for ``store_vectors``."""
    W: tl.constexpr = DIM * BITS // 8
    byte = tl.arange(0, WP)
    packed, meta = quantize_planes(x, (byte < W)[None, None, :], BITS)
    target = page_ptr[:, None] + OFFSET + slot[:, None] * W + byte[None, :]
    tl.store(target, packed, mask=keep[:, None] & (byte < W)[None, :])
    tl.store((page_ptr + META).to(tl.pointer_type(tl.int32)) + slot, meta, mask=keep)


@triton.jit
def store_vectors(
    page_ptr, slot, x_ptr, keep, DIM: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr, META: tl.constexpr,
    WP: tl.constexpr,
):  # fmt: skip
    """Quantise vectors and write codes and metadata of one field; 16 bits copies them.

    Args:
        page_ptr: [R] uint8 pointers to the pages. slot: [R]. keep: [R] mask.
        x_ptr: [R] pointers to the vectors, contiguous elements.
        WP: bytes of a packed vector (elements of a raw one), padded to a power of two.
    """
    if BITS == 16:
        column = tl.arange(0, WP)
        inside = keep[:, None] & (column[None, :] < DIM)
        x = tl.load(x_ptr[:, None] + column[None, :], mask=inside)
        target = (page_ptr + OFFSET).to(tl.pointer_type(x_ptr.dtype.element_ty))
        tl.store(target[:, None] + slot[:, None] * DIM + column[None, :], x, mask=inside)
    else:
        W: tl.constexpr = DIM * BITS // 8
        element = plane_elements(W, WP, BITS)
        byte = tl.arange(0, WP)
        inside = keep[:, None, None] & (byte < W)[None, None, :]
        x = tl.load(x_ptr[:, None, None] + element, mask=inside, other=0.0).to(tl.float32)
        store_planes(page_ptr, slot, x, keep, DIM, BITS, OFFSET, META, WP)
