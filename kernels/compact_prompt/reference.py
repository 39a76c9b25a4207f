"""Prompt-phase compaction: each head's own tokens are sorted into tiers, and pages that fall free return.

All layers and heads of a row at once: plan (classify, count), return the high pages that are no longer
needed, take low pages, move (DiffKV, section 5.3).
"""

from __future__ import annotations

from typing import Protocol

import torch

from sglang_diffkv.kernels.allocate.reference import add_own_pages, recycle
from sglang_diffkv.kernels.append.reference import read_tokens, write_tokens
from sglang_diffkv.kernels.table import own_slot_location, row_table, table_index
from sglang_diffkv.mem_pool.page_format import EMPTY
from sglang_diffkv.mem_pool.state import PageState, Segments


class PromptClassifier(Protocol):
    """The part of a policy that prompt compaction asks."""

    def classify_prompt(
        self, score: torch.Tensor, position: torch.Tensor, seq_len: int, num_tiers: int
    ) -> torch.Tensor:
        """Tier number of each token, ``num_tiers`` for a token to prune. All tensors [...]."""
        ...


def compact_prompt(state: PageState, row: int, seq_len: int, policy: PromptClassifier) -> None:
    """Classify and repack the own tokens of ``row``, which are all in the high tier."""
    tiers = len(state.segments)
    seg = state.segments[0]
    tokens = seg.layout.tokens
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
    position = torch.where(stored, seg.positions[page, place], EMPTY)
    tier_of = policy.classify_prompt(seg.scores[page, place], position, seq_len, tiers)
    tier_of = torch.where(position >= 0, tier_of, tiers)
    kept = (tier_of == 0).sum(2)  # [L, H]
    if bool((kept == used).all()):
        return

    low = None
    if tiers > 1:
        demoted = tier_of == 1
        count = demoted.sum(2)
        key, value = read_tokens(seg, page[demoted], place[demoted])
        low = (key, value, seg.scores[page, place][demoted], position[demoted], demoted, count)

    _close_ranks(seg, page, place, tier_of == 0, present)
    _return_pages(state, row, kept, tokens)
    state.own_tokens[row, :, :, 0] = kept.int()
    state.hole[row] = EMPTY
    if low is not None:
        _store_low(state, rows, *low)


def _close_ranks(
    seg: Segments, page: torch.Tensor, place: torch.Tensor, stays: torch.Tensor, present: torch.Tensor
) -> None:
    """Move the tokens that stay to the first own slots, in order, without touching their codes."""
    order = torch.argsort((~stays).int(), dim=2, stable=True)
    source_page, source_place = page.gather(2, order), place.gather(2, order)
    count = stays.sum(2, keepdim=True)
    filled = torch.arange(order.shape[2], device=page.device) < count
    target_page, target_place = page[filled], place[filled]
    source_page, source_place = source_page[filled], source_place[filled]
    for field in (seg.keys, seg.key_meta, seg.values, seg.value_meta, seg.scores):
        if field is not None:
            field[target_page, target_place] = field[source_page, source_place]
    position = seg.positions[source_page, source_place]
    seg.positions[page[present], place[present]] = EMPTY
    seg.positions[target_page, target_place] = position


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


def _store_low(
    state: PageState,
    rows: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score: torch.Tensor,
    position: torch.Tensor,
    demoted: torch.Tensor,
    count: torch.Tensor,
) -> None:
    """Append demoted tokens, given flat in (layer, head, position) order, to the low tier."""
    row = int(rows[0])
    seg = state.segments[1]
    tokens = seg.layout.tokens
    used = state.own_tokens[row, :, :, 1].long()
    have = (state.entries[row, :, :, 1] - state.own_entry[row, :, :, 1]).long()
    demand = (-(-(used + count) // tokens) - have).clamp(min=0)
    add_own_pages(state, rows, 1, demand.unsqueeze(0), int(demand.max()) if demand.numel() else 0)
    slot = (used.unsqueeze(2) + demoted.long().cumsum(2) - 1)[demoted]
    head = torch.arange(count.numel(), device=count.device).view(*count.shape, 1).expand_as(demoted)[demoted]
    entry = state.own_entry[row, :, :, 1].long().flatten()[head] + slot // tokens
    layer, kv_head = head // state.num_heads, head % state.num_heads
    width = int(entry.max()) + 1 if entry.numel() else 0
    table = torch.arange(width, device=count.device).expand(1, *count.shape, width)
    pages = state.page_table.view(-1)[table_index(state, rows, 1, table)][0].long()
    page = pages[layer, kv_head, entry]
    write_tokens(seg, page, slot % tokens, key, value, score, position, state.segments[0].layout.tier)
    state.own_tokens[row, :, :, 1] = (used + count).int()
