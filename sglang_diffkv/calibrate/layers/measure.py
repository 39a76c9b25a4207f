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

from sglang_diffkv.attention.whole import Sight, causal
from sglang_diffkv.calibrate.reading import load, read
from sglang_diffkv.evaluate.endpoint import EvaluationError
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


def window_scores(query: torch.Tensor, key: torch.Tensor, scaling: float, window: int) -> torch.Tensor:
    """[H, N - window] float32: the attention that each token before the last ``window`` gets from these, mean over them
    and over the query heads of a KV head. query: [Hq, N, D], key: [H, N, D]."""
    heads, count, _ = key.shape
    row = torch.arange(count - window, count, device=key.device)
    q = query[:, -window:].float().unflatten(0, (heads, -1)) * scaling  # [H, G, window, D]
    logits = q @ key.float().unsqueeze(1).mT
    later = torch.arange(count, device=key.device) > row.unsqueeze(1)
    attention = logits.masked_fill(later, float("-inf")).softmax(3)
    return attention.mean((1, 2))[:, : count - window]


class WindowScores:
    """Scores by layer of one prompt; its ``attend`` is what transformers calls."""

    def __init__(self, window: int):
        self.window = window
        self.layers: list[torch.Tensor] = []
        """[H, N - window] of each layer, on the CPU."""

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """Causal attention of one sequence in transformers' shapes [1, heads, N, dim]. Raises EvaluationError for
        layers that a server refuses with ``xkv``, or whose attention is not what is measured here."""
        if not Sight.of(kwargs).plain(query.shape[2]):
            raise EvaluationError("layers with a sliding window, a cap on logits or attention sinks are not measured")
        self.layers.append(window_scores(query[0], key[0], scaling, self.window).cpu())
        return causal(query, key, value, scaling), None

    def take(self) -> torch.Tensor:
        """[L, H, N - window] of the prompt that was read last. Raises EvaluationError where layers differ in heads."""
        found, self.layers = self.layers, []
        if len({x.shape for x in found}) != 1:
            raise EvaluationError("layers differ in their number of KV heads: one for all is needed")
        return torch.stack(found)


def score_layers(scores: torch.Tensor, rule: Rule) -> PromptLayers:
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


def collect(path: str, prompts: Sequence[Sequence[int]], rule: Rule) -> Layers:
    """A forward pass of the model over each prompt. Raises EvaluationError."""
    scores = WindowScores(rule.window)
    model = load(path, scores.attend)
    found = []
    for ids in tqdm(prompts, "layers", unit="prompt"):
        read(model, list(ids))
        found.append(score_layers(scores.take(), rule))
    return Layers(found)
