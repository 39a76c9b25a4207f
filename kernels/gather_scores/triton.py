"""Scores by position on the GPU, and their smoothing; no host synchronisation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from sglang_diffkv.kernels.parts import Part
from sglang_diffkv.kernels.triton_table import layout_constants
from sglang_diffkv.kernels.triton_tokens import held_page, store_values
from sglang_diffkv.layout.state import PageState

PROGRAMS = 8
"""Programs that share a head's pages."""
POSITIONS = 1024
"""Positions of a smoothing program."""
NO_VALUE = tl.constexpr(float("-inf"))


@triton.jit(
    do_not_specialize=["source", "lo", "hi", "shared_len", "seq_len", "window", "sinks", "values_len"],
    do_not_specialize_on_alignment=["shared_scores", "entries", "own_entry"],
)
def gather_kernel(
    source, lo, hi, shared_scores, shared_len, seq_len, window, sinks, values, values_len, stored, pages, page_table,
    range_lo, range_hi, row_blocks, entries, own_entry,
    TIER: tl.constexpr, TIERS: tl.constexpr, TOKENS: tl.constexpr, SCORES: tl.constexpr, POSITIONS: tl.constexpr,
    PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr, SUMS: tl.constexpr,
    OWN: tl.constexpr,
):  # fmt: skip
    """Grid (layers * H, programs): the pages of one tier, round robin. stored [layers * H] int64 counts the tokens."""
    flat = tl.program_id(0)
    layer, head = flat // H, flat % H
    at = ((source.to(tl.int64) * L + layer) * H + head) * TIERS + TIER
    shared_scores += flat.to(tl.int64) * shared_len
    values += flat.to(tl.int64) * values_len
    first = tl.load(own_entry + at) if OWN else 0
    found = tl.zeros([1], tl.int64)
    for entry in range(first + tl.program_id(1), tl.load(entries + at), tl.num_programs(1)):
        _, score, position, held = held_page(
            entry, source, lo, hi, layer, head, shared_scores, shared_len, pages, page_table, range_lo, range_hi,
            row_blocks, TIER, TOKENS, SCORES, POSITIONS, PAGE_BYTES, MAX_BLOCKS, L, H,
        )  # fmt: skip
        if SUMS:
            score = score * (seq_len - 1 - position).to(tl.float32)
        found += store_values(values, position, score, held, seq_len, window, sinks)
    tl.atomic_add(stored + flat + tl.arange(0, 1), found)


def gather_scores(
    state: PageState,
    parts: Sequence[Part],
    values: torch.Tensor,
    seq_len: int,
    *,
    window: int,
    sinks: int = 0,
    sums: bool = False,
    shared_scores: torch.Tensor | None = None,
    own: bool = False,
) -> torch.Tensor:
    """``reference.gather_scores``."""
    layers, heads, fmt = state.num_layers, state.num_heads, state.fmt
    assert values.shape[:2] == (layers, heads) and values.dtype == torch.float32 and values.is_contiguous()
    length, known = values.shape[2], 0
    if shared_scores is not None:
        assert (
            shared_scores.shape[:2] == (layers, heads)
            and shared_scores.dtype == torch.float32
            and shared_scores.is_contiguous()
        )
        known = shared_scores.shape[2]
    values.fill_(float("nan"))
    stored = torch.zeros(layers, heads, dtype=torch.int64, device=values.device)
    scores = shared_scores if shared_scores is not None and known else torch.empty(1, device=values.device)
    names = ("TOKENS", "SCORES", "POSITIONS")
    for row, lo, hi in parts:
        for tier, layout in enumerate(fmt.layouts):
            every = layout_constants(layout)
            gather_kernel[(layers * heads, PROGRAMS)](
                row, lo, min(hi, length), scores, known, seq_len, window, sinks, values, length, stored, state.pages,
                state.page_table, state.range_lo, state.range_hi, state.row_blocks, state.entries, state.own_entry,
                TIER=tier, TIERS=len(fmt.tiers), **{name: every[name] for name in names}, PAGE_BYTES=fmt.page_bytes,
                MAX_BLOCKS=state.row_blocks.shape[1], L=state.row_layers, H=heads, SUMS=sums, OWN=own, num_warps=1,
            )  # fmt: skip
    return stored


@triton.jit(do_not_specialize=["length"])
def smooth_kernel(values, out, length, WIDTH: tl.constexpr, AVERAGE: tl.constexpr, N: tl.constexpr):
    """Grid (heads, ceil(length / N)): ``N`` positions of values [heads, length]."""
    head = tl.program_id(0).to(tl.int64) * length
    position = tl.program_id(1) * N + tl.arange(0, N)
    own = tl.load(values + head + position, mask=position < length, other=NO_VALUE)
    best = tl.zeros([N], tl.float32)
    for step in range(WIDTH):
        at = position + step - WIDTH // 2
        value = tl.load(values + head + at, mask=(at >= 0) & (at < length), other=NO_VALUE)
        value = tl.where(tl.abs(value) < float("inf"), value, 0.0)
        if AVERAGE:
            best += value
        else:
            best = tl.maximum(best, value)
    if AVERAGE:
        best = tl.div_rn(best, tl.full([N], WIDTH, tl.float32))
    tl.store(out + head + position, tl.where(tl.abs(own) < float("inf"), best, own), mask=position < length)


def smooth(values: torch.Tensor, width: int, out: torch.Tensor | None = None, *, average: bool = False) -> torch.Tensor:
    """``reference.smooth``, into ``out`` where it is given: like ``values``, contiguous."""
    out = torch.empty_like(values) if out is None else out
    assert values.is_contiguous() and out.is_contiguous() and out.shape == values.shape
    layers, heads, length = values.shape
    smooth_kernel[(layers * heads, max(1, triton.cdiv(length, POSITIONS)))](
        values, out, length, WIDTH=width, AVERAGE=average, N=POSITIONS, num_warps=4
    )
    return out
