"""LeanKV's table 1 for a model and task files: the fewest bytes that lose nothing, and that lose at most 5%.

For each ``--task`` it calls ``python -m sglang_diffkv.calibrate --procedure leankv``, whose search and rules those are,
and puts the choices in the paper's form: a column for each task file, the cache's bytes over bf16's (without the pages'
free slots; in parentheses the setting). The questions that had no say answer afterwards, and their loss stands below.
The chart has every setting tried, accuracy against bytes, as the paper's figure 9. Options that this command does not
know go to the calibration. Example:

    python -m benchmarks.quality.leankv --model MODEL --task gsm8k=train.jsonl --task mmlu=mmlu/val \\
        --n 500 --output leankv
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import pareto
from benchmarks.figures.cases import MASS_HIGH, MASS_LOW, STOCK_CASE
from benchmarks.figures.data import FigureData, Point
from benchmarks.provenance import headline, provenance
from sglang_diffkv.calibrate import cli as calibrate
from sglang_diffkv.calibrate.arguments import parse_args as parse_calibration
from sglang_diffkv.calibrate.leankv import LeanPoint, LeanProvenance, LeanSetting
from sglang_diffkv.calibration import model_name
from sglang_diffkv.drawing import drawn
from sglang_diffkv.evaluate.report import markdown
from sglang_diffkv.evaluate.store import Store
from sglang_diffkv.evaluate.tasks import LOADERS
from sglang_diffkv.evaluate.tasks.files import stem

LABELS = {"neutral": "perf-neutral", "loss": "5% perf-loss"}
NONE = "none"


def named(spec: str) -> str:
    """A task file as columns name it."""
    kind, _, path = spec.partition("=")
    return f"{kind}/{stem(Path(path))}"


def search(args: argparse.Namespace, spec: str, more: Sequence[str]) -> LeanProvenance:
    """What the calibration finds on one task file; answers are kept beside the table. Raises ``calibrate.FAILURES``."""
    folder = args.output / named(spec).replace("/", "_")
    argv = ["--procedure", "leankv", "--model", args.model, "--task", spec, "--work", str(folder), *more]
    asked = parse_calibration([*argv, "--output", str(folder / "leankv.json")], calibrate.__doc__)
    with Store(asked.work) as store:
        return calibrate.lean_search(asked, store).provenance


def by_name(found: LeanProvenance) -> dict[str, LeanPoint]:
    """The grid by the settings' names."""
    return {LeanSetting(x.tiers, x.mass_high, x.mass_low, x.window, x.rotate).name: x for x in found.grid}


def cell(found: LeanProvenance, target: str) -> str:
    """Bytes and setting of one choice."""
    choice = found.choices[target]
    if choice.setting is None:
        return NONE
    return f"{100 * by_name(found)[choice.setting].ratio_tokens:.1f}% ({choice.setting})"


def held_out(found: LeanProvenance, target: str) -> str:
    """What the choice loses on the questions kept apart."""
    x = found.choices[target].held_out
    if x is None:
        return ""
    return f"{100 * x.difference:+.1f} ± {100 * x.difference_error:.1f} points (n = {x.n})"


def table(model: str, found: dict[str, LeanProvenance]) -> str:
    """The paper's table 1, and the check of it below."""
    rows = [[model, label, *(cell(x, target) for x in found.values())] for target, label in LABELS.items()]
    apart = [[model, label, *(held_out(x, target) for x in found.values())] for target, label in LABELS.items()]
    header = ["model", "", *found]
    parts = [markdown(header, rows), "To bf16, on questions that no choice saw:", markdown(header, apart)]
    return "\n\n".join(parts)


def figure(model: str, found: dict[str, LeanProvenance], about: dict[str, Any]) -> FigureData:
    """Every setting tried, as points of a chart."""
    points = []
    for suite, x in found.items():
        stock, n = x.bf16, x.bf16.n
        label = STOCK_CASE.label
        place = {"suite": suite, "n": n, "ratio_pages": 1.0, "ratio_tokens": 1.0, "error": _error(stock.mean, n)}
        points.append(
            Point(configuration=label, series=STOCK_CASE.series, label=label, accuracy=stock.mean, **place)  # type: ignore[arg-type]
        )
        for name, setting in by_name(x).items():
            points.append(
                Point(
                    configuration=name,
                    suite=suite,
                    series=MASS_LOW if setting.mass_low else MASS_HIGH,
                    label=f"{'-'.join(setting.tiers)} ({setting.mass_high:g}, {setting.mass_low:g})",
                    n=n,
                    accuracy=setting.accuracy.mean,
                    error=_error(setting.accuracy.mean, n),
                    difference=setting.accuracy.difference,
                    difference_error=setting.accuracy.difference_error,
                    ratio_pages=setting.ratio_pages,
                    ratio_tokens=setting.ratio_tokens,
                    share_high=setting.share_high,
                    share_low=setting.share_low,
                    share_pruned=setting.share_pruned,
                )
            )
    return FigureData(figure="evaluated", model=model, ratio="tokens", points=points, about=about)


def _error(share: float, n: int) -> float:
    return float((share * (1 - share) / n) ** 0.5)


def parse_args(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The command line, and what of it is for the calibration."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality.leankv",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", required=True, help="its folder")
    parser.add_argument(
        "--task", action="append", required=True, metavar="KIND=PATH", help=f"KIND: {', '.join(LOADERS)}"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder: table1.md, .json, .png, and answers")
    return parser.parse_known_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Search on every task file and write table and chart; 1 with the reason if a search cannot go on."""
    args, more = parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    try:
        found = {named(spec): search(args, spec, more) for spec in args.task}
    except calibrate.FAILURES as error:
        print(f"benchmarks.quality.leankv: {error}", file=sys.stderr)
        return 1
    about, model = provenance("quality.leankv", argv), model_name(args.model)
    title = f"# LeanKV's table 1: cache bytes over bf16's, {model}"
    text = "\n\n".join([title, table(model, found), f"{headline(about)}\n\n```\n{about['command']}\n```"]) + "\n"
    (args.output / "table1.md").write_text(text, encoding="utf-8")
    content = {name: x.model_dump(mode="json") for name, x in found.items()}
    (args.output / "table1.json").write_text(json.dumps({"about": about, "found": content}, indent=1) + "\n")
    print(text, flush=True)
    drawn(lambda: pareto.draw(figure(model, found, about), args.output / "table1.png"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
