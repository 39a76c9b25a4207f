"""Scores of a sequence's tokens by position, for methods that score a head as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import max_pool1d, pad

from sglang_diffkv.kernels.parts import Held, Part, held_tokens
from sglang_diffkv.layout.state import PageState


def gather_scores(
    state: PageState,
    parts: Sequence[Part],
    values: torch.Tensor,
    seq_len: int,
    *,
    window: int,
    sinks: int = 0,
    sums: bool = False,
    shared_scores: torch.Tensor | None = None,
    own: bool = False,
) -> torch.Tensor:
    """Write the value of each token of ``parts``, of all tiers, to its position, and NaN where there is none.

    Args:
        parts: (row, lo, hi): the tokens of a row with position in [lo, hi); disjoint.
        values: [L, H, n] float32, contiguous, for positions below n, to which ``parts`` are limited.
        seq_len: tokens of the sequence.
        window, sinks: newest and first tokens, whose value is infinite.
        sums: values are scores times the sequence's tokens that are later: sums of attention, not means.
        shared_scores: [L, H, m] float32, scores by position for positions below m where they are numbers.
        own: only tokens in pages that the rows own.

    Returns:
        [L, H] int64, tokens found.
    """

    def scores(x: Held) -> torch.Tensor:
        return (x.score * (seq_len - 1 - x.position) if sums else x.score)[x.held]

    return put_values(state, parts, values, seq_len, scores, window, sinks, shared_scores, own=own)


def put_values(
    state: PageState,
    parts: Sequence[Part],
    values: torch.Tensor,
    seq_len: int,
    value_of: Callable[[Held], torch.Tensor],
    window: int,
    sinks: int,
    shared_scores: torch.Tensor | None = None,
    *,
    own: bool = False,
) -> torch.Tensor:
    """What ``gather_scores`` does, for any value. ``value_of``: those of the tokens held in pages of one tier, [k], in
    the order of ``Held.held``."""
    values.fill_(float("nan"))
    stored = torch.zeros(values.shape[:2], dtype=torch.int64, device=values.device)
    for row, lo, hi in parts:
        for tier in range(len(state.tiers)):
            x = held_tokens(state, (row, lo, min(hi, values.shape[2])), tier, shared_scores, own=own)
            if x is None:
                continue
            layer, head, _, _ = x.held.nonzero(as_tuple=True)
            position = x.position[x.held].long()
            lasting = (position >= seq_len - window) | (position < sinks)
            values[layer, head, position] = value_of(x).masked_fill(lasting, float("inf"))
            stored += x.held.sum((2, 3))
    return stored


def smooth(values: torch.Tensor, width: int, *, average: bool = False) -> torch.Tensor:
    """Each finite value becomes the largest one of the ``width`` (odd) positions around it, or with ``average`` their
    sum over ``width``; [L, H, n]. What is not finite, and what lies before the first position or behind the last,
    counts as 0. Sums go from the first position to the last.
    """
    finite = values.isfinite()
    line = torch.where(finite, values, 0.0).flatten(0, 1)
    if average:
        padded = pad(line, (width // 2, width // 2))
        total = torch.zeros_like(line)
        for step in range(width):
            total = total + padded[:, step : step + line.shape[1]]
        pooled = total / width
    else:
        pooled = max_pool1d(line.unsqueeze(1), width, stride=1, padding=width // 2)
    return torch.where(finite, pooled.view(values.shape), values)
