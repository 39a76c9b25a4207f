"""How far keys repeat one another, on the GPU: unit keys laid out by position, then which token is the last one alike
to each, then each token's sum. Memory is linear in the tokens; several layers at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from sglang_diffkv.kernels.parts import Part
from sglang_diffkv.kernels.triton_table import INTERPRETED, dot_padded, layout_constants, padded
from sglang_diffkv.kernels.triton_tokens import dequantized, held_page
from sglang_diffkv.layout.state import PageState

PROGRAMS = 8
"""Programs that share a head's pages."""
TILE = 64
"""Tokens of a side of a tile of cosines."""
SCRATCH_BYTES = 64 << 20
"""Of what the layers that are taken together need: unit keys, and places by position."""
PLACE_BYTES = 24
"""Of a position of a head, at most, while its places are made and its sum is found."""


@triton.jit(
    do_not_specialize=["source", "lo", "hi", "first_layer", "length", "most"],
    do_not_specialize_on_alignment=["rank", "entries"],
)
def gather_kernel(
    source, lo, hi, first_layer, rank, length, unit, most, raw, pages, page_table, range_lo, range_hi, row_blocks,
    entries,
    TIER: tl.constexpr, TIERS: tl.constexpr, TOKENS: tl.constexpr, KB: tl.constexpr, KEYS: tl.constexpr,
    KMETA: tl.constexpr, SCORES: tl.constexpr, POSITIONS: tl.constexpr, PAGE_BYTES: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Grid (layers * H, programs): unit keys of one tier's pages to unit [layers * H, most, dot_padded(D)], each at the
    place that rank [layers * H, length] int32 says, -1 for none. ``raw`` is of the raw tier's type, and not read."""
    flat = tl.program_id(0)
    layer, head = first_layer + flat // H, flat % H
    kind = tl.pointer_type(raw.dtype.element_ty)
    DP: tl.constexpr = dot_padded(D)
    rank += flat.to(tl.int64) * length
    unit += flat.to(tl.int64) * most * DP
    count = tl.load(entries + ((source.to(tl.int64) * L + layer) * H + head) * TIERS + TIER)
    for entry in range(tl.program_id(1), count, tl.num_programs(1)):
        page, _, position, held = held_page(
            entry, source, lo, hi, layer, head, pages.to(tl.pointer_type(tl.float32)), 0, pages, page_table, range_lo,
            range_hi, row_blocks, TIER, TOKENS, SCORES, POSITIONS, PAGE_BYTES, MAX_BLOCKS, L, H,
        )  # fmt: skip
        place = tl.load(rank + position, mask=held, other=-1)
        chosen = (place >= 0) & (place < most)
        key = dequantized(page, tl.arange(0, padded(TOKENS)), chosen, kind, D, KB, KEYS, KMETA)
        norm = tl.sqrt(tl.sum(key * key, 1))
        key = key / tl.maximum(norm, 1e-12)[:, None]
        at = place.to(tl.int64)[:, None] * DP + tl.arange(0, DP)[None, :]
        tl.store(unit + at, key.to(unit.dtype.element_ty), mask=chosen[:, None])


@triton.jit
def cosine_tile(unit, row, column, n, DP: tl.constexpr, DOT: tl.constexpr):
    """Cosines [rows, columns] of tokens by place, 0 on the diagonal and where there is no token."""
    d = tl.arange(0, DP)
    x = tl.load(unit + row.to(tl.int64)[:, None] * DP + d[None, :], mask=(row < n)[:, None], other=0.0)
    y = tl.load(unit + column.to(tl.int64)[None, :] * DP + d[:, None], mask=(column < n)[None, :], other=0.0)
    cosine = tl.dot(x.to(DOT), y.to(DOT))
    return tl.where(row[:, None] == column[None, :], 0.0, cosine)


@triton.jit(do_not_specialize=["most", "block", "threshold"], do_not_specialize_on_alignment=["counts"])
def last_alike_kernel(unit, counts, last, most, block, threshold, DP: tl.constexpr, N: tl.constexpr, DOT: tl.constexpr):
    """Grid (layers * H, tiles): of each token, the last one of its block whose cosine is above the threshold, or -1."""
    flat = tl.program_id(0).to(tl.int64)
    n = tl.load(counts + flat).to(tl.int32)
    first = tl.program_id(1) * N
    if first >= n:
        return
    unit += flat * most * DP
    column = first + tl.arange(0, N)
    found = tl.full([N], -1, tl.int32)
    begin, end = first // block * block, tl.minimum((first + N - 1) // block * block + block, n)
    for at in range(begin, end, N):
        row = at + tl.arange(0, N)
        cosine = cosine_tile(unit, row, column, n, DP, DOT)
        alike = (cosine > threshold) & (row[:, None] // block == column[None, :] // block) & (row < n)[:, None]
        found = tl.maximum(found, tl.max(tl.where(alike, row[:, None], -1), 0))
    tl.store(last + flat * most + column, found, mask=column < n)


@triton.jit(do_not_specialize=["most", "block"], do_not_specialize_on_alignment=["counts"])
def charge_kernel(unit, counts, last, sums, most, block, DP: tl.constexpr, N: tl.constexpr, DOT: tl.constexpr):
    """Grid (layers * H, tiles): each token's sum of cosines within its block, without those that ``last`` spares it."""
    flat = tl.program_id(0).to(tl.int64)
    n = tl.load(counts + flat).to(tl.int32)
    first = tl.program_id(1) * N
    if first >= n:
        return
    unit += flat * most * DP
    row = first + tl.arange(0, N)
    total = tl.zeros([N], tl.float32)
    begin, end = first // block * block, tl.minimum((first + N - 1) // block * block + block, n)
    for at in range(begin, end, N):
        column = at + tl.arange(0, N)
        cosine = cosine_tile(unit, row, column, n, DP, DOT)
        newest = tl.load(last + flat * most + column, mask=column < n, other=-1)
        charged = (row[:, None] // block == column[None, :] // block) & (row[:, None] != newest[None, :])
        total += tl.sum(tl.where(charged, cosine, 0.0), 1)
    tl.store(sums + flat * most + row, total, mask=row < n)


def redundancy(
    state: PageState,
    parts: Sequence[Part],
    values: torch.Tensor,
    out: torch.Tensor,
    *,
    threshold: float,
    block: int,
    most: int | None = None,
) -> torch.Tensor:
    """``reference.redundancy``, in memory for ``most`` tokens of a head."""
    layers, heads, length = values.shape
    fmt, most = state.fmt, max(min(length if most is None else most, length), 1)
    assert (layers, heads) == (state.num_layers, state.num_heads) and out.shape == values.shape
    assert values.dtype == out.dtype == torch.float32 and values.is_contiguous() and out.is_contiguous()
    counts = length - values.isnan().sum(2)
    counts.clamp_(max=most)
    dim, device = dot_padded(fmt.head_dim), values.device
    kind, dot = (torch.float32, tl.float32) if INTERPRETED else (torch.float16, tl.float16)
    of_layer = heads * (most * dim * kind.itemsize + length * PLACE_BYTES)
    together = max(1, min(layers, SCRATCH_BYTES // of_layer))
    unit = torch.empty(together * heads, most, dim, dtype=kind, device=device)
    last = torch.empty(together * heads, most, dtype=torch.int32, device=device)
    sums = torch.empty(together * heads, most, device=device)
    raw = torch.empty(1, dtype=state.dtype, device=device)
    names = ("TOKENS", "KB", "KEYS", "KMETA", "SCORES", "POSITIONS")
    for first in range(0, layers, together):
        some = min(together, layers - first)
        number, compared = counts[first : first + some].contiguous(), ~values[first : first + some].isnan()
        places = torch.where(compared, compared.cumsum(2, dtype=torch.int32) - 1, -1)
        for row, lo, hi in parts:
            for tier, layout in enumerate(fmt.layouts):
                every = layout_constants(layout)
                gather_kernel[(some * heads, PROGRAMS)](
                    row, lo, min(hi, length), first, places, length, unit, most, raw, state.pages, state.page_table,
                    state.range_lo, state.range_hi, state.row_blocks, state.entries, TIER=tier, TIERS=len(fmt.tiers),
                    **{name: every[name] for name in names}, PAGE_BYTES=fmt.page_bytes,
                    MAX_BLOCKS=state.row_blocks.shape[1], L=state.row_layers, H=heads, D=fmt.head_dim, num_warps=4,
                )  # fmt: skip
        grid, within = (some * heads, triton.cdiv(most, TILE)), block or most
        last_alike_kernel[grid](unit, number, last, most, within, threshold, DP=dim, N=TILE, DOT=dot, num_warps=4)
        charge_kernel[grid](unit, number, last, sums, most, within, DP=dim, N=TILE, DOT=dot, num_warps=4)
        by_place = sums[: some * heads].view(some, heads, most)
        found = by_place.gather(2, places.clamp(min=0, max=most - 1).long())
        out[first : first + some] = found.masked_fill(places < 0, 0.0)
    return counts
