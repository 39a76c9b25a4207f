"""Prompt-phase compaction of rows: one program a (row, layer, head), page after page, in place.

A page is read whole before anything is written. Tokens that stay move up to the next free high slot, demoted
ones go to pages of lower tiers, with the codes that they were given before (``triton_lower.py``). New pages of all
tiers are the row's own pages that were read already,
first come first served. The tokens together never need more than one page of each lower tier beyond those that were
read. That one is taken from the ring beforehand (:func:`spare_kernel`), so that no program takes pages while others
return some. What is left over returns to the ring afterwards (:func:`return_kernel`), head after head.

A prompt's *tail* may begin a page of its own: that is one page more, spare as well. It comes into the table before
other own pages have been given out, so the entry of one of these may be overwritten; a program remembers that one.
"""

import triton
import triton.language as tl

from sglang_diffkv.kernels.triton_ring import EMPTY, NO_LIMIT, drop_references, place_pages
from sglang_diffkv.kernels.triton_table import (
    I_POSITIONS,
    I_TOKENS,
    layout_of,
    padded,
    store_positions,
    table_column,
    table_index,
)
from sglang_diffkv.kernels.triton_tokens import (
    fits_in_slot,
    lasting_of,
    load_cuts,
    load_tokens,
    lowered_tokens,
    page_decision,
    requantized_tokens,
    store_tokens,
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
    empty = tl.full([padded(TOKENS)], EMPTY, tl.int32)
    store_positions(pages + page.to(tl.int64) * PAGE_BYTES, POSITIONS, token, empty, token < TOKENS)


@triton.jit
def next_own_page(
    overwritten, written, taken, first, page_table, row_blocks, row, layer, head,
    TAILED: tl.constexpr, MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """The own page that is given out next: entry ``first + taken`` as it was. ``written``: high entries so far."""
    at = table_index(row_blocks, row, layer, head, first + taken, True, MAX_BLOCKS, L, H)
    page = tl.load(page_table + at)
    if TAILED:
        page = tl.where(written > taken, overwritten, page)
    return page


@triton.jit(do_not_specialize=["count"])
def spare_kernel(spare, ring, counters, refcount, num_pages, count, R: tl.constexpr):
    """Grid (1): a page of the ring for each of [count] heads, in each place for spare pages in turn, ``num_pages``
    where it has none."""
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


@triton.jit(do_not_specialize_on_alignment=["rows"])
def return_kernel(
    rows, spare, surplus, places, page_table, row_blocks, ring, refcount, num_pages,
    SPARES: tl.constexpr, MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Grid (B * L * H): what a head has left goes to its span of the ring: spare pages, then high pages in order."""
    b, flat = tl.program_id(0) // (L * H), tl.program_id(0) % (L * H)
    layer, head = flat // H, flat % H
    row = tl.load(rows + b)
    spare += b * SPARES * L * H + flat
    place = tl.load(places + tl.program_id(0))
    for number in tl.static_range(SPARES):
        spare_page = tl.load(spare + number * L * H)
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


@triton.jit
def end_of_tier(
    at, own_entry, own_tokens, page_table, row_blocks, row, layer, head,
    TIER: tl.constexpr, TOKENS: tl.constexpr, MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """A lower tier of a head: its first own entry, its own tokens, and its last page if that is part-filled, else 0."""
    begin = tl.load(own_entry + at)
    used = tl.load(own_tokens + at)
    page = 0
    if used % TOKENS != 0:
        column = table_column(begin + used // TOKENS, TIER, MAX_BLOCKS)
        page = tl.load(page_table + table_index(row_blocks, row, layer, head, column, True, MAX_BLOCKS, L, H))
    return begin, used, page


@triton.jit
def append_lower(
    goes, codes, word, position, low_first, used, opened, end_page, spare_page, overwritten, written, taken, first,
    num_pages, pages, page_table, range_lo, range_hi, row_blocks, row, layer, head,
    TIER: tl.constexpr, TAILED: tl.constexpr, LAYOUT: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Append those of [T] tokens that go to a lower tier, of which ``used`` are there and ``opened`` pages were taken.
    The first is the spare one, each other the next own page that was read: ``next_own_page``.

    Returns ``used``, ``opened``, the page at the tier's end, the spare page that is left and ``taken``."""
    TOKENS: tl.constexpr = LAYOUT[I_TOKENS]
    rank = used + tl.cumsum(goes.to(tl.int32), 0) - 1
    total = tl.sum(goes.to(tl.int32), 0)
    old_pages = kept_pages(used, TOKENS)
    next_page = end_page
    if tl.cdiv(used + total, TOKENS) > tl.cdiv(used, TOKENS):
        if opened == 0:
            next_page = spare_page
            spare_page = num_pages
        else:
            next_page = next_own_page(
                overwritten, written, taken, first, page_table, row_blocks, row, layer, head, TAILED, MAX_BLOCKS, L, H
            )
            taken += 1
        opened += 1
        open_page(next_page, pages, PAGE_BYTES, LAYOUT[I_POSITIONS], TOKENS)
        column = table_column(low_first + old_pages, TIER, MAX_BLOCKS)
        at = table_index(row_blocks, row, layer, head, column, True, MAX_BLOCKS, L, H)
        tl.store(page_table + at, next_page)
        tl.store(range_lo + at, 0)
        tl.store(range_hi + at, NO_LIMIT)
        tl.debug_barrier()
    page = tl.where(rank // TOKENS >= old_pages, next_page, end_page)
    target = pages + page.to(tl.int64) * PAGE_BYTES
    store_tokens(target, rank % TOKENS, goes, codes, word, position, LAYOUT, D, DV)
    return used + total, opened, next_page, spare_page, taken


@triton.jit(
    do_not_specialize=["window", "sinks", "values_len"],
    do_not_specialize_on_alignment=["rows", "seq_lens", "tails", "entries", "own_entry", "own_tokens", "hole"],
)
def compact_kernel(
    rows, seq_lens, tails, window, sinks, lasting, high_cut, between, low_cut, tie_high, tie_low, values, values_len,
    spare, surplus, freed, raw_like, pages, page_table,
    range_lo, range_hi, row_blocks, entries, own_entry, own_tokens, hole, fault, refcount, num_pages,
    LAYOUTS: tl.constexpr, TIERS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE_BYTES: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr, WHOLE: tl.constexpr, TAILED: tl.constexpr,
):  # fmt: skip
    """Grid (B * L * H). Cuts [L, H] and values [L, H, values_len] as ``Cuts`` has them. Without a spare page of a tier
    a head demotes nothing to it, without one for its tail that begins where the rest ends. A row with a fault, which is
    about to be aborted, stays as it is.

    TAILED: the last ``tails`` [B] int64 tokens, all of which stay whatever the cuts say, begin a page of their own.

    Writes what is left over: ``spare`` [B, TIERS - 1 + TAILED, L * H], surplus [B, L * H, 2] int32 the table entries
    from and to, freed [B, L * H] int32 the number of pages."""
    SPARES: tl.constexpr = TIERS - 1 + TAILED
    b, flat = tl.program_id(0) // (L * H), tl.program_id(0) % (L * H)
    layer, head = flat // H, flat % H
    row, seq_len = tl.load(rows + b), tl.load(seq_lens + b).to(tl.int32)
    spare += b * SPARES * L * H + flat
    cuts, ties = load_cuts(high_cut, between, low_cut, tie_high, tie_low, flat, TIERS, L * H, WHOLE)
    window, sinks = lasting_of(window, sinks, lasting, layer)
    values += flat.to(tl.int64) * values_len
    head_at = (row * L + layer) * H + head
    high_at = head_at * TIERS
    first = tl.load(own_entry + high_at)
    used = tl.load(own_tokens + high_at)
    count = tl.load(entries + high_at) - first
    spares = ()
    for lower in tl.static_range(TIERS - 1):
        spares = spares + (tl.load(spare + lower * L * H),)
    tail_page = num_pages  # the spare page with which the tail begins, or one whose entry was overwritten
    tail_start = NO_LIMIT
    if TAILED:
        tail_page = tl.load(spare + (TIERS - 1) * L * H)
        tail = tl.load(tails + b).to(tl.int32)
        tail_start = seq_len - tail
        window = tl.maximum(window, tail)
    thread = tl.arange(0, THREADS)
    if (tl.load(fault + row) != 0) | (used == 0):
        tl.store(surplus + tl.program_id(0) * 2, 0)
        tl.store(surplus + tl.program_id(0) * 2 + 1, 0)
        unused = 0
        for lower in tl.static_range(TIERS - 1):
            unused += (spares[lower] != num_pages).to(tl.int32)
        if TAILED:
            unused += (tail_page != num_pages).to(tl.int32)
        tl.store(freed + tl.program_id(0), unused)
        return
    HIGH: tl.constexpr = layout_of(LAYOUTS, 0)
    TOKENS: tl.constexpr = HIGH[I_TOKENS]
    raw: tl.constexpr = raw_like.dtype
    slot = tl.arange(0, padded(TOKENS))
    kept = 0
    high_page = 0
    # Of the lower tiers: first own entry, own tokens, own pages taken here, and the page at the end.
    low_first = ()
    low_used = ()
    low_pages = ()
    low_page = ()
    for tier in tl.static_range(1, TIERS):
        begin, filled, last = end_of_tier(
            high_at + tier, own_entry, own_tokens, page_table, row_blocks, row, layer, head,
            tier, LAYOUTS[tier][I_TOKENS], MAX_BLOCKS, L, H,
        )  # fmt: skip
        low_first = low_first + (begin,)
        low_used = low_used + (filled,)
        low_pages = low_pages + (0,)
        low_page = low_page + (last,)
    taken = 0  # own pages that were given out again
    tailed = 0  # tokens of the tail so far
    overwritten = 0  # what the last high entry was while its page has yet to be given out
    held = kept_pages(used, TOKENS)
    next_source = tl.load(page_table + table_index(row_blocks, row, layer, head, first, True, MAX_BLOCKS, L, H))
    for number in range(0, held):
        source_page = next_source
        following = number + 1 < held  # looked up early, while this page's tokens are on their way
        at = table_index(row_blocks, row, layer, head, first + number + 1, following, MAX_BLOCKS, L, H)
        next_source = tl.load(page_table + at, mask=following, other=0)
        if TAILED:
            source_page = tl.where(number < kept_pages(kept, TOKENS), overwritten, source_page)
        source = pages + source_page.to(tl.int64) * PAGE_BYTES
        live = (slot < TOKENS) & (number * TOKENS + slot < used)
        position, word, chosen = page_decision(
            source, slot, live, seq_len, window, sinks, cuts, ties, values, values_len, HIGH, TIERS, WHOLE
        )
        stays = chosen[0]
        goes = ()
        for lower in tl.static_range(TIERS - 1):
            wanted = chosen[lower + 1]
            stuck = wanted & (spares[lower] == num_pages) & (low_pages[lower] == 0)
            stays = stays | stuck
            goes = goes + (wanted & (stuck == 0),)

        # The page is read whole, in the form of each tier, before anything is written.
        codes = load_tokens(source, slot, stays, HIGH, D, DV)
        low_codes = ()
        for lower in tl.static_range(TIERS - 1):
            if fits_in_slot(HIGH, layout_of(LAYOUTS, lower + 1)):
                lowered = lowered_tokens(source, slot, goes[lower], HIGH, layout_of(LAYOUTS, lower + 1), D, DV)
            else:
                lowered = requantized_tokens(source, slot, goes[lower], raw, HIGH, layout_of(LAYOUTS, lower + 1), D, DV)
            low_codes = low_codes + (lowered,)
        tl.debug_barrier()

        # High tokens: slots kept, kept + 1, ..; each part's worth of a page crosses into at most one new page.
        for part in tl.static_range(1 + TAILED):
            moves = stays
            if TAILED:
                moves = stays & ((position >= tail_start) == (part == 1))
            total = tl.sum(moves.to(tl.int32), 0)
            begins = False
            if part == 1:
                begins = (total > 0) & (tailed == 0) & (tail_page != num_pages)
                kept = tl.where(begins, kept_pages(kept, TOKENS) * TOKENS, kept)
                tailed += total
            written = kept_pages(kept, TOKENS)
            rank = kept + tl.cumsum(moves.to(tl.int32), 0) - 1
            next_page = high_page
            if tl.cdiv(kept + total, TOKENS) > written:
                if begins:
                    next_page = tail_page
                    tail_page = num_pages
                else:
                    next_page = next_own_page(
                        overwritten, written, taken, first, page_table, row_blocks, row, layer, head,
                        TAILED, MAX_BLOCKS, L, H,
                    )  # fmt: skip
                    taken += 1
                open_page(next_page, pages, PAGE_BYTES, HIGH[I_POSITIONS], TOKENS)
                at = table_index(row_blocks, row, layer, head, first + written, True, MAX_BLOCKS, L, H)
                if TAILED:
                    overwritten = tl.load(page_table + at)
                tl.debug_barrier()
                tl.store(page_table + at, next_page)
                if TAILED:
                    tl.store(range_lo + at, 0)
                    tl.store(range_hi + at, NO_LIMIT)
                    tl.debug_barrier()
            page = tl.where(rank // TOKENS >= written, next_page, high_page)
            target = pages + page.to(tl.int64) * PAGE_BYTES  # [T]
            store_tokens(target, rank % TOKENS, moves, codes, word, position, HIGH, D, DV)
            high_page = next_page
            kept += total

        new_spares = ()
        new_used = ()
        new_pages = ()
        new_page = ()
        for lower in tl.static_range(TIERS - 1):
            filled, opened, end_page, spare_page = low_used[lower], low_pages[lower], low_page[lower], spares[lower]
            if tl.max(goes[lower].to(tl.int32), 0) > 0:
                filled, opened, end_page, spare_page, taken = append_lower(
                    goes[lower], low_codes[lower], word, position, low_first[lower], filled, opened, end_page,
                    spare_page, overwritten, kept_pages(kept, TOKENS), taken, first, num_pages, pages, page_table,
                    range_lo, range_hi, row_blocks, row, layer, head,
                    lower + 1, TAILED, layout_of(LAYOUTS, lower + 1), D, DV, PAGE_BYTES, MAX_BLOCKS, L, H,
                )  # fmt: skip
            new_spares = new_spares + (spare_page,)
            new_used = new_used + (filled,)
            new_pages = new_pages + (opened,)
            new_page = new_page + (end_page,)
        spares = new_spares
        low_used = new_used
        low_pages = new_pages
        low_page = new_page
        tl.debug_barrier()

    returned = 0
    for lower in tl.static_range(TIERS - 1):
        returned += (spares[lower] != num_pages).to(tl.int32)
    if TAILED:
        if (kept_pages(kept, TOKENS) > taken) & (taken < count):
            tail_page = overwritten
            taken += 1
        returned += (tail_page != num_pages).to(tl.int32)
        tl.store(spare + (TIERS - 1) * L * H, tail_page)
    for begin in range(taken, count, THREADS):
        entry = first + begin + thread
        left = entry < first + count
        at = table_index(row_blocks, row, layer, head, entry, left, MAX_BLOCKS, L, H)
        page = tl.load(page_table + at, mask=left, other=0)
        returned += tl.sum(drop_references(page, left, refcount).to(tl.int32), 0)
    tl.store(surplus + tl.program_id(0) * 2, first + taken)
    tl.store(surplus + tl.program_id(0) * 2 + 1, first + count)
    tl.store(freed + tl.program_id(0), returned)
    tl.store(entries + high_at, first + kept_pages(kept, TOKENS))
    tl.store(own_tokens + high_at, kept)
    tl.store(hole + head_at, -1)
    for lower in tl.static_range(TIERS - 1):
        tl.store(spare + lower * L * H, spares[lower])
        end = low_first[lower] + kept_pages(low_used[lower], LAYOUTS[lower + 1][I_TOKENS])
        tl.store(entries + high_at + lower + 1, end)
        tl.store(own_tokens + high_at + lower + 1, low_used[lower])
