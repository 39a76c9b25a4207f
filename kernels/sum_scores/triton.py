"""Sums of heads' scores in one launch, without host synchronisation."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_diffkv.kernels.triton_table import (
    I_POSITIONS,
    I_SCORES,
    I_TOKENS,
    NO_SCORES,
    check_rows,
    layout_numbers,
    load_bound,
    load_positions,
    padded,
    table_column,
    table_index,
)
from sglang_diffkv.layout.state import PageState

ENTRIES = 16
"""Table entries of an iteration."""


@triton.jit
def tier_sum(
    row, layer, head, count, pages, page_table, range_lo, range_hi, row_blocks,
    TIER: tl.constexpr, TOKENS: tl.constexpr, SCORES: tl.constexpr, POSITIONS: tl.constexpr, PAGE_BYTES: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Of the tokens on the first ``count`` entries of a tier."""
    token = tl.arange(0, padded(TOKENS))
    total = tl.zeros([E, padded(TOKENS)], tl.float32)
    for begin in range(0, count, E):
        entry = begin + tl.arange(0, E)
        live = entry < count
        column = table_column(entry, TIER, MAX_BLOCKS)
        at = table_index(row_blocks, row, layer, head, column, live, MAX_BLOCKS, L, H)
        first = load_bound(range_lo, at, live)  # [E]
        end = load_bound(range_hi, at, live)
        page = tl.load(page_table + at, mask=live, other=0)
        inside = (live & (first < end))[:, None] & (token[None, :] < TOKENS)  # never the scratch page
        source = (pages + page.to(tl.int64) * PAGE_BYTES)[:, None]
        position = load_positions(source, POSITIONS, token[None, :], inside)  # [E, padded tokens]
        held = inside & (position >= first[:, None]) & (position < end[:, None])
        if SCORES != NO_SCORES:
            score_ptr = (source + SCORES).to(tl.pointer_type(tl.float32)) + token[None, :]
            total += tl.load(score_ptr, mask=held, other=0.0)
    return tl.sum(tl.sum(total, 1), 0)


@triton.jit(do_not_specialize_on_alignment=["rows"])
def sum_kernel(
    rows, num_valid, out, pages, page_table, range_lo, range_hi, row_blocks, entries,
    LAYOUTS: tl.constexpr, TIERS: tl.constexpr, PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr, L: tl.constexpr,
    H: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Grid (B * L * H): one head of a request."""
    flat = tl.program_id(0)
    place = flat % (L * H)
    layer, head = place // H, place % H
    if flat // (L * H) >= tl.load(num_valid):
        return
    row = tl.load(rows + flat // (L * H)).to(tl.int64)
    at = entries + (row * (L * H) + place) * TIERS
    total = 0.0
    for tier in tl.static_range(TIERS):
        total += tier_sum(
            row, layer, head, tl.load(at + tier), pages, page_table, range_lo, range_hi, row_blocks,
            tier, LAYOUTS[tier][I_TOKENS], LAYOUTS[tier][I_SCORES], LAYOUTS[tier][I_POSITIONS], PAGE_BYTES, MAX_BLOCKS,
            L, H, E,
        )  # fmt: skip
    tl.store(out + flat, total)


def sum_scores(state: PageState, rows: torch.Tensor, num_valid: torch.Tensor, out: torch.Tensor) -> None:
    """``reference.sum_scores`` of the first ``num_valid`` rows, into ``out``: at least B of [., L, H] float32."""
    check_rows(rows, num_valid, state)
    layers, heads, fmt = state.num_layers, state.num_heads, state.fmt
    assert out.shape[0] >= rows.shape[0] and out.shape[1:] == (layers, heads)
    assert out.dtype == torch.float32 and out.is_contiguous()
    sum_kernel[(rows.shape[0] * layers * heads,)](
        rows, num_valid, out, state.pages, state.page_table, state.range_lo, state.range_hi, state.row_blocks,
        state.entries,
        LAYOUTS=layout_numbers(fmt), TIERS=len(fmt.tiers), PAGE_BYTES=fmt.page_bytes,
        MAX_BLOCKS=state.row_blocks.shape[1], L=layers, H=heads, E=ENTRIES, num_warps=4,
    )  # fmt: skip
