"""Counts of rows in one launch, without host synchronisation."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from sglang_diffkv.kernels.count_rows import reference
from sglang_diffkv.kernels.launch import Launch
from sglang_diffkv.kernels.triton_table import I_TOKENS, layout_numbers
from sglang_diffkv.layout.state import PageState

HEADS = 256
"""(Layer, head) pairs of an iteration."""
DEMAND, ENTRIES, PRIVATE, FAULT = (
    tl.constexpr(x) for x in (reference.DEMAND, reference.ENTRIES, reference.PRIVATE, reference.FAULT)
)


@triton.jit
def pages_needed(held, own_entry, own_tokens, at, live, spare, steps, TOKENS: tl.constexpr):
    """Pages [R] that ``steps`` more tokens take of one tier; ``held`` [R] entries, ``spare`` slots beside the end."""
    own = held - tl.load(own_entry + at, mask=live, other=0)
    slack = own * TOKENS - tl.load(own_tokens + at, mask=live, other=0) + spare
    return tl.where(live, tl.cdiv(tl.maximum(steps - slack, 0), TOKENS), 0)


@triton.jit(do_not_specialize=["steps"], do_not_specialize_on_alignment=["rows"])
def count_rows_kernel(
    rows, steps, entries, kept_entry, own_entry, own_tokens, hole, fault, counters, used, out,
    LAYOUTS: tl.constexpr, TIERS: tl.constexpr, LOW_GROWS: tl.constexpr, LH: tl.constexpr, R: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid (n + 1): a row each, and last the ring's counters. ``R`` of a row's ``LH`` heads at a time. ``used`` may be
    None."""
    number = tl.program_id(0)
    target = out + number.to(tl.int64) * COLUMNS
    if number == tl.num_programs(0) - 1:
        tl.store(target, tl.load(counters))
        tl.store(target + 1, tl.load(counters + 1))
        for column in tl.static_range(2, COLUMNS):
            tl.store(target + column, 0)
    else:
        row = tl.load(rows + number).to(tl.int64)
        demand = tl.zeros([R], tl.int32)
        most = ()
        for _ in tl.static_range(TIERS):
            most = most + (tl.zeros([R], tl.int32),)  # type: ignore[assignment]
        total = tl.zeros([R], tl.int32)
        private = tl.zeros([R], tl.int32)
        for begin in range(0, LH, R):
            head = begin + tl.arange(0, R)
            live = head < LH
            at = (row * LH + head) * TIERS
            spare = (tl.load(hole + row * LH + head, mask=live, other=-1) >= 0).to(tl.int32)
            lower = tl.zeros([R], tl.int32)
            counted = ()
            for tier in tl.static_range(TIERS):
                held = tl.load(entries + at + tier, mask=live, other=0)
                if tier == 0:
                    demand += pages_needed(held, own_entry, own_tokens, at, live, spare, steps, LAYOUTS[0][I_TOKENS])
                elif LOW_GROWS:
                    more = pages_needed(held, own_entry, own_tokens, at + tier, live, 0, steps, LAYOUTS[tier][I_TOKENS])
                    if used is not None:
                        more *= tl.load(used + head * TIERS + tier, mask=live, other=0)
                    lower += more
                counted = counted + (tl.maximum(most[tier], held),)  # type: ignore[assignment]
                total += held
                private += held - tl.load(kept_entry + at + tier, mask=live, other=0)
            demand += tl.minimum(lower, steps) if TIERS > 2 else lower  # a step moves one token of a head
            most = counted
        tl.store(target + DEMAND, tl.sum(demand.to(tl.int64), 0))
        tl.store(target + ENTRIES, tl.sum(total.to(tl.int64), 0))
        tl.store(target + PRIVATE, tl.sum(private.to(tl.int64), 0))
        tl.store(target + FAULT, tl.load(fault + row).to(tl.int64))
        for tier in tl.static_range(TIERS):
            tl.store(target + FAULT + 1 + tier, tl.max(most[tier], 0).to(tl.int64))
        for column in tl.static_range(FAULT + 1 + TIERS, COLUMNS):
            tl.store(target + column, 0)


def count_rows(
    state: PageState, rows: torch.Tensor, *, steps: int, low_grows: bool, used: torch.Tensor | None = None
) -> torch.Tensor:
    """Counts of each row, and the ring's counters: [n + 1, 4 + 2 * T] int64; see ``reference.count_rows``.

    Args:
        rows: [n] int32 or int64, n may be 0.
    """
    return prepare_count_rows(state, low_grows=low_grows, used=used)(rows, steps)


def prepare_count_rows(
    state: PageState, *, low_grows: bool, used: torch.Tensor | None = None
) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """``count_rows`` of a state: rows, always of one type, and steps."""
    for counts in (state.entries, state.kept_entry, state.own_entry, state.own_tokens, state.hole, state.fault):
        assert counts.dtype == torch.int32 and counts.is_contiguous()  # [R, L, H, T], [R, L, H] or [R]
    assert state.counters.shape == (2,) and state.counters.dtype == torch.int64
    tiers = len(state.fmt.tiers)
    if used is not None:
        assert used.shape == (state.num_layers, state.num_heads, tiers) and used.dtype == torch.int32
        assert used.is_contiguous() and used.device == state.device
    columns = reference.columns(tiers)
    launch = Launch(
        count_rows_kernel,
        (1,),
        (
            None, None, state.entries, state.kept_entry, state.own_entry, state.own_tokens, state.hole, state.fault,
            state.counters, used, None,
        ),
        {
            "LAYOUTS": layout_numbers(state.fmt), "TIERS": tiers, "LOW_GROWS": low_grows,
            "LH": state.num_layers * state.num_heads, "R": HEADS, "COLUMNS": columns, "num_warps": 4,
        },
    )  # fmt: skip
    dtypes: set[torch.dtype] = set()

    def count_again(rows: torch.Tensor, steps: int) -> torch.Tensor:
        dtypes.add(rows.dtype)
        assert rows.ndim == 1 and dtypes in ({torch.int32}, {torch.int64}) and rows.is_contiguous()
        assert rows.device == state.device and 0 <= steps < 2**30
        out = torch.empty(rows.shape[0] + 1, columns, dtype=torch.int64, device=state.device)
        launch.resize(rows.shape[0] + 1)
        launch(rows=rows, steps=steps, out=out)
        return out

    return count_again
