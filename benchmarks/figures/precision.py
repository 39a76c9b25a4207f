"""Figure 8: keys against values. Each precision for every token, and its mirror image at the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.figures import cases, style
from benchmarks.figures.cases import MORE_VALUES, STOCK_CASE, uniform
from benchmarks.figures.data import RATIO_LABELS, FigureData, Point, by_series
from benchmarks.figures.session import Session

TIERS = ("K8V4", "K4V8", "K8V2", "K4V2", "K2V4", "K4V1")


def collect(session: Session) -> list[Point]:
    """Stock bf16 and the tiers of ``--tiers``."""
    return session.measure([uniform(tier) for tier in session.args.tiers])


def draw(data: FigureData, path: Path) -> None:
    """A panel for each task file: accuracy against bytes, mirror images joined."""
    suites = data.suites()
    figure, axes = style.canvas(1, len(suites), (5.2, 4.0), sharey=True)
    for axis, suite in zip(axes[0], suites):
        points = data.of(suite)
        for series, line in by_series(points).items():
            style.error_bars(axis, line, style.percents(line, data.ratio), series)
        for above, below in mirrors(points):
            x = style.percents([above, below], data.ratio)
            axis.plot(x, [100 * above.accuracy, 100 * below.accuracy], ":", color=style.GREY, zorder=0)
        for point in points:
            _name(axis, point, 100 * point.ratio(data.ratio))
        axis.set(xlabel=RATIO_LABELS[data.ratio], title=suite)
        axis.margins(x=0.12)
        style.grid(axis)
    axes[0][0].set_ylabel("accuracy, %, ± standard error")
    axes[0][0].legend(fontsize=8)
    style.finish(
        figure, path, style.headline(data, "One precision for all tokens"), style.subject(data), data.remarks()
    )


def _name(axis: Any, point: Point, x: float) -> None:
    left = point.series == MORE_VALUES or point.series == STOCK_CASE.series
    axis.annotate(
        point.label,
        (x, 100 * point.accuracy),
        xytext=(-7 if left else 7, 4),
        textcoords="offset points",
        ha="right" if left else "left",
        fontsize=8,
    )


def mirrors(points: list[Point]) -> list[tuple[Point, Point]]:
    """Pairs such as K8V4 and K4V8, more bits for keys first."""
    tiers = {x.label: (x, cases.Tier.parse(x.label)) for x in points if x.series in (cases.MORE_KEYS, MORE_VALUES)}
    pairs = []
    for point, tier in tiers.values():
        other = tiers.get(f"K{tier.v_bits}V{tier.k_bits}")
        if other is not None and tier.k_bits > tier.v_bits:
            pairs.append((point, other[0]))
    return pairs
