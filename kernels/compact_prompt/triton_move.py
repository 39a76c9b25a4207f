"""Prompt-phase compaction of one row: one program a (layer, head), page after page, in place.

A page is read whole before anything is written. Tokens that stay move up to the next free high slot, demoted
ones are requantised into low pages. New pages of both tiers are the row's own pages that were read already,
first come first served. High and low tokens together never need more than one page beyond those that were read:
that one is taken from the ring beforehand (:func:`spare_kernel`), so that no program takes pages while
others return some. What is left over returns to the ring.
"""

import triton
import triton.language as tl

from sglang_diffkv.kernels.quantize.triton import plane_elements, quantize_planes
from sglang_diffkv.kernels.triton_codec import meta_pair
from sglang_diffkv.kernels.triton_ring import EMPTY, NO_LIMIT, drop_references, settle
from sglang_diffkv.kernels.triton_table import BLOCK, padded, table_index

THREADS = tl.constexpr(128)
"""Threads of a compaction program: pages are returned one a thread, so that no atomic is repeated."""


@triton.jit
def requantized(
    source, live, raw, DIM: tl.constexpr, FROM: tl.constexpr, TO: tl.constexpr, OFFSET: tl.constexpr,
    META: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The [T] vectors of a page in a lower tier's form: bytes [T, WP] uint8 and metadata words [T]."""
    WP: tl.constexpr = padded(DIM * TO // 8)
    element = plane_elements(DIM * TO // 8, WP, TO)  # [1, planes, WP]
    inside = (tl.arange(0, WP) < DIM * TO // 8)[None, None, :]
    slot = tl.arange(0, T)
    mask = inside & live[:, None, None]
    if FROM == 16:
        x_ptr = (source + OFFSET).to(raw) + slot[:, None, None] * DIM
        x = tl.load(x_ptr + element, mask=mask, other=0.0).to(tl.float32)
    else:
        BYTES: tl.constexpr = DIM * FROM // 8
        codes = tl.load(source + OFFSET + slot[:, None, None] * BYTES + element % BYTES, mask=mask, other=0)
        codes = (codes.to(tl.int32) >> (element // BYTES * FROM)) & ((1 << FROM) - 1)
        word = tl.load((source + META).to(tl.pointer_type(tl.int32)) + slot, mask=live, other=0)
        scale, zero = meta_pair(word)
        x = codes.to(tl.float32) * scale[:, None, None] + zero[:, None, None]
    return quantize_planes(x, inside, TO, FROM)


@triton.jit
def kept_pages(tokens, TOKENS: tl.constexpr):
    """Pages that hold ``tokens`` tokens."""
    return (tokens + TOKENS - 1) // TOKENS


@triton.jit
def number_at(page_ptr, OFFSET: tl.constexpr, slot):
    """Pointers to the int32 numbers of a segment."""
    return (page_ptr + OFFSET).to(tl.pointer_type(tl.int32)) + slot


@triton.jit
def return_page(page, thread, ring, counters, refcount, num_pages):
    """Return one page to the ring; ``num_pages`` stands for none."""
    drop_references(page + thread * 0, (thread == 0) & (page != num_pages), ring, counters, refcount, num_pages)


@triton.jit
def open_page(page, pages, PAGE_BYTES: tl.constexpr, POSITIONS: tl.constexpr, TOKENS: tl.constexpr):
    """Mark all slots of a page empty."""
    token = tl.arange(0, padded(TOKENS))
    target = number_at(pages + page.to(tl.int64) * PAGE_BYTES, POSITIONS, token)
    tl.store(target, tl.full([padded(TOKENS)], EMPTY, tl.int32), mask=token < TOKENS)


@triton.jit
def spare_kernel(spare, ring, counters, refcount, ticket, num_pages, count, R: tl.constexpr):
    """Grid (ceil(count / R)): one page of the ring for each of [count] heads, ``num_pages`` where it has none."""
    at = tl.program_id(0) * R + tl.arange(0, R)
    wanted = at < count
    place = tl.atomic_add(counters, tl.sum(wanted.to(tl.int64), 0)) + tl.arange(0, R).to(tl.int64)
    granted = wanted & (place < tl.load(counters + 1))
    page = tl.load(ring + place % num_pages, mask=granted, other=0)
    tl.store(refcount + page, tl.full([R], 1, tl.int32), mask=granted)
    tl.store(spare + at, tl.where(granted, page, num_pages), mask=wanted)
    settle(counters, ticket)


@triton.jit(do_not_specialize=["row", "seq_len", "window"])
def compact_kernel(
    row, seq_len, window, alpha_high, alpha_low, spare, raw_like, pages, page_table, range_lo, range_hi, block_table,
    entries, own_entry, own_tokens, hole, fault, ring, counters, refcount, num_pages,
    H_KB: tl.constexpr, H_VB: tl.constexpr, H_TOKENS: tl.constexpr, H_KEYS: tl.constexpr, H_KMETA: tl.constexpr,
    H_VALUES: tl.constexpr, H_VMETA: tl.constexpr, H_SCORES: tl.constexpr, H_POSITIONS: tl.constexpr,
    L_KB: tl.constexpr, L_VB: tl.constexpr, L_TOKENS: tl.constexpr, L_KEYS: tl.constexpr, L_KMETA: tl.constexpr,
    L_VALUES: tl.constexpr, L_VMETA: tl.constexpr, L_SCORES: tl.constexpr, L_POSITIONS: tl.constexpr,
    TIERS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr,
    L: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Grid (L * H). Without a spare page a head demotes nothing. A row with a fault, which is about to be
    aborted, stays as it is."""
    layer, head = tl.program_id(0) // H, tl.program_id(0) % H
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
        return_page(spare_page, thread, ring, counters, refcount, num_pages)
        return
    T: tl.constexpr = padded(H_TOKENS)
    KB: tl.constexpr = D * H_KB // 8
    VB: tl.constexpr = DV * H_VB // 8
    raw: tl.constexpr = raw_like.dtype
    slot = tl.arange(0, T)
    kbyte = tl.arange(0, padded(KB))
    vbyte = tl.arange(0, padded(VB))
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
            low_page = tl.load(page_table + table_index(block_table, row, layer, head, column, True, MAX_BLOCKS, L, H))
    taken = 0  # own pages that were given out again
    for number in range(0, tl.cdiv(used, H_TOKENS)):
        at = table_index(block_table, row, layer, head, first + number, True, MAX_BLOCKS, L, H)
        source = pages + tl.load(page_table + at).to(tl.int64) * PAGE_BYTES
        live = (slot < H_TOKENS) & (number * H_TOKENS + slot < used)
        position = tl.load(number_at(source, H_POSITIONS, slot), mask=live, other=-1)
        word = tl.load(number_at(source, H_SCORES, slot), mask=live, other=0)
        score = word.to(tl.float32, bitcast=True)
        live = live & (position >= 0)
        mean = tl.div_rn(tl.full([T], 1.0, tl.float32), tl.maximum(position + 1, 1).to(tl.float32))
        lasting = position >= seq_len - window
        low_enough = score >= alpha_low * mean
        if TIERS == 2:
            stays = live & (lasting | (score >= alpha_high * mean))
            stays = stays | (live & low_enough & (spare_page == num_pages) & (low_pages == 0))
        else:
            stays = live & (lasting | low_enough)
        goes = live & (stays == 0) & low_enough

        kmask = stays[:, None] & (kbyte[None, :] < KB)
        vmask = stays[:, None] & (vbyte[None, :] < VB)
        k = tl.load(source + H_KEYS + slot[:, None] * KB + kbyte[None, :], mask=kmask, other=0)
        v = tl.load(source + H_VALUES + slot[:, None] * VB + vbyte[None, :], mask=vmask, other=0)
        if H_KB != 16:
            kmeta = tl.load(number_at(source, H_KMETA, slot), mask=stays, other=0)
            vmeta = tl.load(number_at(source, H_VMETA, slot), mask=stays, other=0)
        if TIERS == 2:
            low_k, low_kmeta = requantized(source, goes, raw, D, H_KB, L_KB, H_KEYS, H_KMETA, T)
            low_v, low_vmeta = requantized(source, goes, raw, DV, H_VB, L_VB, H_VALUES, H_VMETA, T)
        tl.debug_barrier()

        # High tokens: slots kept, kept + 1, ..; a page's worth crosses into at most one new page.
        rank = kept + tl.cumsum(stays.to(tl.int32), 0) - 1
        total = tl.sum(stays.to(tl.int32), 0)
        next_page = high_page
        if tl.cdiv(kept + total, H_TOKENS) > tl.cdiv(kept, H_TOKENS):
            at = table_index(block_table, row, layer, head, first + taken, True, MAX_BLOCKS, L, H)
            next_page = tl.load(page_table + at)
            taken += 1
            open_page(next_page, pages, PAGE_BYTES, H_POSITIONS, H_TOKENS)
            at = table_index(block_table, row, layer, head, first + kept_pages(kept, H_TOKENS), True, MAX_BLOCKS, L, H)
            tl.debug_barrier()
            tl.store(page_table + at, next_page)
        page = tl.where(rank // H_TOKENS >= kept_pages(kept, H_TOKENS), next_page, high_page)
        target = pages + page.to(tl.int64) * PAGE_BYTES  # [T]
        place = rank % H_TOKENS
        tl.store(target[:, None] + H_KEYS + place[:, None] * KB + kbyte[None, :], k, mask=kmask)
        tl.store(target[:, None] + H_VALUES + place[:, None] * VB + vbyte[None, :], v, mask=vmask)
        if H_KB != 16:
            tl.store(number_at(target, H_KMETA, place), kmeta, mask=stays)
            tl.store(number_at(target, H_VMETA, place), vmeta, mask=stays)
        tl.store(number_at(target, H_SCORES, place), word, mask=stays)
        tl.store(number_at(target, H_POSITIONS, place), position, mask=stays)
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
                    at = table_index(block_table, row, layer, head, first + taken, True, MAX_BLOCKS, L, H)
                    next_page = tl.load(page_table + at)
                    taken += 1
                low_pages += 1
                open_page(next_page, pages, PAGE_BYTES, L_POSITIONS, L_TOKENS)
                column = MAX_BLOCKS * BLOCK - 1 - (low_first + old_pages)
                at = table_index(block_table, row, layer, head, column, True, MAX_BLOCKS, L, H)
                tl.store(page_table + at, next_page)
                tl.store(range_lo + at, 0)
                tl.store(range_hi + at, NO_LIMIT)
                tl.debug_barrier()
            page = tl.where(rank // L_TOKENS >= old_pages, next_page, low_page)
            target = pages + page.to(tl.int64) * PAGE_BYTES
            place = rank % L_TOKENS
            LKW: tl.constexpr = D * L_KB // 8
            LVW: tl.constexpr = DV * L_VB // 8
            byte = tl.arange(0, padded(LKW))
            mask = goes[:, None] & (byte[None, :] < LKW)
            tl.store(target[:, None] + L_KEYS + place[:, None] * LKW + byte[None, :], low_k, mask=mask)
            byte = tl.arange(0, padded(LVW))
            mask = goes[:, None] & (byte[None, :] < LVW)
            tl.store(target[:, None] + L_VALUES + place[:, None] * LVW + byte[None, :], low_v, mask=mask)
            tl.store(number_at(target, L_KMETA, place), low_kmeta, mask=goes)
            tl.store(number_at(target, L_VMETA, place), low_vmeta, mask=goes)
            tl.store(number_at(target, L_SCORES, place), word, mask=goes)
            tl.store(number_at(target, L_POSITIONS, place), position, mask=goes)
            low_page = next_page
            low_used += total
        tl.debug_barrier()

    return_page(spare_page, thread, ring, counters, refcount, num_pages)
    for begin in range(taken, count, THREADS):
        surplus = begin + thread
        left = surplus < count
        at = table_index(block_table, row, layer, head, first + surplus, left, MAX_BLOCKS, L, H)
        page = tl.load(page_table + at, mask=left, other=0)
        drop_references(page, left, ring, counters, refcount, num_pages)
    tl.store(entries + high_at, first + kept_pages(kept, H_TOKENS))
    tl.store(own_tokens + high_at, kept)
    tl.store(hole + head_at, -1)
    if TIERS == 2:
        tl.store(entries + high_at + 1, low_first + kept_pages(low_used, L_TOKENS))
        tl.store(own_tokens + high_at + 1, low_used)
