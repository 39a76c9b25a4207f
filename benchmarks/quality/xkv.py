"""XKV's tables II and III for a model and task files: methods that keep few tokens, at the same shares of them.

Table II says what each method looks at, table III has a part for each share (``--ratios``, the paper's 1.6 and 1.2% by
default), a row for each method and a column for each data set, the paper's LongBench or whatever ``--task`` names.
Cells have standard errors and, in parentheses, the bytes of the cache's pages over bf16's, which count free slots and
the tokens of the reply too. The chart has the mean scores over the shares, as figure 12 of the paper. Everything is
stored in bf16, with windows of 8 and pooling over 7 as in the paper. StreamingLLM has no share of its own: its window
is that share of the mean prompt. PyramidInfer is not here. Example:

    python -m benchmarks.quality.xkv --model MODEL --task longbench=longbench --max-prompt-tokens 7500 \\
        --n 200 --output xkv
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import style
from benchmarks.provenance import headline, provenance
from benchmarks.quality.tables import SHOWN, Measured, cell, measure, write
from sglang_diffkv.drawing import drawn
from sglang_diffkv.evaluate import cli
from sglang_diffkv.evaluate.configuration import STOCK
from sglang_diffkv.evaluate.prompts import load_tokenizer
from sglang_diffkv.evaluate.report import markdown
from sglang_diffkv.evaluate.summary import Estimate, Result
from sglang_diffkv.evaluate.table import percent
from sglang_diffkv.evaluate.tasks import LOADERS, TaskFileError, load_task

RATIOS = (0.016, 0.012)
STREAMING, H2O, SNAPKV, PYRAMIDKV, XKV = "StreamingLLM", "H2O", "SnapKV", "PyramidKV", "XKV"
FEATURES = {
    STREAMING: ("streaming", False, False, False, False),
    H2O: ("h2o", True, False, False, False),
    SNAPKV: ("snapkv", True, False, False, False),
    PYRAMIDKV: ("pyramidkv", True, True, False, False),
    XKV: ("xkv", True, True, True, True),
}
"""Policy, and: scores by attention, layers differ in size, by how their importance is spread, by the request.

As these policies are; the paper's table puts StreamingLLM with those that score by attention."""
WINDOW = 8


