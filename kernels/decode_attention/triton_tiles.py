"""Tiles of a head's pages: where they lie, where their logits do, and in which steps they have some."""

import triton
import triton.language as tl

from sglang_diffkv.kernels.triton_table import I_TOKENS, ceil_div, load_bound, table_column, table_index

LOG2E = tl.constexpr(1.4426950408889634)
NEVER = tl.constexpr(-1e30)
"""Below every logit: the running maximum before the first token, of which differences are numbers."""


@triton.jit
def observes(newest, every):
    """Whether scores take in what the token at ``newest`` gives: each ``every``-th does, for as many."""
    return newest % every == every - 1


@triton.jit
def tile_page(
    tile, count, row_blocks, page_table, range_lo, range_hi, row, layer, head,
    TIER: tl.constexpr, CHUNKS: tl.constexpr, MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Pages of tiles (any shape) and their position ranges; past the last entry, page 0 and an empty range."""
    entry = tile // CHUNKS
    live = entry < count
    column = table_column(entry, TIER, MAX_BLOCKS)
    at = table_index(row_blocks, row, layer, head, column, live, MAX_BLOCKS, L, H)
    page = tl.load(page_table + at, mask=live, other=0)
    lo = load_bound(range_lo, at, live)
    hi = load_bound(range_hi, at, live)
    return page, lo, hi


@triton.jit
def head_tiles(counts, LAYOUTS: tl.constexpr, TILES: tl.constexpr, TIERS: tl.constexpr):
    """Table entries that a head has in each tier, to which ``counts`` points, and tiles of them: two tuples.
    ``TILES``: slots of a tile of each tier."""
    entries = ()
    tiles = ()
    for tier in tl.static_range(TIERS):
        count = tl.load(counts + tier)
        entries = entries + (count,)
        tiles = tiles + (count * ceil_div(LAYOUTS[tier][I_TOKENS], TILES[tier]),)
    return entries, tiles


@triton.jit
def kept_slots(offsets, b, layer, head, room, H: tl.constexpr, ROOM_FOR: tl.constexpr):
    """First slot of a request's logits among its head's ``room``."""
    return tl.minimum(tl.load(offsets + (layer * H + head) * ROOM_FOR + b), room)


@triton.jit
def kept_tiles(own, room, TILES: tl.constexpr, TIERS: tl.constexpr):
    """Where the logits of a head's ``own`` tiles of each tier lie, one tier behind the other in ``room`` tokens: tokens
    and tiles before each tier's, and how many of its tiles fit; three tuples."""
    tokens = (0,)
    tiles = (0,)
    fitting = (room // TILES[0],)
    for tier in tl.static_range(1, TIERS):
        tokens = tokens + (tokens[tier - 1] + own[tier - 1] * TILES[tier - 1],)
        tiles = tiles + (tiles[tier - 1] + own[tier - 1],)
        fitting = fitting + (tl.maximum(room - tokens[tier], 0) // TILES[tier],)
    return tokens, tiles, fitting
