"""Give a row references to another row's pages, on the GPU without host synchronisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import Any

import torch
import triton
import triton.language as tl

from sglang_diffkv.kernels.attach.reference import freeze, keep
from sglang_diffkv.kernels.launch import Launch
from sglang_diffkv.kernels.parts import FROM_START, Part
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
from sglang_diffkv.layout.state import PageState
from sglang_diffkv.layout.transfer import to_device

__all__ = ["attach", "freeze", "keep"]

PARTS = 4
"""Parts of a path that one launch attaches."""

PART_NUMBERS = [f"{name}{number}" for number in range(PARTS) for name in ("source", "lo", "hi")]

SEALED = 256
"""Entry counts of a program that seals a row."""

ENTRIES = 32
"""Table entries of an iteration: one a thread of the program's only warp, so that no atomic is repeated."""

UNREAD = tl.constexpr(FROM_START)


@triton.jit
def holds(page, lo, hi, live, pages, POSITIONS: tl.constexpr, TOKENS: tl.constexpr, PAGE_BYTES: tl.constexpr):
    """Whether each of [E] pages has a token with position in [lo, hi)."""
    token = tl.arange(0, padded(TOKENS))
    inside = live[:, None] & (token[None, :] < TOKENS)
    position = load_positions((pages + page.to(tl.int64) * PAGE_BYTES)[:, None], POSITIONS, token[None, :], inside)
    seen = inside & (position >= lo[:, None]) & (position < hi[:, None])
    return tl.max(seen.to(tl.int32), 1) > 0


@triton.jit
def attach_tier(
    target, source, lo, hi, done, layer, head, pages, page_table, range_lo, range_hi, row_blocks, entries, kept_entry,
    refcount, num_pages,
    TIER: tl.constexpr, TIERS: tl.constexpr, KEPT_ONLY: tl.constexpr, TOKENS: tl.constexpr,
    POSITIONS: tl.constexpr, PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr,
    E: tl.constexpr,
):  # fmt: skip
    """One tier of one (layer, head), entries in order, behind the ``done`` ones of the target. How many it has then."""
    source_at = ((source.to(tl.int64) * L + layer) * H + head) * TIERS + TIER
    count = tl.load(entries + source_at)
    first = tl.load(kept_entry + source_at) if KEPT_ONLY else 0
    for begin in range(first, count, E):
        entry = begin + tl.arange(0, E)
        live = entry < count
        column = table_column(entry, TIER, MAX_BLOCKS)
        at = table_index(row_blocks, source, layer, head, column, live, MAX_BLOCKS, L, H)
        page = tl.load(page_table + at, mask=live, other=0)
        page_lo = tl.maximum(load_bound(range_lo, at, live), lo)
        page_hi = tl.minimum(load_bound(range_hi, at, live), hi)
        keep = live & (page != num_pages) & (page_lo < page_hi)
        read = keep & (lo != UNREAD)
        keep = keep & ((lo == UNREAD) | holds(page, page_lo, page_hi, read, pages, POSITIONS, TOKENS, PAGE_BYTES))
        rank = tl.cumsum(keep.to(tl.int32), 0) - 1
        entry = done + rank
        column = table_column(entry, TIER, MAX_BLOCKS)
        at = table_index(row_blocks, target, layer, head, column, keep, MAX_BLOCKS, L, H)
        tl.store(page_table + at, page, mask=keep)
        tl.store(range_lo + at, page_lo, mask=keep)
        tl.store(range_hi + at, page_hi, mask=keep)
        tl.atomic_add(refcount + tl.where(keep, page, 0), keep.to(tl.int32))
        done += tl.sum(keep.to(tl.int32), 0)
    return done


@triton.jit
def nth(number, of0, of1, of2, of3):
    return tl.where(number == 0, of0, tl.where(number == 1, of1, tl.where(number == 2, of2, of3)))


