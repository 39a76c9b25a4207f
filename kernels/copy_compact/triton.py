"""Copy-on-compress on the GPU: count, take pages, copy; no host synchronisation."""

from __future__ import annotations

import torch
import triton

from sglang_diffkv.kernels.allocate.triton import grant_pages
from sglang_diffkv.kernels.copy_compact.triton_copy import copy_kernel, count_kernel, take_kernel
from sglang_diffkv.kernels.cuts import Cuts
from sglang_diffkv.kernels.prefix_sum.triton import take_spans
from sglang_diffkv.kernels.triton_ring import HEADS, Spans
from sglang_diffkv.kernels.triton_table import SAME_BITS, format_constants
from sglang_diffkv.kernels.triton_tokens import cut_arguments
from sglang_diffkv.layout.state import PageState


def copy_compact(
    state: PageState,
    target: int,
    source: int,
    lo: int,
    hi: int,
    seq_len: int,
    spans: Spans,
    cuts: Cuts,
    *,
    shared_scores: torch.Tensor | None = None,
) -> None:
    """``reference.copy_compact`` of one part, by cuts that may be those of several.

    Args:
        spans: of any number of requests.
        shared_scores: [L, H, n] float32, contiguous.
    """
    assert target != source
    cuts.check(state.num_layers, state.num_heads, len(state.fmt.tiers))
    fmt, layers, heads = state.fmt, state.num_layers, state.num_heads
    count = layers * heads
    tiers = len(fmt.tiers)
    counts = torch.empty(count, tiers, dtype=torch.int32, device=state.device)
    known = 0
    if shared_scores is not None:
        assert (
            shared_scores.shape[:2] == (layers, heads)
            and shared_scores.dtype == torch.float32
            and shared_scores.is_contiguous()
        )
        known = shared_scores.shape[2]
    if not known:
        shared_scores = torch.empty(1, device=state.device)
    every = format_constants(fmt)
    shape = {"PAGE_BYTES": fmt.page_bytes, "MAX_BLOCKS": state.row_blocks.shape[1], "L": state.row_layers, "H": heads}
    whole = cuts.values is not None
    rule = (shared_scores, known, seq_len, cuts.window, cuts.sinks, cuts.lasting, *cut_arguments(cuts), counts)
    count_kernel[(count,)](
        source, lo, hi, *rule, state.pages, state.page_table, state.range_lo, state.range_hi, state.row_blocks,
        state.entries,
        LAYOUTS=every["LAYOUTS"], TIERS=tiers, **shape, WHOLE=whole, num_warps=1,
    )  # fmt: skip
    programs = triton.cdiv(count, HEADS)
    take_kernel[(programs, tiers)](
        target, counts, count, state.entries, state.own_entry, state.own_tokens, spans.demand, spans.totals,
        LAYOUTS=every["LAYOUTS"], TIERS=tiers, L=state.row_layers, H=heads, R=HEADS, num_warps=4,
    )  # fmt: skip
    take_spans(state.counters, spans.totals[: tiers * programs], spans.places)
    for tier in range(tiers):
        grant_pages(state, target, tier, count, spans.demand[tier * count :], spans.places[tier * programs :])
    copy_kernel[(count,)](
        target, source, lo, hi, *rule, state.pages.view(state.dtype), state.pages, state.page_table, state.range_lo,
        state.range_hi, state.row_blocks, state.entries, state.own_entry, state.own_tokens,
        **{**every, **shape}, WHOLE=whole, num_warps=4, **SAME_BITS,
    )  # fmt: skip
