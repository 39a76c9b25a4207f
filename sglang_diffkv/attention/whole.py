"""Attention over whole sequences in plain PyTorch, for programs that read a text once: nothing is stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

QUERIES = 256
"""Whose attention is worked out at once."""


@dataclass(frozen=True)
class Sight:
    """What a layer's attention has beside causality.

    Attributes:
        window: tokens that a query may see, itself included; None for all.
        softcap: bound of logits by ``softcap * tanh(logit / softcap)``; None for none.
        sinks: [query heads], a logit for each head that joins the softmax's sum and has no value; None for none.
    """

    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Sight:
        """From what transformers gives an attention beside queries, keys and values."""
        return cls(given.get("sliding_window"), given.get("softcap"), given.get("s_aux"))

    def plain(self, tokens: int) -> bool:
        """Whether so many tokens are attended to as if there were nothing but causality."""
        return self.softcap is None and self.sinks is None and (self.window is None or self.window >= tokens)


PLAIN = Sight()


def attention_rows(
    query: torch.Tensor, key: torch.Tensor, scaling: float, sight: Sight = PLAIN, start: int = 0, step: int = 1
) -> Iterator[tuple[int, torch.Tensor]]:
    """Attention weights of one sequence of every ``step``-th query from ``start`` on, ``QUERIES`` of them at a time:
    the first one's position, and [Hq, M, N] float32. query: [Hq, N, D], key: [H, N, D], any whole number of query heads
    to a KV head.
    """
    heads, tokens = query.shape[:2]
    keys = key.float().repeat_interleave(heads // key.shape[0], 0).mT  # [Hq, D, N]
    column = torch.arange(tokens, device=key.device)
    for first in range(start, tokens, QUERIES * step):
        rows = slice(first, first + QUERIES * step, step)
        row = column[rows, None]
        hidden = column > row  # [M, N]
        if sight.window is not None:
            hidden |= column <= row - sight.window
        logits = (query[:, rows].float() @ keys) * scaling
        if sight.softcap is not None:
            logits = sight.softcap * torch.tanh(logits / sight.softcap)
        logits = logits.masked_fill(hidden, float("-inf"))
        if sight.sinks is None:
            yield first, logits.softmax(-1)
        else:
            sinks = sight.sinks.float().view(-1, 1, 1).expand(-1, logits.shape[1], 1)
            yield first, torch.cat([logits, sinks], 2).softmax(-1)[..., :-1]


SAMPLED = 512
"""Queries of a sequence that ``error_weights`` are of, at most."""


def error_weights(query: torch.Tensor, key: torch.Tensor, scaling: float, sight: Sight = PLAIN) -> torch.Tensor:
    """[H, N] float32: how much an error of each token's key moves attention. It is the sum of ``a (1 - a)`` of its
    attention weights ``a``, of queries that are evenly spread. query, key: as of ``attention_rows``."""
    heads, tokens = key.shape[:2]
    step = -(-tokens // SAMPLED)
    found = torch.zeros(heads, tokens, device=key.device)
    for _, weights in attention_rows(query, key, scaling, sight, step - 1, step):
        found += (weights * (1 - weights)).unflatten(0, (heads, -1)).sum((1, 2))
    return found


def causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, sight: Sight = PLAIN
) -> torch.Tensor:
    """Attention of one sequence, in transformers' shapes."""
    if sight.plain(query.shape[2]):
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous()
    values = value[0].float().repeat_interleave(query.shape[1] // key.shape[1], 0)  # [Hq, N, D]
    rows = [weights @ values for _, weights in attention_rows(query[0], key[0], scaling, sight)]
    return torch.cat(rows, 1).transpose(0, 1).to(query.dtype).unsqueeze(0)