@triton.jit(do_not_specialize=["target", "parts", *PART_NUMBERS])
def attach_kernel(
    target, parts, source0, lo0, hi0, source1, lo1, hi1, source2, lo2, hi2, source3, lo3, hi3,
    pages, page_table, range_lo, range_hi, row_blocks, entries, kept_entry, own_entry, own_tokens, refcount, num_pages,
    KEPT_ONLY: tl.constexpr, LAYOUTS: tl.constexpr, TIERS: tl.constexpr, PAGE_BYTES: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Grid (L * H, TIERS). The first ``parts`` of the sources, in order."""
    layer, head = tl.program_id(0) // H, tl.program_id(0) % H
    target_at = ((target.to(tl.int64) * L + layer) * H + head) * TIERS + tl.program_id(1)
    done = tl.load(entries + target_at)
    for tier in tl.static_range(TIERS):
        if tl.program_id(1) == tier:
            for number in range(parts):
                source = nth(number, source0, source1, source2, source3)
                lo, hi = nth(number, lo0, lo1, lo2, lo3), nth(number, hi0, hi1, hi2, hi3)
                done = attach_tier(
                    target, source, lo, hi, done, layer, head, pages, page_table, range_lo, range_hi, row_blocks,
                    entries, kept_entry, refcount, num_pages, tier, TIERS, KEPT_ONLY, LAYOUTS[tier][I_TOKENS],
                    LAYOUTS[tier][I_POSITIONS], PAGE_BYTES, MAX_BLOCKS, L, H, E,
                )  # fmt: skip
    tl.store(entries + target_at, done)
    tl.store(kept_entry + target_at, done)
    tl.store(own_entry + target_at, done)
    tl.store(own_tokens + target_at, 0)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["numbers"])
def attach_rows_kernel(
    numbers, count, pages, page_table, range_lo, range_hi, row_blocks, entries, kept_entry, own_entry, own_tokens,
    refcount, num_pages,
    LAYOUTS: tl.constexpr, TIERS: tl.constexpr, PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr, L: tl.constexpr,
    H: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Grid (L * H, TIERS, count). numbers: int64, ``count`` targets; the number of the first part of each, and of all
    parts; then source, lo and hi of each part."""
    layer, head = tl.program_id(0) // H, tl.program_id(0) % H
    place = numbers + tl.program_id(2)
    target = tl.load(place)
    first, end = tl.load(place + count), tl.load(place + count + 1)
    target_at = ((target * L + layer) * H + head) * TIERS + tl.program_id(1)
    done = tl.load(entries + target_at)
    for tier in tl.static_range(TIERS):
        if tl.program_id(1) == tier:
            for number in range(first, end):
                part = numbers + 2 * count + 1 + 3 * number
                lo, hi = tl.load(part + 1).to(tl.int32), tl.load(part + 2).to(tl.int32)
                done = attach_tier(
                    target, tl.load(part), lo, hi, done, layer, head, pages, page_table, range_lo, range_hi, row_blocks,
                    entries, kept_entry, refcount, num_pages, tier, TIERS, False, LAYOUTS[tier][I_TOKENS],
                    LAYOUTS[tier][I_POSITIONS], PAGE_BYTES, MAX_BLOCKS, L, H, E,
                )  # fmt: skip
    tl.store(entries + target_at, done)
    tl.store(kept_entry + target_at, done)
    tl.store(own_entry + target_at, done)
    tl.store(own_tokens + target_at, 0)


def attach(state: PageState, target: int, source: int, lo: int, hi: int, *, kept_only: bool = False) -> None:
    """Append to ``target``'s page table the pages of ``source`` that hold a token with position in [lo, hi).

    See ``reference.attach``; ``target`` must differ from ``source``.
    """
    prepare_attach(state, kept_only=kept_only)(target, [(source, lo, hi)])


def _tables(state: PageState) -> tuple[Any, ...]:
    """What the kernels that attach change of a state, in their order."""
    return (
        state.pages, state.page_table, state.range_lo, state.range_hi, state.row_blocks, state.entries,
        state.kept_entry, state.own_entry, state.own_tokens, state.refcount, state.num_pages,
    )  # fmt: skip


def _constants(state: PageState) -> dict[str, Any]:
    return {
        "LAYOUTS": layout_numbers(state.fmt), "TIERS": len(state.fmt.tiers), "PAGE_BYTES": state.fmt.page_bytes,
        "MAX_BLOCKS": state.row_blocks.shape[1], "L": state.num_layers, "H": state.num_heads, "E": ENTRIES,
        "num_warps": 1,
    }  # fmt: skip


def prepare_attach(state: PageState, *, kept_only: bool) -> Callable[[int, Sequence[Part]], None]:
    """``attach`` to rows of a state, of parts one after the other: target, parts. A launch for every ``PARTS``."""
    launch = Launch(
        attach_kernel,
        (state.num_layers * state.num_heads, len(state.fmt.tiers)),
        (None, None, *[None] * len(PART_NUMBERS), *_tables(state)),
        {"KEPT_ONLY": kept_only, **_constants(state)},
    )

    def attach_again(target: int, parts: Sequence[Part]) -> None:
        assert all(target != source for source, _, _ in parts)
        for first in range(0, len(parts), PARTS):
            some = parts[first : first + PARTS]
            numbers = [number for part in some for number in part] + [0] * (len(PART_NUMBERS) - 3 * len(some))
            launch(target=target, parts=len(some), **dict(zip(PART_NUMBERS, numbers, strict=True)))

    return attach_again


def prepare_attach_rows(state: PageState) -> Callable[[Sequence[tuple[int, Sequence[Part]]]], None]:
    """``attach`` to several rows of a state, of parts one after the other: (target, parts) of each. One launch, and one
    copy to the device. The targets differ, and none is a source."""
    heads, tiers = state.num_layers * state.num_heads, len(state.fmt.tiers)
    launch = Launch(
        attach_rows_kernel,
        (heads, tiers, 1),
        (None, None, *_tables(state)),
        _constants(state),
    )

    def attach_rows(paths: Sequence[tuple[int, Sequence[Part]]]) -> None:
        targets = [target for target, _ in paths]
        parts = [part for _, of_row in paths for part in of_row]
        assert len({*targets}) == len(targets) and not {source for source, _, _ in parts}.intersection(targets)
        first = [0, *accumulate(len(of_row) for _, of_row in paths)]
        numbers = to_device([*targets, *first, *chain.from_iterable(parts)], state.device)
        launch.resize(heads, tiers, len(targets))
        launch(numbers=numbers, count=len(targets))

    return attach_rows


@triton.jit(do_not_specialize=["row"])
def seal_kernel(
    row, entries, kept_entry, own_entry, own_tokens, hole, LH: tl.constexpr, TIERS: tl.constexpr, E: tl.constexpr
):
    """Grid (cdiv(LH * TIERS, E)). entries and the three like it: [R, LH, TIERS], hole [R, LH], int32."""
    number = tl.program_id(0) * E + tl.arange(0, E)
    live = number < LH * TIERS
    at = row.to(tl.int64) * LH * TIERS + number
    held = tl.load(entries + at, mask=live, other=0)
    tl.store(own_entry + at, held, mask=live)
    tl.store(kept_entry + at, held, mask=live)
    tl.store(own_tokens + at, 0, mask=live)
    tl.store(hole + row.to(tl.int64) * LH + number, -1, mask=number < LH)


def prepare_seal(state: PageState) -> Callable[[int], None]:
    """``reference.seal`` of rows of a state, in one launch."""
    heads, tiers = state.num_layers * state.num_heads, len(state.fmt.tiers)
    counts = state.entries, state.kept_entry, state.own_entry, state.own_tokens, state.hole
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in counts)
    launch = Launch(
        seal_kernel,
        (triton.cdiv(heads * tiers, SEALED),),
        (None, *counts),
        {"LH": heads, "TIERS": tiers, "E": SEALED, "num_warps": 4},
    )

    def seal_again(row: int) -> None:
        launch(row=row)

    return seal_again
