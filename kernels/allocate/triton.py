"""Slots and pages for a step's new tokens, for all requests, layers and heads in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_diffkv.kernels.triton_ring import add_own_pages, settle
from sglang_diffkv.kernels.triton_table import check_rows
from sglang_diffkv.mem_pool.state import PageState

HEADS = 128
"""Heads of a program."""


@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=["rows", "new_tokens"])
def reserve_kernel(
    rows, new_tokens, num_valid, batch, entries, own_entry, own_tokens, hole, write_slot, pages, ring, counters,
    refcount, block_table, page_table, range_lo, range_hi, fault, ticket, num_pages,
    TOKENS: tl.constexpr, POSITIONS: tl.constexpr, TIERS: tl.constexpr, PAGE_BYTES: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(batch * L * H / R)): ``R`` heads, numbered (request, layer, head)."""
    flat = tl.program_id(0) * R + tl.arange(0, R)
    b = flat // (L * H)
    layer = flat // H % L
    head = flat % H
    live = (b < batch) & (b < tl.load(num_valid))
    row = tl.load(rows + b, mask=live, other=0).to(tl.int64)
    count = tl.load(new_tokens + b, mask=live, other=0).to(tl.int32)
    at = (row * L + layer) * H + head
    gap = tl.load(hole + at, mask=live, other=-1)
    reuse = (gap >= 0) & (count == 1)
    used = tl.load(own_tokens + at * TIERS, mask=live, other=0)
    tl.store(write_slot + at, tl.where(reuse, gap, used), mask=live)
    tl.store(hole + at, tl.where(reuse, -1, gap), mask=live)
    used += tl.where(reuse, 0, count)
    tl.store(own_tokens + at * TIERS, used, mask=live)
    start = tl.load(entries + at * TIERS, mask=live, other=0)
    have = start - tl.load(own_entry + at * TIERS, mask=live, other=0)
    demand = tl.where(live, tl.maximum(tl.cdiv(used, TOKENS) - have, 0), 0)
    tl.store(entries + at * TIERS, start + demand, mask=live & (demand > 0))
    add_own_pages(
        demand, row, layer, head, start, pages, ring, counters, refcount, block_table, page_table, range_lo,
        range_hi, fault, num_pages, True, TOKENS, POSITIONS, PAGE_BYTES, MAX_BLOCKS, L, H, R,
    )  # fmt: skip
    settle(counters, ticket)


def reserve(
    state: PageState,
    rows: torch.Tensor,
    new_tokens: torch.Tensor,
    ticket: torch.Tensor,
    num_valid: torch.Tensor,
) -> None:
    """Make room in the high tier for a step's new tokens; see ``reference.reserve``.

    Args:
        rows, new_tokens: [B] integers; the first ``num_valid`` rows are distinct, the others ignored.
        ticket: [1] int32, zero before the first launch and after each.
    """
    check_rows(rows, num_valid, state)
    assert new_tokens.shape == rows.shape and new_tokens.is_contiguous()
    assert ticket.shape == (1,) and ticket.dtype == torch.int32
    layers, heads, batch = state.num_layers, state.num_heads, rows.shape[0]
    reserve_kernel[(triton.cdiv(max(batch, 1) * layers * heads, HEADS),)](
        rows, new_tokens, num_valid, batch, state.entries, state.own_entry, state.own_tokens, state.hole,
        state.write_slot, state.pages, state.ring, state.counters, state.refcount, state.block_table,
        state.page_table, state.range_lo, state.range_hi, state.fault, ticket, state.num_pages,
        TOKENS=state.fmt.high.tokens, POSITIONS=state.fmt.high.position_offset, TIERS=len(state.fmt.tiers),
        PAGE_BYTES=state.fmt.page_bytes, MAX_BLOCKS=state.block_table.shape[1], L=layers, H=heads, R=HEADS,
        num_warps=4,
    )  # fmt: skip
