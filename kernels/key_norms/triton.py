"""Scores by the norms of stored keys on the GPU; no host synchronisation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from sglang_diffkv.kernels.key_norms import reference
from sglang_diffkv.kernels.parts import Part
from sglang_diffkv.kernels.triton_table import layout_constants, padded
from sglang_diffkv.kernels.triton_tokens import dequantized, held_page, store_values
from sglang_diffkv.layout.state import PageState

PROGRAMS = 8
"""Programs that share a head's pages."""
LEAST_NORM = tl.constexpr(reference.LEAST_NORM)


@triton.jit(
    do_not_specialize=["source", "lo", "hi", "seq_len", "window", "sinks", "values_len"],
    do_not_specialize_on_alignment=["entries", "own_entry"],
)
def norm_kernel(
    source, lo, hi, seq_len, window, sinks, values, values_len, stored, raw, pages, page_table, range_lo, range_hi,
    row_blocks, entries, own_entry,
    TIER: tl.constexpr, TIERS: tl.constexpr, TOKENS: tl.constexpr, KB: tl.constexpr, KEYS: tl.constexpr,
    KMETA: tl.constexpr, SCORES: tl.constexpr, POSITIONS: tl.constexpr, PAGE_BYTES: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr, D: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Grid (layers * H, programs): the pages of one tier, round robin. stored [layers * H] int64 counts the tokens.
    ``raw`` is of the raw tier's type, and not read."""
    flat = tl.program_id(0)
    layer, head = flat // H, flat % H
    kind = tl.pointer_type(raw.dtype.element_ty)
    at = ((source.to(tl.int64) * L + layer) * H + head) * TIERS + TIER
    values += flat.to(tl.int64) * values_len
    first = tl.load(own_entry + at) if OWN else 0
    found = tl.zeros([1], tl.int64)
    for entry in range(first + tl.program_id(1), tl.load(entries + at), tl.num_programs(1)):
        page, _, position, held = held_page(
            entry, source, lo, hi, layer, head, values, 0, pages, page_table, range_lo, range_hi, row_blocks,
            TIER, TOKENS, SCORES, POSITIONS, PAGE_BYTES, MAX_BLOCKS, L, H,
        )  # fmt: skip
        key = dequantized(page, tl.arange(0, padded(TOKENS)), held, kind, D, KB, KEYS, KMETA)
        norm = tl.maximum(tl.sqrt_rn(tl.sum(key * key, 1)), LEAST_NORM)
        value = tl.div_rn(tl.full(norm.shape, 1.0, tl.float32), norm)
        found += store_values(values, position, value, held, seq_len, window, sinks)
    tl.atomic_add(stored + flat + tl.arange(0, 1), found)


def key_norms(
    state: PageState,
    parts: Sequence[Part],
    values: torch.Tensor,
    seq_len: int,
    *,
    window: int,
    sinks: int = 0,
    own: bool = False,
) -> torch.Tensor:
    """``reference.key_norms``."""
    layers, heads, fmt = state.num_layers, state.num_heads, state.fmt
    assert values.shape[:2] == (layers, heads) and values.dtype == torch.float32 and values.is_contiguous()
    values.fill_(float("nan"))
    stored = torch.zeros(layers, heads, dtype=torch.int64, device=values.device)
    raw = torch.empty(1, dtype=state.dtype, device=values.device)
    names = ("TOKENS", "KB", "KEYS", "KMETA", "SCORES", "POSITIONS")
    for row, lo, hi in parts:
        for tier, layout in enumerate(fmt.layouts):
            every = layout_constants(layout)
            norm_kernel[(layers * heads, PROGRAMS)](
                row, lo, min(hi, values.shape[2]), seq_len, window, sinks, values, values.shape[2], stored, raw,
                state.pages, state.page_table, state.range_lo, state.range_hi, state.row_blocks, state.entries,
                state.own_entry, TIER=tier, TIERS=len(fmt.tiers), **{name: every[name] for name in names},
                PAGE_BYTES=fmt.page_bytes, MAX_BLOCKS=state.row_blocks.shape[1], L=state.row_layers, H=heads,
                D=fmt.head_dim, OWN=own, num_warps=4,
            )  # fmt: skip
    return stored
