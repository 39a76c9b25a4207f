"""Finds thresholds that give a wanted share of high-tier tokens on a model with dummy weights.

The policy's shares follow from the attention, which with dummy weights is not a real model's. This search runs short
loads, a server for each threshold tried, and writes for each wanted share the DiffKV configuration that comes
nearest, for ``python -m benchmarks.serving --pinned FILE``. Use lengths like those of the load to be measured.
Example, for the shares that alpha_high 3 and 1 have on the small reference model:

    python -m benchmarks.serving.pin_shares --geometry llama3-8b --high 0.34 0.60

Exit code 1 if a share was not reached within the tolerance; FILE then says which.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.budget import Budget
from benchmarks.provenance import headline, provenance
from benchmarks.serving.backends import Backend, parse_diffkv
from benchmarks.serving.cli import add_model_arguments, model_name, prepare
from benchmarks.serving.client import BenchmarkError
from benchmarks.serving.loads import Batch
from benchmarks.serving.session import GUESSES, OK, Record, Setup, run_backend, run_together
from sglang_diffkv.config import DiffKVConfig, DiffKVPolicyConfig
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.evaluate.report import markdown

LOWEST, HIGHEST = 2.0**-10, 2.0**10
SHARES = ("share_high", "share_low", "share_pruned", "ratio_pages", "ratio_tokens")
STEP = 4.0
"""Factor between thresholds while the wanted share is not yet between two shares measured."""

Trials = dict[float, float]
"""alpha_high -> share of high-tier tokens."""


def next_alpha(trials: Trials, wanted: float) -> float | None:
    """The threshold to try next: the share falls as the threshold rises. None where no other is worth a try."""
    if not trials:
        return 1.0
    above = max((alpha for alpha, share in trials.items() if share >= wanted), default=None)
    below = min((alpha for alpha, share in trials.items() if share < wanted), default=None)
    if above is None:
        return min(trials) / STEP if min(trials) > LOWEST else None
    if below is None:
        return max(trials) * STEP if max(trials) < HIGHEST else None
    if below <= above * 1.001:
        return None
    rest = (trials[above] - wanted) / (trials[above] - trials[below])
    place = min(0.8, max(0.2, rest))  # near a measured point the curve's bend would only move this end
    return math.exp(math.log(above) + place * (math.log(below) - math.log(above)))


def nearest(trials: Trials, wanted: float) -> float:
    """The threshold whose share came nearest."""
    return min(trials, key=lambda alpha: abs(trials[alpha] - wanted))


def search(
    measure: Callable[[float], float], wanted: Sequence[float], tolerance: float, most: int, known: Trials | None = None
) -> Trials:
    """Measure thresholds until every wanted share is met within ``tolerance``, ``most`` besides those known."""
    trials = dict(known or {})
    most += len(trials)
    for share in wanted:
        while not trials or abs(trials[nearest(trials, share)] - share) > tolerance:
            alpha = next_alpha(trials, share)
            if alpha is None or len(trials) >= most:
                break
            trials[alpha] = measure(alpha)
    return trials


def with_alpha(config: DiffKVConfig, alpha: float) -> DiffKVConfig:
    """The configuration with another ``alpha_high``."""
    policy = config.policy or DiffKVPolicyConfig()
    if len(config.tiers) < 2 or not isinstance(policy, DiffKVPolicyConfig):
        raise ConfigError("only the policy diffkv with two tiers has a share to choose")
    data = {**config.model_dump(exclude_none=True), "policy": {**policy.model_dump(), "alpha_high": alpha}}
    return DiffKVConfig.model_validate(data)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--high", type=float, nargs="+", required=True, metavar="SHARE", help="between 0 and 1")
    parser.add_argument(
        "--first", type=float, nargs="+", default=[], metavar="ALPHA", help="tried first, their servers started at once"
    )
    parser.add_argument("--config", default="{}", help="the other settings as JSON (default: DiffKV's)")
    parser.add_argument("--requests", type=int, default=16, help="of a short run (default: %(default)s)")
    parser.add_argument("--input", type=int, default=1024, help="prompt tokens (default: %(default)s)")
    parser.add_argument("--generate", type=int, default=1024, help="new tokens (default: %(default)s)")
    parser.add_argument("--tolerance", type=float, default=0.02, help="of a share (default: %(default)s)")
    parser.add_argument("--trials", type=int, default=10, help="thresholds tried at most (default: %(default)s)")
    args = parser.parse_args(argv)
    args.argv = argv
    if bad := [share for share in args.high if not 0 < share < 1]:
        parser.error(f"--high takes shares between 0 and 1, not {bad}")
    try:
        args.backend = parse_diffkv(f"base={args.config}")
        with_alpha(args.backend.config, 1.0)
    except (argparse.ArgumentTypeError, ConfigError) as error:
        parser.error(f"--config: {error}")
    return args


class Meter:
    """Measures a threshold's shares with a server of its own."""

    def __init__(self, args: argparse.Namespace, setup: Setup, budget: Budget):
        self.setup, self.budget, self.base = setup, budget, args.backend.config
        load = Batch("shares", args.requests, args.input, args.generate, min(args.requests, args.max_running))
        self.points = load.points()
        self.records: list[dict[str, Any]] = []

    def _backend(self, alpha: float) -> Backend:
        return Backend(f"alpha_{alpha:.4g}", "diffkv", "diffkv", with_alpha(self.base, alpha))

    def _note(self, alpha: float, record: Record) -> float:
        if record["status"] != OK:
            raise BenchmarkError(f"alpha_high {alpha:.4g}: {record['error']}")
        self.records.append({"alpha_high": alpha, **{key: record[key] for key in SHARES}})
        print(f"{self.budget.elapsed():5.0f} s  alpha_high {alpha:.4g}: {record['share_high']:.1%} high", flush=True)
        return record["share_high"]

    def __call__(self, alpha: float) -> float:
        found: list[Record] = []
        run_backend(self._backend(alpha), self.points, self.setup, self.budget, found.append)
        return self._note(alpha, found[0])

    def together(self, alphas: Sequence[float]) -> Trials:
        """The shares of several thresholds, whose servers start at once."""
        found: list[Record] = []
        if alphas:
            run_together([self._backend(x) for x in alphas], self.points, self.setup, self.budget, found.append)
        return {alpha: self._note(alpha, record) for alpha, record in zip(alphas, found, strict=True)}


