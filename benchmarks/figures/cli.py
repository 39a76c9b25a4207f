"""DiffKV's quality figures for a model, each from one command: a PNG, its table and the JSON that both are made from.

    fig2        distributions of attention scores and of value norms (fig2 to fig5: a forward pass of the
                Hugging Face model, no server)
    fig3        attention scores of the tokens of one sequence
    fig4, fig5  critical tokens by layer, by KV head
    fig8        uniform precisions and their mirror images
    fig9        pruning per head against static budgets, at equal pruning
    fig10       accuracy and bytes over alpha_high and alpha_low
    fig11       accuracy against memory, all configurations, Pareto front
    fig12       shares of high-tier, low-tier and pruned tokens by task

Servers are started one after the other, or --jobs of them at once. Answers are kept in the output folder, so a run
that was broken off goes on with the same command, and figures share what they have in common. Example:

    python -m benchmarks.figures fig8 fig11 --model examples/models/nano --split dev --n 200 --output figures
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import requests

from benchmarks.figures import (
    breakdown,
    critical_tokens,
    distributions,
    pareto,
    precision,
    sparsity,
    table,
    thresholds,
    token_scores,
)
from benchmarks.figures.data import FigureData, Point, Ratio
from benchmarks.figures.session import Session
from benchmarks.paths import DATA, NANO
from benchmarks.provenance import headline, provenance
from benchmarks.splits import SPLITS
from sglang_diffkv.calibration import CalibrationError
from sglang_diffkv.drawing import drawn
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.evaluate.cli import add_question_arguments, question_options
from sglang_diffkv.evaluate.client import RequestError
from sglang_diffkv.evaluate.endpoint import EvaluationError
from sglang_diffkv.evaluate.prompts import load_tokenizer
from sglang_diffkv.evaluate.runner import Suite
from sglang_diffkv.evaluate.server import ServerError
from sglang_diffkv.evaluate.store import Store
from sglang_diffkv.evaluate.tasks import LOADERS, TaskFileError, load_task
from sglang_diffkv.layout.page_format import Tier


@dataclass(frozen=True)
class Figure:
    """How a figure of accuracies or shares is measured and drawn."""

    collect: Callable[[Session], list[Point]]
    draw: Callable[[FigureData, Path], None]


SERVED = {
    "fig8": Figure(precision.collect, precision.draw),
    "fig9": Figure(sparsity.collect, sparsity.draw),
    "fig10": Figure(thresholds.collect, thresholds.draw),
    "fig11": Figure(pareto.collect, pareto.draw),
    "fig12": Figure(breakdown.collect, breakdown.draw),
}


@dataclass(frozen=True)
class Offline:
    """A figure of a forward pass over prompts: what it is drawn from, how that is measured, drawn and tabled."""

    data: type[Any]
    collect: Callable[[argparse.Namespace, Sequence[Suite], str, dict[str, Any]], Any]
    draw: Callable[[Any, Path], None]
    table: Callable[[Any], str]


_CRITICAL = (critical_tokens.CriticalTokens, critical_tokens.collect)
OFFLINE = {
    "fig2": Offline(distributions.Distributions, distributions.collect, distributions.draw, distributions.table),
    "fig3": Offline(token_scores.TokenScores, token_scores.collect, token_scores.draw, token_scores.table),
    "fig4": Offline(*_CRITICAL, critical_tokens.draw_layers, table.of_layers),
    "fig5": Offline(*_CRITICAL, critical_tokens.draw_heads, table.of_heads),
}
NAMES = (*OFFLINE, *SERVED)


def tier(text: str) -> str:
    """A tier's name as the package writes it. Raises ValueError, which argparse reports."""
    return Tier.parse(text).name


