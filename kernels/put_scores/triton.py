"""New scores by position on the GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_diffkv.kernels.triton_table import layout_constants
from sglang_diffkv.kernels.triton_tokens import held_page, number_at
from sglang_diffkv.layout.state import PageState

PROGRAMS = 8
"""Programs that share a head's pages."""


@triton.jit(do_not_specialize=["row", "values_len"], do_not_specialize_on_alignment=["entries", "own_entry"])
def put_kernel(
    row, values, values_len, pages, page_table, range_lo, range_hi, row_blocks, entries, own_entry,
    TIER: tl.constexpr, TIERS: tl.constexpr, TOKENS: tl.constexpr, SCORES: tl.constexpr, POSITIONS: tl.constexpr,
    PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Grid (layers * H, programs): the own pages of one tier, round robin."""
    flat = tl.program_id(0)
    layer, head = flat // H, flat % H
    at = ((row.to(tl.int64) * L + layer) * H + head) * TIERS + TIER
    values += flat.to(tl.int64) * values_len
    for entry in range(tl.load(own_entry + at) + tl.program_id(1), tl.load(entries + at), tl.num_programs(1)):
        page, _, position, held = held_page(
            entry, row, 0, values_len, layer, head, values, 0, pages, page_table, range_lo, range_hi, row_blocks,
            TIER, TOKENS, SCORES, POSITIONS, PAGE_BYTES, MAX_BLOCKS, L, H,
        )  # fmt: skip
        value = tl.load(values + position, mask=held, other=float("nan"))
        slot = tl.arange(0, value.shape[0])
        tl.store(number_at(page, SCORES, slot), value.to(tl.int32, bitcast=True), mask=held & (value == value))


def put_scores(state: PageState, row: int, values: torch.Tensor) -> None:
    """``reference.put_scores``; values contiguous."""
    layers, heads, fmt = state.num_layers, state.num_heads, state.fmt
    assert values.shape[:2] == (layers, heads) and values.dtype == torch.float32 and values.is_contiguous()
    names = ("TOKENS", "SCORES", "POSITIONS")
    for tier, layout in enumerate(fmt.layouts):
        if layout.score_offset is None:
            continue
        every = layout_constants(layout)
        put_kernel[(layers * heads, PROGRAMS)](
            row, values, values.shape[2], state.pages, state.page_table, state.range_lo, state.range_hi,
            state.row_blocks, state.entries, state.own_entry, TIER=tier, TIERS=len(fmt.tiers),
            **{name: every[name] for name in names}, PAGE_BYTES=fmt.page_bytes, MAX_BLOCKS=state.row_blocks.shape[1],
            L=state.row_layers, H=heads, num_warps=1,
        )  # fmt: skip
