"""Scores by the norms of stored keys: a token counts the more, the shorter its key."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_diffkv.kernels.append.reference import read_tokens
from sglang_diffkv.kernels.parts import Part, held_tokens
from sglang_diffkv.layout.state import PageState

LEAST_NORM = 1e-20
"""Of a key that is all zeros, so that its score is a finite number."""


def key_norms(
    state: PageState,
    parts: Sequence[Part],
    values: torch.Tensor,
    seq_len: int,
    *,
    window: int,
    sinks: int = 0,
    own: bool = False,
) -> torch.Tensor:
    """As ``gather_scores``, but the value of a token is 1 / (L2 norm of its stored key). So values are not negative,
    and their order is that of minus the norm.

    Args and returns: those of ``kernels/gather_scores``.
    """
    values.fill_(float("nan"))
    stored = torch.zeros(values.shape[:2], dtype=torch.int64, device=values.device)
    for row, lo, hi in parts:
        for tier, view in enumerate(state.tiers):
            x = held_tokens(state, (row, lo, min(hi, values.shape[2])), tier, own=own)
            if x is None:
                continue
            layer, head, _, slot = x.held.nonzero(as_tuple=True)
            key, _ = read_tokens(view, x.page.unsqueeze(3).expand(x.held.shape)[x.held], slot)
            value, position = 1.0 / key.norm(dim=1).clamp(min=LEAST_NORM), x.position[x.held].long()
            lasting = (position >= seq_len - window) | (position < sinks)
            values[layer, head, position] = value.masked_fill(lasting, float("inf"))
            stored += x.held.sum((2, 3))
    return stored
