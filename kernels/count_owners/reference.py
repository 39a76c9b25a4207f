"""Pages by who refers to them: requests, other rows, or both."""

from __future__ import annotations

import torch

from sglang_diffkv.kernels.table import head_index, table_column
from sglang_diffkv.layout.state import PageState, bounds

OWNERS = ("private", "shared", "cached", "free")
"""Referred to by requests alone, by requests and the prefix cache, by the prefix cache alone, by nobody."""


def count_owners(state: PageState, rows: torch.Tensor) -> torch.Tensor:
    """Pages of each of ``OWNERS`` but the last, where ``rows`` are those of requests.

    The prefix cache has a page that has more references than requests hold of it. Entries of the scratch page, which
    have an empty range, do not count.

    Args:
        rows: [n] int64, n may be 0.

    Returns:
        [3] int64.
    """
    held = torch.zeros_like(state.refcount)  # references of requests
    heads = state.num_layers * state.num_heads
    for tier in range(len(state.fmt.tiers)):
        count = state.entries[rows, :, :, tier].long().flatten()  # [n * L * H]
        owner = torch.arange(count.shape[0], device=state.device).repeat_interleave(count)  # [entries]
        entry = torch.arange(owner.shape[0], device=state.device) - (count.cumsum(0) - count)[owner]
        column = table_column(state, tier, entry)
        at = head_index(state, rows[owner // heads], owner % heads, column)
        counts = (bounds(state.range_hi.view(-1)[at]) > 0).int()
        held.index_add_(0, state.page_table.view(-1)[at], counts)
    total, held = state.refcount[: state.num_pages], held[: state.num_pages]
    requests, cache = held > 0, total > held
    return torch.stack([(requests & ~cache).sum(), (requests & cache).sum(), (cache & ~requests).sum()])
