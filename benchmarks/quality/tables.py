"""The DiffKV paper's tables 1 to 3 in form, for models and task files that you have.

    table 1  GSM8K, MATH, MMLU, MMLU-Pro, HumanEval+, MBPP+: a row each, a column for each model and configuration
    table 2  LongBench: a row for each model and configuration, a column for each data set
    table 3  MATH, GPQA, AIME24 of thinking models, where GPQA or AIME are among the task files

Every cell has the standard error, and in parentheses the cache's bytes over bf16's. Other task files with right and
wrong answers or scores come in a table of their own. It calls ``python -m sglang_diffkv.evaluate`` for each --model,
whose paired tests are in OUTPUT/MODEL/results.md; a run that was broken off goes on with the same command. The paper's
other systems are not here: the uniform tiers have the bits of INT4 and KIVI and this package's quantization, one scale
and zero for each token's key and value. Example:

    python -m benchmarks.quality.tables --model MODEL --task gsm8k=test.jsonl --task math=MATH/test \\
        --task longbench=longbench --max-prompt-tokens 7500 --n 500 --output tables
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.provenance import headline, provenance
from sglang_diffkv.evaluate import cli
from sglang_diffkv.evaluate.configuration import FP8, STOCK
from sglang_diffkv.evaluate.report import markdown
from sglang_diffkv.evaluate.summary import Estimate, Result
from sglang_diffkv.evaluate.table import percent
from sglang_diffkv.evaluate.tasks import LOADERS

CONFIGS = (
    STOCK,
    FP8,
    'K4V4={"tiers": ["K4V4"], "rotate": "none"}',
    'K2V2={"tiers": ["K2V2"], "rotate": "none"}',
    'SnapKV 50%={"tiers": ["BF16"], "policy": {"name": "snapkv", "fraction": 0.5}}',
    "DiffKV={}",
)
"""Beside stock: the bits of INT4 and of KIVI in every token, half of the tokens, and what a server runs by default."""
BENCHMARKS = {
    "gsm8k": "GSM8K",
    "math": "MATH",
    "mmlu": "MMLU",
    "mmlu_pro": "MMLU-Pro",
    "humaneval_plus": "HumanEval+",
    "mbpp_plus": "MBPP+",
    "gpqa": "GPQA",
    "aime": "AIME24",
}
TABLE_1 = ("gsm8k", "math", "mmlu", "mmlu_pro", "humaneval_plus", "mbpp_plus")
TABLE_3 = ("math", "gpqa", "aime")
LONGBENCH = "longbench"
SHOWN = {STOCK: "bf16"}
CHOICES = ("1", "2", "3", "others")


@dataclass(frozen=True)
class Measured:
    """What one model's evaluation found."""

    model: str
    results: tuple[Result, ...]
    skipped: dict[str, str]

    @classmethod
    def read(cls, model: str, folder: Path) -> Measured:
        """From the ``results.json`` of an evaluation's folder."""
        data = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        return cls(model, tuple(Result.model_validate(x) for x in data["results"]), data["skipped"])

    @property
    def configurations(self) -> list[str]:
        return list(dict.fromkeys(x.configuration for x in self.results))

    def of(self, suite: str, configuration: str) -> Result | None:
        """The configuration's result on a task file."""
        found = (x for x in self.results if (x.suite, x.configuration) == (suite, configuration))
        return next(found, None)


def kind(suite: str) -> str:
    """The kind of a task file, by its name in results."""
    return suite.partition("/")[0]


def cell(result: Result | None, score: Estimate | None = None) -> str:
    """A score in percent, its standard error, and the bytes over bf16's, where they are fewer."""
    if result is None:
        return ""
    ratio = result.cache.ratio_pages if result.cache else 1.0
    return percent(score or result.score) + (f" ({100 * ratio:.1f}%)" if ratio != 1.0 else "")


def by_benchmark(title: str, suites: Sequence[str], models: Sequence[Measured]) -> str:
    """A row for each task file, a column for each model and configuration."""
    columns = [(model, name) for model in models for name in model.configurations]
    rows = []
    for suite in suites:
        found = [model.of(suite, name) for model, name in columns]
        count = max((x.score.n for x in found if x), default=0)
        several = sum(kind(x) == kind(suite) for x in suites) > 1 or kind(suite) not in BENCHMARKS
        label = suite if several else BENCHMARKS[kind(suite)]
        rows.append([label, str(count), *(cell(x) for x in found)])
    header = ["benchmark", "n", *(f"{model.model}: {SHOWN.get(name, name)}" for model, name in columns)]
    return f"## {title}\n\n{markdown(header, rows)}"


