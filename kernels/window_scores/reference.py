"""Scores of all tokens that a row holds, by its newest queries (Zipage, appendix C.2)."""

from __future__ import annotations

import math

import torch

from sglang_diffkv.kernels.append.reference import read_tokens
from sglang_diffkv.kernels.parts import held_tokens
from sglang_diffkv.layout.state import PageState


def window_scores(
    state: PageState,
    row: int,
    seq_len: int,
    queries: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    *,
    logit_cap: float = 0.0,
) -> None:
    """Write the score of each token that ``row`` holds, shared or its own, of all tiers, to its position, and NaN where
    there is none. The score is its attention from the newest queries, each over the tokens up to its own: maximum over
    the query heads of a KV head, mean over queries.

    Args:
        seq_len: tokens of the sequence, at least as many as queries.
        queries: [L, w, Hq, D], that of position ``p`` at ``p % w``.
        values: [L, H, n] float32, contiguous, for positions below n, at least ``seq_len``.
    """
    values.fill_(float("nan"))
    layers, window, q_heads, dim = queries.shape
    heads, group = state.num_heads, q_heads // state.num_heads
    found = [x for tier in range(len(state.tiers)) if (x := held_tokens(state, (row, 0, seq_len), tier)) is not None]
    if not found:
        return
    asked = torch.arange(seq_len - window, seq_len, device=values.device)  # positions of the queries
    q = queries[:, asked % window].float().view(layers, window, heads, group, dim)
    logits, positions, held = [], [], []
    for x in found:
        slot = torch.arange(x.position.shape[3], device=values.device).expand(x.position.shape)
        key, _ = read_tokens(state.tiers[x.tier], x.page.unsqueeze(3).expand(slot.shape), slot)
        key = torch.where(x.held.unsqueeze(4), key, 0.0).flatten(2, 3)  # [L, H, N, D]
        logits.append(torch.einsum("lwhgd,lhnd->lhwgn", q, key) * scale)
        positions.append(x.position.flatten(2))
        held.append(x.held.flatten(2))
    logit, position, live = torch.cat(logits, 4), torch.cat(positions, 2), torch.cat(held, 2)
    if logit_cap:
        logit = logit_cap * torch.tanh(logit / logit_cap)
    seen = live.unsqueeze(2) & (position.unsqueeze(2) <= asked.view(1, 1, -1, 1))  # [L, H, w, N]
    attention = logit.masked_fill(~seen.unsqueeze(3), -math.inf).softmax(4).nan_to_num(0.0)
    score = attention.amax(3).mean(2)  # [L, H, N]
    layer, head, _ = live.nonzero(as_tuple=True)
    values[layer, head, position[live].long()] = score[live]
