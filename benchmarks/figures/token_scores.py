"""Figure 3: the attention score of each token of one sequence in one layer.

Scores are those of ``attention.py``: a token's mean attention from later tokens, maximum over the query heads of its KV
head. The sequence is the longest of those asked for, cut to ``--max-tokens``; the layer is ``--layer``, or one a
quarter of the way through the model, as is the paper's 8th of 32.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict

from benchmarks.figures import style
from benchmarks.figures.attention import asked, visit_layers
from sglang_diffkv.calibration import model_name
from sglang_diffkv.evaluate.endpoint import EvaluationError
from sglang_diffkv.evaluate.report import markdown
from sglang_diffkv.evaluate.runner import Suite

SHARES = (0.01, 0.05, 0.2, 0.5)
DIGITS = 4
NAMED_HEADS = 8
"""Heads that the legend names; of more, all have one colour."""


class TokenScores(BaseModel):
    """What figure 3 is drawn from. ``layer`` of ``layers`` that attend; ``scores``: [KV heads][tokens]; ``question``:
    the sequence."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["figure"] = "figure"
    figure: str
    model: str
    settings: dict[str, Any]
    question: str
    layer: int
    layers: int
    scores: list[list[float]]
    about: dict[str, Any] = {}


def collect(args: Any, suites: Sequence[Suite], figure: str, about: dict[str, Any]) -> TokenScores:
    """From a forward pass over the longest prompt. Raises EvaluationError."""
    prompts, settings = asked(args, suites)
    longest = max(range(len(prompts)), key=lambda x: len(prompts[x]))
    found: list[torch.Tensor] = []
    layers = visit_layers(args.model, [prompts[longest]], lambda layer, scores, values: found.append(scores.cpu()))
    layer = (layers - 1) // 4 if args.layer is None else args.layer
    if not 0 <= layer < layers:
        raise EvaluationError(f"--layer {layer}: the model has layers 0 to {layers - 1} that attend")
    return TokenScores(
        figure=figure,
        model=model_name(args.model),
        settings=settings,
        question=settings["questions"][longest],
        layer=layer,
        layers=layers,
        scores=[[float(f"{x:.{DIGITS}g}") for x in head] for head in found[layer].tolist()],
        about=about,
    )


def table(data: TokenScores) -> str:
    """By KV head: the attention of the first tokens when they are sorted, and how many are above the mean."""
    header = ["KV head", *(f"attention of the top {x:.0%}, %" for x in SHARES), "tokens above the mean attention, %"]
    rows = []
    for number, head in enumerate(data.scores):
        values = np.sort(head)[::-1]
        reached, n = np.cumsum(values) / max(values.sum(), 1e-30), len(values)
        tops = [f"{100 * reached[max(1, round(share * n)) - 1]:.0f}" for share in SHARES]
        rows.append([str(number), *tops, f"{100 * np.mean(values > 1 / n):.0f}"])
    return markdown(header, rows)


def draw(data: TokenScores, path: Path) -> None:
    """Scores over positions, a colour for each KV head where they are few."""
    figure, axes = style.canvas(1, 1, (8.0, 3.6))
    axis, n = axes[0][0], len(data.scores[0])
    few = len(data.scores) <= NAMED_HEADS
    for number, head in enumerate(data.scores):
        colour, marker = style.CYCLE[number % len(style.CYCLE)] if few else style.CYCLE[0]
        values = np.where(np.array(head) > 0, head, np.nan)
        label = f"KV head {number}" if few else None
        axis.plot(range(n), values, marker, color=colour, markersize=2, alpha=0.5, label=label, linestyle="none")
    axis.axhline(1 / n, color=style.BLACK, linestyle="--", linewidth=1, label="mean attention, 1 / tokens")
    axis.set(xlabel="token", ylabel="attention score", yscale="log", xlim=(0, n))
    axis.margins(y=0.18)
    axis.legend(fontsize=7, ncols=3, markerscale=2)
    style.grid(axis)
    title = f"Attention scores of tokens in layer {data.layer} (the first is 0)\n{data.model}, {n} tokens"
    subject = f"{data.model}; {', '.join(data.settings['tasks'])}, {data.question}. Mean attention from later tokens, "
    style.finish(figure, path, title, f"{subject}maximum over the query heads of a KV head.")
