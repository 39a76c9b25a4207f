"""Find the thresholds that save most of a model's KV cache within a loss of accuracy.

Each setting answers the questions of a calibration file on a server of its own and is compared with stock SGLang
in bf16 on the same questions. The first one is what a plain server runs; what is not searched is as there. The
answers are kept in the work folder, so a search that was broken off goes on with the same command. With --jobs several
servers run at once; the choice is the same. Copy the result into the model's folder as diffkv_calibration.json.
Without questions that have answers, plain text will do: see --text FILE --help. Example:

    python -m sglang_diffkv.calibrate --model MODEL --task gsm8k=train.jsonl \\
        --n 250 --tolerance 3 --work calibration --output diffkv_calibration.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import requests

from sglang_diffkv.access import cause
from sglang_diffkv.calibrate import leankv
from sglang_diffkv.calibrate.answers import Answers, circumstances, configured
from sglang_diffkv.calibrate.arguments import load_calibration, parse_args, read_head_scale, selection
from sglang_diffkv.calibrate.heads.fit import Source, fit_all
from sglang_diffkv.calibrate.search import DEFAULT, Search, Setting, beats, grid, grid_starts, paper
from sglang_diffkv.calibrate.shuffled import shuffled
from sglang_diffkv.calibration import (
    CalibratedEntry,
    CalibratedThresholds,
    CalibrationFile,
    GridPoint,
    HeadScale,
    ModelGeometry,
    Provenance,
    model_name,
    policy_fields,
)
from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.evaluate import report, runner
from sglang_diffkv.evaluate.client import RequestError
from sglang_diffkv.evaluate.configuration import STOCK
from sglang_diffkv.evaluate.endpoint import EvaluationError
from sglang_diffkv.evaluate.prompts import load_tokenizer
from sglang_diffkv.evaluate.server import ServerError
from sglang_diffkv.evaluate.store import Store
from sglang_diffkv.evaluate.summary import Result, summarise
from sglang_diffkv.evaluate.table import percent
from sglang_diffkv.evaluate.task import Task
from sglang_diffkv.evaluate.tasks import TaskFileError

FAILURES = (ConfigError, TaskFileError, EvaluationError, RequestError, ServerError, requests.RequestException)
"""What ends a search with a reason."""
MAX_FITTED_TOKENS = 4096
"""Of a question that factors are fitted to, reply included."""


class Calibration:
    """Settings measured on one model and one calibration file."""

    def __init__(self, args: argparse.Namespace, store: Store):
        self.args, self.store = args, store
        self.task = load_graded(args)
        self.tokenizer = load_tokenizer(args.tokenizer or args.model)
        self.suite = runner.Suite.of(self.task, self.tokenizer)
        self.head_scale = None if args.head_scale is None else read_head_scale(args.head_scale)
        self.factors: dict[Setting, HeadScale] = {}
        self.answers = Answers(args, store, [self.suite])

    @cached_property
    def stock(self) -> Result:
        """What all settings are compared with."""
        self.ask([])
        return self._result(STOCK)

    def ask(self, settings: Sequence[Setting]) -> None:
        """Have stock and the settings answer what the store does not hold, once; ``--jobs`` of them at once."""
        self.answers.ask({x.name: self.config(x) for x in settings})

    def _result(self, name: str) -> Result:
        return next(x for x in summarise(self.store, [self.suite]) if x.configuration == name)

    def with_heads(self, settings: Sequence[Setting]) -> list[Setting]:
        """The settings with factors by head fitted to ``--fit-heads`` questions, but for those that factors do not
        change, as where a threshold is out of every token's reach."""
        args = self.args
        task = load_calibration(args, whole=True)
        source = Source(args.model, task, self.tokenizer, args.fit_heads, MAX_FITTED_TOKENS, selection(args))
        able = {setting.name: setting for setting in settings if setting.alpha_high is not None}
        fitted = fit_all(source, {name: self.config(x) for name, x in able.items()}, args.work / "heads")
        for name, scale in fitted.items():
            if any(factor != 1.0 for layer in scale for factor in layer):
                self.factors[replace(able[name], heads=True)] = scale
        return list(self.factors)

    def scale(self, setting: Setting) -> HeadScale | None:
        """Factors by head of a setting; those fitted with nothing pruned serve every ``alpha_low``."""
        if not setting.heads:
            return None
        return self.head_scale or self.factors[replace(setting, alpha_low=0.0)]

    def config(self, setting: Setting) -> DiffKVConfig:
        """The DiffKV configuration of a setting."""
        rule = (setting.window, setting.sinks, setting.horizon, self.scale(setting))
        policy = policy_fields(setting.alpha_high, setting.alpha_low, *rule)
        return configured(self.args.base, {"tiers": setting.tiers, "policy": policy, "rotate": setting.rotate})

    def measure(self, setting: Setting) -> GridPoint:
        """One point of the grid."""
        self.ask([setting])
        result = self._result(setting.name)
        change, cache = result.difference, result.cache
        if change is None or cache is None:
            raise EvaluationError(f"{setting.name}: the server reported no figures of its cache")
        return GridPoint(
            **asdict(setting),
            n=change.n,
            accuracy=result.score.mean,
            accuracy_error=result.score.error,
            difference=change.mean,
            difference_error=change.error,
            p=change.p,
            ratio_pages=cache.ratio_pages,
            ratio_tokens=cache.ratio_tokens,
            long_ratio_pages=cache.long_ratio_pages,
            long_ratio_tokens=cache.long_ratio_tokens,
            share_high=cache.share_high,
            share_low=cache.share_low,
            share_pruned=cache.share_pruned,
        )

    def entry(self, chosen: Setting, search: Search[Setting, GridPoint]) -> CalibratedThresholds:
        """What is written for a chosen setting."""
        args = self.args
        rule = {name: value for name, value in asdict(chosen).items() if name != "heads"}
        return CalibratedThresholds(
            models=(model_name(args.model),),
            geometry=ModelGeometry.of(args.model),
            **rule,
            head_scale=self.scale(chosen),
            source="measured",
            chosen=search.tried[chosen],
            provenance=Provenance(
                **circumstances(args, self.task),
                n=self.stock.score.n,
                bf16_accuracy=self.stock.score.mean,
                bf16_accuracy_error=self.stock.score.error,
                grid=tuple(search.tried.values()),
            ),
        )


