"""Tiles of a head's pages: where they lie, and which program of decode attention takes which."""

import triton
import triton.language as tl

from sglang_diffkv.kernels.triton_table import BLOCK, table_index

LOG2E = tl.constexpr(1.4426950408889634)
NEVER = tl.constexpr(-1e30)
"""Below every logit: the running maximum before the first token, of which differences are numbers."""
LEAST_TILES = tl.constexpr(2)
"""Tiles of a split at least, while the head has as many: each split has to be joined."""


@triton.jit
def tile_page(
    tile, count, row_blocks, page_table, range_lo, range_hi, row, layer, head,
    HIGH: tl.constexpr, CHUNKS: tl.constexpr, MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Page of a tile and its position range; past the last entry, page 0 and an empty range. Scalars."""
    entry = tile // CHUNKS
    live = entry < count
    column = entry if HIGH else MAX_BLOCKS * BLOCK - 1 - entry
    at = table_index(row_blocks, row, layer, head, column, live, MAX_BLOCKS, L, H)
    page = tl.load(page_table + at, mask=live, other=0)
    lo = tl.load(range_lo + at, mask=live, other=0)
    hi = tl.load(range_hi + at, mask=live, other=0)
    return page, lo, hi


@triton.jit
def split_work(
    splits, high, low, WEIGHT_H: tl.constexpr, WEIGHT_L: tl.constexpr
):  # fmt: skip
    """Work of a head's ``high`` and ``low`` tiles, and a split's share of it: splits past the last share are empty."""
    work = high * WEIGHT_H + low * WEIGHT_L
    return work, tl.maximum(tl.cdiv(work, splits), LEAST_TILES * max(WEIGHT_H, WEIGHT_L))


@triton.jit
def split_span(
    split, splits, count_high, count_low, WEIGHT_H: tl.constexpr, WEIGHT_L: tl.constexpr,
    CHUNKS_H: tl.constexpr, CHUNKS_L: tl.constexpr, TIERS: tl.constexpr,
):  # fmt: skip
    """A split's share of a head's tiles, balanced by ``WEIGHT``, the cost of a tile.

    Returns tiles of the high tier, its span [first, last), the low tier's span, the split in which the
    high tier ends, and how many splits have work.
    """
    high = count_high * CHUNKS_H
    low = count_low * CHUNKS_L if TIERS == 2 else 0
    end = high * WEIGHT_H
    work, per = split_work(splits, high, low, WEIGHT_H, WEIGHT_L)
    start, stop = split * per, (split + 1) * per
    high_first = tl.minimum(tl.cdiv(start, WEIGHT_H), high)
    high_last = tl.minimum(tl.cdiv(stop, WEIGHT_H), high)
    low_first = tl.minimum(tl.cdiv(tl.maximum(start - end, 0), WEIGHT_L), low)
    low_last = tl.minimum(tl.cdiv(tl.maximum(stop - end, 0), WEIGHT_L), low)
    return high, high_first, high_last, low_first, low_last, tl.minimum(end // per, splits - 1), tl.cdiv(work, per)


@triton.jit
def kept_slots(offsets, b, layer, head, room, H: tl.constexpr, ROOM_FOR: tl.constexpr):
    """First slot of a request's logits among its head's ``room``."""
    return tl.minimum(tl.load(offsets + (layer * H + head) * ROOM_FOR + b), room)


@triton.jit
def kept_tiles(high, room, N_H: tl.constexpr, N_L: tl.constexpr):
    """Tiles of each tier whose logits fit into ``room`` tokens, the high tier's ``high`` tiles first."""
    return room // N_H, tl.maximum(room - high * N_H, 0) // N_L
