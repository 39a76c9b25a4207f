"""Keep a decode step's queries for requests that have a query slot."""

from __future__ import annotations

import torch

from sglang_diffkv.layout.query_cache import QueryCache


def store_queries(cache: QueryCache, layer: int, q: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor) -> None:
    """Write one layer's queries over the oldest of each request.

    Args:
        q: [B, Hq, D], the query of position ``seq_lens - 1`` of each of ``rows`` [B].
    """
    slot = cache.slot_of[rows.long()].long()
    kept = slot >= 0
    place = (seq_lens.long()[kept] - 1) % cache.window
    cache.queries[slot[kept], layer, place] = q[kept].to(cache.queries.dtype)
