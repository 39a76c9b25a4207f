"""Figure 8: keys against values. Each precision for every token, and its mirror image at the same bytes."""

from __future__ import annotations

from pathlib import Path

from benchmarks.figures import cases, style
from benchmarks.figures.cases import STOCK_CASE, uniform
from benchmarks.figures.data import RATIO_LABELS, FigureData, Point, by_series
from benchmarks.figures.session import Session

TIERS = ("K8V4", "K4V8", "K8V2", "K4V2", "K2V4", "K4V1")


def collect(session: Session) -> list[Point]:
    """Stock bf16 and the tiers of ``--tiers``."""
    return session.measure([uniform(tier) for tier in session.args.tiers])


def draw(data: FigureData, path: Path) -> None:
    """For each task file accuracies above and bytes below, in the order of bits; mirror images stand side by side."""
    suites = data.suites()
    width = max(4.5, 0.72 * len(data.of(suites[0])))
    figure, axes = style.canvas(2, len(suites), (width, 2.6), sharex="col", sharey="row", height_ratios=(2, 1))
    for (above, below), suite in zip(axes.T, suites):
        points = sorted(data.of(suite), key=order)
        for series, line in by_series(points).items():
            colour = style.GREY if series == STOCK_CASE.series else style.LOOKS[series][0]
            at = [points.index(x) for x in line]
            error = [100 * x.error for x in line]
            above.bar(at, [100 * x.accuracy for x in line], yerr=error, color=colour, capsize=3, label=series)
            below.bar(at, style.percents(line, data.ratio), color=colour)
        for number, ratio in enumerate(style.percents(points, data.ratio)):
            below.annotate(f"{ratio:.0f}", (number, ratio), ha="center", va="bottom", fontsize=8)
        below.set_xticks(range(len(points)), [x.label for x in points])
        above.set_title(suite)
        style.grid(above)
    axes[0][0].set(ylabel="accuracy, %,\n± standard error", ylim=(0, None))
    axes[1][0].set(ylabel=RATIO_LABELS[data.ratio].replace(", ", ",\n", 1).replace(" (", "\n("), ylim=(0, 115))
    axes[0][-1].legend(fontsize=8, loc="upper right")
    style.finish(
        figure, path, style.headline(data, "One precision for all tokens"), style.subject(data), data.remarks()
    )


def order(point: Point) -> tuple[int, int]:
    """Most bits first, then more bits for keys."""
    tier = cases.Tier.parse(point.label)
    return -(tier.k_bits + tier.v_bits), -tier.k_bits
