"""Retention and sizes by layer as an image."""

from __future__ import annotations

from pathlib import Path

from sglang_diffkv.calibrate.layers.result import LayerFractions

MARKS = "osD^vPX*"


def draw(content: LayerFractions, path: Path) -> None:
    """Write a PNG: retention by layer at several sizes, and the share of the tokens that each layer keeps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = content.provenance
    layers = range(len(content.layer_fractions))
    figure = Figure(figsize=(max(9.0, 0.36 * len(layers) + 4.0), 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for number, share in enumerate(found.shares):
        line = [100 * row[number] for row in found.retention]
        left.plot(layers, line, marker=MARKS[number % len(MARKS)], markersize=4, label=f"{share:.0%} of the tokens")
    left.set(ylabel="importance retained, %", ylim=(0, 102), title="retention at one size for all layers")
    left.legend(fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    heights, bars = ([100 * x for x in values] for values in (content.layer_fractions, found.spread))
    lower = [min(x, y) for x, y in zip(bars, heights, strict=True)]
    right.bar(layers, heights, yerr=(lower, bars), color="#56B4E9", edgecolor="black", linewidth=0.5, capsize=3)
    size = ", ".join(f"{name} {found.rule[name]:g}" for name in ("keep", "min_retention") if name in found.rule)
    right.set(ylabel="kept of the tokens outside the window, %", title=f"sizes with {size}; bars: deviation")
    for axis in (left, right):
        axis.set(xlabel="layer", xticks=range(0, len(layers), max(1, len(layers) // 16)))
        axis.grid(alpha=0.3)
    figure.suptitle(f"{found.model}, {found.task_file}, n = {found.n}", fontsize=10)
    figure.savefig(path, format="png")
