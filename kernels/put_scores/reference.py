"""Give the tokens that a row owns new scores, by position."""

from __future__ import annotations

import torch

from sglang_diffkv.kernels.parts import held_tokens
from sglang_diffkv.layout.state import PageState


def put_scores(state: PageState, row: int, values: torch.Tensor) -> None:
    """Tokens of pages that ``row`` may write get their position's value where it is a number; others keep theirs. Tiers
    without scores get none.

    Args:
        values: [L, H, n] float32, for positions below n.
    """
    for tier, view in enumerate(state.tiers):
        x = held_tokens(state, (row, 0, values.shape[2]), tier, own=True)
        if x is None or view.scores is None:
            continue
        layer, head, _, slot = x.held.nonzero(as_tuple=True)
        page = x.page.unsqueeze(3).expand(x.held.shape)[x.held]
        value = values[layer, head, x.position[x.held].long()]
        known = ~value.isnan()
        view.scores[page[known], slot[known]] = value[known]
