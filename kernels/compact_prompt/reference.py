"""Prompt-phase compaction: each head's own tokens are sorted into tiers, and pages that fall free return.

All layers and heads of a row at once: classify and count, return the high pages that are no longer
needed, take low pages, move (DiffKV, section 5.3).
"""

from __future__ import annotations

import torch

from sglang_diffkv.kernels.allocate.reference import add_own_pages, append_slots, recycle
from sglang_diffkv.kernels.append.reference import read_tokens, write_tokens
from sglang_diffkv.kernels.cuts import Cuts, prompt_tiers
from sglang_diffkv.kernels.table import own_slot_location, row_table
from sglang_diffkv.layout.page_format import EMPTY
from sglang_diffkv.layout.state import PageState


def compact_prompts(
    state: PageState, rows: torch.Tensor, seq_lens: torch.Tensor, cuts: Cuts, tails: torch.Tensor | None = None
) -> None:
    """``compact_prompt`` of each of ``rows`` [B], different ones, whose sequences have ``seq_lens`` [B] tokens, with
    tails of ``tails`` [B] tokens."""
    each = [0] * rows.shape[0] if tails is None else tails.tolist()
    for row, seq_len, tail in zip(rows.tolist(), seq_lens.tolist(), each, strict=True):
        compact_prompt(state, row, seq_len, cuts, tail)


def compact_prompt(state: PageState, row: int, seq_len: int, cuts: Cuts, tail: int = 0) -> None:
    """Sort the own high-tier tokens of ``row`` into tiers and repack them.

    Args:
        seq_len: tokens of the sequence. tail: of these, the last that begin a page of their own in each head; they are
            the row's own, and stay in the high tier whatever the cuts say.
    """
    tiers = len(state.tiers)
    view = state.tiers[0]
    tokens = view.layout.tokens
    rows = torch.tensor([row], device=state.device)
    used = state.own_tokens[row, :, :, 0].long()  # [L, H]
    total = int(used.max())
    if total == 0:
        return
    slot = torch.arange(total, device=state.device).expand(*used.shape, -1)
    present = slot < used.unsqueeze(2)
    own_slot = torch.where(present, slot, 0).unsqueeze(0)
    page, place = (x[0] for x in own_slot_location(state, rows, 0, own_slot))  # [L, H, N]
    stored = present & (page != state.scratch_page)
    position = torch.where(stored, view.positions[page, place], EMPTY)
    tier_of = prompt_tiers(cuts, view.scores_of(page, place), position, seq_len, tiers)
    if tail:
        tier_of = torch.where(position >= seq_len - tail, 0, tier_of)
    tier_of = torch.where(position >= 0, tier_of, tiers)
    stays = tier_of == 0
    kept = stays.sum(2)  # [L, H]
    if bool((kept == used).all()) and not tail:
        return

    demoted = [tier_of == tier for tier in range(1, tiers)]
    lowered = [(*read_tokens(view, page[x], place[x]), view.scores_of(page[x], place[x]), position[x]) for x in demoted]
    behind = stays & (position >= seq_len - tail) if tail else torch.zeros_like(stays)
    gap = _gap(state, row, kept, behind.sum(2))
    _close_ranks(state, row, (page, place), stays, present, behind, gap)
    kept = kept + gap
    _return_pages(state, row, kept, tokens)
    state.own_tokens[row, :, :, 0] = kept.int()
    state.hole[row] = EMPTY
    for tier, (chosen, tokens_of) in enumerate(zip(demoted, lowered, strict=True), 1):
        at = append_slots(state, row, tier, chosen)
        write_tokens(state.tiers[tier], *at, *tokens_of, view.layout.tier)


def _gap(state: PageState, row: int, kept: torch.Tensor, behind: torch.Tensor) -> torch.Tensor:
    """Empty slots, [L, H], between the ``kept`` [L, H] tokens before a tail and its ``behind`` [L, H] tokens, with
    pages for the tail. None in a head for whose tail no page is left."""
    tokens = state.fmt.high.tokens
    gap = torch.where(behind > 0, -(kept - behind) % tokens, 0)
    have = (state.entries[row, :, :, 0] - state.own_entry[row, :, :, 0]).long()
    lacks = -(-(kept + gap) // tokens) > have
    free = state.counters[1] - state.counters[0]
    lacks &= (lacks.flatten().long().cumsum(0) <= free).view_as(lacks)
    rows = torch.tensor([row], device=state.device)
    add_own_pages(state, rows, 0, lacks.long().unsqueeze(0), 1)
    enough = -(-(kept + gap) // tokens) <= have + lacks
    return torch.where(enough, gap, 0)


def _close_ranks(
    state: PageState,
    row: int,
    source: tuple[torch.Tensor, torch.Tensor],
    stays: torch.Tensor,
    present: torch.Tensor,
    behind: torch.Tensor,
    gap: torch.Tensor,
) -> None:
    """Move the tokens that stay to the first own slots, in order, without touching their codes, and those of them that
    are ``behind`` ``gap`` slots further. ``source``: page and slot in the page, [L, H, N] each."""
    view, rows = state.tiers[0], torch.tensor([row], device=state.device)
    page, place = source
    slot = torch.where(stays, stays.long().cumsum(2) - 1 + behind * gap.unsqueeze(2), 0)
    target_page, target_place = (x[0][stays] for x in own_slot_location(state, rows, 0, slot.unsqueeze(0)))
    source_page, source_place = page[stays], place[stays]
    for field in (view.keys, view.key_meta, view.values, view.value_meta, view.scores):
        if field is not None:
            field[target_page, target_place] = field[source_page, source_place]
    position = view.positions[source_page, source_place]
    view.positions[page[present], place[present]] = EMPTY
    view.positions[target_page, target_place] = position


def _return_pages(state: PageState, row: int, kept: torch.Tensor, tokens: int) -> None:
    """Give back own high pages past the last kept token."""
    rows = torch.tensor([row], device=state.device)
    width = int(state.entries[row, :, :, 0].max())
    page, _, _ = row_table(state, rows, 0, width)
    last = state.own_entry[row, :, :, 0] + -(-kept // tokens).int()
    entry = torch.arange(width, device=state.device)
    spare = (entry >= last.unsqueeze(2)) & (entry < state.entries[row, :, :, 0].unsqueeze(2))
    recycle(state, page.flatten(), spare.flatten())
    state.entries[row, :, :, 0] = last
