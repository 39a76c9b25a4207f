"""LeanKV's procedure (Zhang et al., 2024, section 7.2): the cheapest thresholds that lose nothing, and the cheapest of
at most 5% loss.

The paper searches the grid of ``mass_high`` (its T_h) and ``mass_low`` (T_l) for each pair of tiers, and takes the
setting of fewest bytes under each of two constraints. Each experiment is run five times with the data set shuffled, and
its mean counts. A setting is *neutral* if its mean lies within three standard deviations of bf16's.

What the paper leaves open, and what is done here:

- what shuffling is for: decoding is greedy, so the order of the requests changes which of them are computed together
  and what the prefix cache holds, and with that rounding. Each run sends all questions in a random order of its own,
  the same for every setting, to an empty prefix cache;
- the deviation is that of bf16's runs, with one degree of freedom less; a setting above bf16's mean is neutral too;
- 5% are of bf16's accuracy, not points;
- a line of rising ``mass_low`` ends where the loss is beyond both limits by more than two standard errors of the
  questions, as with the other procedures, unless the whole grid is asked for;
- what a plain server runs, DiffKV's default, is measured first and printed as a row; of this search's settings one that
  loses more than the default at more bytes is not written;
- the smallest of many measured settings is a lucky one. So some questions are held out: no choice sees them, and what
  is chosen answers them afterwards.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from sglang_diffkv.calibrate.answers import Answers, circumstances, configured
from sglang_diffkv.calibrate.arguments import PAPER_WINDOW
from sglang_diffkv.calibrate.search import Search, allows, rotation_of
from sglang_diffkv.calibrate.shuffled import Runs
from sglang_diffkv.calibration import CalibratedPolicy, measured_policy, model_name
from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.evaluate import report
from sglang_diffkv.evaluate.configuration import STOCK
from sglang_diffkv.evaluate.endpoint import EvaluationError
from sglang_diffkv.evaluate.runner import Suite
from sglang_diffkv.evaluate.store import Store
from sglang_diffkv.evaluate.summary import cache_figures
from sglang_diffkv.policies.leankv import LeanKVPolicyConfig

DEVIATIONS = 3.0
DEFAULT_NAME = "default (diffkv)"


@dataclass(frozen=True)
class LeanSetting:
    """What one server of the search runs."""

    tiers: tuple[str, ...]
    mass_high: float
    mass_low: float
    window: int = PAPER_WINDOW
    rotate: str = ""
    """As of a ``Setting``."""

    def __post_init__(self) -> None:
        if not self.rotate:
            object.__setattr__(self, "rotate", rotation_of(self.tiers))

    @property
    def name(self) -> str:
        """Unique among settings, and readable."""
        window = "" if self.window == PAPER_WINDOW else f" window={self.window}"
        rotate = "" if self.rotate == rotation_of(self.tiers) else f" rotate={self.rotate}"
        return f"{'-'.join(self.tiers)} mass_high={self.mass_high:g} mass_low={self.mass_low:g}{window}{rotate}"

    @property
    def policy(self) -> LeanKVPolicyConfig:
        return LeanKVPolicyConfig(mass_high=self.mass_high, mass_low=self.mass_low, window=self.window)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Accuracy(_Strict):
    """Of ``n`` questions in several runs: the share of right answers in each, their mean and its difference to bf16's,
    with the standard error of the questions. Each question counts with its mean over runs."""

    n: int
    runs: tuple[float, ...]
    mean: float
    difference: float
    difference_error: float


class Measured(_Strict):
    """Figures of a setting; ratios and shares as in a ``GridPoint``, means over runs."""

    accuracy: Accuracy
    ratio_pages: float
    ratio_tokens: float
    share_high: float
    share_low: float
    share_pruned: float

    @property
    def difference(self) -> float:
        return self.accuracy.difference

    @property
    def difference_error(self) -> float:
        return self.accuracy.difference_error


class LeanPoint(Measured):
    """One setting that was tried."""

    tiers: tuple[str, ...]
    mass_high: float
    mass_low: float
    window: int
    rotate: str


class Choice(_Strict):
    """The setting taken for one target, by its name; ``allowed``: the loss that it may have, a share of all answers."""

    allowed: float
    setting: str | None
    held_out: Accuracy | None = None


class LeanProvenance(_Strict):
    """How thresholds were found. ``bf16_deviation``: the standard deviation of bf16's accuracy over runs."""

    date: str
    procedure: str
    tolerance_percent: float
    margin: float
    task_file: str
    task_sha256: str
    selection: dict[str, Any]
    bf16: Accuracy
    bf16_deviation: float
    bf16_held_out: Accuracy | None
    target: str
    choices: dict[str, Choice]
    versions: dict[str, str | None]
    device: str
    default: Measured | None = None
    grid: tuple[LeanPoint, ...]


