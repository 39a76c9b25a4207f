"""Prompt-phase compaction on the GPU; two launches, no host synchronisation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from sglang_diffkv.kernels.compact_prompt.triton_move import compact_kernel, spare_kernel
from sglang_diffkv.kernels.cuts import Cuts
from sglang_diffkv.kernels.triton_table import SAME_BITS, format_constants
from sglang_diffkv.kernels.triton_tokens import cut_arguments
from sglang_diffkv.mem_pool.state import PageState


@dataclass
class PromptWorkspace:
    """Pages that compaction may need beyond a row's own, and the launch ticket."""

    spare: torch.Tensor  # [L * H] int32
    ticket: torch.Tensor  # [1] int32, zero between launches

    @classmethod
    def create(cls, state: PageState) -> PromptWorkspace:
        count = state.num_layers * state.num_heads
        return cls(
            torch.zeros(count, dtype=torch.int32, device=state.device),
            torch.zeros(1, dtype=torch.int32, device=state.device),
        )


def compact_prompt(
    state: PageState,
    row: int,
    seq_len: int,
    workspace: PromptWorkspace,
    cuts: Cuts,
) -> None:
    """``reference.compact_prompt``: sort the own high-tier tokens of ``row`` into tiers.

    It borrows one page a head from the ring; a head that gets none keeps in the high tier what would go low.
    """
    cuts.check(state.num_layers, state.num_heads)
    fmt, count = state.fmt, state.num_layers * state.num_heads
    if len(fmt.tiers) > 1:
        spare_kernel[(triton.cdiv(count, 128),)](
            workspace.spare, state.ring, state.counters, state.refcount, workspace.ticket, state.num_pages, count,
            R=128, num_warps=4,
        )  # fmt: skip
    compact_kernel[(count,)](
        row, seq_len, cuts.window, cuts.sinks, *cut_arguments(cuts), workspace.spare,
        state.pages.view(state.dtype), state.pages, state.page_table, state.range_lo,
        state.range_hi, state.block_table, state.entries, state.own_entry,
        state.own_tokens, state.hole, state.fault, state.ring, state.counters, state.refcount, state.num_pages,
        **format_constants(fmt), MAX_BLOCKS=state.block_table.shape[1], L=state.num_layers, H=state.num_heads,
        WHOLE=cuts.values is not None, num_warps=4, **SAME_BITS,
    )  # fmt: skip
