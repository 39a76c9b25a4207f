"""The pages of rows and what is known of each, in an order that the host can tell from its counts."""

from __future__ import annotations

import torch

from sglang_diffkv.kernels.table import row_table
from sglang_diffkv.layout.page_format import EMPTY
from sglang_diffkv.layout.state import PageState

TIER, HEAD, LO, UPPER, LEAST, LAST = range(6)
"""Rows of what is known of each page: its tier, its KV head, which counts over layers, the position range in which its
tokens count, and the first and last position in it. Where there is none the first is ``NO_POSITION``, the last
EMPTY."""
NO_POSITION = 2**31 - 1


def list_pages(state: PageState, asked: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first pages of each row by tier, by head, and in order.

    Args:
        asked: [5, B] int64, of each row: its number; ``lo`` and ``hi``, to which position ranges are cut; the place of
            its first page; how many pages at most. total: places in all.

    Returns:
        Pages [total] int64 and what is known of each, [6, total] int32. Places that no page goes to have zeros.
    """
    rows, lo, hi, first, count = asked.unbind(0)
    tables = [_of_tier(state, rows, tier, lo.view(-1, 1, 1), hi.view(-1, 1, 1)) for tier in range(len(state.fmt.tiers))]
    page, used, known = (torch.cat(x, dim=-1) for x in zip(*tables, strict=True))  # [B, n], [B, n], [6, B, n]
    place = used.long().cumsum(1) - 1
    place = torch.where(used & (place < count.unsqueeze(1)), place + first.unsqueeze(1), total).flatten()
    pages = page.new_zeros(total + 1).scatter_(0, place, page.flatten())
    listed = known.new_zeros(6, total + 1).scatter_(1, place.expand(6, -1), known.flatten(1))
    return pages[:total], listed[:, :total].contiguous()


def _of_tier(
    state: PageState, rows: torch.Tensor, tier: int, lo: torch.Tensor, hi: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All entry places of a tier: pages [B, n] int64, which of them are used [B, n], what is known [6, B, n] int32."""
    width = state.width // (2 if len(state.fmt.tiers) > 2 else 1)
    page, low, high = (x.flatten(1, 2) for x in row_table(state, rows, tier, width))  # [B, heads, width]
    used = torch.arange(width, device=state.device) < state.entries[rows, :, :, tier].flatten(1).unsqueeze(2)
    head = torch.arange(page.shape[1], device=state.device).view(-1, 1).expand_as(page)
    low, high = low.clamp(min=lo), high.clamp(max=hi)
    position = state.tiers[tier].positions[page]  # [B, heads, width, tokens]
    inside = (position >= low.unsqueeze(3)) & (position < high.unsqueeze(3))
    least = torch.where(inside, position, NO_POSITION).amin(3)
    last = torch.where(inside, position, EMPTY).amax(3)
    known = torch.stack([torch.full_like(head, tier), head, low, high, least, last]).int()
    return page.flatten(1), used.flatten(1), known.flatten(2)
