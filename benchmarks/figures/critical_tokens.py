"""Figures 4 and 5: how many tokens hold most of the attention, by layer and by KV head, across requests.

A token's significance is DiffKV's: the mean attention from later tokens, maximum over the query heads of its KV
head (see ``attention.py``). The critical tokens of a head are the fewest that hold ``--mass`` of the sum of all
significances.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict

from benchmarks.figures import style
from benchmarks.figures.attention import asked, prompts_read, visit_layers
from sglang_diffkv.calibration import model_name
from sglang_diffkv.evaluate.endpoint import EvaluationError
from sglang_diffkv.evaluate.runner import Suite

FIGURES = ("fig4", "fig5")


class CriticalTokens(BaseModel):
    """What both figures are drawn from.

    Attributes:
        settings: all that the counts depend on.
        tokens: of each request. critical: counts [request][layer][KV head].
    """

    model_config = ConfigDict(frozen=True)

    kind: Literal["figure"] = "figure"
    figure: str
    model: str
    settings: dict[str, Any]
    tokens: list[int]
    critical: list[list[list[int]]]
    about: dict[str, Any] = {}

    def percent(self) -> np.ndarray:
        """[requests, layers, heads]: critical tokens in % of the request's tokens."""
        return 100 * np.array(self.critical, dtype=float) / np.array(self.tokens, dtype=float)[:, None, None]


def critical_counts(scores: torch.Tensor, mass: float) -> torch.Tensor:
    """[heads]: the fewest tokens whose scores [heads, N] sum to at least ``mass`` of all."""
    ordered = scores.double().sort(dim=-1, descending=True).values.cumsum(-1)
    return (ordered < mass * ordered[:, -1:]).sum(-1) + 1


def measure(path: str, prompts: Sequence[Sequence[int]], mass: float) -> list[list[list[int]]]:
    """Critical tokens [request][layer][KV head]. Raises EvaluationError."""
    counts: list[list[list[int]]] = []

    def visit(layer: int, scores: torch.Tensor, values: torch.Tensor) -> None:
        if layer == 0:
            counts.append([])
        counts[-1].append(critical_counts(scores, mass).tolist())

    visit_layers(path, prompts, visit)
    if len({len(heads) for layers in counts for heads in layers}) > 1:
        raise EvaluationError("layers differ in their number of KV heads: one for all is needed")
    return counts


def collect(args: Any, suites: Sequence[Suite], figure: str, about: dict[str, Any]) -> CriticalTokens:
    """From a pass over the prompts, or from the other figure's file if that has the same settings."""
    prompts, settings = asked(args, suites)
    settings["mass"] = args.mass
    name = model_name(args.model)
    for other in FIGURES:
        held = read(args.output / f"{other}.json")
        if held is not None and (held.model, held.settings) == (name, settings):
            return held.model_copy(update={"figure": figure})
    critical = measure(args.model, prompts, args.mass)
    tokens = [len(x) for x in prompts]
    return CriticalTokens(figure=figure, model=name, settings=settings, tokens=tokens, critical=critical, about=about)


def read(path: Path) -> CriticalTokens | None:
    """A figure's file; None if there is none or it is of another form."""
    try:
        return CriticalTokens.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def subject(data: CriticalTokens) -> str:
    """Task files, request lengths and what was measured."""
    what = f"the fewest tokens that hold {data.settings['mass']:.0%} of the summed mean attention from later tokens"
    prompts = prompts_read(data.settings, data.tokens)
    return f"{data.model}; {prompts}. Critical: {what}; bars: standard deviation over requests."


def draw_layers(data: CriticalTokens, path: Path) -> None:
    """Figure 4: mean over the KV heads of each layer."""
    values = data.percent().mean(2)
    layers = values.shape[1]
    figure, axes = style.canvas(1, 1, (max(5.0, 0.24 * layers + 1.5), 3.4))
    axis = axes[0][0]
    axis.errorbar(range(layers), values.mean(0), values.std(0), color=style.BLUE, marker="o", markersize=4, capsize=3)
    axis.set(xlabel="layer", ylabel="critical tokens, % of the request", ylim=(0, None))
    axis.set_xticks(range(0, layers, max(1, layers // 16)))
    style.grid(axis)
    style.finish(figure, path, f"Critical tokens by layer\n{data.model}, n = {len(data.tokens)}", subject(data))


def draw_heads(data: CriticalTokens, path: Path) -> None:
    """Figure 5: each KV head of the first, the middle and the last layer."""
    values = data.percent()
    layers = sorted({0, values.shape[1] // 2, values.shape[1] - 1})
    heads = values.shape[2]
    figure, axes = style.canvas(1, len(layers), (3.0, max(1.8, 0.3 * heads + 0.8)), sharex=True, sharey=True)
    for axis, layer in zip(axes[0], layers):
        mean, spread = values[:, layer].mean(0), values[:, layer].std(0)
        axis.barh(range(heads), mean, xerr=spread, color=style.SKY, edgecolor=style.BLACK, linewidth=0.5, capsize=3)
        axis.set(xlabel="critical tokens,\n% of the request", title=f"layer {layer}")
        style.grid(axis)
    axes[0][0].set(ylabel="KV head", yticks=range(heads), xlim=(0, None))
    axes[0][0].invert_yaxis()
    style.finish(figure, path, f"Critical tokens by KV head\n{data.model}, n = {len(data.tokens)}", subject(data))
