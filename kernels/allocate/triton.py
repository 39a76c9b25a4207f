"""Slots and pages for a step's new tokens, for all requests, layers and heads: count, prefix sum, take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from sglang_diffkv.kernels.launch import Launch
from sglang_diffkv.kernels.prefix_sum.triton import take_spans
from sglang_diffkv.kernels.triton_ring import EMPTY, HEADS, NO_LIMIT, Spans, record_demand
from sglang_diffkv.kernels.triton_table import (
    BLOCK,
    check_rows,
    layout_constants,
    padded,
    store_positions,
    table_column,
)
from sglang_diffkv.layout.state import PageState


@triton.jit(do_not_specialize=["rows", "heads"], do_not_specialize_on_alignment=["demand", "places", "entries"])
def grant_kernel(
    rows, heads, demand, places, entries, pages, ring, counters, refcount, row_blocks, page_table, range_lo,
    range_hi, fault, num_pages,
    ONE_ROW: tl.constexpr, TIER: tl.constexpr, TIERS: tl.constexpr, TOKENS: tl.constexpr, POSITIONS: tl.constexpr,
    PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(heads / R)): append fresh pages to the tables of ``R`` heads, numbered (request, layer, head).

    ``rows`` points to the requests' rows, or with ``ONE_ROW`` is the only one. demand [heads] int32, places [programs]
    int64. What the ring cannot give becomes the scratch page with an empty range, and raises the row's fault.
    """
    flat = tl.program_id(0) * R + tl.arange(0, R)
    wanted = tl.load(demand + flat, mask=flat < heads, other=0)
    most = tl.max(wanted, 0)
    if most > 0:
        asks = wanted > 0
        layer = flat // H % L
        head = flat % H
        if ONE_ROW:
            row = rows.to(tl.int64) + tl.zeros([R], tl.int64)
        else:
            row = tl.load(rows + flat // (L * H), mask=asks, other=0).to(tl.int64)
        at_entries = entries + ((row * L + layer) * H + head) * TIERS + TIER
        start = tl.load(at_entries, mask=asks, other=0)
        tl.store(at_entries, start + wanted, mask=asks)
        first = tl.load(places + tl.program_id(0)) + (tl.cumsum(wanted, 0) - wanted).to(tl.int64)  # [R]
        limit = tl.load(counters + 1)
        token = tl.arange(0, padded(TOKENS))
        for step in range(most):
            due = step < wanted
            place = first + step
            granted = due & (place < limit)
            page = tl.load(ring + place % num_pages, mask=granted, other=0)
            page = tl.where(granted, page, num_pages)  # the scratch page lies behind the ring's
            entry = start + step
            column = table_column(entry, TIER, MAX_BLOCKS)
            block = tl.load(row_blocks + row * MAX_BLOCKS + column // BLOCK, mask=due, other=0)
            at = ((block.to(tl.int64) * L + layer) * H + head) * BLOCK + column % BLOCK
            tl.store(page_table + at, page, mask=due)
            tl.store(range_lo + at, tl.zeros([R], tl.int32), mask=due)
            tl.store(range_hi + at, tl.where(granted, NO_LIMIT, 0), mask=due)
            tl.store(refcount + page, tl.full([R], 1, tl.int32), mask=granted)
            tl.store(fault + row, tl.full([R], 1, tl.int32), mask=due & (place >= limit))
            target = (pages + page.to(tl.int64) * PAGE_BYTES)[:, None]
            empty = tl.full([R, padded(TOKENS)], EMPTY, tl.int32)
            store_positions(target, POSITIONS, token[None, :], empty, due[:, None] & (token[None, :] < TOKENS))


def grant_pages(
    state: PageState, rows: torch.Tensor | int, tier: int, heads: int, demand: torch.Tensor, places: torch.Tensor
) -> None:
    """Append the pages of the heads' spans to the rows' tables: all slots empty, range unlimited.

    Args:
        rows: [B] int32 or int64, or one row. heads: of all of them.
        demand: [at least heads] int32. places: [at least a number each ``HEADS`` heads] int64, of ``take_spans``.
    """
    prepare_grant(state, rows, tier, heads, demand, places)(rows=rows)


def prepare_grant(
    state: PageState, rows: torch.Tensor | int | None, tier: int, heads: int, demand: torch.Tensor, places: torch.Tensor
) -> Launch:
    """``grant_pages`` of what these tensors hold by then, to ``rows`` of each call; ``rows`` here: of the form of
    these, or None for one row."""
    assert demand.dtype == torch.int32 and demand.is_contiguous() and demand.shape[0] >= heads
    assert places.dtype == torch.int64 and places.is_contiguous() and places.shape[0] * HEADS >= heads
    layout = layout_constants(state.fmt.layouts[tier])
    return Launch(
        grant_kernel,
        (triton.cdiv(heads, HEADS),),
        (
            None, heads, demand, places, state.entries, state.pages, state.ring, state.counters, state.refcount,
            state.row_blocks, state.page_table, state.range_lo, state.range_hi, state.fault, state.num_pages,
        ),
        {
            "ONE_ROW": not isinstance(rows, torch.Tensor), "TIER": tier, "TIERS": len(state.fmt.tiers),
            "TOKENS": layout["TOKENS"], "POSITIONS": layout["POSITIONS"], "PAGE_BYTES": state.fmt.page_bytes,
            "MAX_BLOCKS": state.row_blocks.shape[1], "L": state.row_layers, "H": state.num_heads, "R": HEADS,
            "num_warps": 4,
        },
    )  # fmt: skip


def add_own_pages(state: PageState, rows: torch.Tensor, tiers: Sequence[int], spans: Spans) -> None:
    """``reference.add_own_pages``, of one of ``tiers`` after the other, of the demand that ``record_demand`` left in
    ``spans``: [tiers, heads], and totals [tiers, programs]. rows [B]; a launch, and one for each tier."""
    heads = rows.shape[0] * state.num_layers * state.num_heads
    programs = triton.cdiv(heads, HEADS)
    take_spans(state.counters, spans.totals[: len(tiers) * programs], spans.places)
    for number, tier in enumerate(tiers):
        grant_pages(state, rows, tier, heads, spans.demand[number * heads :], spans.places[number * programs :])


@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=["rows", "new_tokens"])
def reserve_kernel(
    rows, new_tokens, num_valid, batch, entries, own_entry, own_tokens, hole, write_slot, demand, totals,
    TOKENS: tl.constexpr, TIERS: tl.constexpr, L: tl.constexpr, H: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(batch * L * H / R)): slots of ``R`` heads, as in ``grant_kernel``, and how many pages they need."""
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
    have = tl.load(entries + at * TIERS, mask=live, other=0) - tl.load(own_entry + at * TIERS, mask=live, other=0)
    wanted = tl.where(live, tl.maximum(tl.cdiv(used, TOKENS) - have, 0), 0)
    record_demand(wanted, flat, b < batch, tl.program_id(0), demand, totals)


def reserve(
    state: PageState,
    rows: torch.Tensor,
    new_tokens: torch.Tensor,
    spans: Spans,
    num_valid: torch.Tensor,
) -> None:
    """Make room in the high tier for a step's new tokens, in three launches; see ``reference.reserve``.

    Args:
        rows, new_tokens: [B] integers; the first ``num_valid`` rows are distinct, the others ignored.
        spans: for at least B requests.
    """
    check_rows(rows, num_valid, state)
    assert new_tokens.shape == rows.shape and new_tokens.is_contiguous() and rows.shape[0] <= spans.requests
    layers, heads, batch = state.num_layers, state.num_heads, rows.shape[0]
    if not batch:
        return
    reserve_kernel[(triton.cdiv(batch * layers * heads, HEADS),)](
        rows, new_tokens, num_valid, batch, state.entries, state.own_entry, state.own_tokens, state.hole,
        state.write_slot, spans.demand, spans.totals,
        TOKENS=state.fmt.high.tokens, TIERS=len(state.fmt.tiers), L=layers, H=heads, R=HEADS, num_warps=4,
    )  # fmt: skip
    add_own_pages(state, rows, (0,), spans)
