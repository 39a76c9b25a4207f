"""Figure 12: shares of high-tier, low-tier and pruned tokens by task.

The server reports the shares of all requests that ended, so each task of a file is asked by itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.figures import style
from benchmarks.figures.cases import Case, chosen, diffkv
from benchmarks.figures.data import FigureData, Point, unique
from benchmarks.figures.session import Session
from sglang_diffkv.evaluate.configuration import parse_configuration

SHARES = (
    ("share_high", "high tier", style.BLUE, ""),
    ("share_low", "low tier", style.SKY, "//"),
    ("share_pruned", "pruned", style.RED, "xx"),
)
LEAST_NAMED = 0.04
"""Share from which its number is written into the bar."""


def collect(session: Session) -> list[Point]:
    """``--config``, or the calibrated or default thresholds."""
    args = session.args
    cases = [_given(spec, args.model) for spec in args.config or ()]
    if not cases:
        at = chosen(args.model, args.at_alpha_high)
        cases = [diffkv(at, "")]
        session.notes.append(f"thresholds: {at.source}")
    return session.measure_alone(cases, session.suites_by_task())


def _given(spec: str, model: str) -> Case:
    configuration = parse_configuration(spec, model)
    return Case(configuration, "", configuration.name)


def draw(data: FigureData, path: Path) -> None:
    """A panel for each configuration, a bar for each task, in the order of the first panel's high shares."""
    names = unique(x.configuration for x in data.points)
    rows = {(x.configuration, x.suite): x for x in data.points}
    order = sorted(data.suites(), key=lambda suite: -(rows[names[0], suite].share_high or 0.0))
    figure, axes = style.canvas(1, len(names), (6.0, max(2.0, 0.28 * len(order) + 0.8)), sharey=True)
    for axis, name in zip(axes[0], names):
        left = [0.0] * len(order)
        for field, label, colour, hatch in SHARES:
            width = [100 * (getattr(rows[name, suite], field) or 0.0) for suite in order]
            bars = axis.barh(range(len(order)), width, left=left, color=colour, hatch=hatch, label=label)
            for bar in bars:
                bar.set_edgecolor("white")
            _numbers(axis, width, left, colour)
            left = [a + b for a, b in zip(left, width)]
        axis.set(xlabel="tokens, % (all layers and KV heads)", title=name, xlim=(0, 100))
    first = [f"{_task(suite)} (n = {rows[names[0], suite].n})" for suite in order]
    axes[0][0].set_yticks(range(len(order)), first)
    axes[0][0].invert_yaxis()
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    files = ", ".join(unique("/".join(suite.split("/")[:2]) for suite in order))
    total = sum(rows[names[0], suite].n for suite in order)
    title = f"Tokens by tier and task\n{data.model}, n = {total}"
    style.finish(figure, path, title, f"{data.model}; {files}", data.remarks())


def _task(suite: str) -> str:
    parts = suite.split("/")
    return parts[2] if len(parts) > 2 else suite


def _numbers(axis: Any, width: list[float], left: list[float], colour: str) -> None:
    ink = "black" if colour == style.SKY else "white"
    for row, (share, start) in enumerate(zip(width, left)):
        if share >= 100 * LEAST_NAMED:
            box = {"facecolor": colour, "edgecolor": "none", "pad": 0.8}
            axis.text(start + share / 2, row, f"{share:.0f}", ha="center", va="center", color=ink, fontsize=7, bbox=box)
