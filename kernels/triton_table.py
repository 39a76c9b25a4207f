"""Device-side addressing of the bidirectional page table, and the checks every Triton wrapper makes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

import torch
import triton
import triton.language as tl

from sglang_diffkv.mem_pool.page_format import PageFormat, TierLayout
from sglang_diffkv.mem_pool.state import TABLE_BLOCK, PageState

BLOCK = tl.constexpr(TABLE_BLOCK)
SAME_BITS = {"enable_fp_fusion": False}
"""Launch options of kernels that requantise: a fused multiply-add would round differently from the reference."""
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


@triton.jit
def table_index(
    row_blocks, row, layer, head, column, live,
    MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Flat int64 index into the page table of ``column`` (any shape); 0 where not ``live``."""
    block = tl.load(row_blocks + row.to(tl.int64) * MAX_BLOCKS + column // BLOCK, mask=live, other=0)
    return ((block.to(tl.int64) * L + layer) * H + head) * BLOCK + column % BLOCK


@triton.jit
def earlier_entries(
    entries, own_entry, write_slot, head_at, extend,
    HIGH: tl.constexpr, TIER: tl.constexpr, TIERS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Table entries of a head before those that hold only new tokens of a step of ``extend`` tokens.

    ``head_at`` is the head's place in [R, L, H]. A single new token may fill a hole anywhere.
    """
    count = tl.load(entries + head_at * TIERS + TIER)
    if HIGH:
        filled = (tl.load(write_slot + head_at) + TOKENS - 1) // TOKENS
        count = tl.where(extend > 1, tl.minimum(count, tl.load(own_entry + head_at * TIERS) + filled), count)
    return count


@triton.jit
def request_head_tile(batch, H: tl.constexpr):
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


@cache
def layout_constants(layout: TierLayout, prefix: str) -> Mapping[str, int]:
    """Compile-time constants of one tier, each name with ``prefix`` in front."""
    names = {
        "KB": layout.tier.k_bits,
        "VB": layout.tier.v_bits,
        "TOKENS": layout.tokens,
        "KEYS": layout.key_offset,
        "KMETA": layout.key_meta_offset,
        "VALUES": layout.value_offset,
        "VMETA": layout.value_meta_offset,
        "SCORES": layout.score_offset,
        "POSITIONS": layout.position_offset,
    }
    return MappingProxyType({prefix + name: value for name, value in names.items()})


@cache
def format_constants(fmt: PageFormat) -> Mapping[str, int]:
    """Constants of both tiers (``H_`` and ``L_``) and of the page; a single tier stands for both."""
    rest = {"TIERS": len(fmt.tiers), "D": fmt.head_dim, "DV": fmt.v_head_dim, "PAGE_BYTES": fmt.page_bytes}
    return MappingProxyType({**layout_constants(fmt.high, "H_"), **layout_constants(fmt.low, "L_"), **rest})


def check_rows(rows: torch.Tensor, num_valid: torch.Tensor, state: PageState) -> None:
    """Rows are [B] int32 or int64 on the state's device, ``num_valid`` [1] int32."""
    assert rows.ndim == 1 and rows.dtype in (torch.int32, torch.int64) and rows.is_contiguous()
    assert num_valid.shape == (1,) and num_valid.dtype == torch.int32
    assert rows.device == state.device == num_valid.device