def accuracy(store: Store, name: str, suites: Sequence[Suite]) -> Accuracy:
    """Of a configuration over the runs of one part, against stock's."""

    def rights(configuration: str) -> list[dict[str, bool]]:
        return [
            {x.id: bool(store.answers[configuration, suite.task.name][x.id].outcome.right) for x in suite.questions}
            for suite in suites
        ]

    mine, stock = rights(name), rights(STOCK)
    ids = list(mine[0])
    changes = [statistics.fmean(a[x] - b[x] for a, b in zip(mine, stock, strict=True)) for x in ids]
    runs = tuple(statistics.fmean(run.values()) for run in mine)
    error = statistics.stdev(changes) / math.sqrt(len(ids)) if len(ids) > 1 else 0.0
    return Accuracy(
        n=len(ids),
        runs=runs,
        mean=statistics.fmean(runs),
        difference=statistics.fmean(changes),
        difference_error=error,
    )


class LeanCalibration:
    """Settings of LeanKV measured on one model and one calibration file."""

    def __init__(self, args: argparse.Namespace, store: Store, runs: Runs):
        self.args, self.store, self.runs = args, store, runs
        self.answers = Answers(args, store, [*runs.chosen_on, *runs.held_out])
        default = configured(args.base, {})
        self.answers.ask({DEFAULT_NAME: default}, runs.chosen_on)
        self.default = Measured(**self.figures(DEFAULT_NAME))
        self.stock = accuracy(store, STOCK, runs.chosen_on)
        self.deviation = statistics.stdev(self.stock.runs)
        self.allowed = {
            "neutral": DEVIATIONS * self.deviation,
            "loss": args.tolerance / 100 * self.stock.mean,
        }

    def config(self, setting: LeanSetting) -> DiffKVConfig:
        """The DiffKV configuration of a setting."""
        fields = {"tiers": setting.tiers, "policy": setting.policy.model_dump(), "rotate": setting.rotate}
        return configured(self.args.base, fields)

    def ask(self, settings: Sequence[LeanSetting], suites: Sequence[Suite] | None = None) -> None:
        """Have them answer."""
        asked = self.runs.chosen_on if suites is None else suites
        self.answers.ask({x.name: self.config(x) for x in settings}, asked)

    def figures(self, name: str) -> dict[str, Any]:
        """The fields of ``Measured`` of a configuration that has answered."""
        suites = self.runs.chosen_on
        found = [cache_figures(self.store, name, suite.task.name) for suite in suites]
        caches = [x.model_dump() for x in found if x is not None and x.measured]
        if len(caches) < len(suites):
            raise EvaluationError(f"{name}: the server reported no figures of its cache")
        names = ("ratio_pages", "ratio_tokens", "share_high", "share_low", "share_pruned")
        figures: dict[str, Any] = {name: statistics.fmean(cache[name] for cache in caches) for name in names}
        return {"accuracy": accuracy(self.store, name, suites), **figures}

    def measure(self, setting: LeanSetting) -> LeanPoint:
        """One point of the grid."""
        self.ask([setting])
        return LeanPoint(**asdict(setting), **self.figures(setting.name))

    def search(self) -> Search[LeanSetting, LeanPoint]:
        """The grid, measured."""
        args = self.args
        limit = max(self.allowed.values())
        found = Search(self.measure, limit, args.margin, args.whole_grid, args.jobs, self.ask)
        found.lines(lines(args.tiers, args.mass_high, args.mass_low, args.window[0], args.rotate[0]))
        return found

    def held_out(self, settings: Sequence[LeanSetting | None]) -> None:
        """Have stock and what was chosen answer the questions that no choice saw."""
        if self.runs.held_out:
            self.ask([x for x in dict.fromkeys(settings) if x is not None], self.runs.held_out)

    def held_out_accuracy(self, name: str) -> Accuracy | None:
        return accuracy(self.store, name, self.runs.held_out) if self.runs.held_out else None

    def choices(self, chosen: Mapping[str, LeanSetting | None]) -> dict[str, Choice]:
        """What was taken for each target, with the questions held out."""
        return {
            target: Choice(
                allowed=self.allowed[target],
                setting=None if setting is None else setting.name,
                held_out=None if setting is None else self.held_out_accuracy(setting.name),
            )
            for target, setting in chosen.items()
        }

    def provenance(self, choices: dict[str, Choice], grid: Sequence[LeanPoint]) -> LeanProvenance:
        """All that was found, and how."""
        args = self.args
        about = circumstances(args, self.runs.chosen_on[0].task)
        del about["tolerance_points"]
        about["selection"] |= {"held_out": args.held_out, "runs": args.runs, "concurrency": args.concurrency}
        return LeanProvenance(
            **about,
            tolerance_percent=args.tolerance,
            bf16=self.stock,
            bf16_deviation=self.deviation,
            bf16_held_out=self.held_out_accuracy(STOCK),
            target=args.target,
            choices=choices,
            default=self.default,
            grid=tuple(grid),
        )

    def entry(self, chosen: LeanSetting, found: LeanProvenance) -> CalibratedPolicy:
        """What is written for a chosen setting."""
        return measured_policy(self.args.model, chosen.tiers, chosen.rotate, chosen.policy, found)


