"""Tokens and pages that rows hold of a range of positions, in one launch, without host synchronisation."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from sglang_diffkv.kernels.launch import Launch
from sglang_diffkv.kernels.triton_ring import NO_LIMIT
from sglang_diffkv.kernels.triton_table import (
    I_POSITIONS,
    I_TOKENS,
    check_table,
    layout_numbers,
    load_bound,
    load_positions,
    padded,
    table_column,
    table_index,
)
from sglang_diffkv.layout.state import PageState

ENTRIES = 16
"""Table entries of an iteration."""


@triton.jit
def clamped(position):
    """An int64 bound of positions as int32: none lies outside [0, NO_LIMIT)."""
    return tl.minimum(tl.maximum(position, 0), NO_LIMIT).to(tl.int32)


@triton.jit
def count_held(
    row, layer, head, count, lo, hi, pages, page_table, range_lo, range_hi, row_blocks,
    TIER: tl.constexpr, TOKENS: tl.constexpr, POSITIONS: tl.constexpr, PAGE_BYTES: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Tokens with position in [lo, hi) on the first ``count`` entries of a tier, and pages that hold one."""
    token = tl.arange(0, padded(TOKENS))
    tokens = tl.zeros([E], tl.int32)
    held_pages = tl.zeros([E], tl.int32)
    for begin in range(0, count, E):
        entry = begin + tl.arange(0, E)
        live = entry < count
        column = table_column(entry, TIER, MAX_BLOCKS)
        at = table_index(row_blocks, row, layer, head, column, live, MAX_BLOCKS, L, H)
        first = tl.maximum(load_bound(range_lo, at, live), lo)  # [E]
        end = tl.minimum(load_bound(range_hi, at, live), hi)
        live = live & (first < end)  # never the scratch page
        page = tl.load(page_table + at, mask=live, other=0)
        source = (pages + page.to(tl.int64) * PAGE_BYTES)[:, None]
        inside = live[:, None] & (token[None, :] < TOKENS)
        position = load_positions(source, POSITIONS, token[None, :], inside)  # [E, padded tokens]
        held = inside & (position >= first[:, None]) & (position < end[:, None])
        found = tl.sum(held.to(tl.int32), 1)
        tokens += found
        held_pages += (found > 0).to(tl.int32)
    return tl.sum(tokens, 0), tl.sum(held_pages, 0)


@triton.jit(do_not_specialize_on_alignment=["rows", "lo", "hi"])
def measure_kernel(
    rows, lo, hi, pages, page_table, range_lo, range_hi, row_blocks, entries, out,
    LAYOUTS: tl.constexpr, TIERS: tl.constexpr, PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr,
    L: tl.constexpr, H: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Grid (n, L * H): one (layer, head) of a row, all tiers."""
    number, place = tl.program_id(0), tl.program_id(1)
    layer, head = place // H, place % H
    row = tl.load(rows + number).to(tl.int64)
    first, end = clamped(tl.load(lo + number)), clamped(tl.load(hi + number))
    at = entries + (row * (L * H) + place) * TIERS
    target = out + (number.to(tl.int64) * (L * H) + place) * (TIERS + 1)
    held_pages = 0
    for tier in tl.static_range(TIERS):
        tokens, of_tier = count_held(
            row, layer, head, tl.load(at + tier), first, end, pages, page_table, range_lo, range_hi, row_blocks,
            tier, LAYOUTS[tier][I_TOKENS], LAYOUTS[tier][I_POSITIONS], PAGE_BYTES, MAX_BLOCKS, L, H, E,
        )  # fmt: skip
        tl.store(target + tier, tokens)
        held_pages += of_tier
    tl.store(target + TIERS, held_pages)


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["rows", "lo", "hi", "out"])
def add_held_kernel(
    rows, lo, hi, stride, pages, page_table, range_lo, range_hi, row_blocks, entries, out,
    LAYOUTS: tl.constexpr, TIERS: tl.constexpr, PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr,
    L: tl.constexpr, H: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Grid (n, L * H): one (layer, head) of a row, all tiers. ``stride``: numbers from a row of ``out`` to the next."""
    number, place = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + number).to(tl.int64)
    first, end = clamped(tl.load(lo + number)), clamped(tl.load(hi + number))
    at = entries + (row * (L * H) + place) * TIERS
    target = out + number.to(tl.int64) * stride
    for tier in tl.static_range(TIERS):
        tokens, _ = count_held(
            row, place // H, place % H, tl.load(at + tier), first, end, pages, page_table, range_lo, range_hi,
            row_blocks, tier, LAYOUTS[tier][I_TOKENS], LAYOUTS[tier][I_POSITIONS], PAGE_BYTES, MAX_BLOCKS, L, H, E,
        )  # fmt: skip
        tl.atomic_add(target + tier, tokens.to(tl.int64))


