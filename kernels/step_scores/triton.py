"""Scores and searches of a decode step whose attention is known, on the GPU: one launch for all layers."""

from __future__ import annotations

import torch

from sglang_diffkv.kernels.decode_attention.triton import FoundTokens
from sglang_diffkv.kernels.decode_attention.triton_workspace import DecodeConfig, tile_constants
from sglang_diffkv.kernels.device import processors_of
from sglang_diffkv.kernels.step_scores.triton_search import search_kernel
from sglang_diffkv.kernels.triton_table import INTERPRETED, check_rows, check_windows, format_constants
from sglang_diffkv.layout.state import NO_LIMIT, PageState

PROGRAMS = 32
"""Of a multiprocessor, one warp each, that share heads while there are fewer heads."""


def step_scores(
    state: PageState,
    layers: range,
    q: torch.Tensor,
    lse: torch.Tensor,
    chosen: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    found: FoundTokens,
    num_valid: torch.Tensor,
    config: DecodeConfig,
    *,
    q_heads: int,
    window: int = 0,
    sinks: int = 0,
    horizon: int = 0,
    every: int = 1,
    logit_cap: float = 0.0,
    reduce: str = "max",
    row_windows: torch.Tensor | None = None,
) -> None:
    """As the reference.

    Args:
        q, lse: contiguous. q_heads: query heads, of which ``q`` may have none where
            nothing is scored. num_valid: [1] int32, requests that are not padding, for which nothing is found.
    """
    fmt, batch, heads = state.fmt, rows.shape[0], state.num_heads
    assert layers.step == 1 and layers.stop <= state.num_layers and chosen.shape == seq_lens.shape == rows.shape
    assert found.packed.shape[0] >= batch and found.packed.is_contiguous() and q_heads % heads == 0
    check_rows(rows, num_valid, state)
    check_windows(row_windows, state)
    if found.scored:
        assert q.is_contiguous() and q.shape[::2] == (state.num_layers, q_heads) and q.shape[3] == fmt.head_dim
        assert lse.is_contiguous() and lse.shape == q.shape[:3] and lse.dtype == torch.float32
    most = found.packed.shape[4]
    parts = max(1, min(most, PROGRAMS * processors_of(state.device) // (batch * heads * len(layers))))
    constants = {k: v for k, v in format_constants(fmt).items() if k != "DV"}
    search_kernel[(batch * heads, parts, len(layers))](
        layers.start, q, lse, q.shape[1], chosen, found.packed, most, state.pages, state.page_table, state.range_lo,
        state.range_hi, state.row_blocks, state.entries, state.own_entry, rows, seq_lens, num_valid, window, sinks,
        horizon or NO_LIMIT, every, sm_scale, logit_cap, row_windows,
        **constants, TILES=tile_constants(fmt, config)["TILES"], TIERS_SCORED=len(fmt.tiers) if found.score_low else 1,
        SCORED=found.scored, MAX_BLOCKS=state.row_blocks.shape[1], L=state.num_layers, H=heads, G=q_heads // heads,
        HAS_CAP=logit_cap > 0, ASM=not INTERPRETED, MEAN=reduce == "mean", num_warps=1, num_stages=2,
    )  # fmt: skip
