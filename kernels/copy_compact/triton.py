"""Copy-on-compress on the GPU: count, take pages, copy; no host synchronisation."""

from __future__ import annotations

import torch
import triton

from sglang_diffkv.kernels.copy_compact.triton_copy import copy_kernel, count_kernel, take_kernel
from sglang_diffkv.kernels.cuts import Cuts
from sglang_diffkv.kernels.triton_table import SAME_BITS, format_constants
from sglang_diffkv.kernels.triton_tokens import cut_arguments
from sglang_diffkv.mem_pool.state import PageState

HEADS = 128
"""Heads of a program that takes pages."""


def copy_compact(
    state: PageState,
    target: int,
    source: int,
    lo: int,
    hi: int,
    seq_len: int,
    ticket: torch.Tensor,
    cuts: Cuts,
    *,
    judged: torch.Tensor | None = None,
) -> None:
    """``reference.copy_compact`` of one part, by cuts that may be those of several.

    Args:
        ticket: [1] int32, zero before the first launch and after each.
        judged: [L, H, n] float32, contiguous.
    """
    assert target != source
    cuts.check(state.num_layers, state.num_heads)
    assert ticket.shape == (1,) and ticket.dtype == torch.int32
    fmt, layers, heads = state.fmt, state.num_layers, state.num_heads
    count = layers * heads
    counts = torch.empty(count, 2, dtype=torch.int32, device=state.device)
    known = 0
    if judged is not None:
        assert judged.shape[:2] == (layers, heads) and judged.dtype == torch.float32 and judged.is_contiguous()
        known = judged.shape[2]
    if not known:
        judged = torch.empty(1, device=state.device)
    every = format_constants(fmt)
    shape = {"PAGE_BYTES": fmt.page_bytes, "MAX_BLOCKS": state.block_table.shape[1], "L": layers, "H": heads}
    whole = cuts.values is not None
    rule = (judged, known, seq_len, cuts.window, cuts.sinks, *cut_arguments(cuts), counts)
    names = ("TOKENS", "SCORES", "POSITIONS")
    count_kernel[(count,)](
        source, lo, hi, *rule, state.pages, state.page_table, state.range_lo, state.range_hi, state.block_table,
        state.entries,
        **{f"{tier}_{name}": every[f"{tier}_{name}"] for tier in "HL" for name in names}, TIERS=every["TIERS"],
        **shape, WHOLE=whole, num_warps=1,
    )  # fmt: skip
    for tier, layout in enumerate(fmt.layouts):
        take_kernel[(triton.cdiv(count, HEADS),)](
            target, counts, count, state.entries, state.own_entry, state.own_tokens, state.pages, state.ring,
            state.counters, state.refcount, state.block_table, state.page_table, state.range_lo, state.range_hi,
            state.fault, ticket, state.num_pages,
            HIGH=tier == 0, TOKENS=layout.tokens, POSITIONS=layout.position_offset, TIERS=every["TIERS"], R=HEADS,
            **shape, num_warps=4,
        )  # fmt: skip
    copy_kernel[(count,)](
        target, source, lo, hi, *rule, state.pages.view(state.dtype), state.pages, state.page_table, state.range_lo,
        state.range_hi, state.block_table, state.entries, state.own_entry, state.own_tokens,
        **{**every, **shape}, WHOLE=whole, num_warps=4, **SAME_BITS,
    )  # fmt: skip
