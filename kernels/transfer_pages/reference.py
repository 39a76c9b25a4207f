"""Part with the pages that a row may not write: they go to another row, without a reference being taken or dropped."""

from __future__ import annotations

import torch

from sglang_diffkv.kernels.table import max_entries, put_entries, row_table, table_index
from sglang_diffkv.layout.state import PageState


def transfer_pages(state: PageState, row: int, target: int) -> None:
    """Move the entries of ``row`` before those whose pages it may write to the table of ``target``, which is empty, in
    order and with their ranges; the row's own close ranks. No byte of a page moves.

    The target never writes to what it gets, and no segment holds it for the target.
    """
    rows = torch.tensor([row, target], device=state.device)
    src, dst = rows[:1], rows[1:]
    for tier in range(len(state.tiers)):
        own = state.own_entry[row, :, :, tier].clone()  # [L, H]
        width = max_entries(state, src, tier)
        if width:
            page, lo, hi = row_table(state, src, tier, width)  # [1, L, H, E]
            entry = torch.arange(width, device=state.device).expand(page.shape)
            given = entry < own.unsqueeze(2)
            left = ~given & (entry < state.entries[row, :, :, tier].unsqueeze(2))
            for owner, moved, to in ((dst, given, entry), (src, left, entry - own.unsqueeze(2))):
                where = table_index(state, owner, tier, torch.where(moved, to, 0).long())[moved]
                put_entries(state, where, page[moved], lo[moved], hi[moved])
        state.entries[row, :, :, tier] -= own
        state.entries[target, :, :, tier] = own
        state.own_entry[target, :, :, tier] = own
    state.kept_entry[row] = state.own_entry[row] = state.kept_entry[target] = 0
    state.own_tokens[target] = 0
