"""Tokens and pages that rows hold of a range of positions."""

from __future__ import annotations

import torch

from sglang_diffkv.kernels.table import max_entries, row_table
from sglang_diffkv.layout.state import PageState


def measure(state: PageState, rows: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor) -> torch.Tensor:
    """Tokens of each tier, and pages with at least one such token, for each layer and head of ``rows``.

    A token counts if its position lies both in [lo, hi) and in its table entry's range. The scratch page's
    entries have an empty range, so nothing on it counts.

    Args:
        rows, lo, hi: [n] int64, lo >= 0; n may be 0.

    Returns:
        [n, L, H, T + 1] int32: tokens of each tier, then pages of all tiers.
    """
    tiers = len(state.tiers)
    shape = (rows.shape[0], state.num_layers, state.num_heads, tiers + 1)
    out = torch.zeros(shape, dtype=torch.int32, device=state.device)
    first, end = lo.view(-1, 1, 1, 1), hi.view(-1, 1, 1, 1)
    for tier, view in enumerate(state.tiers):
        page, range_lo, range_hi = row_table(state, rows, tier, max_entries(state, rows, tier))  # [n, L, H, E]
        position = view.positions[page]  # [n, L, H, E, tokens]
        above = position >= torch.maximum(range_lo, first).unsqueeze(4)
        held = above & (position < torch.minimum(range_hi, end).unsqueeze(4))
        out[..., tier] = held.sum((3, 4))
        out[..., tiers] += held.any(4).sum(3, dtype=torch.int32)
    return out


def add_held(state: PageState, rows: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor, out: torch.Tensor) -> None:
    """Add up the tokens of each tier that ``measure`` counts, over layers and heads.

    Args:
        rows, lo, hi: [n] int64, as of ``measure``.
        out: [n, T] int64, columns of a larger tensor perhaps. It gets the sums added.
    """
    out += measure(state, rows, lo, hi)[..., :-1].sum((1, 2))


def tally(state: PageState, row: int, hi: int, out: torch.Tensor, number: int) -> None:
    """Add up what a row holds below position ``hi``, over layers and heads.

    Args:
        out: [n, T + 2] int64. ``out[number]`` is zero; it gets the tokens of each tier, the pages that hold one, and
            the tokens of layers with a sliding window.
    """
    rows, ends = torch.tensor([[row], [hi]], device=state.device)
    counts = measure(state, rows, torch.zeros_like(rows), ends)[0]  # [L, H, T + 1]
    out[number, :-1] += counts.sum((0, 1))
    sliding = [layer for layer in range(state.num_layers) if state.attention_span(layer)]
    if sliding:
        out[number, -1] += counts[sliding, :, :-1].sum()
