"""A plan as an image."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sglang_diffkv.capacity.estimate import Row

STOCK, OURS, HOST = "#7f7f7f", "#0072B2", "#56B4E9"


def draw(title: str, rows: Sequence[Row], path: Path) -> None:
    """Write a PNG or SVG: for each setting, tokens that fit, requests at once, and, where a plan has them, tokens a
    second and hit rates."""
    names = [x.setting.name for x in rows]
    colours = [OURS if x.setting.config else STOCK for x in rows]
    speeds, hits = [x.speed for x in rows], [x.hits for x in rows]
    panels = 2 + any(speeds) + any(hits)
    figure = Figure(figsize=(1.6 + 2.7 * panels, 1.5 + 0.36 * len(rows)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(1, panels, sharey=True, squeeze=False)[0])
    at = range(len(rows))
    _bars(axes[0], at, [x.tokens for x in rows], colours, "tokens that fit")
    _bars(axes[1], at, [x.running.mean for x in rows], colours, "requests running, staggered")
    if any(speeds):
        least = [x.decode[0] if x else 0.0 for x in speeds]
        widths = [x.decode[1] - x.decode[0] if x else 0.0 for x in speeds]
        axes[2].barh(at, widths, left=least, color=colours)
        axes[2].set_xlim(left=0)
        axes[2].set_xlabel("output tokens/s, decoding" + (" (scaled)" if any(x and x.scaled for x in speeds) else ""))
    if any(hits):
        near = [100 * x.gpu if x else 0.0 for x in hits]
        axes[-1].barh(at, near, color=colours, label="GPU")
        axes[-1].barh(at, [100 * x.host if x else 0.0 for x in hits], left=near, color=HOST, label="host")
        axes[-1].set_xlabel("prompt tokens found, %")
    axes[0].set_yticks(list(at), names)
    axes[0].invert_yaxis()
    figure.suptitle("\n".join(textwrap.wrap(title, 34 * panels)), fontsize=9)
    figure.savefig(path, format=path.suffix[1:].lower())


def _bars(axes: Any, at: range, values: Sequence[float], colours: Sequence[str], label: str) -> None:
    bars = axes.barh(at, values, color=colours)
    axes.bar_label(bars, labels=[f"{x:,.0f}" for x in values], fontsize=7, padding=2)
    axes.margins(x=0.25)
    axes.set_xlabel(label)
