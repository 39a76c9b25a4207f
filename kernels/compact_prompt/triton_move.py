"""Prompt-phase compaction of one row: one program a (layer, head), page after page, in place.

A page is read whole before anything is written. Tokens that stay move up to the next free high slot, demoted
ones are requantised into low pages. New pages of both tiers are the row's own pages that were read already,
first come first served. High and low tokens together never need more than one page beyond those that were read:
that one is taken from the ring beforehand (:func:`spare_kernel`), so that no program takes pages while
others return some. What is left over returns to the ring afterwards (:func:`return_kernel`), head after head.
"""

import triton
import triton.language as tl

from sglang_diffkv.kernels.triton_ring import EMPTY, NO_LIMIT, drop_references, place_pages
from sglang_diffkv.kernels.triton_table import BLOCK, padded, table_index
from sglang_diffkv.kernels.triton_tokens import (
    load_codes,
    load_cuts,
    number_at,
    prompt_decision,
    requantized,
    store_codes,
    store_numbers,
)

THREADS = tl.constexpr(128)
"""Threads of a compaction program: references are dropped one a thread, so that no atomic is repeated."""


@triton.jit
def kept_pages(tokens, TOKENS: tl.constexpr):
    """Pages that hold ``tokens`` tokens."""
    return (tokens + TOKENS - 1) // TOKENS


@triton.jit
def open_page(page, pages, PAGE_BYTES: tl.constexpr, POSITIONS: tl.constexpr, TOKENS: tl.constexpr):
    """Mark all slots of a page empty."""
    token = tl.arange(0, padded(TOKENS))
    target = number_at(pages + page.to(tl.int64) * PAGE_BYTES, POSITIONS, token)
    tl.store(target, tl.full([padded(TOKENS)], EMPTY, tl.int32), mask=token < TOKENS)


@triton.jit
def spare_kernel(spare, ring, counters, refcount, num_pages, count, R: tl.constexpr):
    """Grid (1): one page of the ring for each of [count] heads in order, ``num_pages`` where it has none."""
    first = tl.load(counters)
    limit = tl.load(counters + 1)
    for begin in range(0, count, R):
        at = begin + tl.arange(0, R)
        wanted = at < count
        place = first + at
        granted = wanted & (place < limit)
        page = tl.load(ring + place % num_pages, mask=granted, other=0)
        tl.store(refcount + page, tl.full([R], 1, tl.int32), mask=granted)
        tl.store(spare + at, tl.where(granted, page, num_pages), mask=wanted)
    tl.debug_barrier()  # every thread has read the counter
    tl.store(counters, tl.minimum(first + count, limit))


