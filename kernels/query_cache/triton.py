"""Keep a decode step's queries on the GPU; a CUDA graph may hold it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_diffkv.kernels.triton_table import padded
from sglang_diffkv.layout.query_cache import QueryCache


@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["rows", "seq_lens"])
def store_kernel(
    queries, slot_of, q, rows, seq_lens, layer,
    L: tl.constexpr, W: tl.constexpr, VECTORS: tl.constexpr,
):  # fmt: skip
    """Grid (B): one request's queries, ``VECTORS`` = Hq * D numbers."""
    b = tl.program_id(0)
    slot = tl.load(slot_of + tl.load(rows + b).to(tl.int64))
    if slot < 0:
        return
    place = (tl.load(seq_lens + b).to(tl.int64) - 1) % W
    at = ((slot.to(tl.int64) * L + layer) * W + place) * VECTORS
    number = tl.arange(0, padded(VECTORS))
    live = number < VECTORS
    x = tl.load(q + b.to(tl.int64) * VECTORS + number, mask=live, other=0.0)
    tl.store(queries + at + number, x, mask=live)


def store_queries(cache: QueryCache, layer: int, q: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor) -> None:
    """``reference.store_queries``; q contiguous, in the cache's dtype."""
    _, layers, window, q_heads, dim = cache.queries.shape
    assert q.shape == (rows.shape[0], q_heads, dim) and q.is_contiguous() and q.dtype == cache.queries.dtype
    assert rows.shape == seq_lens.shape and cache.queries.is_contiguous() and cache.slot_of.dtype == torch.int32
    store_kernel[(rows.shape[0],)](
        cache.queries, cache.slot_of, q, rows, seq_lens, layer, L=layers, W=window, VECTORS=q_heads * dim, num_warps=4
    )
