"""Device functions over the tokens of pages: move them as they are or into a lower tier, and judge a prompt's."""

import triton
import triton.language as tl

from sglang_diffkv.kernels.quantize.triton import plane_elements, quantize_planes
from sglang_diffkv.kernels.triton_codec import meta_pair
from sglang_diffkv.kernels.triton_table import padded


@triton.jit
def number_at(page, OFFSET: tl.constexpr, slot):
    """Pointers to the int32 numbers of a segment."""
    return (page + OFFSET).to(tl.pointer_type(tl.int32)) + slot


@triton.jit
def prompt_decision(score, position, live, seq_len, window, sinks, alpha_high, alpha_low, LOWER: tl.constexpr):
    """DiffKV's prompt thresholds for [T] tokens: whether each stays in its tier, and whether it goes down one, which
    none does without a ``LOWER`` tier."""
    mean = tl.div_rn(tl.full(position.shape, 1.0, tl.float32), tl.maximum(position + 1, 1).to(tl.float32))
    lasting = (position >= seq_len - window) | (position < sinks)
    low_enough = score >= alpha_low * mean
    if LOWER:
        stays = live & (lasting | (score >= alpha_high * mean))
    else:
        stays = live & (lasting | low_enough)
    return stays, live & (stays == 0) & low_enough


@triton.jit
def load_codes(
    page, slot, chosen, W: tl.constexpr, OFFSET: tl.constexpr, META: tl.constexpr, RAW: tl.constexpr
):  # fmt: skip
    """Vectors of ``W`` bytes as they are, of the chosen of slots [T] of a page: bytes [T, padded(W)] uint8, and
    metadata words [T] unless ``RAW``."""
    byte = tl.arange(0, padded(W))
    mask = chosen[:, None] & (byte[None, :] < W)
    codes = tl.load(page + OFFSET + slot[:, None] * W + byte[None, :], mask=mask, other=0)
    meta = slot
    if not RAW:
        meta = tl.load(number_at(page, META, slot), mask=chosen, other=0)
    return codes, meta


@triton.jit
def requantized(
    page, slot, chosen, raw, DIM: tl.constexpr, FROM: tl.constexpr, TO: tl.constexpr, OFFSET: tl.constexpr,
    META: tl.constexpr,
):  # fmt: skip
    """As ``load_codes``, in a lower tier's form. ``raw`` is the raw tier's type."""
    WP: tl.constexpr = padded(DIM * TO // 8)
    element = plane_elements(DIM * TO // 8, WP, TO)  # [1, planes, WP]
    inside = (tl.arange(0, WP) < DIM * TO // 8)[None, None, :]
    mask = inside & chosen[:, None, None]
    if FROM == 16:
        x_ptr = (page + OFFSET).to(raw) + slot[:, None, None] * DIM
        x = tl.load(x_ptr + element, mask=mask, other=0.0).to(tl.float32)
    else:
        BYTES: tl.constexpr = DIM * FROM // 8
        codes = tl.load(page + OFFSET + slot[:, None, None] * BYTES + element % BYTES, mask=mask, other=0)
        codes = (codes.to(tl.int32) >> (element // BYTES * FROM)) & ((1 << FROM) - 1)
        scale, zero = meta_pair(tl.load(number_at(page, META, slot), mask=chosen, other=0))
        x = codes.to(tl.float32) * scale[:, None, None] + zero[:, None, None]
    return quantize_planes(x, inside, TO, FROM)


@triton.jit
def store_codes(
    page, slot, chosen, codes, meta, W: tl.constexpr, OFFSET: tl.constexpr, META: tl.constexpr, RAW: tl.constexpr
):  # fmt: skip
    """Write what ``load_codes`` or ``requantized`` gave to slots [T] of pages [T]."""
    byte = tl.arange(0, padded(W))
    mask = chosen[:, None] & (byte[None, :] < W)
    tl.store(page[:, None] + OFFSET + slot[:, None] * W + byte[None, :], codes, mask=mask)
    if not RAW:
        tl.store(number_at(page, META, slot), meta, mask=chosen)


@triton.jit
def store_numbers(page, slot, chosen, score, position, SCORES: tl.constexpr, POSITIONS: tl.constexpr):
    """Write scores, as int32 words [T], and positions [T] to slots [T] of pages [T]."""
    tl.store(number_at(page, SCORES, slot), score, mask=chosen)
    tl.store(number_at(page, POSITIONS, slot), position, mask=chosen)
