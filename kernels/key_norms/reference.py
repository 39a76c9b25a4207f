"""Scores by the norms of stored keys: a token counts the more, the shorter its key."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_diffkv.kernels.append.reference import read_tokens
from sglang_diffkv.kernels.gather_scores.reference import put_values
from sglang_diffkv.kernels.parts import Held, Part
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

    def shortness(x: Held) -> torch.Tensor:
        page, slot = x.page.unsqueeze(3).expand(x.held.shape)[x.held], x.held.nonzero()[:, 3]
        key, _ = read_tokens(state.tiers[x.tier], page, slot)
        return 1.0 / key.norm(dim=1).clamp(min=LEAST_NORM)

    return put_values(state, parts, values, seq_len, shortness, window, sinks, own=own)