def lines(
    tiers: Sequence[tuple[str, ...]], highs: Sequence[float], lows: Sequence[float], window: int, rotate: str
) -> list[list[LeanSetting]]:
    """For each pair of tiers and ``mass_high`` every ``mass_low`` up to it, rising."""
    return [
        [LeanSetting(pair, high, low, window, rotate) for low in sorted(lows) if low <= high]
        for pair in tiers
        for high in sorted(highs)
    ]


def points(x: Accuracy) -> str:
    """The difference to bf16 in points."""
    return report.with_error(100 * x.difference, 100 * x.difference_error, "+.1f", x.n)


def grid_table(calibration: LeanCalibration, search: Search[LeanSetting, LeanPoint]) -> str:
    """The settings tried, as Markdown."""
    header = ["setting", "accuracy %", "runs, lowest to highest", "to bf16", "ratio, tokens", "ratio, pages"]
    header += ["high / low / pruned %", "within"]

    def scores(x: Accuracy) -> list[str]:
        return [f"{100 * x.mean:.1f}", f"{100 * min(x.runs):.1f} to {100 * max(x.runs):.1f}"]

    rows = [[STOCK, *scores(calibration.stock), "", "1", "1", "", ""]]
    measured: dict[str, Measured] = {DEFAULT_NAME: calibration.default}
    measured |= {setting.name: x for setting, x in search.tried.items()}
    for name, x in measured.items():
        within = [target for target, allowed in calibration.allowed.items() if allows(x, allowed, search.margin)]
        ratios = [f"{x.ratio_tokens:.3f}", f"{x.ratio_pages:.3f}"]
        shares = report.shares_cell(x.model_dump(), digits=1)
        rows.append([name, *scores(x.accuracy), points(x.accuracy), *ratios, shares, ", ".join(within)])
    return report.markdown(header, rows)


def summary_table(
    calibration: LeanCalibration,
    search: Search[LeanSetting, LeanPoint],
    chosen: dict[str, LeanSetting | None],
    title: str,
) -> str:
    """The paper's table 1 for one model and benchmark, with what was chosen and the questions held out beside it."""
    held = "held out" if calibration.runs.held_out else "held out (none)"
    header = ["model", "", title, "of it in pages", "setting", "to bf16", f"{held}: accuracy %", "bf16 %", "to bf16"]
    rows = []
    labels = {"neutral": "perf-neutral", "loss": f"{calibration.args.tolerance:g}% perf-loss"}
    for number, (target, setting) in enumerate(chosen.items()):
        first = [model_name(calibration.args.model) if number == 0 else "", labels[target]]
        if setting is None:
            rows.append([*first, "none", *[""] * (len(header) - 3)])
            continue
        x, later = search.tried[setting], calibration.held_out_accuracy(setting.name)
        stock = calibration.held_out_accuracy(STOCK)
        apart = ["", "", ""]
        if later is not None and stock is not None:
            apart = [f"{100 * later.mean:.1f} (n = {later.n})", f"{100 * stock.mean:.1f}", points(later)]
        ratios = [f"{100 * x.ratio_tokens:.1f}%", f"{100 * x.ratio_pages:.1f}%"]
        rows.append([*first, *ratios, setting.name, points(x.accuracy), *apart])
    return report.markdown(header, rows)