def alpha(text: str) -> float:
    """A threshold. Raises ValueError, which argparse reports."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError
    return value


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.figures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("figures", nargs="+", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--model", default=str(NANO), help="default: the nano model of the repository")
    parser.add_argument("--task", action="append", default=[], metavar="KIND=PATH", help=f"KIND: {', '.join(LOADERS)}")
    parser.add_argument(
        "--split", action="append", default=[], choices=SPLITS, help="reference task of benchmarks/data"
    )
    add_question_arguments(parser)
    parser.add_argument("--output", type=Path, required=True, help="folder for answers, JSON and PNG")
    parser.add_argument("--ratio", choices=get_args(Ratio), default="pages", help="bytes shown (default: %(default)s)")
    add = parser.add_argument
    add("--tiers", type=tier, nargs="+", default=precision.TIERS, help="fig8, fig11 (default: %(default)s)")
    add("--alpha-high", type=alpha, nargs="+", default=thresholds.HIGHS, help="fig10, fig11 (default: %(default)s)")
    add("--alpha-low", type=alpha, nargs="+", default=thresholds.LOWS, help="fig10, fig11 (default: %(default)s)")
    add("--at-alpha-high", type=alpha, help="fig10 to fig12: instead of the calibrated or default value")
    add("--prune-alpha", type=alpha, nargs="+", default=sparsity.ALPHAS, help="fig9, fig11 (default: %(default)s)")
    add("--prune-tier", type=tier, default="BF16", help="fig9, fig11: what is pruned (default: %(default)s)")
    add("--parts", nargs="+", choices=pareto.PARTS, default=tuple(pareto.PARTS), help="fig11 (default: all)")
    add("--config", action="append", metavar="NAME=JSON", help="fig12, repeatable (default: the model's thresholds)")
    add("--mass", type=float, default=0.95, help="fig4, fig5: share of the attention (default: %(default)s)")
    add("--layer", type=int, help="fig3: of those that attend, from 0 (default: a quarter of the way through)")
    add("--max-tokens", type=int, default=4096, help="fig2 to fig5: longer prompts are cut (default: %(default)s)")
    add("--prefix-tokens", type=int, default=1024, help="fig2 to fig5: of a wikitext window (default: %(default)s)")
    add("--window-tokens", type=int, default=128, help="fig2 to fig5: behind them (default: %(default)s)")
    args = parser.parse_args(argv)
    args.task += [f"reference={DATA / split}.jsonl.xz" for split in args.split]
    if not args.task:
        parser.error("name questions by --task or --split")
    if not 0 < args.mass <= 1:
        parser.error("--mass is a share above 0 and up to 1")
    return args


def write(data: Any, folder: Path) -> list[Path]:
    """Write the JSON, then table and PNG beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{data.figure}.json"
    path.write_text(json.dumps(data.model_dump(mode="json"), indent=1) + "\n", encoding="utf-8")
    text = f"# {data.figure}, {data.model}\n\n{headline(data.about)}\n\n```\n{data.about['command']}\n```\n\n"
    rows = OFFLINE[data.figure].table(data) if data.figure in OFFLINE else table.of_points(data)
    path.with_suffix(".md").write_text(f"{text}{rows}\n", encoding="utf-8")
    written, image = [path, path.with_suffix(".md")], path.with_suffix(".png")
    return (
        [*written, image] if drawn(lambda: draw(data, image), f"python -m benchmarks.redraw {path.name}") else written
    )


def draw(data: Any, path: Path) -> None:
    """Write the PNG."""
    figure: Offline | Figure = OFFLINE[data.figure] if data.figure in OFFLINE else SERVED[data.figure]
    figure.draw(data, path)


def redraw(path: Path) -> None:
    """Draw a figure again from its JSON."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    kind = OFFLINE[raw["figure"]].data if raw["figure"] in OFFLINE else FigureData
    draw(kind.model_validate(raw), path.with_suffix(".png"))


def run(args: argparse.Namespace, about: dict[str, Any]) -> None:
    """Measure and write every figure that was asked for."""
    tokenizer = load_tokenizer(args.tokenizer or args.model)
    suites = [Suite.of(load_task(spec, question_options(args)), tokenizer) for spec in args.task]
    if len({suite.task.name for suite in suites}) < len(suites):
        raise TaskFileError("two task files of one kind have the same name; rename one")
    for name in (x for x in args.figures if x in OFFLINE):
        _say(name, write(OFFLINE[name].collect(args, suites, name, about), args.output))
    served = [x for x in args.figures if x in SERVED]
    if not served:
        return
    with Store(args.output) as store:
        session = Session(args, suites, store)
        for name in served:
            print(f"{name}:", file=sys.stderr)
            session.begin()
            points = SERVED[name].collect(session)
            _say(name, write(session.data(name, points, about), args.output))


def _say(name: str, written: Sequence[Path]) -> None:
    print(f"{name}: {', '.join(map(str, written))}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 1 with the reason if a figure cannot be measured."""
    args = parse_args(argv)
    try:
        run(args, provenance("figures", argv))
    except (
        ConfigError, CalibrationError, TaskFileError, EvaluationError, RequestError, ServerError,
        requests.RequestException,
    ) as error:  # fmt: skip
        print(f"benchmarks.figures: {error}", file=sys.stderr)
        return 1
    return 0