def by_data_set(title: str, suites: Sequence[str], models: Sequence[Measured]) -> str:
    """LongBench: a row for each model and configuration, a column for each data set."""
    names = sorted({task for model in models for x in model.results if x.suite in suites for task in x.by_task})
    rows, counts = [], dict.fromkeys(names, 0)
    for model in models:
        for configuration in model.configurations:
            cells = dict.fromkeys(names, "")
            for suite in suites:
                result = model.of(suite, configuration)
                for task, score in result.by_task.items() if result else ():
                    cells[task] = cell(result, score)
                    counts[task] = max(counts[task], score.n)
            rows.append([model.model, SHOWN.get(configuration, configuration), *cells.values()])
    header = ["model", "configuration", *(f"{name} (n = {count})" for name, count in counts.items())]
    return f"## {title}\n\n{markdown(header, rows)}"


def report(models: Sequence[Measured], about: dict[str, Any], wanted: Sequence[str] = CHOICES) -> str:
    """The tables ``wanted``, as far as the task files give them, as Markdown."""
    suites = list(dict.fromkeys(x.suite for model in models for x in model.results))
    thinking = any(kind(x) in ("gpqa", "aime") for x in suites)
    third = [x for name in TABLE_3 for x in suites if thinking and kind(x) == name]
    first = [x for name in TABLE_1 for x in suites if kind(x) == name]
    second = [x for x in suites if kind(x) == LONGBENCH]
    others = [x for x in suites if x not in (*first, *second, *third)]
    parts = ["Accuracy or score in percent ± standard error; in parentheses bytes of the cache's pages over bf16's."]
    for name, title, held, form in (
        ("1", "Table 1: benchmarks", first, by_benchmark),
        ("2", "Table 2: LongBench", second, by_data_set),
        ("3", "Table 3: thinking models", third, by_benchmark),
        ("others", "Other task files", others, by_benchmark),
    ):
        parts += [form(title, held, models)] if held and name in wanted else []
    parts += [f"{model.model}, {name} was skipped: {why}." for model in models for name, why in model.skipped.items()]
    return "\n\n".join([*parts, f"{headline(about)}\n\n```\n{about['command']}\n```"]) + "\n"


def write(folder: Path, name: str, text: str, models: Sequence[Measured], about: dict[str, Any]) -> None:
    """The tables as NAME.md, and NAME.json with all that is in them."""
    found = [
        {"model": x.model, "results": [y.model_dump(mode="json") for y in x.results], "skipped": x.skipped}
        for x in models
    ]
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    content = json.dumps({"about": about, "models": found}, indent=1)
    (folder / f"{name}.json").write_text(content + "\n", encoding="utf-8")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality.tables",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", action="append", required=True, help="its folder; repeat for several")
    parser.add_argument("--config", action="append", metavar="NAME=JSON", help=f"default: {', '.join(CONFIGS)}")
    parser.add_argument(
        "--task", action="append", required=True, metavar="KIND=PATH", help=f"KIND: {', '.join(LOADERS)}"
    )
    parser.add_argument("--tables", nargs="+", choices=CHOICES, default=CHOICES, help="default: all that tasks are for")
    cli.add_question_arguments(parser)
    parser.add_argument("--output", type=Path, required=True, help="folder: NAME.md, and a folder for each model")
    parser.add_argument("--name", default="tables", help="of the files that are written (default: %(default)s)")
    args = parser.parse_args(argv)
    names = [Path(model).resolve().name for model in args.model]
    if len(set(names)) < len(names):
        parser.error("two models have the same name; rename one's folder")
    if texts := [x for x in args.task if kind(x.replace("=", "/", 1)) in ("wikitext", "continuation", "replies")]:
        parser.error(f"{texts[0]}: perplexity is not in these tables; ask python -m sglang_diffkv.evaluate")
    return args


def measure(args: argparse.Namespace, configs: Sequence[str]) -> list[Measured] | int:
    """Every model's evaluation in ``--output``; the exit status of one that failed."""
    models = []
    for model in args.model:
        asked = copy(args)
        name = Path(model).resolve().name
        asked.model, asked.url, asked.name = model, None, None
        asked.config, asked.output = list(configs), args.output / name
        if status := cli.run(asked):
            return status
        models.append(Measured.read(name, asked.output))
    return models


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate every model and write the tables; the exit status of the evaluation that failed, if one did."""
    args = parse_args(argv)
    models = measure(args, args.config or CONFIGS)
    if isinstance(models, int):
        return models
    about = provenance("quality.tables", argv)
    text = report(models, about, args.tables)
    write(args.output, args.name, text, models, about)
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
