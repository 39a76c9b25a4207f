"""Copy-on-compress, one program a (layer, head): count what goes where, then copy or requantise it.

Both kernels walk over the source's pages and decide by the same function, so they agree.
"""

import triton
import triton.language as tl

from sglang_diffkv.kernels.compact_prompt.triton_move import number_at, requantized
from sglang_diffkv.kernels.triton_ring import add_own_pages, settle
from sglang_diffkv.kernels.triton_table import BLOCK, padded, table_index


@triton.jit
def source_page(
    entry, source, layer, head, page_table, range_lo, range_hi, block_table, lo, hi,
    HIGH: tl.constexpr, MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """A page of the source row and the positions that count in it. Scalars."""
    column = entry if HIGH else MAX_BLOCKS * BLOCK - 1 - entry
    at = table_index(block_table, source, layer, head, column, True, MAX_BLOCKS, L, H)
    first = tl.maximum(tl.load(range_lo + at), lo)
    return tl.load(page_table + at), first, tl.minimum(tl.load(range_hi + at), hi)


@triton.jit
def decide(
    page_ptr, first, last, judged, judged_len, seq_len, window, alpha_high, alpha_low,
    TOKENS: tl.constexpr, SCORES: tl.constexpr, POSITIONS: tl.constexpr, T: tl.constexpr, TIERS: tl.constexpr,
    SOURCE: tl.constexpr,
):  # fmt: skip
    """DiffKV's prompt thresholds for the [T] slots of a page of tier ``SOURCE``: position, score, whether the token
    stays in its tier, whether it goes down."""
    slot = tl.arange(0, T)
    live = slot < TOKENS
    position = tl.load(number_at(page_ptr, POSITIONS, slot), mask=live, other=-1)
    held = live & (position >= first) & (position < last)
    score = tl.load(number_at(page_ptr, SCORES, slot), mask=held, other=0).to(tl.float32, bitcast=True)
    known = held & (position < judged_len)
    own = tl.load(judged + tl.where(known, position, 0), mask=known, other=0.0)
    score = tl.where(known & (own == own), own, score)
    mean = tl.div_rn(tl.full([T], 1.0, tl.float32), tl.maximum(position + 1, 1).to(tl.float32))
    lasting = position >= seq_len - window
    low_enough = score >= alpha_low * mean
    if SOURCE == 0 and TIERS == 2:
        stays = held & (lasting | (score >= alpha_high * mean))
        goes = held & (stays == 0) & low_enough
    else:
        stays = held & (lasting | low_enough)
        goes = held & (position < 0)
    return position, score, stays, goes


@triton.jit
def target_slots(
    rank, chosen, target, layer, head, own_entry, page_table, block_table,
    HIGH: tl.constexpr, TOKENS: tl.constexpr, TIERS: tl.constexpr, PAGE_BYTES: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Own slots [T] of the target: offsets of their pages in bytes, int64, and slots in the page."""
    tier: tl.constexpr = 0 if HIGH else 1
    entry = tl.load(own_entry + ((target.to(tl.int64) * L + layer) * H + head) * TIERS + tier) + rank // TOKENS
    column = entry if HIGH else MAX_BLOCKS * BLOCK - 1 - entry
    at = table_index(block_table, target, layer, head, column, chosen, MAX_BLOCKS, L, H)
    page = tl.load(page_table + at, mask=chosen, other=0)
    return page.to(tl.int64) * PAGE_BYTES, rank % TOKENS


@triton.jit
def copy_bytes(
    source, target, place, chosen, T: tl.constexpr, W: tl.constexpr, OFFSET: tl.constexpr, META: tl.constexpr,
    RAW: tl.constexpr,
):  # fmt: skip
    """Vectors of ``W`` bytes, with their metadata, of the chosen slots [T] to ``place`` in pages ``target`` [T]."""
    slot = tl.arange(0, T)
    byte = tl.arange(0, padded(W))
    mask = chosen[:, None] & (byte[None, :] < W)
    codes = tl.load(source + OFFSET + slot[:, None] * W + byte[None, :], mask=mask, other=0)
    tl.store(target[:, None] + OFFSET + place[:, None] * W + byte[None, :], codes, mask=mask)
    if not RAW:
        word = tl.load(number_at(source, META, slot), mask=chosen, other=0)
        tl.store(number_at(target, META, place), word, mask=chosen)


@triton.jit(do_not_specialize=["source", "lo", "hi", "judged_len", "seq_len", "window"])
def count_kernel(
    source, lo, hi, judged, judged_len, seq_len, window, alpha_high, alpha_low, counts, pages, page_table,
    range_lo, range_hi, block_table, entries,
    H_TOKENS: tl.constexpr, H_SCORES: tl.constexpr, H_POSITIONS: tl.constexpr, L_TOKENS: tl.constexpr,
    L_SCORES: tl.constexpr, L_POSITIONS: tl.constexpr, TIERS: tl.constexpr, PAGE_BYTES: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Grid (L * H). counts [L * H, 2] int32: tokens that become high and low."""
    flat = tl.program_id(0)
    layer, head = flat // H, flat % H
    at = ((source.to(tl.int64) * L + layer) * H + head) * TIERS
    judged += flat.to(tl.int64) * judged_len
    high = 0
    low = 0
    for entry in range(0, tl.load(entries + at)):
        page, first, last = source_page(
            entry, source, layer, head, page_table, range_lo, range_hi, block_table, lo, hi, True, MAX_BLOCKS, L, H
        )
        _, _, stays, goes = decide(
            pages + page.to(tl.int64) * PAGE_BYTES, first, last, judged, judged_len, seq_len, window, alpha_high,
            alpha_low, H_TOKENS, H_SCORES, H_POSITIONS, padded(H_TOKENS), TIERS, 0,
        )  # fmt: skip
        high += tl.sum(stays.to(tl.int32), 0)
        low += tl.sum(goes.to(tl.int32), 0)
    if TIERS == 2:
        for entry in range(0, tl.load(entries + at + 1)):
            page, first, last = source_page(
                entry, source, layer, head, page_table, range_lo, range_hi, block_table, lo, hi, False, MAX_BLOCKS, L, H
            )
            _, _, stays, _ = decide(
                pages + page.to(tl.int64) * PAGE_BYTES, first, last, judged, judged_len, seq_len, window, alpha_high,
                alpha_low, L_TOKENS, L_SCORES, L_POSITIONS, padded(L_TOKENS), TIERS, 1,
            )  # fmt: skip
            low += tl.sum(stays.to(tl.int32), 0)
    tl.store(counts + flat * 2, high)
    tl.store(counts + flat * 2 + 1, low)


@triton.jit(do_not_specialize=["target"])
def take_kernel(
    target, counts, heads, entries, own_entry, own_tokens, pages, ring, counters, refcount, block_table, page_table,
    range_lo, range_hi, fault, ticket, num_pages,
    HIGH: tl.constexpr, TOKENS: tl.constexpr, POSITIONS: tl.constexpr, TIERS: tl.constexpr, PAGE_BYTES: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(heads / R)): own pages of one tier for the counted tokens; they count as used from here on."""
    tier: tl.constexpr = 0 if HIGH else 1
    flat = tl.program_id(0) * R + tl.arange(0, R)
    live = flat < heads
    layer, head = flat // H, flat % H
    row = target.to(tl.int64) + tl.zeros([R], tl.int64)
    at = ((row * L + layer) * H + head) * TIERS + tier
    used = tl.load(own_tokens + at, mask=live, other=0) + tl.load(counts + flat * 2 + tier, mask=live, other=0)
    tl.store(own_tokens + at, used, mask=live)
    start = tl.load(entries + at, mask=live, other=0)
    have = start - tl.load(own_entry + at, mask=live, other=0)
    demand = tl.where(live, tl.maximum(tl.cdiv(used, TOKENS) - have, 0), 0)
    tl.store(entries + at, start + demand, mask=live & (demand > 0))
    add_own_pages(
        demand, row, layer, head, start, pages, ring, counters, refcount, block_table, page_table, range_lo,
        range_hi, fault, num_pages, HIGH, TOKENS, POSITIONS, PAGE_BYTES, MAX_BLOCKS, L, H, R,
    )  # fmt: skip
    settle(counters, ticket)


@triton.jit(do_not_specialize=["source", "target", "lo", "hi", "judged_len", "seq_len", "window"])
def copy_kernel(
    target, source, lo, hi, judged, judged_len, seq_len, window, alpha_high, alpha_low, counts, raw_like, pages,
    page_table, range_lo, range_hi, block_table, entries, own_entry, own_tokens,
    H_KB: tl.constexpr, H_VB: tl.constexpr, H_TOKENS: tl.constexpr, H_KEYS: tl.constexpr, H_KMETA: tl.constexpr,
    H_VALUES: tl.constexpr, H_VMETA: tl.constexpr, H_SCORES: tl.constexpr, H_POSITIONS: tl.constexpr,
    L_KB: tl.constexpr, L_VB: tl.constexpr, L_TOKENS: tl.constexpr, L_KEYS: tl.constexpr, L_KMETA: tl.constexpr,
    L_VALUES: tl.constexpr, L_VMETA: tl.constexpr, L_SCORES: tl.constexpr, L_POSITIONS: tl.constexpr,
    TIERS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr,
    L: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Grid (L * H). The target's pages were taken by ``take_kernel``."""
    flat = tl.program_id(0)
    layer, head = flat // H, flat % H
    source_at = ((source.to(tl.int64) * L + layer) * H + head) * TIERS
    target_at = ((target.to(tl.int64) * L + layer) * H + head) * TIERS
    judged += flat.to(tl.int64) * judged_len
    raw: tl.constexpr = raw_like.dtype
    high = tl.load(own_tokens + target_at) - tl.load(counts + flat * 2)
    low = 0
    if TIERS == 2:
        low = tl.load(own_tokens + target_at + 1) - tl.load(counts + flat * 2 + 1)
    T: tl.constexpr = padded(H_TOKENS)
    for entry in range(0, tl.load(entries + source_at)):
        page, first, last = source_page(
            entry, source, layer, head, page_table, range_lo, range_hi, block_table, lo, hi, True, MAX_BLOCKS, L, H
        )
        origin = pages + page.to(tl.int64) * PAGE_BYTES
        position, score, stays, goes = decide(
            origin, first, last, judged, judged_len, seq_len, window, alpha_high, alpha_low, H_TOKENS, H_SCORES,
            H_POSITIONS, T, TIERS, 0,
        )  # fmt: skip
        offset, place = target_slots(
            high + tl.cumsum(stays.to(tl.int32), 0) - 1, stays, target, layer, head, own_entry, page_table, block_table,
            True, H_TOKENS, TIERS, PAGE_BYTES, MAX_BLOCKS, L, H,
        )  # fmt: skip
        copy_bytes(origin, pages + offset, place, stays, T, D * H_KB // 8, H_KEYS, H_KMETA, H_KB == 16)
        copy_bytes(origin, pages + offset, place, stays, T, DV * H_VB // 8, H_VALUES, H_VMETA, H_KB == 16)
        tl.store(number_at(pages + offset, H_SCORES, place), score.to(tl.int32, bitcast=True), mask=stays)
        tl.store(number_at(pages + offset, H_POSITIONS, place), position, mask=stays)
        high += tl.sum(stays.to(tl.int32), 0)
        if TIERS == 2:
            low_k, low_kmeta = requantized(origin, goes, raw, D, H_KB, L_KB, H_KEYS, H_KMETA, T)
            low_v, low_vmeta = requantized(origin, goes, raw, DV, H_VB, L_VB, H_VALUES, H_VMETA, T)
            offset, place = target_slots(
                low + tl.cumsum(goes.to(tl.int32), 0) - 1, goes, target, layer, head, own_entry, page_table,
                block_table, False, L_TOKENS, TIERS, PAGE_BYTES, MAX_BLOCKS, L, H,
            )  # fmt: skip
            LKW: tl.constexpr = D * L_KB // 8
            LVW: tl.constexpr = DV * L_VB // 8
            byte = tl.arange(0, padded(LKW))
            to = pages + offset
            mask = goes[:, None] & (byte[None, :] < LKW)
            tl.store(to[:, None] + L_KEYS + place[:, None] * LKW + byte[None, :], low_k, mask=mask)
            byte = tl.arange(0, padded(LVW))
            mask = goes[:, None] & (byte[None, :] < LVW)
            tl.store(to[:, None] + L_VALUES + place[:, None] * LVW + byte[None, :], low_v, mask=mask)
            tl.store(number_at(to, L_KMETA, place), low_kmeta, mask=goes)
            tl.store(number_at(to, L_VMETA, place), low_vmeta, mask=goes)
            tl.store(number_at(to, L_SCORES, place), score.to(tl.int32, bitcast=True), mask=goes)
            tl.store(number_at(to, L_POSITIONS, place), position, mask=goes)
            low += tl.sum(goes.to(tl.int32), 0)
    if TIERS == 2:
        TL: tl.constexpr = padded(L_TOKENS)
        for entry in range(0, tl.load(entries + source_at + 1)):
            page, first, last = source_page(
                entry, source, layer, head, page_table, range_lo, range_hi, block_table, lo, hi, False, MAX_BLOCKS, L, H
            )
            origin = pages + page.to(tl.int64) * PAGE_BYTES
            position, score, stays, _ = decide(
                origin, first, last, judged, judged_len, seq_len, window, alpha_high, alpha_low, L_TOKENS, L_SCORES,
                L_POSITIONS, TL, TIERS, 1,
            )  # fmt: skip
            offset, place = target_slots(
                low + tl.cumsum(stays.to(tl.int32), 0) - 1, stays, target, layer, head, own_entry, page_table,
                block_table, False, L_TOKENS, TIERS, PAGE_BYTES, MAX_BLOCKS, L, H,
            )  # fmt: skip
            copy_bytes(origin, pages + offset, place, stays, TL, D * L_KB // 8, L_KEYS, L_KMETA, False)
            copy_bytes(origin, pages + offset, place, stays, TL, DV * L_VB // 8, L_VALUES, L_VMETA, False)
            tl.store(number_at(pages + offset, L_SCORES, place), score.to(tl.int32, bitcast=True), mask=stays)
            tl.store(number_at(pages + offset, L_POSITIONS, place), position, mask=stays)
            low += tl.sum(stays.to(tl.int32), 0)
