"""The command line of the calibration."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sglang_diffkv import bounds
from sglang_diffkv.arguments import check_output, number
from sglang_diffkv.calibrate.search import DEFAULT, HORIZON, SINKS, WINDOW
from sglang_diffkv.calibration import HeadScale
from sglang_diffkv.config import ROTATIONS, DiffKVPolicyConfig, usual_rotation
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.evaluate.cli import add_question_arguments, question_options
from sglang_diffkv.evaluate.task import Task
from sglang_diffkv.evaluate.tasks import TaskFileError, load_task
from sglang_diffkv.files import named, read_json
from sglang_diffkv.policies.leankv import LeanKVPolicyConfig
from sglang_diffkv.refusals import mistakes

PAPER_HIGHS = (1.0, 2.0, 3.0, 4.0, 5.0)
PAPER_LOWS = (0.0, 0.02, 0.04, 0.06, 0.08, 0.1)
REPORTING = "dev"
LEAN_HIGHS = (0.005, 0.01, 0.05, 0.1, 0.2)
LEAN_LOWS = (0.0, 0.001, 0.005, 0.01)
PAPER_TIERS = (("K8V4", "K4V2"), ("K4V2", "K4V1"))
PAPER_WINDOW = LeanKVPolicyConfig().window
RUNS = 5
TARGETS = ("neutral", "loss")
LEAN_ONLY = ("mass_high", "mass_low", "runs", "held_out", "target")
DIFFKV_ONLY = ("alpha_high", "alpha_low", "sinks", "horizon", "head_scale", "fit_heads")
SELECTION = ("seed", "levels", "only", "exclude")
"""Arguments that choose the questions."""


def new_parser(program: str, description: str | None) -> argparse.ArgumentParser:
    """A parser that asks for a model and a calibration file."""
    parser = argparse.ArgumentParser(
        prog=f"python -m sglang_diffkv.{program}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--task", required=True, metavar="KIND=PATH", help="calibration file, as for evaluate")
    return parser


def tier_names(text: str) -> tuple[str, ...]:
    """``HIGH,LOW``, or one tier."""
    names = tuple(text.upper().split(","))
    if len(names) > 2:
        raise argparse.ArgumentTypeError(f"{len(names)} tiers: thresholds are searched for one or two")
    return names


def add_rotate_argument(parser: Any) -> None:
    """What is rotated; an empty name is for what a plain server does."""
    parser.add_argument(
        "--rotate",
        choices=ROTATIONS,
        nargs="+",
        default=[""],
        help=f"default: as a plain server has it, which for K8V4,K4V2 is {usual_rotation(('K8V4', 'K4V2'))} and for "
        f"K8V4 {usual_rotation(('K8V4',))}",
    )


def add_sinks_argument(parser: Any) -> None:
    """First tokens that stay high."""
    parser.add_argument("--sinks", type=number(bounds.Sinks), nargs="+", default=[SINKS], help=f"default: {SINKS}")


def parse_args(argv: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """The command line."""
    parser = new_parser("calibrate", description)
    parser.add_argument(
        "--tolerance",
        type=number(bounds.Budget),
        help="points below bf16 (default: 1); with --procedure leankv percent of bf16's accuracy (default: 5)",
    )
    parser.add_argument(
        "--margin",
        type=number(bounds.Budget),
        help="standard errors by which a loss has to stay below the tolerance (default: 1, with --procedure leankv 0: "
        "take it as is)",
    )
    parser.add_argument("--procedure", choices=("paper", "grid", "leankv"), default="paper")
    choices = parser.add_argument_group("what is searched", "several of each with --procedure grid")
    choices.add_argument(
        "--tiers",
        type=tier_names,
        action="append",
        metavar="HIGH,LOW",
        help="repeat it for several choices (default: K8V4,K4V2; with --procedure leankv that and K4V2,K4V1)",
    )
    choices.add_argument(
        "--alpha-high", type=number(bounds.Alpha), nargs="+", default=PAPER_HIGHS, help="default: 1 to 5"
    )
    choices.add_argument(
        "--alpha-low", type=number(bounds.Alpha), nargs="+", default=PAPER_LOWS, help="default: 0 to 0.1 by 0.02"
    )
    choices.add_argument(
        "--window",
        type=number(bounds.Window),
        nargs="+",
        help=f"default: {WINDOW}; with --procedure leankv {PAPER_WINDOW}",
    )
    add_rotate_argument(choices)
    add_sinks_argument(choices)
    choices.add_argument(
        "--horizon",
        type=number(bounds.Tokens),
        nargs="+",
        default=[HORIZON],
        help=f"default: {HORIZON}; 0: scores never forget",
    )
    lean = parser.add_argument_group("with --procedure leankv")
    lean.add_argument(
        "--mass-high",
        type=number(bounds.Fraction),
        nargs="+",
        default=LEAN_HIGHS,
        help="default: the paper's, .005 to .2",
    )
    lean.add_argument(
        "--mass-low", type=number(bounds.Fraction), nargs="+", default=LEAN_LOWS, help="default: the paper's, 0 to .01"
    )
    lean.add_argument(
        "--runs", type=number(bounds.SomeCount), default=RUNS, help="of all questions, shuffled (default: %(default)s)"
    )
    lean.add_argument(
        "--held-out",
        type=number(bounds.Fraction),
        default=0.25,
        metavar="SHARE",
        help="of the questions, which no choice sees and what is chosen answers (default: %(default)s)",
    )
    lean.add_argument(
        "--target",
        choices=TARGETS,
        default=TARGETS[0],
        help="what is written: the cheapest neutral setting, or the cheapest within the tolerance (default: neutral)",
    )
    parser.add_argument(
        "--head-scale",
        type=Path,
        metavar="FILE",
        help="JSON, [layers][KV heads] or as calibrate.heads writes it: factors of every setting's thresholds",
    )
    parser.add_argument(
        "--fit-heads",
        type=number(bounds.Count),
        default=0,
        metavar="N",
        help="try every setting of the grid with factors by head too, fitted at it to N of the questions "
        "(see calibrate.heads)",
    )
    parser.add_argument("--base", default="{}", metavar="JSON", help="DiffKV configuration for everything else")
    parser.add_argument("--whole-grid", action="store_true", help="also measure what is surely too lossy")
    add_question_arguments(parser)
    parser.add_argument("--work", type=Path, required=True, help="folder for the answers")
    parser.add_argument("--output", type=Path, required=True, help="calibration file to write")
    args = parser.parse_args(argv)
    check_output(parser, args.output, args.work)
    lean_kv = args.procedure == "leankv"
    for name in LEAN_ONLY if not lean_kv else DIFFKV_ONLY:
        if getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} does not go with --procedure {args.procedure}")
    args.tiers = args.tiers or list(PAPER_TIERS if lean_kv else [DEFAULT.tiers])
    args.window = args.window or [PAPER_WINDOW if lean_kv else WINDOW]
    args.tolerance = (5.0 if lean_kv else 1.0) if args.tolerance is None else args.tolerance
    args.margin = (0.0 if lean_kv else 1.0) if args.margin is None else args.margin
    single = {"paper": ("tiers", "window", "rotate", "sinks", "horizon"), "leankv": ("window", "rotate")}
    for name in single.get(args.procedure, ()):
        if len(getattr(args, name)) > 1:
            parser.error(f"--procedure {args.procedure} takes one choice of --{name}")
    if args.runs < 2 or not 0 <= args.held_out < 1:
        parser.error("--runs is a number from 2 on, --held-out a share below 1")
    if args.fit_heads and (args.procedure != "grid" or args.head_scale):
        parser.error("--fit-heads takes a number of questions from 1 on, --procedure grid, and no --head-scale")
    return args


def load_calibration(args: argparse.Namespace, *, whole: bool = False) -> Task:
    """The calibration file; ``whole``: without regard to ``--n``. Raises TaskFileError, also for a file that is for
    reporting."""
    options = question_options(args)
    task = load_task(args.task, replace(options, n=None) if whole else options)
    if task.name.endswith(f"/{REPORTING}"):
        raise TaskFileError(f"{task.name} is for reporting: fit on another file")
    return task


def selection(args: argparse.Namespace) -> dict[str, Any]:
    """What chose the questions, as files say it."""
    return {name: getattr(args, name) for name in SELECTION}


def read_head_scale(path: Path) -> HeadScale:
    """Factors of thresholds from a file. Raises ConfigError."""
    try:
        policy = DiffKVPolicyConfig.model_validate({"head_scale": read_json(path)})
    except ValidationError as error:
        raise ConfigError(f"--head-scale {named(path)}: {'; '.join(mistakes(error, DiffKVPolicyConfig))}") from None
    except ConfigError as error:
        raise ConfigError(f"--head-scale {named(path)} {error}") from None
    if policy.head_scale is None:
        raise ConfigError(f"--head-scale {named(path)} is null: it must have factors, [layers][KV heads]")
    return policy.head_scale
