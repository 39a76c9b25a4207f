"""Generation-phase compaction on the GPU: decide, take pages, requantise; no host synchronisation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang_diffkv.kernels.allocate.triton import add_own_pages
from sglang_diffkv.kernels.compact_step.triton_decide import decide_kernel
from sglang_diffkv.kernels.cuts import StepBudget, StepCuts, StepRule
from sglang_diffkv.kernels.decode_attention.triton import FoundTokens
from sglang_diffkv.kernels.triton_ring import EMPTY, HEADS, Spans
from sglang_diffkv.kernels.triton_table import BLOCK, SAME_BITS, check_rows, format_constants, table_index
from sglang_diffkv.kernels.triton_tokens import number_at, requantized, store_codes, store_numbers
from sglang_diffkv.mem_pool.state import PageState


@triton.jit(do_not_specialize_on_alignment=["rows"])
def move_kernel(
    demote_in, leave_in, target_in, rows, raw_like, pages, page_table, row_blocks, own_entry, hole,
    H_KB: tl.constexpr, H_VB: tl.constexpr, H_TOKENS: tl.constexpr, H_KEYS: tl.constexpr, H_KMETA: tl.constexpr,
    H_VALUES: tl.constexpr, H_VMETA: tl.constexpr, H_SCORES: tl.constexpr, H_POSITIONS: tl.constexpr,
    L_KB: tl.constexpr, L_VB: tl.constexpr, L_TOKENS: tl.constexpr, L_KEYS: tl.constexpr, L_KMETA: tl.constexpr,
    L_VALUES: tl.constexpr, L_VMETA: tl.constexpr, L_SCORES: tl.constexpr, L_POSITIONS: tl.constexpr,
    TIERS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr,
    L: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Grid (batch * L * H): one head's token. ``raw_like`` is a pointer of the raw tier's type."""
    flat = tl.program_id(0)
    leave = tl.load(leave_in + flat)
    if leave < 0:
        return
    layer, head = flat // H % L, flat % H
    row = tl.load(rows + flat // (L * H)).to(tl.int64)
    at = (row * L + layer) * H + head
    column = tl.load(own_entry + at * TIERS) + leave // H_TOKENS
    page = tl.load(page_table + table_index(row_blocks, row, layer, head, column, True, MAX_BLOCKS, L, H))
    source = pages + page.to(tl.int64) * PAGE_BYTES
    one = tl.zeros([1], tl.int32)  # makes a tensor of a number
    slot = leave % H_TOKENS + one
    if TIERS == 2:
        demoted = tl.load(demote_in + flat) >= 0
        number = tl.load(target_in + flat)
        entry = tl.load(own_entry + at * TIERS + 1) + number // L_TOKENS
        index = table_index(row_blocks, row, layer, head, MAX_BLOCKS * BLOCK - 1 - entry, demoted, MAX_BLOCKS, L, H)
        low_page = tl.load(page_table + index, mask=demoted, other=0)
        target = pages + low_page.to(tl.int64) * PAGE_BYTES + one
        low_slot = number % L_TOKENS + one
        keep = demoted & (one == 0)
        raw: tl.constexpr = raw_like.dtype
        k, kmeta = requantized(source, slot, keep, raw, D, H_KB, L_KB, H_KEYS, H_KMETA)
        v, vmeta = requantized(source, slot, keep, raw, DV, H_VB, L_VB, H_VALUES, H_VMETA)
        store_codes(target, low_slot, keep, k, kmeta, D * L_KB // 8, L_KEYS, L_KMETA, False)
        store_codes(target, low_slot, keep, v, vmeta, DV * L_VB // 8, L_VALUES, L_VMETA, False)
        score, position = tl.load(number_at(source, H_SCORES, slot)), tl.load(number_at(source, H_POSITIONS, slot))
        store_numbers(target, low_slot, keep, score, position, L_SCORES, L_POSITIONS)
    tl.store(number_at(source, H_POSITIONS, slot), one + EMPTY)
    tl.store(hole + at, leave)


@dataclass
class CompactWorkspace:
    """A step's moves, static addresses for graph capture: own slots, -1 for none; and where its pages come from."""

    demote: torch.Tensor  # [B, L, H] int32
    leave: torch.Tensor  # [B, L, H] int32
    target: torch.Tensor  # [B, L, H] int32
    sums: torch.Tensor  # [B, L, H] float32, of heads' scores
    spans: Spans

    @classmethod
    def create(cls, state: PageState, batch: int) -> CompactWorkspace:
        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=state.device)

        heads = (batch, state.num_layers, state.num_heads)
        sums = torch.zeros(heads, device=state.device)
        return cls(ints(*heads), ints(*heads), ints(*heads), sums, Spans.create(state, batch))


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
    first, second = (rule.tokens, rule.fraction) if isinstance(rule, StepBudget) else (rule.high, rule.low)
    assert all(x.shape == (state.num_layers, state.num_heads) and x.is_contiguous() for x in (first, second))
    fmt, layers, heads, batch = state.fmt, state.num_layers, state.num_heads, rows.shape[0]
    shape = {"PAGE_BYTES": fmt.page_bytes, "MAX_BLOCKS": state.row_blocks.shape[1], "L": layers, "H": heads}
    decide_kernel[(triton.cdiv(batch * layers * heads, HEADS),)](
        found.packed, found.packed.shape[4], rows, seq_lens, num_valid, batch, first,
        second, workspace.sums, workspace.demote, workspace.leave, workspace.target, state.entries, state.own_entry,
        state.own_tokens, workspace.spans.demand, workspace.spans.totals,
        TOKENS=fmt.low.tokens, TIERS=len(fmt.tiers), L=layers, H=heads, R=HEADS, BUDGET=budget, OF_SUM=of_sum,
        num_warps=4,
    )  # fmt: skip
    if len(fmt.tiers) > 1 and not budget:
        add_own_pages(state, rows, 1, workspace.spans)
    move_kernel[(batch * layers * heads,)](
        workspace.demote, workspace.leave, workspace.target, rows, state.pages.view(state.dtype), state.pages,
        state.page_table, state.row_blocks, state.own_entry, state.hole,
        **{**format_constants(fmt), **shape}, num_warps=1, **SAME_BITS,
    )  # fmt: skip