def load_graded(args: argparse.Namespace) -> Task:
    """The calibration file. Raises TaskFileError, also if its replies are not right or wrong."""
    task = load_calibration(args)
    if task.metric != "accuracy":
        raise TaskFileError(f"{task.name}: thresholds are fitted to right and wrong answers")
    return task


def table(stock: Result, search: Search[Setting, GridPoint], chosen: Setting | None) -> str:
    """The settings tried, as Markdown."""
    header = ["setting", "accuracy %", "to bf16", "ratio, tokens", "ratio, pages", "high / low / pruned %", "", ""]
    rows = [[STOCK, percent(stock.score), "", "1", "1", "", "", ""]]
    for setting, x in search.tried.items():
        rows.append(
            [
                setting.name,
                report.with_error(100 * x.accuracy, 100 * x.accuracy_error, ".1f", x.n),
                f"{report.with_error(100 * x.difference, 100 * x.difference_error, '+.1f', x.n)} (p = {x.p:.2g})",
                f"{x.ratio_tokens:.3f}",
                f"{x.ratio_pages:.3f}",
                report.shares_cell(x.model_dump(), digits=1),
                "the default" if setting == DEFAULT else "",
                search.verdict(setting, chosen),
            ]
        )
    return report.markdown(header, rows)


def write(args: argparse.Namespace, entry: CalibratedEntry) -> None:
    """Write the calibration file."""
    content = CalibrationFile.model_validate({"entries": (entry,)})
    args.output.write_text(content.model_dump_json(indent=2) + "\n", encoding="utf-8")


