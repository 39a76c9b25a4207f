"""Tokens of rows' pages as a reference op finds them: of parts of rows, or of what a row owns."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_diffkv.kernels.table import max_entries, row_table
from sglang_diffkv.layout.state import PageState

Part = tuple[int, int, int]
"""(row, first position, position after the last)."""

FROM_START = -1
"""As the first position of a part that rows attach to: all that the source holds before the last one. Each of the
source's position ranges has to begin with a token. So which pages hold one is known from these, and no page is read."""


@dataclass(frozen=True)
class Held:
    """Slots of a part's pages in one tier."""

    part: Part
    tier: int
    page: torch.Tensor  # [L, H, E] int64
    position: torch.Tensor  # [L, H, E, tokens] int32
    held: torch.Tensor  # [L, H, E, tokens] bool: the slots with a token of the part
    score: torch.Tensor  # [L, H, E, tokens] float32


def held_tokens(
    state: PageState, part: Part, tier: int, shared_scores: torch.Tensor | None = None, *, own: bool = False
) -> Held | None:
    """A part's tokens of one tier, None if the row has no page there.

    Args:
        shared_scores: [L, H, n] float32, scores by position for positions below n where they are numbers; elsewhere the
            pages' own scores count, 0 where the tier has none.
        own: only tokens in pages that the row owns.
    """
    source, lo, hi = part
    view, rows = state.tiers[tier], torch.tensor([source], device=state.device)
    width = max_entries(state, rows, tier)
    if not width:
        return None
    page, page_lo, page_hi = (x[0] for x in row_table(state, rows, tier, width))  # [L, H, E]
    position = view.positions[page]
    held = (position >= page_lo.clamp(min=lo).unsqueeze(3)) & (position < page_hi.clamp(max=hi).unsqueeze(3))
    if own:
        entry = torch.arange(width, device=page.device)
        held &= (entry >= state.own_entry[source, :, :, tier].unsqueeze(2)).unsqueeze(3)
    return Held(part, tier, page, position, held, _scores(view.scores_of(page), position, held, shared_scores))


def _scores(
    stored: torch.Tensor, position: torch.Tensor, held: torch.Tensor, shared_scores: torch.Tensor | None
) -> torch.Tensor:
    if shared_scores is None:
        return stored
    known = held & (position < shared_scores.shape[2])
    at = torch.where(known, position, 0).long().flatten(2)
    own = shared_scores.gather(2, at).view(position.shape)
    return torch.where(known & ~own.isnan(), own, stored)
