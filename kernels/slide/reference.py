"""Tokens that leave a sliding layer's window are dropped: at most one of a head in a generation step.

The slot becomes the row's hole, which the next token fills, so nothing else moves and a layer's own pages stay as many.
"""

from __future__ import annotations

import torch

from sglang_diffkv.kernels.table import layer_table, max_entries
from sglang_diffkv.layout.page_format import EMPTY
from sglang_diffkv.layout.state import PageState


def slide(state: PageState, rows: torch.Tensor, seq_lens: torch.Tensor) -> None:
    """After a decode step, of each layer in ``state.sliding`` drop the own high token at position ``seq_lens - 1 -
    keep``, if a row has it. Tokens that a row shares stay.

    Args:
        rows: [B] int64, distinct. seq_lens: [B] int64, the new token included.
    """
    view, tokens = state.tiers[0], state.fmt.high.tokens
    for layer, keep in state.sliding.tolist():
        width = max_entries(state, rows, 0, layer)
        if not width:
            continue
        page = layer_table(state, rows, 0, layer, width)[0]  # [B, H, E]
        entry = torch.arange(width, device=page.device)
        first = state.own_entry[rows, layer, :, 0].long().unsqueeze(2)  # [B, H, 1]
        own = (entry >= first) & (entry < state.entries[rows, layer, :, 0].unsqueeze(2)) & (page != state.scratch_page)
        leaving = (seq_lens - 1 - keep).view(-1, 1, 1, 1)
        gone = (view.positions[page] == leaving) & (leaving >= 0) & own.unsqueeze(3)  # [B, H, E, tokens]
        batch, head, at, slot = gone.nonzero(as_tuple=True)
        view.positions[page[batch, head, at], slot] = EMPTY
        state.hole[rows[batch], layer, head] = ((at - first[batch, head, 0]) * tokens + slot).int()
