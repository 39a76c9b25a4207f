"""Return a row's pages, or those of them that hold nothing below a position."""

from __future__ import annotations

import torch

from sglang_diffkv.kernels.allocate.reference import recycle
from sglang_diffkv.kernels.table import max_entries, put_entries, row_table, table_index
from sglang_diffkv.layout.state import PageState


def release(state: PageState, row: int) -> None:
    """Drop every reference the row holds and empty it."""
    rows = torch.tensor([row], device=state.device)
    for tier in range(len(state.tiers)):
        width = max_entries(state, rows, tier)
        if width:
            page, _, hi = row_table(state, rows, tier, width)
            recycle(state, page.flatten(), (hi > 0).flatten())
    state.entries[row] = 0
    state.kept_entry[row] = 0
    state.own_entry[row] = 0
    state.own_tokens[row] = 0
    state.hole[row] = -1
    state.fault[row] = 0


def trim(state: PageState, row: int, end: int) -> None:
    """Forget the row's tokens at positions >= ``end`` and return the pages that hold no other token.

    For rows that own no writable page (tree segments).
    """
    rows = torch.tensor([row], device=state.device)
    for tier, view in enumerate(state.tiers):
        width = max_entries(state, rows, tier)
        if not width:
            continue
        page, lo, hi = row_table(state, rows, tier, width)  # [1, L, H, E]
        used = hi > 0
        hi = hi.clamp(max=end)
        position = view.positions[page]
        keep = used & ((position >= lo.unsqueeze(4)) & (position < hi.unsqueeze(4))).any(4)
        recycle(state, page.flatten(), (used & ~keep).flatten())
        entry = torch.where(keep, keep.long().cumsum(3) - 1, 0)
        where = table_index(state, rows, tier, entry)[keep]
        put_entries(state, where, page[keep], lo[keep], hi[keep])
        state.entries[row, :, :, tier] = keep[0].sum(2, dtype=torch.int32)
    state.kept_entry[row] = state.entries[row]
    state.own_entry[row] = state.entries[row]
