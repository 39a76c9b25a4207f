"""Figure 10: accuracy and bytes over ``alpha_high`` with nothing pruned, and over ``alpha_low`` at one ``alpha_high``.

That one is the calibrated or default value, or ``--at-alpha-high``; it is never chosen from the figure's own answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.figures import style
from benchmarks.figures.cases import ALPHA_HIGH, ALPHA_LOW, TIERS, Case, Thresholds, chosen, diffkv, distinct
from benchmarks.figures.data import RATIO_LABELS, FigureData, Point
from benchmarks.figures.session import Session

HIGHS = (0.0, 0.1, 0.3, 1.0, 2.0, 3.0, 4.0, 5.0)
LOWS = (0.0, 0.02, 0.04, 0.06, 0.08, 0.1)


def collect(session: Session) -> list[Point]:
    """Both sweeps; a configuration that is in both stands in both."""
    args = session.args
    at = chosen(args.model, args.at_alpha_high)
    high, low = sweeps(at, args.alpha_high, args.alpha_low)
    points = session.measure(distinct([*high, *low]))
    session.notes.append(f"alpha_low is swept at {diffkv(replace(at, alpha_low=0.0), '').name} ({at.source})")
    measured = {(x.configuration, x.suite): x for x in points}
    found = [x for x in points if x.series not in (ALPHA_HIGH, ALPHA_LOW)]
    for case in (*high, *low):
        fields = {"series": case.series, "alpha_high": case.alpha_high, "alpha_low": case.alpha_low}
        fields["label"] = case.label
        found += [x.model_copy(update=fields) for (name, _), x in measured.items() if name == case.name]
    return found


def sweeps(at: Thresholds, highs: Sequence[float], lows: Sequence[float]) -> tuple[list[Case], list[Case]]:
    """``alpha_high`` with nothing pruned, and ``alpha_low`` at ``at``; ``alpha_high`` 0 is the high tier alone."""
    pair = at if len(at.tiers) > 1 else replace(at, tiers=TIERS)
    high = [diffkv(replace(pair, alpha_high=x, alpha_low=0.0), ALPHA_HIGH) for x in sorted(set(highs))]
    usable = [x for x in sorted(set(lows)) if at.alpha_high is None or x <= at.alpha_high]
    return high, [diffkv(replace(at, alpha_low=x), ALPHA_LOW) for x in usable]


def draw(data: FigureData, path: Path) -> None:
    """Accuracy above, bytes below; ``alpha_high`` left, ``alpha_low`` right; a line for each task file."""
    figure, axes = style.canvas(2, 2, (4.6, 2.7), sharex="col", sharey="row")
    names = ((ALPHA_HIGH, "alpha_high"), (ALPHA_LOW, "alpha_low"))
    for column, (series, field) in enumerate(names):
        values = sorted({getattr(x, field) for x in data.points if x.series == series})
        for number, suite in enumerate(data.suites()):
            line = [x for x in data.of(suite) if x.series == series]
            line.sort(key=lambda x: getattr(x, field))
            at = [values.index(getattr(x, field)) for x in line]
            _lines(axes, column, at, line, data, style.CYCLE[number % len(style.CYCLE)], suite)
        if len(data.suites()) == 1:
            style.reference_line(axes[0][column], data.points)
        labels = ["off" if series == ALPHA_HIGH and x == 0 else f"{x:g}" for x in values]
        axes[1][column].set_xticks(range(len(values)), labels)
        for axis in axes[:, column]:
            style.grid(axis)
    axes[0][0].set(ylabel="accuracy, %,\n± standard error", title="nothing pruned")
    at_high = next((x.alpha_high for x in data.points if x.series == ALPHA_LOW and x.alpha_low), None)
    axes[0][1].set_title("pruning" if at_high is None else f"pruning, alpha_high {at_high:g}")
    top = max((x for x in style.percents(data.points, data.ratio) if x < 100), default=100.0)
    axes[1][0].set(ylabel=RATIO_LABELS[data.ratio].replace(" (", "\n("), ylim=(0, 1.1 * top))
    axes[1][0].set_xlabel("alpha_high, times the mean attention (off: no low tier)")
    axes[1][1].set_xlabel("alpha_low, times the mean attention")
    axes[0][0].legend(fontsize=8)
    style.finish(figure, path, style.headline(data, "Thresholds"), style.subject(data), data.remarks())


def _lines(
    axes: Any, column: int, at: list[int], line: list[Point], data: FigureData, look: tuple[str, str], name: str
) -> None:
    colour, marker = look
    accuracy, error = [100 * x.accuracy for x in line], [100 * x.error for x in line]
    axes[0][column].errorbar(at, accuracy, error, color=colour, marker=marker, capsize=3, label=name)
    axes[1][column].plot(at, style.percents(line, data.ratio), color=colour, marker=marker)
