"""Copy-on-compress, one program a (layer, head): count what goes where, then copy or requantise it.

Both kernels walk over the source's pages and decide by the same function, so they agree.
"""

import triton
import triton.language as tl

from sglang_diffkv.kernels.triton_ring import record_demand
from sglang_diffkv.kernels.triton_table import (
    I_POSITIONS,
    I_SCORES,
    I_TOKENS,
    layout_of,
    padded,
    table_column,
    table_index,
)
from sglang_diffkv.kernels.triton_tokens import (
    held_page,
    lasting_of,
    load_cuts,
    load_tokens,
    prompt_decision,
    requantized_tokens,
    store_tokens,
)


@triton.jit
def scored_page(
    entry, source, lo, hi, layer, head, shared_scores, shared_len, seq_len, window, sinks, cuts, ties, values,
    values_len, pages, page_table, range_lo, range_hi, row_blocks,
    TIER: tl.constexpr, LAYOUT: tl.constexpr, TIERS: tl.constexpr, PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr,
    L: tl.constexpr, H: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """A page of the source row, and for its [T] slots: score words, positions, and what becomes of those in [lo, hi),
    as ``prompt_decision`` says it. ``shared_scores`` and ``values`` point to those of this layer and head."""
    page, score, position, held = held_page(
        entry, source, lo, hi, layer, head, shared_scores, shared_len, pages, page_table, range_lo, range_hi,
        row_blocks, TIER, LAYOUT[I_TOKENS], LAYOUT[I_SCORES], LAYOUT[I_POSITIONS], PAGE_BYTES, MAX_BLOCKS, L, H,
    )  # fmt: skip
    chosen = prompt_decision(
        score, position, held, seq_len, window, sinks, cuts, ties, values, values_len, TIER, TIERS, WHOLE
    )
    return page, score.to(tl.int32, bitcast=True), position, chosen


@triton.jit
def target_slots(
    used, chosen, target, layer, head, own_entry, pages, page_table, row_blocks,
    TIER: tl.constexpr, TOKENS: tl.constexpr, TIERS: tl.constexpr, PAGE_BYTES: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """The target's own slots from ``used`` on for the chosen of [T] tokens: pages [T] and slots in them [T]."""
    rank = used + tl.cumsum(chosen.to(tl.int32), 0) - 1
    entry = tl.load(own_entry + ((target.to(tl.int64) * L + layer) * H + head) * TIERS + TIER) + rank // TOKENS
    column = table_column(entry, TIER, MAX_BLOCKS)
    at = table_index(row_blocks, target, layer, head, column, chosen, MAX_BLOCKS, L, H)
    page = tl.load(page_table + at, mask=chosen, other=0)
    return pages + page.to(tl.int64) * PAGE_BYTES, rank % TOKENS


@triton.jit
def counted_with(totals, chosen, TIER: tl.constexpr, TIERS: tl.constexpr):
    """``totals`` of each tier with the tokens that ``prompt_decision`` chose of a page of ``TIER``."""
    found = ()
    for to in tl.static_range(TIERS):
        if to < TIER:
            found = found + (totals[to],)
        else:
            found = found + (totals[to] + tl.sum(chosen[to - TIER].to(tl.int32), 0),)
    return found


@triton.jit(
    do_not_specialize=["source", "lo", "hi", "shared_len", "seq_len", "window", "sinks", "values_len"],
    do_not_specialize_on_alignment=["shared_scores", "entries"],
)
def count_kernel(
    source, lo, hi, shared_scores, shared_len, seq_len, window, sinks, lasting,
    high_cut, between, low_cut, tie_high, tie_low, values, values_len,
    counts, pages, page_table, range_lo, range_hi, row_blocks, entries,
    LAYOUTS: tl.constexpr, TIERS: tl.constexpr, PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr,
    L: tl.constexpr, H: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Grid (layers * H). counts [layers * H, TIERS] int32: tokens that each tier gets."""
    flat = tl.program_id(0)
    layer, head = flat // H, flat % H
    at = ((source.to(tl.int64) * L + layer) * H + head) * TIERS
    shared_scores += flat.to(tl.int64) * shared_len
    values += flat.to(tl.int64) * values_len
    cuts, ties = load_cuts(high_cut, between, low_cut, tie_high, tie_low, flat, TIERS, L * H, WHOLE)
    window, sinks = lasting_of(window, sinks, lasting, layer)
    totals = ()
    for _ in tl.static_range(TIERS):
        totals = totals + (0,)
    for tier in tl.static_range(TIERS):
        for entry in range(0, tl.load(entries + at + tier)):
            _page, _score, _position, chosen = scored_page(
                entry, source, lo, hi, layer, head, shared_scores, shared_len, seq_len, window, sinks, cuts, ties,
                values, values_len, pages, page_table, range_lo, range_hi, row_blocks,
                tier, layout_of(LAYOUTS, tier), TIERS, PAGE_BYTES, MAX_BLOCKS, L, H, WHOLE,
            )  # fmt: skip
            totals = counted_with(totals, chosen, tier, TIERS)
    for tier in tl.static_range(TIERS):
        tl.store(counts + flat * TIERS + tier, totals[tier])


@triton.jit(do_not_specialize=["target"], do_not_specialize_on_alignment=["entries", "own_entry", "own_tokens"])
def take_kernel(
    target, counts, heads, entries, own_entry, own_tokens, demand, totals,
    LAYOUTS: tl.constexpr, TIERS: tl.constexpr, L: tl.constexpr, H: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(heads / R), TIERS): own pages that the counted tokens of a tier need; they count as used from here on.

    demand [TIERS, heads], totals [TIERS, programs of a tier].
    """
    tier = tl.program_id(1)
    flat = tl.program_id(0) * R + tl.arange(0, R)
    live = flat < heads
    at = (target.to(tl.int64) * (L * H) + flat) * TIERS + tier
    used = tl.load(own_tokens + at, mask=live, other=0) + tl.load(counts + flat * TIERS + tier, mask=live, other=0)
    tl.store(own_tokens + at, used, mask=live)
    have = tl.load(entries + at, mask=live, other=0) - tl.load(own_entry + at, mask=live, other=0)
    pages = tl.cdiv(used, LAYOUTS[TIERS - 1][I_TOKENS])
    for other in tl.static_range(TIERS - 1):
        pages = tl.where(tier == other, tl.cdiv(used, LAYOUTS[other][I_TOKENS]), pages)
    wanted = tl.where(live, tl.maximum(pages - have, 0), 0)
    program = tier * tl.num_programs(0) + tl.program_id(0)
    record_demand(wanted, flat, live, program, demand + tier * heads, totals)


@triton.jit(
    do_not_specialize=["source", "target", "lo", "hi", "shared_len", "seq_len", "window", "sinks", "values_len"],
    do_not_specialize_on_alignment=["shared_scores", "entries", "own_entry", "own_tokens"],
)
def copy_kernel(
    target, source, lo, hi, shared_scores, shared_len, seq_len, window, sinks, lasting,
    high_cut, between, low_cut, tie_high, tie_low, values, values_len, counts,
    raw_like, pages, page_table, range_lo, range_hi, row_blocks, entries, own_entry, own_tokens,
    LAYOUTS: tl.constexpr, TIERS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE_BYTES: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Grid (layers * H). The target has the pages that ``take_kernel`` asked for."""
    flat = tl.program_id(0)
    layer, head = flat // H, flat % H
    source_at = ((source.to(tl.int64) * L + layer) * H + head) * TIERS
    target_at = ((target.to(tl.int64) * L + layer) * H + head) * TIERS
    shared_scores += flat.to(tl.int64) * shared_len
    values += flat.to(tl.int64) * values_len
    cuts, ties = load_cuts(high_cut, between, low_cut, tie_high, tie_low, flat, TIERS, L * H, WHOLE)
    window, sinks = lasting_of(window, sinks, lasting, layer)
    raw: tl.constexpr = raw_like.dtype
    used = ()
    for tier in tl.static_range(TIERS):
        before = tl.load(own_tokens + target_at + tier) - tl.load(counts + flat * TIERS + tier)
        used = used + (before,)
    for tier in tl.static_range(TIERS):
        slot = tl.arange(0, padded(LAYOUTS[tier][I_TOKENS]))
        for entry in range(0, tl.load(entries + source_at + tier)):
            page, score, position, chosen = scored_page(
                entry, source, lo, hi, layer, head, shared_scores, shared_len, seq_len, window, sinks, cuts, ties,
                values, values_len, pages, page_table, range_lo, range_hi, row_blocks,
                tier, layout_of(LAYOUTS, tier), TIERS, PAGE_BYTES, MAX_BLOCKS, L, H, WHOLE,
            )  # fmt: skip
            for to in tl.static_range(tier, TIERS):
                goes = chosen[to - tier]
                if to == tier:
                    codes = load_tokens(page, slot, goes, layout_of(LAYOUTS, tier), D, DV)
                else:
                    codes = requantized_tokens(
                        page, slot, goes, raw, layout_of(LAYOUTS, tier), layout_of(LAYOUTS, to), D, DV
                    )
                into, place = target_slots(
                    used[to], goes, target, layer, head, own_entry, pages, page_table, row_blocks, to,
                    LAYOUTS[to][I_TOKENS], TIERS, PAGE_BYTES, MAX_BLOCKS, L, H,
                )  # fmt: skip
                store_tokens(into, place, goes, codes, score, position, layout_of(LAYOUTS, to), D, DV)
            used = counted_with(used, chosen, tier, TIERS)
