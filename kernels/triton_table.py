"""Device-side addressing of the bidirectional page table, and the checks every Triton wrapper makes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl

from sglang_diffkv.layout.page_format import PageFormat, TierLayout
from sglang_diffkv.layout.state import TABLE_BLOCK, PageState, range_dtype

BLOCK = tl.constexpr(TABLE_BLOCK)
SAME_BITS = {"enable_fp_fusion": False}
"""Launch options of kernels that requantise: a fused multiply-add would round differently from the reference."""
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


@triton.jit
def table_column(entry, TIER: tl.constexpr, MAX_BLOCKS: tl.constexpr):
    """Column of an entry of ``TIER`` (any shape), see ``PageState``."""
    if TIER == 0:
        column = entry
    elif TIER == 1:
        column = MAX_BLOCKS * BLOCK - 1 - entry
    elif TIER == 2:
        column = MAX_BLOCKS // 2 * BLOCK - 1 - entry
    else:
        column = MAX_BLOCKS // 2 * BLOCK + entry
    return column


@triton.jit
def table_index(
    row_blocks, row, layer, head, column, live,
    MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Flat int64 index into the page table of ``column`` (any shape); 0 where not ``live``."""
    block = tl.load(row_blocks + row.to(tl.int64) * MAX_BLOCKS + column // BLOCK, mask=live, other=0)
    return ((block.to(tl.int64) * L + layer) * H + head) * BLOCK + column % BLOCK


@triton.jit
def load_bound(bounds, at, live):
    """Ends of position ranges at flat indices ``at`` of the page table (any shape), int32, whatever they take there; 0
    where not ``live``. Stored, they lose what is beyond the table's bits."""
    bound = tl.load(bounds + at, mask=live, other=0)
    if bounds.dtype.element_ty == tl.int16:
        bound = bound.to(tl.int32) & 0xFFFF
    return bound


@triton.jit
def reserved_slots(
    token, head, rows, offset, num_valid, write_slot, own_entry, row_blocks, page_table, pages, layer,
    TIERS: tl.constexpr, TOKENS: tl.constexpr, PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr, L: tl.constexpr,
    H: tl.constexpr,
):  # fmt: skip
    """Where ``reserve`` has set room aside for new tokens [R] in the high tier of ``head`` (one, or [R]). Gives
    pointers to pages, slots on them, and which tokens are no padding and have a slot; [R] each."""
    keep = token < tl.load(num_valid)
    row = tl.load(rows + token, mask=keep, other=0).to(tl.int64)
    at = (row * L + layer) * H + head
    slot = tl.load(write_slot + at, mask=keep, other=0)
    slot += tl.load(offset + token, mask=keep, other=0).to(tl.int32)
    column = tl.load(own_entry + at * TIERS, mask=keep, other=0) + slot // TOKENS
    index = table_index(row_blocks, row, layer, head, column, keep, MAX_BLOCKS, L, H)
    page = tl.load(page_table + index, mask=keep, other=0)
    return pages + page.to(tl.int64) * PAGE_BYTES, slot % TOKENS, keep & (page >= 0)


@triton.jit
def earlier_entries(
    entries, own_entry, write_slot, head_at, extend,
    TIER: tl.constexpr, TIERS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Table entries of a head before those that hold only new tokens of a step of ``extend`` stored tokens.

    ``head_at`` is the head's place in [R, L, H]. A single new token may fill a hole anywhere.
    """
    count = tl.load(entries + head_at * TIERS + TIER)
    if TIER == 0:
        filled = (tl.load(write_slot + head_at) + TOKENS - 1) // TOKENS
        count = tl.where(extend > 1, tl.minimum(count, tl.load(own_entry + head_at * TIERS) + filled), count)
    return count


@triton.jit
def request_head_tile(batch, H):
    """A program's request, KV head and tile in a grid (B * H * tiles), and the number of tiles.

    Only the first side of a grid may have more than 65,535 programs, and a long prompt has more tiles. Requests and
    heads come first."""
    heads = batch * H
    pid = tl.program_id(0)
    tile = pid // heads
    tl.assume(tile >= 0)
    tl.assume(tile < 1 << 22)  # a tile's first token is a positive int32, as the compiler knows of the other sides
    return pid % batch, pid % heads // batch, tile, tl.num_programs(0) // heads


@triton.constexpr_function
def padded(n):
    """Smallest power of two that holds ``n``."""
    return 1 << max(n - 1, 0).bit_length()


@triton.constexpr_function
def dot_padded(n):
    """Smallest size of a tensor-core operand's side that holds ``n``."""
    return 1 << (max(n, 16) - 1).bit_length()


@triton.constexpr_function
def ceil_div(a, b):
    """``tl.cdiv`` for numbers known at compile time."""
    return -(-a // b)


@triton.constexpr_function
def field_offset(field):
    """Offset of a field that ``field_of`` describes."""
    return field // 8


@triton.constexpr_function
def field_bytes(field):
    """Bytes of a number of a field that ``field_of`` describes."""
    return field % 8


@triton.jit
def positions_at(page, POSITIONS: tl.constexpr, slot):
    """Pointers to the positions of slots of pages, which broadcast; ``POSITIONS`` as ``field_of`` has it."""
    if field_bytes(POSITIONS) == 2:
        at = (page + field_offset(POSITIONS)).to(tl.pointer_type(tl.uint16)) + slot
    else:
        at = (page + field_offset(POSITIONS)).to(tl.pointer_type(tl.int32)) + slot
    return at


@triton.jit
def load_positions(page, POSITIONS: tl.constexpr, slot, mask):
    """Positions of slots of pages, int32; -1 in empty slots and without ``mask``."""
    at = positions_at(page, POSITIONS, slot)
    if field_bytes(POSITIONS) == 2:
        word = tl.load(at, mask=mask, other=0xFFFF).to(tl.int32)
        position = tl.where(word == 0xFFFF, -1, word)
    else:
        position = tl.load(at, mask=mask, other=-1)
    return position


@triton.jit
def load_positions_ahead(page, POSITIONS: tl.constexpr, slot, mask, TOKENS: tl.constexpr):
    """``load_positions`` of consecutive slots [N] of pages of ``TOKENS``, in a loop of one warp whose loads are to be
    copied while the iteration before computes. The GPU does this only if a thread reads 4 bytes at a time. Where a
    thread has one slot, or pairs of slots do not end with a page, it reads the pair that its slot is of."""
    if field_bytes(POSITIONS) == 2 and (slot.shape[0] <= 32 or TOKENS % 2 == 1):
        pairs = (page + field_offset(POSITIONS)).to(tl.pointer_type(tl.int32))
        word = (tl.load(pairs + slot // 2, mask=mask, other=-1) >> (slot % 2 * 16)) & 0xFFFF
        position = tl.where(word == 0xFFFF, -1, word)
    else:
        position = load_positions(page, POSITIONS, slot, mask)
    return position


@triton.jit
def store_positions(page, POSITIONS: tl.constexpr, slot, position, mask):
    """Write int32 positions, -1 for none, to slots of pages."""
    at = positions_at(page, POSITIONS, slot)
    tl.store(at, position.to(at.dtype.element_ty), mask=mask)


I_KB, I_VB, I_TOKENS, I_KEYS, I_KMETA, I_VALUES, I_VMETA, I_SCORES, I_POSITIONS, I_KTURNED, I_VTURNED = (
    tl.constexpr(i) for i in range(11)
)
"""Places of the numbers that ``layout_numbers`` gives of a tier: bits of keys and values, tokens of a page, offsets;
1 for rotated keys, and values, else 0.
Scores have ``NO_SCORES`` where there are none; positions have what ``field_of`` makes of offset and bytes."""
NO_SCORES = tl.constexpr(-1)


@triton.constexpr_function
def layout_of(layouts, tier):
    """A tier's numbers, for a function that takes one ``LAYOUT``."""
    return layouts[tier]


def field_of(offset: int, size: int) -> int:
    """A field's offset and the bytes of one of its numbers, as one compile-time constant."""
    return offset * 8 + size


@cache
def layout_numbers(fmt: PageFormat) -> tuple[tuple[int, ...], ...]:
    """What kernels are told of each tier, as one compile-time constant: ``LAYOUTS[tier][I_TOKENS]``."""
    turned = tuple(map(int, fmt.turned))
    return tuple((*layout_constants(layout).values(), *turned) for layout in fmt.layouts)


@cache
def layout_constants(layout: TierLayout) -> Mapping[str, int]:
    """Compile-time constants of one tier by name, in the order of ``I_KB`` and so on."""
    names = {
        "KB": layout.tier.k_bits,
        "VB": layout.tier.v_bits,
        "TOKENS": layout.tokens,
        "KEYS": layout.key_offset,
        "KMETA": layout.key_meta_offset,
        "VALUES": layout.value_offset,
        "VMETA": layout.value_meta_offset,
        "SCORES": NO_SCORES.value if layout.score_offset is None else layout.score_offset,
        "POSITIONS": field_of(layout.position_offset, layout.position_bytes),
    }
    return MappingProxyType(names)


@cache
def format_constants(fmt: PageFormat) -> Mapping[str, Any]:
    """Constants of all tiers and of the page."""
    rest = {"TIERS": len(fmt.tiers), "D": fmt.head_dim, "DV": fmt.v_head_dim, "PAGE_BYTES": fmt.page_bytes}
    return MappingProxyType({"LAYOUTS": layout_numbers(fmt), **rest})


def check_table(state: PageState) -> None:
    """What kernels that go through the whole page table take it for: [C, L, H, TABLE_BLOCK] each, contiguous."""
    for table in (state.page_table, state.range_lo, state.range_hi):
        assert table.shape[1:] == (state.num_layers, state.num_heads, TABLE_BLOCK) and table.is_contiguous()
    assert state.page_table.dtype == torch.int32
    assert state.range_lo.dtype == state.range_hi.dtype == range_dtype(state.fmt)


def check_rows(rows: torch.Tensor, num_valid: torch.Tensor, state: PageState) -> None:
    """Rows are [B] int32 or int64 on the state's device, ``num_valid`` [1] int32."""
    assert rows.ndim == 1 and rows.dtype in (torch.int32, torch.int64) and rows.is_contiguous()
    assert num_valid.shape == (1,) and num_valid.dtype == torch.int32
    assert rows.device == state.device == num_valid.device


def check_windows(row_windows: torch.Tensor | None, state: PageState) -> None:
    """Windows of rows are None, or [R] int32 on the state's device, for every row."""
    if row_windows is not None:
        assert row_windows.shape == state.fault.shape and row_windows.dtype == torch.int32
        assert row_windows.is_contiguous() and row_windows.device == state.device
