"""Figure 11: accuracy against memory, all configurations on one chart, with the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import precision, sparsity, style, thresholds
from benchmarks.figures.cases import FP8_CASE, MASS_HIGH, MASS_LOW
from benchmarks.figures.data import RATIO_LABELS, FigureData, Point, Ratio, by_series
from benchmarks.figures.session import Session

PARTS = {"uniform": precision.collect, "thresholds": thresholds.collect, "pruning": sparsity.collect}


def collect(session: Session) -> list[Point]:
    """Stock bf16 and fp8, and the configurations of figures 8, 10 and 9, as far as ``--parts`` names them."""
    points = session.measure([FP8_CASE])
    for part in session.args.parts:
        points += PARTS[part](session)
    return once(points)


def once(points: Sequence[Point]) -> list[Point]:
    """The first point of each configuration and task file."""
    found: dict[tuple[str, str], Point] = {}
    for point in points:
        found.setdefault((point.configuration, point.suite), point)
    return list(found.values())


def front(points: Sequence[Point], ratio: Ratio) -> list[Point]:
    """The points that no other beats: none is as accurate or more with as few bytes or fewer. Rising bytes.

    A configuration that answers nothing is not among them.
    """
    known = [x for x in points if not math.isnan(x.ratio(ratio))]
    best: list[Point] = []
    for point in sorted(known, key=lambda x: (x.ratio(ratio), -x.accuracy)):
        if point.accuracy > (best[-1].accuracy if best else 0.0):
            best.append(point)
    return best


def draw(data: FigureData, path: Path) -> None:
    """A panel for each task file; configurations of the front are named and joined."""
    suites = data.suites()
    figure, axes = style.canvas(1, len(suites), (7.0, 5.0))
    for axis, suite in zip(axes[0], suites):
        points = data.of(suite)
        best = front(points, data.ratio)
        for series, line in by_series(points).items():
            style.error_bars(axis, line, style.percents(line, data.ratio), series)
        x, y = style.percents(best, data.ratio), [100 * point.accuracy for point in best]
        axis.plot(x, y, drawstyle="steps-post", color=style.GREY, linewidth=1, zorder=0, label="Pareto front")
        axis.scatter(x, y, s=160, facecolors="none", edgecolors=style.BLACK, linewidths=1.2, zorder=3)
        _names(axis, best, data.ratio)
        axis.set(xlabel=RATIO_LABELS[data.ratio], title=suite, xlim=(0, None))
        axis.set_ylabel("accuracy, %, ± standard error")
        style.grid(axis)
    figure.legend(*style.legend_entries(axes[0]), loc="outside right upper", fontsize=8)
    title = style.headline(data, "Accuracy against memory")
    lean = any(x.series in (MASS_HIGH, MASS_LOW) for x in data.points)
    pair = "mass_high, mass_low" if lean else "alpha_high, alpha_low"
    note = f"Rings: Pareto front by measured means, without regard to their errors. (a, b): {pair}."
    style.finish(figure, path, title, style.subject(data), [note, *data.remarks()])


NAME_WIDTH, NAME_HEIGHT = 0.12, 0.04
"""Room of a name, as a share of the axes."""


def _names(axis: Any, best: Sequence[Point], ratio: Ratio) -> None:
    """Names beside the points; of points close together the first alone has one, for names would cover each other."""
    (left, right), (bottom, top) = axis.get_xlim(), axis.get_ylim()
    width, height = NAME_WIDTH * (right - left), NAME_HEIGHT * (top - bottom)
    named: list[tuple[float, float]] = []
    for point in best:
        at = (100 * point.ratio(ratio), 100 * point.accuracy)
        if any(abs(at[0] - x) < width and abs(at[1] - y) < height for x, y in named):
            continue
        named.append(at)
        axis.annotate(
            point.label, at, xytext=(-6, 9), textcoords="offset points", ha="right", fontsize=8, fontweight="bold"
        )