def result(args: argparse.Namespace, meter: Meter) -> dict[str, Any]:
    """What is written: a configuration for each share that was met, and the shares that were not."""
    trials = {x["alpha_high"]: x["share_high"] for x in meter.records}
    met = {w: nearest(trials, w) for w in args.high if trials and abs(trials[nearest(trials, w)] - w) <= args.tolerance}
    configs = {
        f"high{share:g}": with_alpha(meter.base, alpha).model_dump(mode="json", exclude_none=True)
        for share, alpha in met.items()
    }
    return {
        "kind": "shares",
        "model": model_name(args),
        "provenance": provenance("serving.pin_shares", args.argv),
        "load": {"requests": args.requests, "input": args.input, "output": args.generate},
        "tolerance": args.tolerance,
        "configs": configs,
        "missed": [share for share in args.high if share not in met],
        "trials": sorted(meter.records, key=lambda x: x["alpha_high"]),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Search, print the trials and write the file."""
    args = parse_args(argv)
    budget = Budget(args.budget_seconds, GUESSES)
    with tempfile.TemporaryDirectory(prefix="model-") as folder:
        meter = Meter(args, prepare(args, Path(folder), 40), budget)
        try:
            search(meter, args.high, args.tolerance, args.trials, meter.together(args.first))
        except BenchmarkError as error:
            print(f"stopped: {error}", file=sys.stderr)
    data = result(args, meter)
    path = args.output / f"shares_{model_name(args)}.json"
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    rows = [[f"{x['alpha_high']:.4g}", f"{x['share_high']:.3f}", f"{x['ratio_pages']:.3f}"] for x in data["trials"]]
    print(f"\n{headline(data['provenance'])}\n\n{markdown(['alpha_high', 'share high', 'of bf16, pages'], rows)}")
    for name, config in data["configs"].items():
        print(f"{name}: --diffkv '{name}={json.dumps(config)}'")
    for share in data["missed"]:
        print(f"not reached: a high share of {share}", file=sys.stderr)
    return int(bool(data["missed"]))


if __name__ == "__main__":
    sys.exit(main())