@triton.jit(do_not_specialize=["row", "hi", "number"])
def tally_kernel(
    row, hi, number, pages, page_table, range_lo, range_hi, row_blocks, entries, slides, out,
    LAYOUTS: tl.constexpr, TIERS: tl.constexpr, PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr,
    L: tl.constexpr, H: tl.constexpr, E: tl.constexpr, SLIDES: tl.constexpr,
):  # fmt: skip
    """Grid (L * H): one (layer, head), all tiers. slides [L] int32: whether a layer has a window."""
    place = tl.program_id(0)
    layer, head = place // H, place % H
    wide = row.to(tl.int64)
    at = entries + (wide * (L * H) + place) * TIERS
    target = out + number.to(tl.int64) * (TIERS + 2)
    all_pages = tl.zeros([], tl.int32)
    all_tokens = tl.zeros([], tl.int32)
    for tier in tl.static_range(TIERS):
        tokens, of_tier = count_held(
            wide, layer, head, tl.load(at + tier), 0, hi, pages, page_table, range_lo, range_hi, row_blocks,
            tier, LAYOUTS[tier][I_TOKENS], LAYOUTS[tier][I_POSITIONS], PAGE_BYTES, MAX_BLOCKS, L, H, E,
        )  # fmt: skip
        tl.atomic_add(target + tier, tokens.to(tl.int64))
        all_pages += of_tier
        all_tokens += tokens
    tl.atomic_add(target + TIERS, all_pages.to(tl.int64))
    if SLIDES:
        of_window = tl.where(tl.load(slides + layer) > 0, all_tokens, 0)
        tl.atomic_add(target + TIERS + 1, of_window.to(tl.int64))


def prepare_tally(state: PageState) -> Callable[[int, int, torch.Tensor, int], None]:
    """``reference.tally`` of rows of a state: row, hi, out, number. Nothing is allocated."""
    check_table(state)
    tiers = len(state.fmt.tiers)
    spans = [int(state.attention_span(layer) > 0) for layer in range(state.num_layers)]
    launch = Launch(
        tally_kernel,
        (state.num_layers * state.num_heads,),
        (
            None, None, None, state.pages, state.page_table, state.range_lo, state.range_hi, state.row_blocks,
            state.entries, torch.tensor(spans, dtype=torch.int32, device=state.device), None,
        ),
        {
            "LAYOUTS": layout_numbers(state.fmt), "TIERS": tiers, "PAGE_BYTES": state.fmt.page_bytes,
            "MAX_BLOCKS": state.row_blocks.shape[1], "L": state.num_layers, "H": state.num_heads, "E": ENTRIES,
            "SLIDES": state.slides, "num_warps": 1,
        },
    )  # fmt: skip

    def tally(row: int, hi: int, out: torch.Tensor, number: int) -> None:
        assert out.dtype == torch.int64 and out.shape[1] == tiers + 2 and out.is_contiguous() and number < len(out)
        launch(row=row, hi=hi, number=number, out=out)

    return tally


def measure(state: PageState, rows: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor) -> torch.Tensor:
    """Tokens of each tier, and pages that hold one: [n, L, H, T + 1] int32; see ``reference.measure``.

    Args:
        rows, lo, hi: [n] int64, lo >= 0; n may be 0.
    """
    return prepare_measure(state)(rows, lo, hi)


def prepare_measure(state: PageState) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """``measure`` of a state: rows, lo, hi."""
    layers, heads, tiers = state.num_layers, state.num_heads, len(state.fmt.tiers)
    assert state.entries.dtype == torch.int32 and state.entries.is_contiguous()  # [R, L, H, T]
    assert state.row_blocks.dtype == torch.int32 and state.row_blocks.is_contiguous()  # [R, max_blocks]
    check_table(state)
    assert state.pages.shape[1] == state.fmt.page_bytes and state.pages.is_contiguous()
    launch = Launch(
        measure_kernel,
        (1, layers * heads),
        (
            None, None, None, state.pages, state.page_table, state.range_lo, state.range_hi, state.row_blocks,
            state.entries, None,
        ),
        {
            "LAYOUTS": layout_numbers(state.fmt), "TIERS": tiers, "PAGE_BYTES": state.fmt.page_bytes,
            "MAX_BLOCKS": state.row_blocks.shape[1], "L": layers, "H": heads, "E": ENTRIES, "num_warps": 4,
        },
    )  # fmt: skip

    def measure_again(rows: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor) -> torch.Tensor:
        for numbers in (rows, lo, hi):
            assert numbers.shape == (rows.numel(),) and numbers.dtype == torch.int64 and numbers.is_contiguous()
            assert numbers.device == state.device
        out = torch.empty(rows.shape[0], layers, heads, tiers + 1, dtype=torch.int32, device=state.device)
        if rows.shape[0]:
            launch.resize(rows.shape[0], layers * heads)
            launch(rows=rows, lo=lo, hi=hi, out=out)
        return out

    return measure_again


def prepare_add_held(
    state: PageState,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """``reference.add_held`` of a state: rows, lo, hi, out. Nothing is allocated."""
    check_table(state)
    tiers, heads = len(state.fmt.tiers), state.num_layers * state.num_heads
    launch = Launch(
        add_held_kernel,
        (1, heads),
        (
            None, None, None, None, state.pages, state.page_table, state.range_lo, state.range_hi, state.row_blocks,
            state.entries, None,
        ),
        {
            "LAYOUTS": layout_numbers(state.fmt), "TIERS": tiers, "PAGE_BYTES": state.fmt.page_bytes,
            "MAX_BLOCKS": state.row_blocks.shape[1], "L": state.num_layers, "H": state.num_heads, "E": ENTRIES,
            "num_warps": 4,
        },
    )  # fmt: skip

    def add_held_again(rows: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor, out: torch.Tensor) -> None:
        for numbers in (rows, lo, hi):
            assert numbers.shape == (len(out),) and numbers.dtype == torch.int64 and numbers.is_contiguous()
        assert out.shape[1] == tiers and out.dtype == torch.int64 and out.stride(1) == 1
        if len(out):
            launch.resize(len(out), heads)
            launch(rows=rows, lo=lo, hi=hi, stride=out.stride(0), out=out)

    return add_held_again
