"""Generation-phase compaction on the GPU: decide, take pages, requantise; no host synchronisation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang_diffkv.kernels.allocate.triton import add_own_pages
from sglang_diffkv.kernels.compact_step.triton_decide import decide_kernel
from sglang_diffkv.kernels.cuts import StepBudget, StepCuts, StepRule, check_between
from sglang_diffkv.kernels.decode_attention.triton import FoundTokens
from sglang_diffkv.kernels.triton_ring import EMPTY, HEADS, Spans
from sglang_diffkv.kernels.triton_table import (
    I_POSITIONS,
    I_SCORES,
    I_TOKENS,
    SAME_BITS,
    check_rows,
    format_constants,
    layout_numbers,
    layout_of,
    load_positions,
    store_positions,
    table_column,
    table_index,
)
from sglang_diffkv.kernels.triton_tokens import load_scores, requantized_tokens, store_tokens
from sglang_diffkv.layout.state import PageState


@triton.jit(do_not_specialize_on_alignment=["rows"])
def move_kernel(
    demote_in, leave_in, target_in, tier_in, rows, raw_like, pages, page_table, row_blocks, own_entry, hole,
    LAYOUTS: tl.constexpr, TIERS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE_BYTES: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Grid (batch * L * H): one head's token. ``raw_like`` is a pointer of the raw tier's type. ``tier_in``: the lower
    tier, None where there is only one."""
    HIGH: tl.constexpr = layout_of(LAYOUTS, 0)
    flat = tl.program_id(0)
    leave = tl.load(leave_in + flat)
    if leave < 0:
        return
    layer, head = flat // H % L, flat % H
    row = tl.load(rows + flat // (L * H)).to(tl.int64)
    at = (row * L + layer) * H + head
    column = tl.load(own_entry + at * TIERS) + leave // HIGH[I_TOKENS]
    page = tl.load(page_table + table_index(row_blocks, row, layer, head, column, True, MAX_BLOCKS, L, H))
    source = pages + page.to(tl.int64) * PAGE_BYTES
    one = tl.zeros([1], tl.int32)  # makes a tensor of a number
    slot = leave % HIGH[I_TOKENS] + one
    for tier in tl.static_range(1, TIERS):
        demoted = tl.load(demote_in + flat) >= 0
        if TIERS > 2:
            demoted = demoted & (tl.load(tier_in + flat) == tier)
        if demoted:  # codes of a tier are worked out where a token goes to it
            number = tl.load(target_in + flat)
            entry = tl.load(own_entry + at * TIERS + tier) + number // LAYOUTS[tier][I_TOKENS]
            column = table_column(entry, tier, MAX_BLOCKS)
            index = table_index(row_blocks, row, layer, head, column, True, MAX_BLOCKS, L, H)
            target = pages + tl.load(page_table + index).to(tl.int64) * PAGE_BYTES + one
            low_slot = number % LAYOUTS[tier][I_TOKENS] + one
            keep = one == 0
            codes = requantized_tokens(source, slot, keep, raw_like.dtype, HIGH, layout_of(LAYOUTS, tier), D, DV)
            score = load_scores(source, HIGH[I_SCORES], slot, keep)
            position = load_positions(source, HIGH[I_POSITIONS], slot, keep)
            store_tokens(target, low_slot, keep, codes, score, position, layout_of(LAYOUTS, tier), D, DV)
    store_positions(source, HIGH[I_POSITIONS], slot, one + EMPTY, one == 0)
    tl.store(hole + at, leave)


@dataclass
class CompactWorkspace:
    """A step's moves, static addresses for graph capture: own slots, -1 for none; and where its pages come from.

    All but ``spans`` is written and read behind a step's last layer, so it may lie in memory that layers use."""

    demote: torch.Tensor  # [B, L, H] int32
    leave: torch.Tensor  # [B, L, H] int32
    target: torch.Tensor  # [B, L, H] int32
    tier: torch.Tensor | None  # [B, L, H] int32, with more than two tiers
    sums: torch.Tensor  # [B, L, H] float32, of heads' scores
    spans: Spans

    @classmethod
    def create(cls, state: PageState, batch: int, memory: torch.Tensor | None = None) -> CompactWorkspace:
        """``memory``: uint8, of ``nbytes`` at least."""
        heads = (batch, state.num_layers, state.num_heads)
        size = cls.nbytes(state, batch)
        if memory is None:
            memory = torch.zeros(size, dtype=torch.uint8, device=state.device)
        demote, leave, target, sums, *tier = memory[:size].view(torch.int32).view(-1, *heads)
        spans = Spans.create(state, batch)
        return cls(demote, leave, target, tier[0] if tier else None, sums.view(torch.float32), spans)

    @staticmethod
    def nbytes(state: PageState, batch: int) -> int:
        """Bytes of all but ``spans``."""
        return (4 + (len(state.fmt.tiers) > 2)) * 4 * batch * state.num_layers * state.num_heads


def compact_step(
    state: PageState,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    found: FoundTokens,
    workspace: CompactWorkspace,
    num_valid: torch.Tensor,
    rule: StepRule,
) -> None:
    """After a decode step: ``reference.step_moves``, then ``reference.compact_step``.

    Args:
        rows, seq_lens: [B] integers, the new token counted.
        found: the step's searches, for at least B requests.
        workspace: for at least B requests; with the sums where the rule is ``of_sum``.
        rule: of [L, H] contiguous tensors.
    """
    check_rows(rows, num_valid, state)
    assert seq_lens.shape == rows.shape and found.packed.shape[0] >= rows.shape[0] <= workspace.leave.shape[0]
    assert rows.shape[0] <= workspace.spans.requests
    budget, of_sum = isinstance(rule, StepBudget), isinstance(rule, StepCuts) and rule.of_sum
    if isinstance(rule, StepBudget):
        first, between, second = rule.tokens, None, rule.fraction
    else:
        first, between, second = rule.high, rule.between, rule.low
        assert between is None or not of_sum
        check_between(between, state.num_layers, state.num_heads, len(state.fmt.tiers))
    assert all(x.shape == (state.num_layers, state.num_heads) and x.is_contiguous() for x in (first, second))
    fmt, layers, heads, batch = state.fmt, state.num_layers, state.num_heads, rows.shape[0]
    shape = {"PAGE_BYTES": fmt.page_bytes, "MAX_BLOCKS": state.row_blocks.shape[1], "L": layers, "H": heads}
    decide_kernel[(triton.cdiv(batch * layers * heads, HEADS),)](
        found.packed, found.packed.shape[4], rows, seq_lens, num_valid, batch, first, between,
        second, workspace.sums, workspace.demote, workspace.leave, workspace.target, workspace.tier, state.entries,
        state.own_entry, state.own_tokens, workspace.spans.demand, workspace.spans.totals,
        LAYOUTS=layout_numbers(fmt), TIERS=len(fmt.tiers), L=layers, H=heads, R=HEADS, BUDGET=budget, OF_SUM=of_sum,
        num_warps=4,
    )  # fmt: skip
    if len(fmt.tiers) > 1 and not budget:
        add_own_pages(state, rows, range(1, len(fmt.tiers)), workspace.spans)
    move_kernel[(batch * layers * heads,)](
        workspace.demote, workspace.leave, workspace.target, workspace.tier, rows, state.pages.view(state.dtype),
        state.pages, state.page_table, state.row_blocks, state.own_entry, state.hole,
        **{**format_constants(fmt), **shape}, num_warps=1, **SAME_BITS,
    )  # fmt: skip
