"""How figures look: colours that colour-blind readers can tell apart (Okabe and Ito), and marks beside them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import cases
from benchmarks.figures.data import FigureData, Point, Ratio, unique

BLACK, GREY, BROWN = "#000000", "#7f7f7f", "#7a4a00"
ORANGE, SKY, GREEN, BLUE, RED, PURPLE = (
    "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
CYCLE = ((BLUE, "o"), (RED, "s"), (GREEN, "^"), (PURPLE, "D"), (ORANGE, "v"), (SKY, "P"), (BLACK, "X"))
LOOKS = {
    cases.STOCK_CASE.series: (BLACK, "*"),
    cases.FP8_CASE.series: (GREY, "X"),
    cases.MORE_KEYS: (BLUE, "o"),
    cases.MORE_VALUES: (RED, "v"),
    cases.EQUAL: (GREEN, "s"),
    cases.ALPHA_HIGH: (ORANGE, "D"),
    cases.ALPHA_LOW: (PURPLE, "P"),
    cases.MASS_HIGH: (ORANGE, "D"),
    cases.MASS_LOW: (PURPLE, "P"),
    cases.DYNAMIC: (SKY, "^"),
    cases.PROMPT_BUDGET: (GREEN, "<"),
    cases.STEP_BUDGET: (BROWN, ">"),
}
"""Colour and mark of each series."""
NOTE_CHARACTERS = 15
"""Characters of the note below a figure that fit into an inch."""


def canvas(rows: int, columns: int, panel: tuple[float, float], **share: Any) -> tuple[Any, Any]:
    """A figure and its axes [rows][columns]; ``panel`` is the size of one in inches."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    size = (columns * panel[0] + 0.5, rows * panel[1] + 0.8)
    return plt.subplots(rows, columns, figsize=size, dpi=150, layout="constrained", squeeze=False, **share)


def finish(figure: Any, path: Path, title: str, subject: str, remarks: Sequence[str] = ()) -> None:
    """Title, what it was measured on, remarks below, and the file."""
    import matplotlib.pyplot as plt

    width = int(NOTE_CHARACTERS * figure.get_figwidth())
    lines = [line for text in (subject, *remarks) for line in textwrap.wrap(text, width)]
    heading = [line for text in title.splitlines() for line in textwrap.wrap(text, int(width * 0.7))]
    figure.suptitle("\n".join(heading), fontsize=11)
    figure.supxlabel("\n".join(lines), fontsize=7, x=0.01, ha="left", color="#444444")
    figure.savefig(path)
    plt.close(figure)


def subject(data: FigureData) -> str:
    """Model, task files and questions."""
    counts = {suite: max(x.n for x in data.of(suite)) for suite in data.suites()}
    device = (data.about.get("gpus") or [data.about.get("cpu") or ""])[0]
    files = ", ".join(f"{suite} n = {n}" for suite, n in counts.items())
    return f"{data.model}; {files}" + (f"; {device}" if device else "")


def headline(data: FigureData, what: str) -> str:
    """A title with a second line that names the model and the number of questions."""
    counts = sorted({max(x.n for x in data.of(suite)) for suite in data.suites()})
    n = " to ".join(unique(f"{x}" for x in (counts[:1] + counts[-1:]))) or "0"
    return f"{what}\n{data.model}, n = {n}"


def error_bars(axis: Any, points: Sequence[Point], x: Sequence[float], series: str, **more: Any) -> None:
    """Accuracy in % with its standard error."""
    colour, marker = LOOKS[series]
    look = {"color": colour, "marker": marker, "markersize": 7, "capsize": 3, "linestyle": "none", "elinewidth": 1}
    look.update(markeredgecolor="black", markeredgewidth=0.5, label=series)
    axis.errorbar(x, [100 * p.accuracy for p in points], [100 * p.error for p in points], **{**look, **more})


def reference_line(axis: Any, points: Sequence[Point]) -> None:
    """Stock bf16's accuracy with its standard error, across the panel."""
    stock = next((x for x in points if x.series == cases.STOCK_CASE.series), None)
    if stock is None:
        return
    mean, error = 100 * stock.accuracy, 100 * stock.error
    axis.axhline(mean, color=BLACK, linestyle="--", linewidth=1, label=stock.series)
    axis.axhspan(mean - error, mean + error, color=BLACK, alpha=0.08, linewidth=0)


def legend_entries(axes: Sequence[Any]) -> tuple[list[Any], list[str]]:
    """Marks and names of all panels, each name once."""
    found: dict[str, Any] = {}
    for axis in axes:
        for mark, name in zip(*axis.get_legend_handles_labels()):
            found.setdefault(name, mark)
    return list(found.values()), list(found)


def percents(points: Sequence[Point], ratio: Ratio) -> list[float]:
    """Ratios in %."""
    return [100 * x.ratio(ratio) for x in points]


def grid(axis: Any) -> None:
    """Fine lines behind the data."""
    axis.grid(alpha=0.3, linewidth=0.6)
    axis.set_axisbelow(True)
