"""Prompt-phase compaction on the GPU; no host synchronisation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_diffkv.kernels.attach.triton import ENTRIES
from sglang_diffkv.kernels.compact_prompt.triton_move import compact_kernel, return_kernel, spare_kernel
from sglang_diffkv.kernels.cuts import Cuts
from sglang_diffkv.kernels.prefix_sum.triton import return_spans
from sglang_diffkv.kernels.triton_ring import Spans
from sglang_diffkv.kernels.triton_table import SAME_BITS, format_constants
from sglang_diffkv.kernels.triton_tokens import cut_arguments
from sglang_diffkv.mem_pool.state import PageState


@dataclass
class PromptWorkspace:
    """Pages that compaction may need beyond a row's own, and those that it leaves over."""

    spare: torch.Tensor  # [max(T - 1, 1), L * H] int32, of each lower tier
    surplus: torch.Tensor  # [L * H, 2] int32, high table entries from and to
    spans: Spans

    @classmethod
    def create(cls, state: PageState) -> PromptWorkspace:
        count = state.num_layers * state.num_heads
        return cls(
            torch.zeros(max(len(state.fmt.tiers) - 1, 1), count, dtype=torch.int32, device=state.device),
            torch.zeros(count, 2, dtype=torch.int32, device=state.device),
            Spans.create(state, 1),
        )


def compact_prompt(
    state: PageState,
    row: int,
    seq_len: int,
    workspace: PromptWorkspace,
    cuts: Cuts,
) -> None:
    """``reference.compact_prompt``: sort the own high-tier tokens of ``row`` into tiers.

    It borrows one page a head and lower tier from the ring; a head that gets none keeps in the high tier what would go
    to that tier. The other new pages are the row's own, so they are as many as the reference's, but not the same ones.
    """
    cuts.check(state.num_layers, state.num_heads, len(state.fmt.tiers))
    fmt, count = state.fmt, state.num_layers * state.num_heads
    freed = workspace.spans.totals[:count]
    if len(fmt.tiers) > 1:
        spare_kernel[(1,)](
            workspace.spare, state.ring, state.counters, state.refcount, state.num_pages,
            (len(fmt.tiers) - 1) * count, R=256, num_warps=4,
        )  # fmt: skip
    compact_kernel[(count,)](
        row, seq_len, cuts.window, cuts.sinks, cuts.lasting, *cut_arguments(cuts), workspace.spare,
        workspace.surplus, freed, state.pages.view(state.dtype), state.pages, state.page_table, state.range_lo,
        state.range_hi, state.row_blocks, state.entries, state.own_entry,
        state.own_tokens, state.hole, state.fault, state.refcount, state.num_pages,
        **format_constants(fmt), MAX_BLOCKS=state.row_blocks.shape[1], L=state.num_layers, H=state.num_heads,
        WHOLE=cuts.values is not None, num_warps=4, **SAME_BITS,
    )  # fmt: skip
    return_spans(state.counters, freed, workspace.spans.places)
    return_kernel[(count,)](
        row, workspace.spare, workspace.surplus, workspace.spans.places, state.page_table, state.row_blocks,
        state.ring, state.refcount, state.num_pages,
        TIERS=len(fmt.tiers), MAX_BLOCKS=state.row_blocks.shape[1], L=state.num_layers, H=state.num_heads, E=ENTRIES,
        num_warps=1,
    )  # fmt: skip
