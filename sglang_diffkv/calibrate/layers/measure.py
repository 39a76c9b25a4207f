"""How a prompt's importance is spread over the tokens of each layer, and what XKV gives each layer of it.

Importance and sizes are worked out by the references of the kernels that a server runs (``kernels/importance``,
``kernels/select``), from attention of the Hugging Face model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from sglang_diffkv.calibrate.heads.capture import LayerPass, run
from sglang_diffkv.kernels.gather_scores.reference import smooth
from sglang_diffkv.kernels.importance.reference import importance
from sglang_diffkv.kernels.select.reference import count_above, select_count, select_mass

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Of the tokens outside the window, at which retention is tabled."""


@dataclass(frozen=True)
class Rule:
    """As the fields of ``xkv``; one of ``keep`` and ``min_retention``."""

    window: int
    pool: int
    keep: float | None = None
    min_retention: float | None = None


@dataclass(frozen=True)
class PromptLayers:
    """One prompt with ``tokens`` outside its window.

    Attributes:
        kept: [L] int64, tokens that each layer is given of these. retained: [L] float64, the share of importance that
            they have. at_shares: [L, len(SHARES)] float64, the same of the layer's first tokens, so many of them.
    """

    tokens: int
    kept: torch.Tensor
    retained: torch.Tensor
    at_shares: torch.Tensor


@dataclass(frozen=True)
class Layers:
    """All prompts, each of which counts the same."""

    prompts: Sequence[PromptLayers]

    def fractions(self) -> torch.Tensor:
        """[prompts, L]: tokens kept over tokens outside the window."""
        return torch.stack([x.kept / x.tokens for x in self.prompts]).double()

    def retention(self) -> torch.Tensor:
        """[L, len(SHARES)]: R by layer, mean over prompts."""
        return torch.stack([x.at_shares for x in self.prompts]).mean(0)

    def retained(self) -> torch.Tensor:
        """[L]: R by layer of what is kept, mean over prompts."""
        return torch.stack([x.retained for x in self.prompts]).mean(0)

    def isr(self) -> torch.Tensor:
        """[L, len(SHARES)]: the paper's importance to size ratio, R over log2 n, mean over prompts in which the share
        is more than one token; NaN if there is none."""
        ratios = []
        for prompt in self.prompts:
            sizes = torch.tensor([size_of(share, prompt.tokens) for share in SHARES]).double()
            ratios.append(torch.where(sizes > 1, prompt.at_shares / sizes.log2(), float("nan")))
        return torch.stack(ratios).nanmean(0)


def size_of(share: float, tokens: int) -> int:
    """Tokens, rounded up."""
    return math.ceil(share * tokens)


def window_scores(seen: LayerPass, window: int) -> torch.Tensor:
    """[H, N - window] float32: the attention that each token before the last ``window`` gets from these, mean over them
    and over the query heads of a KV head."""
    heads, count, _ = seen.k.shape
    query = torch.arange(count - window, count, device=seen.k.device)
    q = seen.q[:, -window:].float().unflatten(0, (heads, -1)) * seen.scale  # [H, G, window, D]
    logits = q @ seen.k.float().unsqueeze(1).mT
    later = torch.arange(count, device=query.device) > query.unsqueeze(1)
    attention = logits.masked_fill(later, float("-inf")).softmax(3)
    return attention.mean((1, 2))[:, : count - window]


def judge(scores: torch.Tensor, rule: Rule) -> PromptLayers:
    """From scores [L, H, m] float32 of the tokens outside the window."""
    layers, _, tokens = scores.shape
    values = smooth(scores, rule.pool, average=True) if rule.pool > 1 else scores
    parts = torch.empty(layers, 1, tokens)
    importance(values.contiguous(), parts)
    if rule.min_retention is None:
        assert rule.keep is not None
        chosen = select_count(parts, torch.tensor([[size_of(rule.keep, layers * tokens)]]))
    else:
        chosen = select_mass(parts, rule.min_retention, together=True)
    kept = count_above(parts, *chosen).squeeze(1)
    reached = parts.squeeze(1).double().sort(1, descending=True).values.cumsum(1)
    reached = reached / reached[:, -1:].clamp(min=1e-30)

    def at(sizes: torch.Tensor) -> torch.Tensor:
        """Of sizes [L, k]."""
        return torch.where(sizes > 0, reached.gather(1, (sizes - 1).clamp(min=0)), 0.0)

    shares = torch.tensor([size_of(share, tokens) for share in SHARES]).expand(layers, -1)
    return PromptLayers(tokens, kept, at(kept.unsqueeze(1)).squeeze(1), at(shares))


def collect(model: Any, prompts: Sequence[Sequence[int]], rule: Rule) -> Layers:
    """A forward pass over each prompt."""
    return Layers([judge(_scores(model, ids, rule.window), rule) for ids in tqdm(prompts, "layers", unit="prompt")])


def _scores(model: Any, ids: Sequence[int], window: int) -> torch.Tensor:
    """[L, H, N - window] on the CPU."""
    scores: list[torch.Tensor] = []

    def visit(seen: LayerPass) -> None:
        scores.append(window_scores(seen, window).cpu())

    run(model, ids, visit)
    return torch.stack(scores)
