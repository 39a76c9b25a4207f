"""Pages by who refers to them, in a number of launches that depends on the pool only, without host synchronisation."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_diffkv.kernels.triton_table import check_table, load_bound, table_column, table_index
from sglang_diffkv.layout.state import PageState

ENTRIES = 32
"""Table entries of an iteration: one a thread of the program's only warp, so that no atomic is repeated."""
PAGES = 1024
"""Pages of a program that tells owners apart."""


@triton.jit
def add_references(
    row, layer, head, count, first, pages, page_table, range_hi, row_blocks, held,
    TIER: tl.constexpr, MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """One tier's first ``count`` entries of a head."""
    for begin in range(0, count, E):
        entry = begin + tl.arange(0, E)
        live = entry < count
        column = table_column(entry, TIER, MAX_BLOCKS)
        at = table_index(row_blocks, row, layer, head, column, live, MAX_BLOCKS, L, H)
        page = tl.load(page_table + at, mask=live, other=0) - first
        live = live & (load_bound(range_hi, at, live) > 0)  # never the scratch page
        live = live & (page >= 0) & (page < pages)
        tl.atomic_add(held + tl.where(live, page, 0), live.to(tl.int32), mask=live)


@triton.jit(do_not_specialize=["first", "pages"], do_not_specialize_on_alignment=["rows"])
def held_kernel(
    rows, first, pages, page_table, range_hi, row_blocks, entries, held,
    TIERS: tl.constexpr, MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Grid (n, L * H): references that one (layer, head) of a row holds to ``pages`` pages from ``first`` on."""
    place = tl.program_id(1)
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    at = entries + (row * (L * H) + place) * TIERS
    for tier in tl.static_range(TIERS):
        add_references(
            row, place // H, place % H, tl.load(at + tier), first, pages, page_table, range_hi, row_blocks, held,
            tier, MAX_BLOCKS, L, H, E,
        )  # fmt: skip


@triton.jit(do_not_specialize=["first", "pages"])
def owners_kernel(first, pages, refcount, held, out, N: tl.constexpr):
    """Grid (pages / N): add each page to its owner's count."""
    page = tl.program_id(0) * N + tl.arange(0, N)
    live = page < pages
    mine = tl.load(held + page, mask=live, other=0)
    requests = mine > 0
    cache = tl.load(refcount + first + page, mask=live, other=0) > mine
    tl.atomic_add(out, tl.sum((requests & (cache == 0)).to(tl.int64), 0))
    tl.atomic_add(out + 1, tl.sum((requests & cache).to(tl.int64), 0))
    tl.atomic_add(out + 2, tl.sum((cache & (requests == 0)).to(tl.int64), 0))


def count_owners(state: PageState, rows: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """Pages of requests alone, of both and of the prefix cache alone: [3] int64; see ``reference.count_owners``.

    Args:
        rows: [n] int64, n may be 0.
        scratch: [at least 1] int32, overwritten; one number a page, or pages are counted in parts.
    """
    assert rows.ndim == 1 and rows.dtype == torch.int64 and rows.is_contiguous() and rows.device == state.device
    assert scratch.ndim == 1 and scratch.dtype == torch.int32 and scratch.is_contiguous() and scratch.numel()
    assert scratch.device == state.device
    layers, heads = state.num_layers, state.num_heads
    assert state.entries.dtype == torch.int32 and state.entries.is_contiguous()  # [R, L, H, T]
    assert state.row_blocks.dtype == torch.int32 and state.row_blocks.is_contiguous()  # [R, max_blocks]
    assert state.refcount.dtype == torch.int32 and state.refcount.is_contiguous()  # [P + 1]
    check_table(state)
    out = torch.zeros(3, dtype=torch.int64, device=state.device)
    for first in range(0, state.num_pages, scratch.numel()):
        pages = min(scratch.numel(), state.num_pages - first)
        held = scratch[:pages].zero_()
        if rows.shape[0]:
            held_kernel[(rows.shape[0], layers * heads)](
                rows, first, pages, state.page_table, state.range_hi, state.row_blocks, state.entries, held,
                TIERS=len(state.fmt.tiers), MAX_BLOCKS=state.row_blocks.shape[1], L=layers, H=heads, E=ENTRIES,
                num_warps=1,
            )  # fmt: skip
        owners_kernel[(triton.cdiv(pages, PAGES),)](first, pages, state.refcount, held, out, N=PAGES, num_warps=4)
    return out
