"""Part with the pages that a row may not write, on the GPU without host synchronisation."""

from __future__ import annotations

import triton
import triton.language as tl

from sglang_diffkv.kernels.attach.triton import ENTRIES
from sglang_diffkv.kernels.decode_attention.triton_tiles import tile_page
from sglang_diffkv.kernels.triton_table import table_column, table_index
from sglang_diffkv.layout.state import PageState


@triton.jit(
    do_not_specialize=["row", "target"],
    do_not_specialize_on_alignment=["entries", "kept_entry", "own_entry", "own_tokens"],
)
def transfer_pages_kernel(
    row, target, page_table, range_lo, range_hi, row_blocks, entries, kept_entry, own_entry, own_tokens,
    TIERS: tl.constexpr, MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Grid (layers * H): one (layer, head), entries in order: what is moved down was read before."""
    layer, head = tl.program_id(0) // H, tl.program_id(0) % H
    for tier in tl.static_range(TIERS):
        row_at = ((row.to(tl.int64) * L + layer) * H + head) * TIERS + tier
        target_at = ((target.to(tl.int64) * L + layer) * H + head) * TIERS + tier
        count, own = tl.load(entries + row_at), tl.load(own_entry + row_at)
        for begin in range(0, count, E):
            entry = begin + tl.arange(0, E)
            live = entry < count
            page, lo, hi = tile_page(
                entry, count, row_blocks, page_table, range_lo, range_hi, row, layer, head, tier, 1, MAX_BLOCKS, L, H
            )
            tl.debug_barrier()
            given, left = live & (entry < own), live & (entry >= own)
            to = table_column(tl.where(given, entry, 0), tier, MAX_BLOCKS)
            there = table_index(row_blocks, target, layer, head, to, given, MAX_BLOCKS, L, H)
            to = table_column(tl.where(left, entry - own, 0), tier, MAX_BLOCKS)
            here = table_index(row_blocks, row, layer, head, to, left, MAX_BLOCKS, L, H)
            tl.store(page_table + there, page, mask=given)
            tl.store(range_lo + there, lo, mask=given)
            tl.store(range_hi + there, hi, mask=given)
            tl.store(page_table + here, page, mask=left)
            tl.store(range_lo + here, lo, mask=left)
            tl.store(range_hi + here, hi, mask=left)
        tl.store(entries + row_at, count - own)
        tl.store(kept_entry + row_at, 0)
        tl.store(own_entry + row_at, 0)
        tl.store(entries + target_at, own)
        tl.store(kept_entry + target_at, 0)
        tl.store(own_entry + target_at, own)
        tl.store(own_tokens + target_at, 0)


def transfer_pages(state: PageState, row: int, target: int) -> None:
    """``reference.transfer_pages``; ``target`` must differ from ``row``."""
    assert target != row
    transfer_pages_kernel[(state.num_layers * state.num_heads,)](
        row, target, state.page_table, state.range_lo, state.range_hi, state.row_blocks, state.entries,
        state.kept_entry, state.own_entry, state.own_tokens,
        TIERS=len(state.fmt.tiers), MAX_BLOCKS=state.row_blocks.shape[1], L=state.row_layers, H=state.num_heads,
        E=ENTRIES, num_warps=1,
    )  # fmt: skip
