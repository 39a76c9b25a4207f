"""Figure 2: how widely attention scores of tokens are spread, and how narrowly the norms of their value vectors.

A token's score is its mean attention from later tokens, maximum over the query heads of its KV head (see
``attention.py``; the last token has none), a norm the length of one KV head's value vector. Three layers are shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict

from benchmarks.figures import style
from benchmarks.figures.attention import asked, prompts_read, visit_layers
from sglang_diffkv.calibration import model_name
from sglang_diffkv.evaluate.report import markdown
from sglang_diffkv.evaluate.runner import Suite

LOWEST, HIGHEST, PER_DECADE = -16, 6, 20
"""Of the histogram, as powers of ten; what lies outside counts in the outermost bins."""
TAIL = 0.001
"""Share of the tokens left out at either end of what is called the span."""
SCORE, NORM = "attention score of a token", "norm of a value vector"


class Spread(BaseModel):
    """One quantity in one layer: a histogram over powers of ten; ``counts`` of bin ``first`` and those behind it."""

    model_config = ConfigDict(frozen=True)

    layer: int
    quantity: str
    first: int
    counts: list[int]

    def edges(self) -> np.ndarray:
        """[bins + 1]: limits of the bins as powers of ten."""
        return LOWEST + (self.first + np.arange(len(self.counts) + 1)) / PER_DECADE

    def quantile(self, share: float) -> float:
        """The power of ten below which ``share`` of the numbers lie, to within a bin."""
        reached = np.cumsum(self.counts) / sum(self.counts)
        return float(self.edges()[1:][np.searchsorted(reached, min(share, reached[-1]))])

    def decades(self) -> float:
        """Orders of magnitude from ``TAIL`` to ``1 - TAIL`` of the numbers."""
        return self.quantile(1 - TAIL) - self.quantile(TAIL) + 1 / PER_DECADE


class Distributions(BaseModel):
    """What figure 2 is drawn from. ``tokens``: of each request; ``settings``: what was read."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["figure"] = "figure"
    figure: str
    model: str
    settings: dict[str, Any]
    tokens: list[int]
    spreads: list[Spread]
    about: dict[str, Any] = {}

    def of(self, quantity: str) -> list[Spread]:
        """One quantity, by layer."""
        return [x for x in self.spreads if x.quantity == quantity]


def bins_of(values: torch.Tensor) -> np.ndarray:
    """[bins] int64: how many of the positive numbers lie in each bin; 0 counts in the lowest."""
    power = values.double().clamp(min=10.0**LOWEST).log10().flatten()
    place = ((power - LOWEST) * PER_DECADE).floor().long()
    most = (HIGHEST - LOWEST) * PER_DECADE
    return torch.bincount(place.clamp(max=most - 1), minlength=most).cpu().numpy()


def collect(args: Any, suites: Sequence[Suite], figure: str, about: dict[str, Any]) -> Distributions:
    """From a forward pass over the prompts. Raises EvaluationError."""
    prompts, settings = asked(args, suites)
    found: dict[tuple[int, str], np.ndarray] = {}

    def visit(layer: int, scores: torch.Tensor, values: torch.Tensor) -> None:
        for quantity, numbers in ((SCORE, scores[:, :-1]), (NORM, values.float().norm(dim=2))):
            found[layer, quantity] = found.get((layer, quantity), 0) + bins_of(numbers)

    layers = visit_layers(args.model, prompts, visit)
    spreads = []
    for layer in sorted({0, layers // 2, layers - 1}):
        for quantity in (SCORE, NORM):
            counts = found[layer, quantity]
            used = np.flatnonzero(counts)
            first, last = (int(used[0]), int(used[-1])) if len(used) else (0, 0)
            part = counts[first : last + 1].tolist()
            spreads.append(Spread(layer=layer, quantity=quantity, first=first, counts=part))
    return Distributions(
        figure=figure,
        model=model_name(args.model),
        settings=settings,
        tokens=[len(x) for x in prompts],
        spreads=spreads,
        about=about,
    )


def table(data: Distributions) -> str:
    """Quantiles and spans, as Markdown."""
    header = ["layer", "of", f"{TAIL:.1%} below", "median", f"{TAIL:.1%} above", "orders of magnitude"]
    rows = []
    for quantity in (SCORE, NORM):
        for x in data.of(quantity):
            limits = [f"{10 ** x.quantile(share):.2g}" for share in (TAIL, 0.5, 1 - TAIL)]
            rows.append([str(x.layer), quantity, *limits, f"{x.decades():.1f}"])
    return markdown(header, rows)


def draw(data: Distributions, path: Path) -> None:
    """A panel for each quantity over as many powers of ten, a line for each layer."""
    figure, axes = style.canvas(1, 2, (4.8, 3.4))
    shown = [(x.quantile(TAIL), x.quantile(1 - TAIL)) for x in data.spreads]
    left, right = math.floor(min(x for x, _ in shown)), math.ceil(max(x for _, x in shown))
    for axis, quantity in zip(axes[0], (SCORE, NORM)):
        for number, x in enumerate(data.of(quantity)):
            colour = style.CYCLE[number % len(style.CYCLE)][0]
            middles = [sum(pair) / 2 for pair in pairwise(x.edges())]
            share = 100 * np.array(x.counts) / sum(x.counts)
            label = f"layer {x.layer}: {x.decades():.1f} orders"
            axis.plot(middles, share, color=colour, drawstyle="steps-mid", label=label)
        axis.set(title=quantity, xlim=(left, right), ylim=(0, None))
        axis.set_xticks(range(left, right + 1), [f"$10^{{{x}}}$" for x in range(left, right + 1)])
        axis.legend(fontsize=7)
        style.grid(axis)
    axes[0][0].set_ylabel(f"tokens, % in each 1/{PER_DECADE} of a decade")
    title = f"Attention scores and value norms\n{data.model}, n = {len(data.tokens)}"
    subject = f"{data.model}; {prompts_read(data.settings, data.tokens)}. Orders of magnitude between the outermost "
    style.finish(figure, path, title, f"{subject}{TAIL:.1%} of the tokens.")
