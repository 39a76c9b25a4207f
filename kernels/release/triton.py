"""Return a row's pages, or those that hold nothing below a position, on the GPU without host synchronisation.

Three launches: drop references and count what falls free, prefix sum, put pages into the ring and tidy the table.
"""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl

from sglang_diffkv.kernels.attach.triton import ENTRIES, holds
from sglang_diffkv.kernels.launch import Launch
from sglang_diffkv.kernels.prefix_sum.triton import prepare_return_spans
from sglang_diffkv.kernels.triton_ring import Spans, drop_references, place_pages
from sglang_diffkv.kernels.triton_table import (
    I_POSITIONS,
    I_TOKENS,
    layout_numbers,
    load_bound,
    table_column,
    table_index,
)
from sglang_diffkv.layout.state import PageState


@triton.jit
def drop_pages(
    row, layer, head, count, end, pages, page_table, range_lo, range_hi, row_blocks, refcount,
    TIER: tl.constexpr, ALL: tl.constexpr, TOKENS: tl.constexpr, POSITIONS: tl.constexpr, PAGE_BYTES: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Drop a head's references of one tier, as ``release_kernel``; returns the number of pages that fall free.

    Without ``ALL`` the kept entries end at ``end`` and the others get an empty range."""
    freed = 0
    for begin in range(0, count, E):
        entry = begin + tl.arange(0, E)
        live = entry < count
        column = table_column(entry, TIER, MAX_BLOCKS)
        at = table_index(row_blocks, row, layer, head, column, live, MAX_BLOCKS, L, H)
        page = tl.load(page_table + at, mask=live, other=0)
        hi = load_bound(range_hi, at, live)
        dropped = live & (hi > 0)  # not the scratch page
        if not ALL:
            lo = load_bound(range_lo, at, live)
            hi = tl.minimum(hi, end)
            keep = dropped & holds(page, lo, hi, dropped, pages, POSITIONS, TOKENS, PAGE_BYTES)
            tl.store(range_hi + at, tl.where(keep, hi, 0), mask=live)
            dropped = dropped & (keep == 0)
        freed += tl.sum(drop_references(page, dropped, refcount).to(tl.int32), 0)
    return freed


@triton.jit
def tidy_table(
    row, layer, head, count, place, page_table, range_lo, range_hi, row_blocks, ring, refcount, num_pages,
    TIER: tl.constexpr, ALL: tl.constexpr, MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr,
    E: tl.constexpr,
):  # fmt: skip
    """Put a head's pages of one tier without references into the ring from ``place`` on; without ``ALL`` the kept
    entries close ranks in order. Returns the number of these."""
    done = 0
    for begin in range(0, count, E):
        entry = begin + tl.arange(0, E)
        live = entry < count
        column = table_column(entry, TIER, MAX_BLOCKS)
        at = table_index(row_blocks, row, layer, head, column, live, MAX_BLOCKS, L, H)
        page = tl.load(page_table + at, mask=live, other=num_pages)
        live = live & (page != num_pages)
        freed = live & (tl.load(refcount + page, mask=live, other=1) == 0)
        place = place_pages(page, freed, place, ring, num_pages)
        if not ALL:
            lo = load_bound(range_lo, at, live)
            hi = load_bound(range_hi, at, live)
            tl.debug_barrier()
            keep = live & (hi > 0)
            entry = done + tl.cumsum(keep.to(tl.int32), 0) - 1
            column = table_column(entry, TIER, MAX_BLOCKS)
            at = table_index(row_blocks, row, layer, head, column, keep, MAX_BLOCKS, L, H)
            tl.store(page_table + at, page, mask=keep)
            tl.store(range_lo + at, lo, mask=keep)
            tl.store(range_hi + at, hi, mask=keep)
            done += tl.sum(keep.to(tl.int32), 0)
    return done


@triton.jit(do_not_specialize=["row", "end"])
def drop_kernel(
    row, end, pages, page_table, range_lo, range_hi, row_blocks, entries, refcount, freed,
    ALL: tl.constexpr, TIERS: tl.constexpr, LAYOUTS: tl.constexpr, PAGE_BYTES: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Grid (L * H): one (layer, head). ``ALL`` drops every page, else those without a token below ``end``.

    freed [TIERS, L * H] int32: pages that nobody refers to now.
    """
    layer, head = tl.program_id(0) // H, tl.program_id(0) % H
    row_at = ((row.to(tl.int64) * L + layer) * H + head) * TIERS
    for tier in tl.static_range(TIERS):
        count = drop_pages(
            row, layer, head, tl.load(entries + row_at + tier), end, pages, page_table, range_lo, range_hi, row_blocks,
            refcount, tier, ALL, LAYOUTS[tier][I_TOKENS], LAYOUTS[tier][I_POSITIONS], PAGE_BYTES, MAX_BLOCKS, L, H, E,
        )  # fmt: skip
        tl.store(freed + tier * L * H + tl.program_id(0), count)


@triton.jit(do_not_specialize=["row"])
def release_kernel(
    row, places, page_table, range_lo, range_hi, row_blocks, entries, kept_entry, own_entry, own_tokens, hole, fault,
    ring, refcount, num_pages,
    ALL: tl.constexpr, TIERS: tl.constexpr, MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr,
    E: tl.constexpr,
):  # fmt: skip
    """Grid (L * H): one (layer, head). The freed pages go to their ``places`` [TIERS, L * H]; with ``ALL`` the row is
    empty then."""
    layer, head = tl.program_id(0) // H, tl.program_id(0) % H
    heads_at = (row.to(tl.int64) * L + layer) * H + head
    for tier in tl.static_range(TIERS):
        row_at = heads_at * TIERS + tier
        done = tidy_table(
            row, layer, head, tl.load(entries + row_at), tl.load(places + tier * L * H + tl.program_id(0)), page_table,
            range_lo, range_hi, row_blocks, ring, refcount, num_pages, tier, ALL, MAX_BLOCKS, L, H, E,
        )  # fmt: skip
        tl.store(entries + row_at, done)
        tl.store(kept_entry + row_at, done)
        tl.store(own_entry + row_at, done)
        if ALL:
            tl.store(own_tokens + row_at, 0)
    if ALL:
        tl.store(hole + heads_at, -1)
        tl.store(fault + row, 0)


def prepare_release(state: PageState, spans: Spans, *, everything: bool) -> Callable[[int, int], None]:
    """``release`` of rows of a state, if ``everything``, else ``trim``: row, end."""
    tiers, heads = len(state.fmt.tiers), state.num_layers * state.num_heads
    shape = {
        "ALL": everything, "TIERS": tiers, "MAX_BLOCKS": state.row_blocks.shape[1], "L": state.num_layers,
        "H": state.num_heads, "E": ENTRIES, "num_warps": 1,
    }  # fmt: skip
    freed = spans.totals[: tiers * heads]
    drop = Launch(
        drop_kernel,
        (heads,),
        (
            None, None, state.pages, state.page_table, state.range_lo, state.range_hi, state.row_blocks, state.entries,
            state.refcount, freed,
        ),
        {"LAYOUTS": layout_numbers(state.fmt), "PAGE_BYTES": state.fmt.page_bytes, **shape},
    )  # fmt: skip
    give_back = Launch(
        release_kernel,
        (heads,),
        (
            None, spans.places, state.page_table, state.range_lo, state.range_hi, state.row_blocks, state.entries,
            state.kept_entry, state.own_entry, state.own_tokens, state.hole, state.fault, state.ring, state.refcount,
            state.num_pages,
        ),
        shape,
    )  # fmt: skip
    count = prepare_return_spans(state.counters, freed, spans.places)

    def release_again(row: int, end: int) -> None:
        drop(row=row, end=end)
        count()
        give_back(row=row)

    return release_again


def release(state: PageState, row: int, spans: Spans) -> None:
    """Drop every reference the row holds and empty it."""
    prepare_release(state, spans, everything=True)(row, 0)


def trim(state: PageState, row: int, end: int, spans: Spans) -> None:
    """Forget the row's tokens at positions >= ``end``; for rows that own no writable page (tree segments)."""
    prepare_release(state, spans, everything=False)(row, end)