def policies(ratio: float, tokens: float) -> dict[str, dict[str, Any]]:
    """The methods that keep ``ratio`` of prompts of ``tokens`` tokens."""
    kept = max(1, round(ratio * tokens))
    sinks = min(4, kept - 1)
    share = {"fraction": ratio, "window": WINDOW}
    return {
        STREAMING: {"name": "streaming", "sinks": sinks, "window": min(kept - sinks, 4096)},
        H2O: {"name": "h2o", "fraction": ratio, "window": min(max(1, kept // 2), 4096)},
        SNAPKV: {"name": "snapkv", **share},
        PYRAMIDKV: {"name": "pyramidkv", **share},
        XKV: {"name": "xkv", "keep": ratio, "window": WINDOW},
    }


def called(method: str, ratio: float) -> str:
    """A configuration's name."""
    return f"{method} {100 * ratio:g}%"


def configurations(ratios: Sequence[float], tokens: float) -> list[str]:
    """Stock bf16, and every method at every share."""
    found = [STOCK]
    for ratio in ratios:
        for method, policy in policies(ratio, tokens).items():
            config = json.dumps({"tiers": ["BF16"], "policy": policy})
            found.append(f"{called(method, ratio)}={config}")
    return found


def features() -> str:
    """Table II."""
    header = ["method", "policy", "scores by attention", "sizes by layer", "by importance in layers", "by request"]
    rows = [[name, f"`{policy}`", *("yes" if x else "no" for x in has)] for name, (policy, *has) in FEATURES.items()]
    return f"## Table II: methods\n\n{markdown(header, rows)}"


def columns(model: Measured) -> list[tuple[str, str]]:
    """Task file and, of LongBench, data set, in the order of the results."""
    found: dict[tuple[str, str], None] = {}
    for result in model.results:
        tasks = sorted(result.by_task) if result.suite.startswith("longbench") else [""]
        found |= {(result.suite, task): None for task in tasks}
    return list(found)


def score_of(result: Result | None, task: str) -> Estimate | None:
    """Of a column, if it was asked."""
    return None if result is None else result.by_task.get(task) if task else result.score


def mean_of(model: Measured, configuration: str) -> Estimate | None:
    """The mean over columns, each counting the same; None where one is missing."""
    found = [score_of(model.of(suite, configuration), task) for suite, task in columns(model)]
    scores = [x for x in found if x is not None]
    if len(scores) < len(found) or not scores:
        return None
    mean = sum(x.mean for x in scores) / len(scores)
    error = math.sqrt(sum(x.error**2 for x in scores)) / len(scores)
    return Estimate(n=sum(x.n for x in scores), mean=mean, error=error)


def scores(models: Sequence[Measured], ratio: float) -> str:
    """Table III at one share."""
    header: list[str] = []
    rows = []
    for model in models:
        named = columns(model)
        if not header:
            header = ["model", "method", *(task or suite for suite, task in named), "mean"]
        for name, configuration in [(SHOWN[STOCK], STOCK), *((x, called(x, ratio)) for x in FEATURES)]:
            cells = []
            for suite, task in named:
                result = model.of(suite, configuration)
                cells.append(cell(result, score_of(result, task)))
            rows.append([model.model, name, *cells, percent(mean_of(model, configuration))])
    return f"## Table III: {100 * ratio:g}% of the prompt's tokens kept\n\n{markdown(header, rows)}"


def draw(models: Sequence[Measured], ratios: Sequence[float], path: Path) -> None:
    """Mean score over the shares, a panel for each model."""
    figure, axes = style.canvas(1, len(models), (5.2, 3.6), sharey=True)
    for axis, model in zip(axes[0], models):
        full = mean_of(model, STOCK)
        if full is not None:
            axis.axhline(100 * full.mean, color=style.BLACK, linestyle="--", linewidth=1, label=SHOWN[STOCK])
        for number, name in enumerate(FEATURES):
            held = [(100 * ratio, mean_of(model, called(name, ratio))) for ratio in sorted(ratios)]
            known = [(x, y) for x, y in held if y is not None]
            colour, marker = style.CYCLE[number]
            x, y = [x for x, _ in known], [100 * y.mean for _, y in known]
            error = [0 if math.isnan(y.error) else 100 * y.error for _, y in known]
            axis.errorbar(x, y, error, color=colour, marker=marker, capsize=3, label=name)
        axis.set(xlabel="tokens of the prompt kept, %", title=model.model, ylim=(0, None))
        style.grid(axis)
    axes[0][0].set_ylabel("mean score, %, ± standard error")
    axes[0][-1].legend(fontsize=7)
    subject = f"{', '.join(x.model for x in models)}; {', '.join(task or suite for suite, task in columns(models[0]))}"
    style.finish(figure, path, "Few tokens: scores over what is kept", subject)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality.xkv",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="its folder")
    parser.add_argument(
        "--task", action="append", required=True, metavar="KIND=PATH", help=f"KIND: {', '.join(LOADERS)}"
    )
    parser.add_argument(
        "--ratios", type=float, nargs="+", default=RATIOS, metavar="SHARE", help="of the tokens (default: %(default)s)"
    )
    cli.add_question_arguments(parser)
    parser.add_argument("--output", type=Path, required=True, help="folder: xkv.md, .json, .png, and one for answers")
    args = parser.parse_args(argv)
    if not all(0 < x < 1 for x in args.ratios):
        parser.error("--ratios are shares between 0 and 1")
    return args


def mean_prompt(args: argparse.Namespace) -> float:
    """Tokens of a prompt, over all task files. Raises TaskFileError."""
    tokenizer, options = load_tokenizer(args.tokenizer or args.model), cli.question_options(args)
    lengths = [len(x.prompt_ids) for spec in args.task for x in load_task(spec, options).questions(tokenizer)]
    return sum(lengths) / len(lengths)


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate and write tables and chart; the exit status of the evaluation, if it failed."""
    args = parse_args(argv)
    try:
        tokens = mean_prompt(args)
    except TaskFileError as error:
        print(f"benchmarks.quality.xkv: {error}", file=sys.stderr)
        return 1
    args.model = [args.model]
    models = measure(args, configurations(args.ratios, tokens))
    if isinstance(models, int):
        return models
    about = provenance("quality.xkv", argv)
    said = "Scores in percent ± standard error; in parentheses bytes of pages over bf16's. "
    said += f"Mean prompt: {tokens:.0f} tokens."
    source = f"{headline(about)}\n\n```\n{about['command']}\n```"
    text = "\n\n".join([features(), said, *(scores(models, ratio) for ratio in args.ratios), source]) + "\n"
    write(args.output, "xkv", text, models, about)
    print(text, flush=True)
    drawn(lambda: draw(models, args.ratios, args.output / "xkv.png"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
