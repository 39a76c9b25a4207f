"""Return a row's pages, or those that hold nothing below a position, on the GPU without host synchronisation."""

from __future__ import annotations

import triton
import triton.language as tl

from sglang_diffkv.kernels.attach.triton import ENTRIES, holds
from sglang_diffkv.kernels.triton_ring import drop_references
from sglang_diffkv.kernels.triton_table import BLOCK, layout_constants, table_index
from sglang_diffkv.mem_pool.state import PageState


@triton.jit(do_not_specialize=["row", "end"])
def release_kernel(
    row, end, pages, page_table, range_lo, range_hi, block_table, entries, kept_entry, own_entry, own_tokens, hole,
    fault, ring, counters, refcount, num_pages,
    HIGH: tl.constexpr, TIER: tl.constexpr, TIERS: tl.constexpr, ALL: tl.constexpr, TOKENS: tl.constexpr,
    POSITIONS: tl.constexpr, PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr,
    E: tl.constexpr,
):  # fmt: skip
    """Grid (L * H): one (layer, head) of one tier. ``ALL`` drops every page, else those without a token below
    ``end``, and the others close ranks in order."""
    layer, head = tl.program_id(0) // H, tl.program_id(0) % H
    heads_at = (row.to(tl.int64) * L + layer) * H + head
    row_at = heads_at * TIERS + TIER
    count = tl.load(entries + row_at)
    done = 0
    for begin in range(0, count, E):
        entry = begin + tl.arange(0, E)
        live = entry < count
        column = entry if HIGH else MAX_BLOCKS * BLOCK - 1 - entry
        at = table_index(block_table, row, layer, head, column, live, MAX_BLOCKS, L, H)
        page = tl.load(page_table + at, mask=live, other=0)
        hi = tl.load(range_hi + at, mask=live, other=0)
        used = live & (hi > 0)  # not the scratch page
        if ALL:
            drop_references(page, used, ring, counters, refcount, num_pages)
        else:
            lo = tl.load(range_lo + at, mask=live, other=0)
            hi = tl.minimum(hi, end)
            keep = used & holds(page, lo, hi, used, pages, POSITIONS, TOKENS, PAGE_BYTES)
            drop_references(page, used & (keep == 0), ring, counters, refcount, num_pages)
            tl.debug_barrier()
            entry = done + tl.cumsum(keep.to(tl.int32), 0) - 1
            column = entry if HIGH else MAX_BLOCKS * BLOCK - 1 - entry
            at = table_index(block_table, row, layer, head, column, keep, MAX_BLOCKS, L, H)
            tl.store(page_table + at, page, mask=keep)
            tl.store(range_lo + at, lo, mask=keep)
            tl.store(range_hi + at, hi, mask=keep)
            done += tl.sum(keep.to(tl.int32), 0)
    tl.store(entries + row_at, done)
    tl.store(kept_entry + row_at, done)
    tl.store(own_entry + row_at, done)
    if ALL:
        tl.store(own_tokens + row_at, 0)
        tl.store(hole + heads_at, -1)
        tl.store(fault + row, 0)


def _launch(state: PageState, row: int, end: int, everything: bool) -> None:
    for tier, layout in enumerate(state.fmt.layouts):
        constants = layout_constants(layout, "")
        release_kernel[(state.num_layers * state.num_heads,)](
            row, end, state.pages, state.page_table, state.range_lo, state.range_hi, state.block_table,
            state.entries, state.kept_entry, state.own_entry, state.own_tokens, state.hole, state.fault,
            state.ring, state.counters, state.refcount, state.num_pages,
            HIGH=tier == 0, TIER=tier, TIERS=len(state.fmt.tiers), ALL=everything, TOKENS=constants["TOKENS"],
            POSITIONS=constants["POSITIONS"], PAGE_BYTES=state.fmt.page_bytes,
            MAX_BLOCKS=state.block_table.shape[1], L=state.num_layers, H=state.num_heads, E=ENTRIES, num_warps=1,
        )  # fmt: skip


def release(state: PageState, row: int) -> None:
    """Drop every reference the row holds and empty it."""
    _launch(state, row, 0, True)


def trim(state: PageState, row: int, end: int) -> None:
    """Forget the row's tokens at positions >= ``end``; for rows that own no writable page (tree segments)."""
    _launch(state, row, end, False)
