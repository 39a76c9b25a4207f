"""Give a row references to another row's pages, for a range of positions; no byte of a page moves."""

from __future__ import annotations

import torch

from sglang_diffkv.kernels.parts import FROM_START
from sglang_diffkv.kernels.table import max_entries, put_entries, row_table, table_index
from sglang_diffkv.layout.state import PageState


def attach(state: PageState, target: int, source: int, lo: int, hi: int, *, kept_only: bool = False) -> None:
    """Append to ``target``'s page table the pages of ``source`` that hold a token with position in [lo, hi).

    The target sees only the positions in the intersection of [lo, hi) and the source's own range for
    that page. Entries stay sorted as in the source and end at the left (high) or right (low) of the table.
    The target's own region starts after the attached pages: it never writes to them.

    Args:
        lo: or ``FROM_START``. kept_only: take only the pages that no segment holds yet.
    """
    rows = torch.tensor([source, target], device=state.device)
    src, dst = rows[:1], rows[1:]
    for tier, view in enumerate(state.tiers):
        width = max_entries(state, src, tier)
        if width:
            page, page_lo, page_hi = (x[0] for x in row_table(state, src, tier, width))  # [L, H, E]
            page_lo, page_hi = page_lo.clamp(min=lo), page_hi.clamp(max=hi)
            if lo == FROM_START:
                keep = page_lo < page_hi
            else:
                position = view.positions[page]  # [L, H, E, tokens]
                keep = ((position >= page_lo.unsqueeze(3)) & (position < page_hi.unsqueeze(3))).any(3)
            keep &= page != state.scratch_page
            if kept_only:
                first = state.kept_entry[source, :, :, tier].unsqueeze(2)
                keep &= torch.arange(width, device=state.device) >= first
            start = state.entries[target, :, :, tier].long().unsqueeze(2)
            entry = torch.where(keep, start + keep.long().cumsum(2) - 1, 0)
            where = table_index(state, dst, tier, entry.unsqueeze(0))[0][keep]
            put_entries(state, where, page[keep], page_lo[keep], page_hi[keep])
            state.refcount.index_add_(0, page[keep], torch.ones_like(page[keep], dtype=torch.int32))
            state.entries[target, :, :, tier] += keep.sum(2, dtype=torch.int32)
        state.kept_entry[target, :, :, tier] = state.entries[target, :, :, tier]
        state.own_entry[target, :, :, tier] = state.entries[target, :, :, tier]
        state.own_tokens[target, :, :, tier] = 0


def keep(state: PageState, row: int) -> None:
    """A segment holds all entries of a row before those whose pages it may write."""
    state.kept_entry[row] = state.own_entry[row]


def seal(state: PageState, row: int) -> None:
    """A segment holds all entries of a row, and its next token starts a page of its own."""
    freeze(state, row)
    keep(state, row)


def freeze(state: PageState, rows: int | torch.Tensor, tails: torch.Tensor | None = None) -> None:
    """Make the present pages of a row, or of [n] int64 rows, immutable for it: its next token starts a page of its
    own. For one row given as an integer no memory is allocated.

    Args:
        tails: [n] int64, tokens at the end of the high tier that stay the row's own, where they begin a page of their
            own (``kernels/compact_prompt``). Heads in which they do not are frozen as a whole.
    """
    if isinstance(rows, int):
        assert tails is None, "a row with a tail is given as a tensor"
        state.own_entry[rows].copy_(state.entries[rows])
        state.own_tokens[rows].zero_()
        state.hole[rows].fill_(-1)
        return
    own_entry, own_tokens = state.entries[rows].clone(), torch.zeros_like(state.own_tokens[rows])
    if tails is not None:
        tokens, held, tail = state.fmt.high.tokens, state.own_tokens[rows][..., 0], tails.int().view(-1, 1, 1)
        apart = (held >= tail) & ((held - tail) % tokens == 0)  # [n, L, H]
        before = state.own_entry[rows][..., 0] + (held - tail) // tokens
        own_entry[..., 0] = torch.where(apart, before, own_entry[..., 0])
        own_tokens[..., 0] = torch.where(apart, tail, 0)
    state.own_entry[rows], state.own_tokens[rows] = own_entry, own_tokens
    state.hole[rows] = torch.full_like(state.hole[rows], -1)  # a number by itself would be copied from the host