def thresholds(args: argparse.Namespace, store: Store) -> int:
    """DiffKV's thresholds: search, print the grid, write; 1 if none are within the tolerance."""
    calibration = Calibration(args, store)
    rule = (args.tolerance / 100, args.margin, args.whole_grid)
    search = Search(calibration.measure, *rule, jobs=args.jobs, measure_ahead=calibration.ask)
    if args.procedure == "paper":
        fixed = (args.window[0], args.rotate[0], args.sinks[0], args.horizon[0], args.head_scale is not None)
        chosen = paper(search, args.tiers[0], args.alpha_high, args.alpha_low, *fixed)
    else:
        choices = (args.window, args.rotate, args.sinks, args.horizon)
        starts = grid_starts(args.tiers, args.alpha_high, *choices, heads=args.head_scale is not None)
        if args.fit_heads:
            starts += calibration.with_heads(starts)
        chosen = grid(search, starts, args.alpha_low)
    stock = calibration.stock
    print(f"{stock.score.n} questions of {calibration.task.name}\n")
    print(table(stock, search, chosen))
    by = f" by {args.margin:g} standard errors" if args.margin else ""
    if chosen is None:
        found = any(search.within(x) for x in search.tried.values())
        but = ", or another one loses less at fewer bytes: ask more questions (--n)" if found else ""
        print(f"\nno setting is within {args.tolerance:g} points of bf16{by}{but}", file=sys.stderr)
        return 1
    write(args, calibration.entry(chosen, search))
    print(f"\n{chosen.name} saves most within {args.tolerance:g} points of bf16{by}; written to {args.output}")
    return 0


@dataclass(frozen=True)
class LeanFound:
    """What LeanKV's procedure found: the settings tried, those taken by target, and all that a file says of it."""

    task: str
    calibration: leankv.LeanCalibration
    search: Search[leankv.LeanSetting, leankv.LeanPoint]
    chosen: dict[str, leankv.LeanSetting | None]
    provenance: leankv.LeanProvenance


def lean_search(args: argparse.Namespace, store: Store) -> LeanFound:
    """LeanKV's grid, measured, with what is neutral and within the loss, and both on the questions held out. Raises
    what ``main`` reports."""
    task, tokenizer = load_graded(args), load_tokenizer(args.tokenizer or args.model)
    runs = shuffled(task, tokenizer, args.runs, args.held_out, args.seed)
    calibration = leankv.LeanCalibration(args, store, runs)
    search = calibration.search()
    chosen = {target: search.best(allowed) for target, allowed in calibration.allowed.items()}
    calibration.held_out(list(chosen.values()))
    provenance = calibration.provenance(calibration.choices(chosen), list(search.tried.values()))
    return LeanFound(task.name, calibration, search, chosen, provenance)


def lean(args: argparse.Namespace, store: Store) -> int:
    """LeanKV's thresholds: search, print the grid and what is neutral and within the loss, write one of them; 1 if
    there is none."""
    found = lean_search(args, store)
    calibration, title = found.calibration, found.task
    deviation = f"bf16's deviation over runs: {100 * calibration.deviation:.2f} points"
    print(f"{calibration.stock.n} questions of {title}, {args.runs} runs in random orders; {deviation}\n")
    print(leankv.grid_table(calibration, found.search))
    print(f"\nKV memory over bf16's, fewest bytes of {len(found.search.tried)} settings:\n")
    print(leankv.summary_table(calibration, found.search, found.chosen, title))
    chosen = found.chosen[args.target]
    if chosen is None:
        print(f"\nno setting is within the target {args.target!r}", file=sys.stderr)
        return 1
    if beats(calibration.default, found.search.tried[chosen]):
        print(f"\n{chosen.name} is not written: a plain server loses less at fewer bytes", file=sys.stderr)
        return 1
    write(args, calibration.entry(chosen, found.provenance))
    print(f"\n{chosen.name} ({args.target}) is written to {args.output}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Search, print the grid, write the thresholds; 1 if none are within the tolerance or the search cannot go on."""
    args = parse_args(argv, __doc__)
    try:
        with Store(args.work) as store:
            return lean(args, store) if args.procedure == "leankv" else thresholds(args, store)
    except FAILURES as error:
        print(f"sglang_diffkv.calibrate: {cause(error)}", file=sys.stderr)
        return 1
