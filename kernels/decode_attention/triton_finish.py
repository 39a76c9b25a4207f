"""Second pass of decode attention: join the splits, update the scores and search for the policy.

The first pass cannot know a head's final normaliser; this one reads it, turns the kept logits into
attention, folds that into each own token's running mean and finds the token that leaves the window and the
least significant token of each tier. Only logits, scores and positions are read again. Slots are numbered
flat: ``PADDED`` (a whole number of tiles) of each page.
"""

import triton
import triton.language as tl

from sglang_diffkv.kernels.decode_attention.triton_tiles import LOG2E, kept_slots, kept_tiles
from sglang_diffkv.kernels.triton_table import BLOCK, ceil_div, padded, table_index

NOTHING = tl.constexpr(2**63 - 1)
"""Search result of a program that found no token; above every (score bits, slot) pair."""


@triton.jit
def score_tier(
    part, lse, newest, window, sinks, horizon, logits_ptr, tile_max_ptr, room, pages, page_table, range_hi, block_table,
    row, layer, head, count, own_first,
    HIGH: tl.constexpr, TOKENS: tl.constexpr, SCORES: tl.constexpr, POSITIONS: tl.constexpr,
    N: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr, PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr,
    L: tl.constexpr, H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """A program's share of one tier; returns the packed candidate and least significant token, int64 each.

    ``lse`` [GP] is the head's base-2 normaliser; ``room`` tiles of logits were kept.
    """
    PADDED: tl.constexpr = ceil_div(TOKENS, N) * N
    g = tl.arange(0, GP)
    candidate = tl.full([SIZE], NOTHING, tl.int64)
    least = tl.full([SIZE], NOTHING, tl.int64)
    start = own_first * PADDED
    stop = tl.minimum(count * PADDED, start + room * N)
    share = tl.cdiv(tl.cdiv(tl.maximum(stop - start, 0), PARTS), SIZE) * SIZE
    start += part * share
    stop = tl.minimum(stop, start + share)
    for base in range(start, stop, SIZE):
        at = base + tl.arange(0, SIZE)
        entry = at // PADDED
        slot = at % PADDED
        own = (at < stop) & (slot < TOKENS)
        column = entry if HIGH else MAX_BLOCKS * BLOCK - 1 - entry
        index = table_index(block_table, row, layer, head, column, own, MAX_BLOCKS, L, H)
        page = tl.load(page_table + index, mask=own, other=0)
        hi = tl.load(range_hi + index, mask=own, other=0)  # a page of its own starts at position 0
        words = (pages + page.to(tl.int64) * PAGE_BYTES).to(tl.pointer_type(tl.int32)) + slot
        score_ptr = (words + SCORES // 4).to(tl.pointer_type(tl.float32))
        position = tl.load(words + POSITIONS // 4, mask=own, other=-1)
        old = tl.load(score_ptr, mask=own, other=0.0)
        own &= (position >= 0) & (position < hi)
        inside = own[:, None] & (g[None, :] < G)
        kept = at - own_first * PADDED
        x = tl.load(logits_ptr + kept[:, None] * G + g[None, :], mask=inside, other=float("-inf")).to(tl.float32)
        top = tl.load(tile_max_ptr + (kept // N)[:, None] * G + g[None, :], mask=inside, other=0.0)
        received = tl.max(tl.exp2(x + (top - lse[None, :])), 1)
        age = tl.minimum(tl.maximum(newest - position, 1), horizon).to(tl.float32)
        new = tl.where(position < newest, old + (received - old) / age, old)
        tl.store(score_ptr, new, mask=own)
        number = (entry - own_first) * TOKENS + slot
        bits = new.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        packed = (bits.to(tl.int64) << 32) | number.to(tl.int64)
        if HIGH:
            leaving = own & (position == newest - window) & (position >= sinks)
            candidate = tl.minimum(candidate, tl.where(leaving, packed, NOTHING))
        least = tl.minimum(least, tl.where(own & (position <= newest - window) & (position >= sinks), packed, NOTHING))
    return tl.min(candidate, 0), tl.min(least, 0)


@triton.jit(
    do_not_specialize=["layer", "window", "sinks", "horizon", "splits"],
    do_not_specialize_on_alignment=["rows", "seq_lens"],
)
def finish_kernel(
    out, lse_out, found, partial_out, partial_lse, logits, tile_max, offsets, pages, page_table, range_hi,
    block_table, entries, own_entry, rows, seq_lens, num_valid, layer, window, sinks, horizon, room, splits,
    H_TOKENS: tl.constexpr, H_SCORES: tl.constexpr, H_POSITIONS: tl.constexpr,
    L_TOKENS: tl.constexpr, L_SCORES: tl.constexpr, L_POSITIONS: tl.constexpr,
    TIERS: tl.constexpr, DV: tl.constexpr, PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr,
    L: tl.constexpr, H: tl.constexpr, G: tl.constexpr, SLOTS: tl.constexpr,
    N_H: tl.constexpr, N_L: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr,
    JUDGE_LOW: tl.constexpr, ROOM_FOR: tl.constexpr,
):  # fmt: skip
    """Grid (B * H, 1 + PARTS): program 0 of a head joins the splits, the others share its tokens' scores.
    Without scores the grid is (B * H, 1). ``SLOTS``: a power of two, the partial results of a head at most."""
    bh = tl.program_id(0)
    part = tl.program_id(1)
    b, head = bh // H, bh % H
    GP: tl.constexpr = padded(G)
    DP: tl.constexpr = padded(DV)
    slots = splits + TIERS - 1
    bh64 = bh.to(tl.int64)
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    inside = (g[:, None] < G) & (d[None, :] < DV)
    out_ptr = out + bh64 * G * DV + g[:, None] * DV + d[None, :]
    found_ptr = found + ((b.to(tl.int64) * L + layer) * H + head) * (TIERS + 1) * PARTS + part - 1
    if b >= tl.load(num_valid):
        if part == 0:
            tl.store(out_ptr, tl.zeros([GP, DP], out.dtype.element_ty), mask=inside)
            tl.store(lse_out + bh64 * G + g, tl.full([GP], float("-inf"), tl.float32), mask=g < G)
        else:
            for k in tl.static_range(TIERS + 1):
                tl.store(found_ptr + k * PARTS, tl.full([], NOTHING, tl.int64))
        return

    s = tl.arange(0, SLOTS)
    lse_at = (bh64 * slots + s[:, None]) * G + g[None, :]
    known = (s[:, None] < slots) & (g[None, :] < G)
    each = tl.load(partial_lse + lse_at, mask=known, other=float("-inf"))  # [SLOTS, GP]
    top = tl.max(each, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    norm = tl.sum(tl.exp2(each - top[None, :]), 0)
    lse = top + tl.log2(norm)

    if part == 0:
        acc = tl.zeros([GP, DP], tl.float32)
        for slot in range(slots):
            at = bh64 * slots + slot
            weight = tl.exp2(tl.load(partial_lse + at * G + g, mask=g < G, other=float("-inf")) - top)
            x = tl.load(partial_out + at * G * DV + g[:, None] * DV + d[None, :], mask=inside, other=0.0)
            acc += weight[:, None] * x
        acc = acc * tl.where(norm > 0, 1.0 / norm, 0.0)[:, None]
        tl.store(out_ptr, acc.to(out.dtype.element_ty), mask=inside)
        tl.store(lse_out + bh64 * G + g, lse / LOG2E, mask=g < G)
        return

    row = tl.load(rows + b).to(tl.int64)
    newest = tl.load(seq_lens + b).to(tl.int32) - 1
    counts = ((row * L + layer) * H + head) * TIERS
    count_high = tl.load(entries + counts)
    own_high = tl.load(own_entry + counts)
    high = (count_high - own_high) * ceil_div(H_TOKENS, N_H)
    kept_from = kept_slots(offsets, b, layer, head, room, H, ROOM_FOR)
    room_high, room_low = kept_tiles(high, room - kept_from, N_H, N_L)
    lse = tl.where(norm > 0, lse, 0.0)
    logits_ptr = logits + (head.to(tl.int64) * room + kept_from) * G
    tile_max_ptr = tile_max + (head.to(tl.int64) * room + kept_from) // 16 * G
    candidate, least = score_tier(
        part - 1, lse, newest, window, sinks, horizon, logits_ptr, tile_max_ptr, room_high, pages, page_table, range_hi,
        block_table, row, layer, head, count_high, own_high,
        True, H_TOKENS, H_SCORES, H_POSITIONS, N_H, PARTS, SIZE, PAGE_BYTES, MAX_BLOCKS, L, H, G, GP,
    )  # fmt: skip
    tl.store(found_ptr, candidate)
    tl.store(found_ptr + PARTS, least)
    if TIERS == 2 and JUDGE_LOW:
        _, least = score_tier(
            part - 1, lse, newest, window, sinks, horizon, logits_ptr + high * N_H * G, tile_max_ptr + high * G,
            room_low, pages, page_table, range_hi, block_table, row, layer, head, tl.load(entries + counts + 1),
            tl.load(own_entry + counts + 1),
            False, L_TOKENS, L_SCORES, L_POSITIONS, N_L, PARTS, SIZE, PAGE_BYTES, MAX_BLOCKS, L, H, G, GP,
        )  # fmt: skip
        tl.store(found_ptr + 2 * PARTS, least)
    elif TIERS == 2:
        tl.store(found_ptr + 2 * PARTS, tl.full([], NOTHING, tl.int64))
