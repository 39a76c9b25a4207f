"""Attention over one raw tier, with the arithmetic of SGLang's ``torch_native`` backend.

With tiers ``["BF16"]`` and no pruning a CPU server must give the tokens of a stock server; this op calls
``scaled_dot_product_attention`` on the same numbers in the same order, so that it gives the same bits.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang_diffkv.kernels.table import layer_table, max_entries
from sglang_diffkv.mem_pool.state import NO_LIMIT, PageState, TierView


def _gather(state: PageState, layer: int, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [H, length, dim] and values [H, length, v_dim] of a row, in order of position."""
    layout = state.tiers[0].layout
    rows = torch.tensor([row], device=state.device)
    page, lo, hi = (x[0] for x in layer_table(state, rows, 0, layer, max_entries(state, rows, 0, layer)))
    seg = TierView.of(state.pages.index_select(0, page.flatten()), layout, state.dtype)
    position = seg.positions.reshape(*page.shape, layout.tokens)  # [H, E, tokens]
    valid = (position >= lo.unsqueeze(2)) & (position < hi.unsqueeze(2)) & (position < length)
    order = torch.where(valid, position, NO_LIMIT).flatten(1).argsort(dim=1)[:, :length]  # [H, length]
    keys = seg.keys.reshape(page.shape[0], -1, seg.keys.shape[2])
    values = seg.values.reshape(page.shape[0], -1, seg.values.shape[2])
    head = torch.arange(page.shape[0], device=page.device).unsqueeze(1)
    lost = ~valid.flatten(1).gather(1, order).unsqueeze(2)  # a row that found the ring empty has fewer tokens
    return keys[head, order].masked_fill(lost, 0), values[head, order].masked_fill(lost, 0)


def raw_attention(
    state: PageState,
    layer: int,
    q: torch.Tensor,
    rows: torch.Tensor,
    extend_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    sm_scale: float,
) -> torch.Tensor:
    """Causal attention of new tokens, already appended, to all tokens of their row.

    Args:
        q: [tokens, Hq, head_dim], requests one after the other. rows, extend_lens, prefix_lens: [B] int64.

    Returns:
        [tokens, Hq, v_head_dim] in q's dtype.
    """
    outs, start = [], 0
    for row, count, prefix in zip(rows.tolist(), extend_lens.tolist(), prefix_lens.tolist(), strict=True):
        key, value = _gather(state, layer, row, prefix + count)
        query = q[start : start + count].transpose(0, 1)  # [Hq, n, dim]
        if count > 1:
            padded = query.new_zeros(query.shape[0], prefix + count, query.shape[2])
            padded[:, prefix:] = query
            query = padded
        out = scaled_dot_product_attention(
            query.unsqueeze(0),
            key.unsqueeze(0),
            value.unsqueeze(0),
            enable_gqa=query.shape[0] != key.shape[0],
            scale=sm_scale,
            is_causal=count > 1,
        )
        outs.append(out[0, :, -count:].transpose(0, 1))
        start += count
    return torch.cat(outs) if outs else q.new_zeros(0, q.shape[1], state.fmt.v_head_dim)
