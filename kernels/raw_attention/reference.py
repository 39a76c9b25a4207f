"""Attention over one raw tier, with the arithmetic of SGLang's ``torch_native`` backend.

With tiers ``["BF16"]`` and no pruning a CPU server must give the tokens of a stock server. So this op calls
``scaled_dot_product_attention`` on the same numbers in the same order, which gives the same bits.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang_diffkv.kernels.table import layer_table, max_entries
from sglang_diffkv.layout.state import PageState, TierView


def _gather(state: PageState, layer: int, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [H, length, dim] and values [H, length, v_dim] of a row by position, zeros where there is no token: where
    it has left a sliding window, or a row found the ring empty."""
    layout = state.tiers[0].layout
    rows = torch.tensor([row], device=state.device)
    page, lo, hi = (x[0] for x in layer_table(state, rows, 0, layer, max_entries(state, rows, 0, layer)))
    view = TierView.of(state.pages.index_select(0, page.flatten()), layout, state.dtype)
    position = view.positions[:].reshape(*page.shape, layout.tokens)  # [H, E, tokens]
    valid = (position >= lo.unsqueeze(2)) & (position < hi.unsqueeze(2)) & (position < length)
    head, entry, slot = valid.nonzero(as_tuple=True)
    at = position[valid].long()
    found = []
    for field in (view.keys, view.values):
        field = field.reshape(*page.shape, layout.tokens, -1)
        by_position = field.new_zeros(page.shape[0], length, field.shape[3])
        by_position[head, at] = field[head, entry, slot]
        found.append(by_position)
    return found[0], found[1]


def _in_span(queries: int, first: int, length: int, attention_span: int, device: torch.device) -> torch.Tensor:
    """[queries, length] bool: what queries from position ``first`` on see of the sequence."""
    query = torch.arange(first, first + queries, device=device).unsqueeze(1)
    position = torch.arange(length, device=device).unsqueeze(0)
    return (position <= query) & (position > query - attention_span)


def raw_attention(
    state: PageState,
    layer: int,
    q: torch.Tensor,
    rows: torch.Tensor,
    extend_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    sm_scale: float,
    attention_span: int = 0,
) -> torch.Tensor:
    """Causal attention of new tokens, already appended, to all tokens of their row.

    Args:
        q: [tokens, Hq, head_dim], requests one after the other. rows, extend_lens, prefix_lens: [B] int64.
        attention_span: newest tokens, its own included, that a query sees; 0 for all.

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
        mask = None
        if attention_span:
            queries = query.shape[1]
            mask = _in_span(queries, prefix + count - queries, prefix + count, attention_span, q.device)
        out = scaled_dot_product_attention(
            query.unsqueeze(0),
            key.unsqueeze(0),
            value.unsqueeze(0),
            attn_mask=mask,
            enable_gqa=query.shape[0] != key.shape[0],
            scale=sm_scale,
            is_causal=count > 1 and mask is None,
        )
        outs.append(out[0, :, -count:].transpose(0, 1))
        start += count
    return torch.cat(outs) if outs else q.new_zeros(0, q.shape[1], state.fmt.v_head_dim)


def raw_verification(
    state: PageState,
    layer: int,
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: torch.Tensor,
    extend_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    sm_scale: float,
    attention_span: int = 0,
    ancestors: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of new tokens that are not appended: of each as its own decode step would compute it.

    Args:
        q: [tokens, Hq, head_dim], key: [tokens, H, head_dim], value: [tokens, H, v_head_dim], requests one after the
            other. ancestors: as for ``extend_attention``. The rest as for ``raw_attention``.

    Returns:
        [tokens, Hq, v_head_dim] in q's dtype.
    """
    assert ancestors is None or not attention_span, "a tree has no span"
    outs, start = [], 0
    for row, count, prefix in zip(rows.tolist(), extend_lens.tolist(), prefix_lens.tolist(), strict=True):
        stored = _gather(state, layer, row, prefix)
        new = (x[start : start + count].transpose(0, 1) for x in (key, value))
        keys, values = (torch.cat(pair, 1).unsqueeze(0) for pair in zip(stored, new, strict=True))
        for number in range(count):
            length = prefix + number + 1
            seen: slice | torch.Tensor = slice(length)
            if ancestors is not None:
                path = ((ancestors[start + number] >> torch.arange(count, device=q.device)) & 1).nonzero().squeeze(1)
                seen = torch.cat([torch.arange(prefix, device=q.device), prefix + path])
            out = scaled_dot_product_attention(
                q[start + number].view(1, q.shape[1], 1, -1),
                keys[:, :, seen].contiguous(),
                values[:, :, seen].contiguous(),
                attn_mask=_in_span(1, length - 1, length, attention_span, q.device) if attention_span else None,
                enable_gqa=q.shape[1] != key.shape[1],
                scale=sm_scale,
            )
            outs.append(out[0].transpose(0, 1))
        start += count
    return torch.cat(outs) if outs else q.new_zeros(0, q.shape[1], state.fmt.v_head_dim)
