"""Lists of rows' pages in one launch, without host synchronisation."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from sglang_diffkv.kernels.launch import Launch
from sglang_diffkv.kernels.list_pages import reference
from sglang_diffkv.kernels.triton_table import (
    I_POSITIONS,
    I_TOKENS,
    layout_numbers,
    load_bound,
    load_positions,
    padded,
    table_column,
    table_index,
)
from sglang_diffkv.layout.page_format import EMPTY
from sglang_diffkv.layout.state import PageState

ENTRIES = 16
"""Table entries of an iteration."""
TIER, HEAD, LO, UPPER, LEAST, LAST = (
    tl.constexpr(x)
    for x in (
        reference.TIER, reference.HEAD, reference.LO, reference.UPPER, reference.LEAST, reference.LAST
    )
)  # fmt: skip
NO_POSITION, NONE = tl.constexpr(reference.NO_POSITION), tl.constexpr(EMPTY)


@triton.jit
def list_tier(
    row, lo, hi, first, most, before, number, pages, page_table, range_lo, range_hi, row_blocks, entries, out, known,
    total,
    TIER_NUMBER: tl.constexpr, TIERS: tl.constexpr, TOKENS: tl.constexpr, POSITIONS: tl.constexpr,
    PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """One tier of one head, ``number`` over all layers, behind ``before`` other pages of its row."""
    count = tl.load(entries + (row * (L * H) + number) * TIERS + TIER_NUMBER)
    token = tl.arange(0, padded(TOKENS))
    for begin in range(0, count, E):
        entry = begin + tl.arange(0, E)
        live = entry < count
        column = table_column(entry, TIER_NUMBER, MAX_BLOCKS)
        at = table_index(row_blocks, row, number // H, number % H, column, live, MAX_BLOCKS, L, H)
        page = tl.load(page_table + at, mask=live, other=0).to(tl.int64)
        low = tl.maximum(load_bound(range_lo, at, live), lo)
        high = tl.minimum(load_bound(range_hi, at, live), hi)
        there = live[:, None] & (token[None, :] < TOKENS)
        position = load_positions((pages + page * PAGE_BYTES)[:, None], POSITIONS, token[None, :], there)
        inside = there & (position >= low[:, None]) & (position < high[:, None])
        keep = live & (before + entry < most)
        place = first + before + entry
        tl.store(out + place, page, mask=keep)
        target = known + place
        tl.store(target + TIER * total, tl.full([E], TIER_NUMBER, tl.int32), mask=keep)
        tl.store(target + HEAD * total, tl.zeros([E], tl.int32) + number, mask=keep)
        tl.store(target + LO * total, low, mask=keep)
        tl.store(target + UPPER * total, high, mask=keep)
        tl.store(target + LEAST * total, tl.min(tl.where(inside, position, NO_POSITION), 1), mask=keep)
        tl.store(target + LAST * total, tl.max(tl.where(inside, position, NONE), 1), mask=keep)


@triton.jit(do_not_specialize=["total", "n"], do_not_specialize_on_alignment=["asked", "out", "known"])
def list_pages_kernel(
    asked, n, total, out, known, pages, page_table, range_lo, range_hi, row_blocks, entries,
    LAYOUTS: tl.constexpr, TIERS: tl.constexpr, PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr, L: tl.constexpr,
    H: tl.constexpr, PADDED_HEADS: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Grid (L * H, n). ``asked``: [5, n] int64."""
    number, which = tl.program_id(0), tl.program_id(1)
    row = tl.load(asked + which)
    lo = tl.load(asked + n + which).to(tl.int32)
    hi = tl.load(asked + 2 * n + which).to(tl.int32)
    first = tl.load(asked + 3 * n + which)
    most = tl.load(asked + 4 * n + which)
    head = tl.arange(0, PADDED_HEADS)
    before = tl.zeros([], tl.int32)
    for tier in tl.static_range(TIERS):
        held = tl.load(entries + (row * (L * H) + head) * TIERS + tier, mask=head < L * H, other=0)
        list_tier(
            row, lo, hi, first, most, before + tl.sum(tl.where(head < number, held, 0), 0), number, pages, page_table,
            range_lo, range_hi, row_blocks, entries, out, known, total, tier, TIERS, LAYOUTS[tier][I_TOKENS],
            LAYOUTS[tier][I_POSITIONS], PAGE_BYTES, MAX_BLOCKS, L, H, E,
        )  # fmt: skip
        before += tl.sum(held, 0)


Lists = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


def prepare_list(state: PageState) -> Lists:
    """``list_pages`` of rows of a state."""
    heads = state.num_layers * state.num_heads
    launch = Launch(
        list_pages_kernel,
        (heads, 1),
        (
            None, None, None, None, None, state.pages, state.page_table, state.range_lo, state.range_hi,
            state.row_blocks, state.entries,
        ),
        {
            "LAYOUTS": layout_numbers(state.fmt), "TIERS": len(state.fmt.tiers), "PAGE_BYTES": state.fmt.page_bytes,
            "MAX_BLOCKS": state.row_blocks.shape[1], "L": state.num_layers, "H": state.num_heads,
            "PADDED_HEADS": triton.next_power_of_2(heads), "E": ENTRIES, "num_warps": 2,
        },
    )  # fmt: skip

    def list_again(asked: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert asked.shape[0] == 5 and asked.dtype == torch.int64 and asked.is_contiguous()
        out = torch.zeros(total, dtype=torch.int64, device=state.device)
        known = torch.zeros(6, total, dtype=torch.int32, device=state.device)
        count = asked.shape[1]
        launch.resize(heads, count)
        launch(asked=asked, n=count, total=total, out=out, known=known)
        return out, known

    return list_again


def list_pages(state: PageState, asked: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first pages of each row by tier, by head, and in order; see ``reference.list_pages``."""
    return prepare_list(state)(asked, total)
