"""Scores and searches of a decode step whose attention was computed before, in plain PyTorch: the specification.

A chain of drafts is verified in one pass; what it accepts is then taken as decode steps, one token of each request
after the other. The attention of such a token is known, and so is the log-sum-exp of its logits: what is left is what
decode attention does for the policy.
"""

from __future__ import annotations

import math

import torch

from sglang_diffkv.kernels.decode_attention.reference import StepScores, decode_attention
from sglang_diffkv.layout.state import PageState


def step_scores(
    state: PageState,
    layers: range,
    q: torch.Tensor,
    lse: torch.Tensor,
    chosen: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    scores: StepScores,
    *,
    window: int = 0,
    sinks: int = 0,
    horizon: int = 0,
    every: int = 1,
    logit_cap: float = 0.0,
    reduce: str = "max",
    row_windows: torch.Tensor | None = None,
) -> None:
    """Update own tokens' scores in ``layers`` and fill in the policy's searches, as ``decode_attention`` does.

    Args:
        q: [L, tokens, Hq, head_dim], of all layers, as they attend to what is stored; without scores of any length.
        lse: [L, tokens, Hq] float32, base 2: of each query, over all that it saw, a sink included.
        chosen: [B] integers: which token is the newest of each request, already appended, at ``seq_lens - 1``.
        rows, seq_lens: [B] int64. The rest as for ``decode_attention``.
    """
    for layer in layers:
        if scores.scored:
            query, known = q[layer, chosen], lse[layer, chosen] * math.log(2)
        else:
            query, known = q.new_zeros(len(rows), state.num_heads, state.fmt.head_dim), None
        decode_attention(
            state, layer, query, rows, seq_lens, sm_scale, scores=scores, window=window, sinks=sinks, horizon=horizon,
            every=every, logit_cap=logit_cap, reduce=reduce, known_lse=known, row_windows=row_windows,
        )  # fmt: skip
