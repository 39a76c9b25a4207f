"""Copy-on-compress, one program a (layer, head): count what goes where, then copy or requantise it.

Both kernels walk over the source's pages and decide by the same function, so they agree.
"""

import triton
import triton.language as tl

from sglang_diffkv.kernels.triton_ring import record_demand
from sglang_diffkv.kernels.triton_table import BLOCK, padded, table_index
from sglang_diffkv.kernels.triton_tokens import (
    held_page,
    load_codes,
    load_cuts,
    prompt_decision,
    requantized,
    store_codes,
    store_numbers,
)


@triton.jit
def judged_page(
    entry, source, lo, hi, layer, head, judged, judged_len, seq_len, window, sinks,
    high_cut, low_cut, tie_high, tie_low, values, values_len,
    pages, page_table, range_lo, range_hi, row_blocks,
    TIER: tl.constexpr, TOKENS: tl.constexpr, SCORES: tl.constexpr, POSITIONS: tl.constexpr, TIERS: tl.constexpr,
    PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """A page of the source row, and for its [T] slots: score words, positions, and what becomes of those in [lo, hi).
    ``judged`` and ``values`` point to those of this layer and head."""
    page, score, position, held = held_page(
        entry, source, lo, hi, layer, head, judged, judged_len, pages, page_table, range_lo, range_hi, row_blocks,
        TIER, TOKENS, SCORES, POSITIONS, PAGE_BYTES, MAX_BLOCKS, L, H,
    )  # fmt: skip
    lower: tl.constexpr = TIER + 1 < TIERS
    stays, goes = prompt_decision(
        score, position, held, seq_len, window, sinks, high_cut, low_cut, tie_high, tie_low, values, values_len,
        lower, WHOLE,
    )  # fmt: skip
    return page, score.to(tl.int32, bitcast=True), position, stays, goes


@triton.jit
def target_slots(
    used, chosen, target, layer, head, own_entry, pages, page_table, row_blocks,
    HIGH: tl.constexpr, TOKENS: tl.constexpr, TIERS: tl.constexpr, PAGE_BYTES: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """The target's own slots from ``used`` on for the chosen of [T] tokens: pages [T] and slots in them [T]."""
    tier: tl.constexpr = 0 if HIGH else 1
    rank = used + tl.cumsum(chosen.to(tl.int32), 0) - 1
    entry = tl.load(own_entry + ((target.to(tl.int64) * L + layer) * H + head) * TIERS + tier) + rank // TOKENS
    column = entry if HIGH else MAX_BLOCKS * BLOCK - 1 - entry
    at = table_index(row_blocks, target, layer, head, column, chosen, MAX_BLOCKS, L, H)
    page = tl.load(page_table + at, mask=chosen, other=0)
    return pages + page.to(tl.int64) * PAGE_BYTES, rank % TOKENS


@triton.jit(do_not_specialize=["source", "lo", "hi", "judged_len", "seq_len", "window", "sinks", "values_len"])
def count_kernel(
    source, lo, hi, judged, judged_len, seq_len, window, sinks,
    high_cut, low_cut, tie_high, tie_low, values, values_len,
    counts, pages, page_table, range_lo, range_hi, row_blocks, entries,
    H_TOKENS: tl.constexpr, H_SCORES: tl.constexpr, H_POSITIONS: tl.constexpr, L_TOKENS: tl.constexpr,
    L_SCORES: tl.constexpr, L_POSITIONS: tl.constexpr, TIERS: tl.constexpr, PAGE_BYTES: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Grid (L * H). counts [L * H, 2] int32: tokens that become high and low."""
    flat = tl.program_id(0)
    layer, head = flat // H, flat % H
    at = ((source.to(tl.int64) * L + layer) * H + head) * TIERS
    judged += flat.to(tl.int64) * judged_len
    values += flat.to(tl.int64) * values_len
    high_at, low_at, tie_of_high, tie_of_low = load_cuts(high_cut, low_cut, tie_high, tie_low, flat, WHOLE)
    high = 0
    low = 0
    for entry in range(0, tl.load(entries + at)):
        _, _, _, stays, goes = judged_page(
            entry, source, lo, hi, layer, head, judged, judged_len, seq_len, window, sinks, high_at, low_at,
            tie_of_high, tie_of_low, values, values_len, pages, page_table, range_lo, range_hi, row_blocks,
            0, H_TOKENS, H_SCORES, H_POSITIONS, TIERS, PAGE_BYTES, MAX_BLOCKS, L, H, WHOLE,
        )  # fmt: skip
        high += tl.sum(stays.to(tl.int32), 0)
        low += tl.sum(goes.to(tl.int32), 0)
    if TIERS == 2:
        for entry in range(0, tl.load(entries + at + 1)):
            _, _, _, stays, _ = judged_page(
                entry, source, lo, hi, layer, head, judged, judged_len, seq_len, window, sinks, high_at, low_at,
                tie_of_high, tie_of_low, values, values_len, pages, page_table, range_lo, range_hi, row_blocks,
                1, L_TOKENS, L_SCORES, L_POSITIONS, TIERS, PAGE_BYTES, MAX_BLOCKS, L, H, WHOLE,
            )  # fmt: skip
            low += tl.sum(stays.to(tl.int32), 0)
    tl.store(counts + flat * 2, high)
    tl.store(counts + flat * 2 + 1, low)


@triton.jit(do_not_specialize=["target"])
def take_kernel(
    target, counts, heads, entries, own_entry, own_tokens, demand, totals,
    H_TOKENS: tl.constexpr, L_TOKENS: tl.constexpr, TIERS: tl.constexpr, L: tl.constexpr, H: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(heads / R), TIERS): own pages that the counted tokens of a tier need; they count as used from here on.

    demand [TIERS, heads], totals [TIERS, programs of a tier].
    """
    tier = tl.program_id(1)
    flat = tl.program_id(0) * R + tl.arange(0, R)
    live = flat < heads
    at = (target.to(tl.int64) * (L * H) + flat) * TIERS + tier
    used = tl.load(own_tokens + at, mask=live, other=0) + tl.load(counts + flat * 2 + tier, mask=live, other=0)
    tl.store(own_tokens + at, used, mask=live)
    have = tl.load(entries + at, mask=live, other=0) - tl.load(own_entry + at, mask=live, other=0)
    pages = tl.where(tier == 0, tl.cdiv(used, H_TOKENS), tl.cdiv(used, L_TOKENS))
    wanted = tl.where(live, tl.maximum(pages - have, 0), 0)
    program = tier * tl.num_programs(0) + tl.program_id(0)
    record_demand(wanted, flat, live, program, demand + tier * heads, totals)


@triton.jit(
    do_not_specialize=["source", "target", "lo", "hi", "judged_len", "seq_len", "window", "sinks", "values_len"]
)
def copy_kernel(
    target, source, lo, hi, judged, judged_len, seq_len, window, sinks,
    high_cut, low_cut, tie_high, tie_low, values, values_len, counts,
    raw_like, pages, page_table, range_lo, range_hi, row_blocks, entries, own_entry, own_tokens,
    H_KB: tl.constexpr, H_VB: tl.constexpr, H_TOKENS: tl.constexpr, H_KEYS: tl.constexpr, H_KMETA: tl.constexpr,
    H_VALUES: tl.constexpr, H_VMETA: tl.constexpr, H_SCORES: tl.constexpr, H_POSITIONS: tl.constexpr,
    L_KB: tl.constexpr, L_VB: tl.constexpr, L_TOKENS: tl.constexpr, L_KEYS: tl.constexpr, L_KMETA: tl.constexpr,
    L_VALUES: tl.constexpr, L_VMETA: tl.constexpr, L_SCORES: tl.constexpr, L_POSITIONS: tl.constexpr,
    TIERS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr,
    L: tl.constexpr, H: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Grid (L * H). The target has the pages that ``take_kernel`` asked for."""
    flat = tl.program_id(0)
    layer, head = flat // H, flat % H
    source_at = ((source.to(tl.int64) * L + layer) * H + head) * TIERS
    target_at = ((target.to(tl.int64) * L + layer) * H + head) * TIERS
    judged += flat.to(tl.int64) * judged_len
    values += flat.to(tl.int64) * values_len
    high_at, low_at, tie_of_high, tie_of_low = load_cuts(high_cut, low_cut, tie_high, tie_low, flat, WHOLE)
    raw: tl.constexpr = raw_like.dtype
    high = tl.load(own_tokens + target_at) - tl.load(counts + flat * 2)
    low = 0
    if TIERS == 2:
        low = tl.load(own_tokens + target_at + 1) - tl.load(counts + flat * 2 + 1)
    slot = tl.arange(0, padded(H_TOKENS))
    for entry in range(0, tl.load(entries + source_at)):
        page, score, position, stays, goes = judged_page(
            entry, source, lo, hi, layer, head, judged, judged_len, seq_len, window, sinks, high_at, low_at,
            tie_of_high, tie_of_low, values, values_len, pages, page_table, range_lo, range_hi, row_blocks,
            0, H_TOKENS, H_SCORES, H_POSITIONS, TIERS, PAGE_BYTES, MAX_BLOCKS, L, H, WHOLE,
        )  # fmt: skip
        to, place = target_slots(
            high, stays, target, layer, head, own_entry, pages, page_table, row_blocks, True, H_TOKENS, TIERS,
            PAGE_BYTES, MAX_BLOCKS, L, H,
        )  # fmt: skip
        k, kmeta = load_codes(page, slot, stays, D * H_KB // 8, H_KEYS, H_KMETA, H_KB == 16)
        v, vmeta = load_codes(page, slot, stays, DV * H_VB // 8, H_VALUES, H_VMETA, H_KB == 16)
        store_codes(to, place, stays, k, kmeta, D * H_KB // 8, H_KEYS, H_KMETA, H_KB == 16)
        store_codes(to, place, stays, v, vmeta, DV * H_VB // 8, H_VALUES, H_VMETA, H_KB == 16)
        store_numbers(to, place, stays, score, position, H_SCORES, H_POSITIONS)
        high += tl.sum(stays.to(tl.int32), 0)
        if TIERS == 2:
            k, kmeta = requantized(page, slot, goes, raw, D, H_KB, L_KB, H_KEYS, H_KMETA)
            v, vmeta = requantized(page, slot, goes, raw, DV, H_VB, L_VB, H_VALUES, H_VMETA)
            to, place = target_slots(
                low, goes, target, layer, head, own_entry, pages, page_table, row_blocks, False, L_TOKENS, TIERS,
                PAGE_BYTES, MAX_BLOCKS, L, H,
            )  # fmt: skip
            store_codes(to, place, goes, k, kmeta, D * L_KB // 8, L_KEYS, L_KMETA, False)
            store_codes(to, place, goes, v, vmeta, DV * L_VB // 8, L_VALUES, L_VMETA, False)
            store_numbers(to, place, goes, score, position, L_SCORES, L_POSITIONS)
            low += tl.sum(goes.to(tl.int32), 0)
    if TIERS == 2:
        low_slot = tl.arange(0, padded(L_TOKENS))
        for entry in range(0, tl.load(entries + source_at + 1)):
            page, score, position, stays, _ = judged_page(
                entry, source, lo, hi, layer, head, judged, judged_len, seq_len, window, sinks, high_at, low_at,
                tie_of_high, tie_of_low, values, values_len, pages, page_table, range_lo, range_hi, row_blocks,
                1, L_TOKENS, L_SCORES, L_POSITIONS, TIERS, PAGE_BYTES, MAX_BLOCKS, L, H, WHOLE,
            )  # fmt: skip
            to, place = target_slots(
                low, stays, target, layer, head, own_entry, pages, page_table, row_blocks, False, L_TOKENS, TIERS,
                PAGE_BYTES, MAX_BLOCKS, L, H,
            )  # fmt: skip
            k, kmeta = load_codes(page, low_slot, stays, D * L_KB // 8, L_KEYS, L_KMETA, False)
            v, vmeta = load_codes(page, low_slot, stays, DV * L_VB // 8, L_VALUES, L_VMETA, False)
            store_codes(to, place, stays, k, kmeta, D * L_KB // 8, L_KEYS, L_KMETA, False)
            store_codes(to, place, stays, v, vmeta, DV * L_VB // 8, L_VALUES, L_VMETA, False)
            store_numbers(to, place, stays, score, position, L_SCORES, L_POSITIONS)
            low += tl.sum(stays.to(tl.int32), 0)
