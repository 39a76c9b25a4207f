"""Copy-on-compress on the GPU: count, take pages, copy; no host synchronisation."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

import torch
import triton

from sglang_diffkv.kernels.allocate.triton import prepare_grant
from sglang_diffkv.kernels.copy_compact.triton_copy import copy_kernel, count_kernel, take_kernel
from sglang_diffkv.kernels.cuts import Cuts
from sglang_diffkv.kernels.launch import Launch
from sglang_diffkv.kernels.prefix_sum.triton import prepare_take_spans
from sglang_diffkv.kernels.triton_ring import HEADS, Spans
from sglang_diffkv.kernels.triton_table import SAME_BITS, format_constants
from sglang_diffkv.kernels.triton_tokens import cut_arguments
from sglang_diffkv.layout.state import PageState

RULE = (
    "shared_scores", "shared_len", "seq_len", "window", "sinks", "lasting", "high_cut", "between", "low_cut",
    "tie_high", "tie_low", "values", "values_len", "counts",
)  # fmt: skip
"""Arguments of both kernels by which tokens are sorted."""


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
    prepare_copy(state, spans, cuts)(target, source, lo, hi, seq_len, cuts, shared_scores)


class PreparedCopy(Protocol):
    """``copy_compact`` in the same state, by cuts of the same form."""

    def __call__(
        self, target: int, source: int, lo: int, hi: int, seq_len: int, cuts: Cuts, shared_scores: torch.Tensor | None
    ) -> None: ...


def form_of_cuts(cuts: Cuts) -> Hashable:
    """What the variants of the copy's kernels depend on."""
    tensors = (cuts.high, cuts.low, cuts.values, cuts.tie_high, cuts.tie_low, cuts.between, cuts.lasting)
    return tuple(None if x is None else x.data_ptr() % 16 for x in tensors)


def prepare_copy(state: PageState, spans: Spans, cuts: Cuts) -> PreparedCopy:
    """What copies by cuts of a form have in common. Arguments as of ``copy_compact``. Nothing is allocated later."""
    fmt, layers, heads, tiers = state.fmt, state.num_layers, state.num_heads, len(state.fmt.tiers)
    count, programs = layers * heads, triton.cdiv(layers * heads, HEADS)
    nothing = torch.empty(1, device=state.device)
    counts = torch.empty(count, tiers, dtype=torch.int32, device=state.device)
    every = format_constants(fmt)
    layouts = {"LAYOUTS": every["LAYOUTS"], "TIERS": tiers}
    shape = {"PAGE_BYTES": fmt.page_bytes, "MAX_BLOCKS": state.row_blocks.shape[1], "L": state.row_layers, "H": heads}
    whole = cuts.values is not None
    table = (state.pages, state.page_table, state.range_lo, state.range_hi, state.row_blocks, state.entries)
    rule = [None] * len(RULE)
    count_tokens = Launch(
        count_kernel, (count,), (None, None, None, *rule, *table), {**layouts, **shape, "WHOLE": whole, "num_warps": 1}
    )
    take_tokens = Launch(
        take_kernel,
        (programs, tiers),
        (None, counts, count, state.entries, state.own_entry, state.own_tokens, spans.demand, spans.totals),
        {**layouts, "L": state.row_layers, "H": heads, "R": HEADS, "num_warps": 4},
    )
    take = prepare_take_spans(state.counters, spans.totals[: tiers * programs], spans.places)
    grants = [
        prepare_grant(state, None, tier, count, spans.demand[tier * count :], spans.places[tier * programs :])
        for tier in range(tiers)
    ]
    copy = Launch(
        copy_kernel,
        (count,),
        (None, None, None, None, *rule, state.pages.view(state.dtype), *table, state.own_entry, state.own_tokens),
        {**every, **shape, "WHOLE": whole, "num_warps": 4, **SAME_BITS},
    )

    def copy_again(
        target: int, source: int, lo: int, hi: int, seq_len: int, cuts: Cuts, shared_scores: torch.Tensor | None
    ) -> None:
        assert target != source
        cuts.check(layers, heads, tiers)
        if shared_scores is not None:
            assert shared_scores.shape[:2] == (layers, heads) and shared_scores.dtype == torch.float32
            assert shared_scores.is_contiguous()
        known = 0 if shared_scores is None else shared_scores.shape[2]
        scores = shared_scores if known else nothing
        numbers = (scores, known, seq_len, cuts.window, cuts.sinks, cuts.lasting, *cut_arguments(cuts), counts)
        changed = {"source": source, "lo": lo, "hi": hi, **dict(zip(RULE, numbers, strict=True))}
        count_tokens(**changed)
        take_tokens(target=target)
        take()
        for grant in grants:
            grant(rows=target)
        copy(target=target, **changed)

    return copy_again
