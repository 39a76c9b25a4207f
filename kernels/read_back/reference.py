"""Keys and values of stored tokens as the model gave them, in one tensor with the new ones that follow them.

Attention of many new queries to a prefix multiplies as much as among themselves, and libraries do that several times
as fast as a kernel that unpacks pages for each few of them. So each token is unpacked once a layer instead.
"""

from __future__ import annotations

import torch

from sglang_diffkv.kernels.append.reference import read_tokens
from sglang_diffkv.kernels.rotate.reference import NO_ROTATION, Rotation, rotated
from sglang_diffkv.kernels.table import layer_table, max_entries
from sglang_diffkv.layout.state import PageState


def read_back(
    state: PageState,
    layer: int,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    extend_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    into: torch.Tensor,
    key_out: torch.Tensor,
    value_out: torch.Tensor,
    *,
    rotation: Rotation = NO_ROTATION,
    key_means: torch.Tensor | None = None,
    first_head: int = 0,
) -> None:
    """Fill the requests' parts of ``key_out`` and ``value_out``: stored tokens by position, then the new ones.

    For heads that hold every token; the place of one that a head has dropped stays as it is. A row with a fault may
    miss some tokens and is about to be aborted; zeros stand for its stored ones. What was in memory before may be NaN,
    which a library that reads beyond a request multiplies by 0 for its neighbour.

    Args:
        key: [tokens, H, head_dim] and value: [tokens, H, v_head_dim], the new tokens, requests one after the other.
        rows, starts, extend_lens, prefix_lens: [B] integers: owner, first token in ``key``, new tokens, and tokens
            before them.
        into: [B] integers: place of a request's first token in the outputs.
        key_out: [all tokens, n, head_dim]. value_out: [all tokens, n, v_head_dim]. Both in the state's dtype, of the
            ``n`` KV heads from ``first_head`` on.
        rotation: what was rotated before it was stored, and is rotated back. key_means: [H, head_dim] float32, then
            added to keys.
    """
    lens = zip(*(x.tolist() for x in (rows, starts, extend_lens, prefix_lens, into)), strict=True)
    head = torch.arange(state.num_heads, device=state.device)
    some = slice(first_head, first_head + key_out.shape[1])
    for row, start, count, prefix, at in lens:
        one = torch.tensor([row], device=state.device)
        faulted = bool(state.fault[row])
        if faulted:
            key_out[at : at + prefix] = 0
            value_out[at : at + prefix] = 0
        for tier, view in enumerate(() if faulted else state.tiers):
            width = max_entries(state, one, tier, layer) if prefix else 0
            page, lo, hi = (x[0].unsqueeze(2) for x in layer_table(state, one, tier, layer, width))  # [H, E, 1]
            slot = torch.arange(view.layout.tokens, device=state.device).expand(*page.shape[:2], -1)
            position = view.positions[page, slot]  # [H, E, tokens]
            held = (position >= lo) & (position < hi) & (position < prefix)
            held[: some.start] = held[some.stop :] = False
            keys, values = read_tokens(view, page.expand_as(slot)[held], slot[held])  # [n, dim]
            keys = rotated(keys) if rotation.keys else keys
            values = rotated(values) if rotation.values else values
            of_head = head.view(-1, 1, 1).expand_as(slot)[held]
            keys = keys if key_means is None else keys + key_means[of_head]
            place = at + position[held].long()
            key_out[place, of_head - first_head] = keys.to(key_out.dtype)
            value_out[place, of_head - first_head] = values.to(value_out.dtype)
        key_out[at + prefix : at + prefix + count] = key[start : start + count, some]
        value_out[at + prefix : at + prefix + count] = value[start : start + count, some]