@triton.jit(do_not_specialize=["row"])
def return_kernel(
    row, spare, surplus, places, page_table, row_blocks, ring, refcount, num_pages,
    TIERS: tl.constexpr, MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Grid (L * H): what a head has left goes to its span of the ring: the spare page, then high pages in order."""
    layer, head = tl.program_id(0) // H, tl.program_id(0) % H
    place = tl.load(places + tl.program_id(0))
    if TIERS == 2:
        spare_page = tl.load(spare + tl.program_id(0))
        if spare_page != num_pages:
            tl.store(refcount + spare_page, 0)
            tl.store(ring + place % num_pages, spare_page)
            place += 1
    end = tl.load(surplus + tl.program_id(0) * 2 + 1)
    for begin in range(tl.load(surplus + tl.program_id(0) * 2), end, E):
        entry = begin + tl.arange(0, E)
        left = entry < end
        at = table_index(row_blocks, row, layer, head, entry, left, MAX_BLOCKS, L, H)
        page = tl.load(page_table + at, mask=left, other=0)
        freed = left & (tl.load(refcount + page, mask=left, other=1) == 0)
        place = place_pages(page, freed, place, ring, num_pages)


@triton.jit(do_not_specialize=["row", "seq_len", "window", "sinks", "values_len"])
def compact_kernel(
    row, seq_len, window, sinks, high_cut, low_cut, tie_high, tie_low, values, values_len,
    spare, surplus, freed, raw_like, pages, page_table,
    range_lo, range_hi, row_blocks, entries, own_entry, own_tokens, hole, fault, refcount, num_pages,
    H_KB: tl.constexpr, H_VB: tl.constexpr, H_TOKENS: tl.constexpr, H_KEYS: tl.constexpr, H_KMETA: tl.constexpr,
    H_VALUES: tl.constexpr, H_VMETA: tl.constexpr, H_SCORES: tl.constexpr, H_POSITIONS: tl.constexpr,
    L_KB: tl.constexpr, L_VB: tl.constexpr, L_TOKENS: tl.constexpr, L_KEYS: tl.constexpr, L_KMETA: tl.constexpr,
    L_VALUES: tl.constexpr, L_VMETA: tl.constexpr, L_SCORES: tl.constexpr, L_POSITIONS: tl.constexpr,
    TIERS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr,
    L: tl.constexpr, H: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Grid (L * H). Cuts [L, H] and values [L, H, values_len] as ``Cuts`` has them. Without a spare page a head
    demotes nothing. A row with a fault, which is about to be aborted, stays as it is.

    Writes what is left over: ``spare``, surplus [L * H, 2] int32 the table entries from and to, freed [L * H] int32 the
    number of pages."""
    layer, head = tl.program_id(0) // H, tl.program_id(0) % H
    high_at_least, low_at_least, tie_of_high, tie_of_low = load_cuts(
        high_cut, low_cut, tie_high, tie_low, tl.program_id(0), WHOLE
    )
    values += tl.program_id(0).to(tl.int64) * values_len
    head_at = (row.to(tl.int64) * L + layer) * H + head
    high_at = head_at * TIERS
    first = tl.load(own_entry + high_at)
    used = tl.load(own_tokens + high_at)
    count = tl.load(entries + high_at) - first
    spare_page = num_pages
    if TIERS == 2:
        spare_page = tl.load(spare + tl.program_id(0))
    thread = tl.arange(0, THREADS)
    if (tl.load(fault + row) != 0) | (used == 0):
        tl.store(surplus + tl.program_id(0) * 2, 0)
        tl.store(surplus + tl.program_id(0) * 2 + 1, 0)
        tl.store(freed + tl.program_id(0), (spare_page != num_pages).to(tl.int32))
        return
    T: tl.constexpr = padded(H_TOKENS)
    KB: tl.constexpr = D * H_KB // 8
    VB: tl.constexpr = DV * H_VB // 8
    raw: tl.constexpr = raw_like.dtype
    slot = tl.arange(0, T)
    kept = 0
    high_page = 0
    low_first = 0
    low_used = 0
    low_pages = 0
    low_page = 0
    if TIERS == 2:
        low_first = tl.load(own_entry + high_at + 1)
        low_used = tl.load(own_tokens + high_at + 1)
        if low_used % L_TOKENS != 0:
            column = MAX_BLOCKS * BLOCK - 1 - (low_first + low_used // L_TOKENS)
            low_page = tl.load(page_table + table_index(row_blocks, row, layer, head, column, True, MAX_BLOCKS, L, H))
    taken = 0  # own pages that were given out again
    for number in range(0, tl.cdiv(used, H_TOKENS)):
        at = table_index(row_blocks, row, layer, head, first + number, True, MAX_BLOCKS, L, H)
        source = pages + tl.load(page_table + at).to(tl.int64) * PAGE_BYTES
        live = (slot < H_TOKENS) & (number * H_TOKENS + slot < used)
        position = tl.load(number_at(source, H_POSITIONS, slot), mask=live, other=-1)
        word = tl.load(number_at(source, H_SCORES, slot), mask=live, other=0)
        score = word.to(tl.float32, bitcast=True)
        live = live & (position >= 0)
        stays, goes = prompt_decision(
            score, position, live, seq_len, window, sinks, high_at_least, low_at_least, tie_of_high, tie_of_low,
            values, values_len, TIERS == 2, WHOLE,
        )  # fmt: skip
        if TIERS == 2:
            stuck = goes & (spare_page == num_pages) & (low_pages == 0)
            stays = stays | stuck
            goes = goes & (stuck == 0)

        k, kmeta = load_codes(source, slot, stays, KB, H_KEYS, H_KMETA, H_KB == 16)
        v, vmeta = load_codes(source, slot, stays, VB, H_VALUES, H_VMETA, H_KB == 16)
        if TIERS == 2:
            low_k, low_kmeta = requantized(source, slot, goes, raw, D, H_KB, L_KB, H_KEYS, H_KMETA)
            low_v, low_vmeta = requantized(source, slot, goes, raw, DV, H_VB, L_VB, H_VALUES, H_VMETA)
        tl.debug_barrier()

        # High tokens: slots kept, kept + 1, ..; a page's worth crosses into at most one new page.
        rank = kept + tl.cumsum(stays.to(tl.int32), 0) - 1
        total = tl.sum(stays.to(tl.int32), 0)
        next_page = high_page
        if tl.cdiv(kept + total, H_TOKENS) > tl.cdiv(kept, H_TOKENS):
            at = table_index(row_blocks, row, layer, head, first + taken, True, MAX_BLOCKS, L, H)
            next_page = tl.load(page_table + at)
            taken += 1
            open_page(next_page, pages, PAGE_BYTES, H_POSITIONS, H_TOKENS)
            at = table_index(row_blocks, row, layer, head, first + kept_pages(kept, H_TOKENS), True, MAX_BLOCKS, L, H)
            tl.debug_barrier()
            tl.store(page_table + at, next_page)
        page = tl.where(rank // H_TOKENS >= kept_pages(kept, H_TOKENS), next_page, high_page)
        target = pages + page.to(tl.int64) * PAGE_BYTES  # [T]
        place = rank % H_TOKENS
        store_codes(target, place, stays, k, kmeta, KB, H_KEYS, H_KMETA, H_KB == 16)
        store_codes(target, place, stays, v, vmeta, VB, H_VALUES, H_VMETA, H_KB == 16)
        store_numbers(target, place, stays, word, position, H_SCORES, H_POSITIONS)
        high_page = next_page
        kept += total

        if TIERS == 2:
            rank = low_used + tl.cumsum(goes.to(tl.int32), 0) - 1
            total = tl.sum(goes.to(tl.int32), 0)
            old_pages = kept_pages(low_used, L_TOKENS)
            next_page = low_page
            if tl.cdiv(low_used + total, L_TOKENS) > tl.cdiv(low_used, L_TOKENS):
                if low_pages == 0:
                    next_page = spare_page
                    spare_page = num_pages
                else:
                    at = table_index(row_blocks, row, layer, head, first + taken, True, MAX_BLOCKS, L, H)
                    next_page = tl.load(page_table + at)
                    taken += 1
                low_pages += 1
                open_page(next_page, pages, PAGE_BYTES, L_POSITIONS, L_TOKENS)
                column = MAX_BLOCKS * BLOCK - 1 - (low_first + old_pages)
                at = table_index(row_blocks, row, layer, head, column, True, MAX_BLOCKS, L, H)
                tl.store(page_table + at, next_page)
                tl.store(range_lo + at, 0)
                tl.store(range_hi + at, NO_LIMIT)
                tl.debug_barrier()
            page = tl.where(rank // L_TOKENS >= old_pages, next_page, low_page)
            target = pages + page.to(tl.int64) * PAGE_BYTES
            place = rank % L_TOKENS
            store_codes(target, place, goes, low_k, low_kmeta, D * L_KB // 8, L_KEYS, L_KMETA, False)
            store_codes(target, place, goes, low_v, low_vmeta, DV * L_VB // 8, L_VALUES, L_VMETA, False)
            store_numbers(target, place, goes, word, position, L_SCORES, L_POSITIONS)
            low_page = next_page
            low_used += total
        tl.debug_barrier()

    returned = (spare_page != num_pages).to(tl.int32)
    for begin in range(taken, count, THREADS):
        entry = first + begin + thread
        left = entry < first + count
        at = table_index(row_blocks, row, layer, head, entry, left, MAX_BLOCKS, L, H)
        page = tl.load(page_table + at, mask=left, other=0)
        returned += tl.sum(drop_references(page, left, refcount).to(tl.int32), 0)
    tl.store(surplus + tl.program_id(0) * 2, first + taken)
    tl.store(surplus + tl.program_id(0) * 2 + 1, first + count)
    tl.store(freed + tl.program_id(0), returned)
    tl.store(entries + high_at, first + kept_pages(kept, H_TOKENS))
    tl.store(own_tokens + high_at, kept)
    tl.store(hole + head_at, -1)
    if TIERS == 2:
        tl.store(spare + tl.program_id(0), spare_page)
        tl.store(entries + high_at + 1, low_first + kept_pages(low_used, L_TOKENS))
        tl.store(own_tokens + high_at + 1, low_used)
