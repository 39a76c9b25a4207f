"""The sum of the scores of all tokens that a head holds, for methods that compare a token with its share of it."""

from __future__ import annotations

import torch

from sglang_diffkv.kernels.table import max_entries, row_table
from sglang_diffkv.layout.state import PageState


def sum_scores(state: PageState, rows: torch.Tensor) -> torch.Tensor:
    """Sums over the tokens of all tiers, those of shared pages included, with the scores that their pages have.

    Args:
        rows: [B] int64.

    Returns:
        [B, L, H] float32.
    """
    total = torch.zeros(rows.shape[0], state.num_layers, state.num_heads, device=state.device)
    for tier, view in enumerate(state.tiers):
        page, lo, hi = row_table(state, rows, tier, max_entries(state, rows, tier))  # [B, L, H, E]
        position = view.positions[page]  # [B, L, H, E, tokens]
        held = (position >= lo.unsqueeze(4)) & (position < hi.unsqueeze(4))
        total += torch.where(held, view.scores_of(page), 0.0).sum((3, 4))
    return total
