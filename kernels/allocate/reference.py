"""Circular free page list: heads take and return disjoint spans (DiffKV, section 5.2, coordination)."""

from __future__ import annotations

import torch

from sglang_diffkv.kernels.prefix_sum.reference import exclusive_prefix_sum
from sglang_diffkv.kernels.table import own_slot_location, put_entries, table_index
from sglang_diffkv.layout.page_format import EMPTY
from sglang_diffkv.layout.state import NO_LIMIT, PageState


def take(state: PageState, demand: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Take ``demand[i]`` pages for head ``i``; what the ring cannot give becomes the scratch page.

    Args:
        demand: [N] int64 pages, each at most ``width``.

    Returns:
        pages [N, width] int64 (EMPTY past a head's demand), short [N] bool: the ring was empty for this head.
    """
    offset, total = exclusive_prefix_sum(demand)
    free = state.counters[1] - state.counters[0]
    index = offset.unsqueeze(1) + torch.arange(width, device=demand.device)  # [N, width]
    wanted = torch.arange(width, device=demand.device) < demand.unsqueeze(1)
    granted = wanted & (index < free)
    page = state.ring[(state.counters[0] + index) % state.num_pages].long()
    page = torch.where(granted, page, torch.where(wanted, state.scratch_page, EMPTY))
    state.refcount.index_add_(0, page.clamp(min=0).flatten(), granted.flatten().int())
    state.counters[0] += torch.minimum(total, free)
    return page, (wanted & ~granted).any(1)


def recycle(state: PageState, pages: torch.Tensor, mask: torch.Tensor) -> None:
    """Drop one reference of each page of ``pages`` where ``mask``; pages without references enter the ring, in order.

    Args:
        pages: [N] int64. The scratch page and EMPTY are skipped.
        mask: [N] bool.
    """
    pages = pages[mask & (pages >= 0) & (pages != state.scratch_page)]
    state.refcount.index_add_(0, pages, torch.full_like(pages, -1, dtype=torch.int32))
    number = torch.arange(pages.numel(), device=pages.device)
    first = torch.full((state.num_pages,), pages.numel(), device=pages.device)
    first.scatter_reduce_(0, pages, number, "amin")  # a page that is named twice enters once
    freed = pages[(state.refcount[pages] == 0) & (first[pages] == number)]
    place = (state.counters[1] + torch.arange(freed.numel(), device=pages.device)) % state.num_pages
    state.ring[place] = freed.int()
    state.counters[1] += freed.numel()


def add_own_pages(state: PageState, rows: torch.Tensor, tier: int, demand: torch.Tensor, width: int) -> None:
    """Append fresh own pages to the rows' page table: all slots empty, range unlimited.

    The range of an entry that got the scratch page is empty: what others wrote there is never read.

    Args:
        rows: [B] int64, distinct.
        demand: [B, L, H] int64 pages for each head, each at most ``width``.
    """
    page, short = take(state, demand.reshape(-1), width)
    page = page.view(*demand.shape, width)
    granted = page >= 0
    start = state.entries[rows, :, :, tier].long().unsqueeze(3)
    entry = torch.where(granted, start + torch.arange(width, device=rows.device), 0)
    where = table_index(state, rows, tier, entry)[granted]
    page = page[granted]
    end = torch.where(page == state.scratch_page, 0, NO_LIMIT)
    put_entries(state, where, page, torch.zeros_like(end), end)
    state.tiers[tier].positions[page] = EMPTY
    state.entries[rows, :, :, tier] += demand.int()
    state.fault[rows] |= short.view(*demand.shape).flatten(1).any(1).int()


def make_room(state: PageState, row: int, tier: int, count: torch.Tensor) -> None:
    """Take the own pages that ``count`` ([L, H] int64) tokens behind a row's own tokens need."""
    total = state.own_tokens[row, :, :, tier] + count
    have = (state.entries[row, :, :, tier] - state.own_entry[row, :, :, tier]).long()
    demand = (-(-total // state.fmt.layouts[tier].tokens) - have).clamp(min=0)
    rows = torch.tensor([row], device=state.device)
    add_own_pages(state, rows, tier, demand.unsqueeze(0), int(demand.max()))


def append_slots(state: PageState, row: int, tier: int, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Own slots of ``tier`` behind a row's own tokens, and the pages that they need, for new tokens.

    Args:
        chosen: [L, H, N] bool, the tokens that get a slot.

    Returns:
        page and slot in the page, each [chosen tokens] int64, in the order of ``chosen``.
    """
    rows = torch.tensor([row], device=state.device)
    used = state.own_tokens[row, :, :, tier].long()
    count = chosen.sum(2)
    make_room(state, row, tier, count)
    state.own_tokens[row, :, :, tier] = (used + count).int()
    slot = torch.where(chosen, used.unsqueeze(2) + chosen.long().cumsum(2) - 1, 0)
    page, place = own_slot_location(state, rows, tier, slot.unsqueeze(0))
    return page[0][chosen], place[0][chosen]


def reserve(state: PageState, rows: torch.Tensor, new_tokens: torch.Tensor, max_new_tokens: int) -> None:
    """Make room in the high tier for a step's new tokens, for all layers and heads at once.

    Sets ``write_slot`` to the own slot of each row's first new token; the others follow it. A single
    new token takes the slot that a downgraded token left, where there is one.

    Args:
        rows: [B] int64, distinct.
        new_tokens: [B] int64.
        max_new_tokens: host-known maximum of ``new_tokens``.
    """
    tokens = state.fmt.high.tokens
    hole = state.hole[rows].long()
    reuse = (hole >= 0) & (new_tokens == 1).view(-1, 1, 1)
    used = state.own_tokens[rows, :, :, 0].long()
    state.write_slot[rows] = torch.where(reuse, hole, used).int()
    state.hole[rows] = torch.where(reuse, EMPTY, hole).int()
    used = used + torch.where(reuse, 0, new_tokens.view(-1, 1, 1))
    state.own_tokens[rows, :, :, 0] = used.int()
    have = (state.entries[rows, :, :, 0] - state.own_entry[rows, :, :, 0]).long()
    demand = (-(-used // tokens) - have).clamp(min=0)
    add_own_pages(state, rows, 0, demand, -(-max_new_tokens // tokens) + 1)
