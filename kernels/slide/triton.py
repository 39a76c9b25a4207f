"""Sliding layers drop what has left their window, on the GPU: one launch for all layers; no host synchronisation."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_diffkv.kernels.triton_ring import EMPTY
from sglang_diffkv.kernels.triton_table import (
    check_rows,
    layout_constants,
    load_positions,
    padded,
    store_positions,
    table_index,
)
from sglang_diffkv.layout.state import PageState

ENTRIES = 8
"""Pages of an iteration."""


@triton.jit(do_not_specialize_on_alignment=["rows", "seq_lens"])
def slide_kernel(
    sliding, rows, seq_lens, num_valid, pages, page_table, row_blocks, entries, own_entry, hole, scratch_page,
    TIERS: tl.constexpr, TOKENS: tl.constexpr, POSITIONS: tl.constexpr, PAGE_BYTES: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr, S: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Grid (B * S * H): the own high pages of a request's head, ``E`` an iteration, of sliding layer ``S``."""
    flat = tl.program_id(0)
    b, which, head = flat // (S * H), flat // H % S, flat % H
    if b >= tl.load(num_valid):
        return
    layer = tl.load(sliding + which * 2)
    leaving = tl.load(seq_lens + b).to(tl.int32) - 1 - tl.load(sliding + which * 2 + 1)
    if leaving < 0:
        return
    row = tl.load(rows + b).to(tl.int64)
    at = (row * L + layer) * H + head
    first = tl.load(own_entry + at * TIERS)
    count = tl.load(entries + at * TIERS)
    slot = tl.arange(0, padded(TOKENS))
    found = tl.full([E, padded(TOKENS)], EMPTY, tl.int32)
    for begin in range(first, count, E):
        entry = begin + tl.arange(0, E)
        live = entry < count
        index = table_index(row_blocks, row, layer, head, entry, live, MAX_BLOCKS, L, H)
        page = tl.load(page_table + index, mask=live, other=0)
        inside = (live & (page != scratch_page))[:, None] & (slot < TOKENS)[None, :]
        source = (pages + page.to(tl.int64) * PAGE_BYTES)[:, None]
        gone = inside & (load_positions(source, POSITIONS, slot[None, :], inside) == leaving)
        store_positions(source, POSITIONS, slot[None, :], tl.full([E, padded(TOKENS)], EMPTY, tl.int32), gone)
        found = tl.maximum(found, tl.where(gone, ((entry - first) * TOKENS)[:, None] + slot[None, :], EMPTY))
    place = tl.max(tl.max(found, 1), 0)
    tl.store(hole + at, place, mask=place >= 0)


def slide(state: PageState, rows: torch.Tensor, seq_lens: torch.Tensor, num_valid: torch.Tensor) -> None:
    """``reference.slide``. rows, seq_lens: [B] integers. num_valid: [1] int32, requests that are not padding."""
    check_rows(rows, num_valid, state)
    assert seq_lens.shape == rows.shape
    layers, heads, count = state.num_layers, state.num_heads, state.sliding.shape[0]
    if not count:
        return
    high = layout_constants(state.fmt.high)
    slide_kernel[(rows.shape[0] * count * heads,)](
        state.sliding, rows, seq_lens, num_valid, state.pages, state.page_table, state.row_blocks, state.entries,
        state.own_entry, state.hole, state.scratch_page,
        TIERS=len(state.fmt.tiers), TOKENS=high["TOKENS"], POSITIONS=high["POSITIONS"], PAGE_BYTES=state.fmt.page_bytes,
        MAX_BLOCKS=state.row_blocks.shape[1], L=layers, H=heads, S=count, E=ENTRIES, num_warps=1,
    )  # fmt: skip
