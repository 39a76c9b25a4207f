"""Writes tables and charts again from the JSON results of ``serving``, ``stationary``, ``step_profile``, ``kernels``,
``figures`` or ``evaluate``. Example:

    python -m benchmarks.redraw results/serving_llama3-8b.json

With ``--together`` results of ``stationary``, measured by several commands, become one chart:

    python -m benchmarks.redraw --together running.png first/stationary_nano.json second/stationary_nano.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import cli as figures
from benchmarks.figures import evaluated
from benchmarks.kernels import report as kernel_report
from benchmarks.serving import charts as serving_charts
from benchmarks.serving import report as serving_report


def main(argv: Sequence[str] | None = None) -> None:
    """Redraw each file, or the one chart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--together", type=Path, metavar="PNG", help="one chart of all these results, and nothing else")
    args = parser.parse_args(argv)
    if args.together:
        every = [json.loads(path.read_text(encoding="utf-8")) for path in args.results]
        if any(data.get("kind") != "stationary" for data in every):
            parser.error("--together draws results of stationary only")
        serving_charts.running(every, args.together)
        return
    for path in args.results:
        data = json.loads(path.read_text(encoding="utf-8"))
        kind = data.get("kind")
        if kind == "serving":
            path.with_suffix(".md").write_text(serving_report.document(data), encoding="utf-8")
            serving_charts.charts(data, path.parent, path.stem)
        elif kind == "kernels":
            kernel_report.write_tables(data, path.parent)
            kernel_report.write_charts(data, path.parent)
        elif kind == "stationary":
            serving_charts.running([data], path.with_suffix(".png"))
        elif kind == "step_profile":
            serving_charts.breakdown(data, path.with_suffix(".png"))
        elif kind == "figure":
            figures.redraw(path)
        elif "configurations" in data and "results" in data:
            evaluated.draw(data, path.with_suffix(".png"))
        else:
            parser.error(f"{path.name} is no result of serving, stationary, step_profile, kernels, figures or evaluate")


if __name__ == "__main__":
    main()
