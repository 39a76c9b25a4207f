"""Fit factors of both thresholds for every layer and KV head: less error of attention in the same bytes.

The Hugging Face model reads questions of a calibration file with their right replies. For each head and each factor the
change of what attention adds to the residual stream is measured, as are the bytes; the factors chosen have the least
sum of changes at the bytes of factor 1 everywhere. No server is started and no accuracy measured: give the file to
calibrate --head-scale, or as policy.head_scale to a configuration, and compare. Example:

    python -m sglang_diffkv.calibrate.heads --model examples/models/nano \\
        --task reference=benchmarks/data/calib.jsonl.xz --exclude chain vars --levels easy medium \\
        --alpha-high 3 --window 64 --rotate keys --max-tokens 2048 --output heads.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from sglang_diffkv.calibrate.arguments import new_parser, tier_names
from sglang_diffkv.calibrate.cli import REPORTING
from sglang_diffkv.calibrate.heads.capture import load_model
from sglang_diffkv.calibrate.heads.curves import Rule
from sglang_diffkv.calibrate.heads.fit import FACTORS, choose, collect, read
from sglang_diffkv.calibrate.heads.result import Change, HeadProvenance, HeadScaleFile
from sglang_diffkv.calibration import ModelGeometry, model_name, policy_fields
from sglang_diffkv.config import ConfigError, DiffKVConfig, DiffKVPolicyConfig
from sglang_diffkv.evaluate.cli import add_selection_arguments, positive, question_options
from sglang_diffkv.evaluate.configuration import device_name
from sglang_diffkv.evaluate.endpoint import EvaluationError
from sglang_diffkv.evaluate.tasks import TaskFileError, load_task
from sglang_diffkv.testing import report
from sglang_diffkv.testing.tasks import load_tokenizer

DEFAULT = DiffKVPolicyConfig()


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = new_parser("calibrate.heads", __doc__)
    rule = parser.add_argument_group("what the factors are fitted at")
    rule.add_argument("--tiers", type=tier_names, default=("K8V4", "K4V2"))
    rule.add_argument("--alpha-high", type=float, default=DEFAULT.alpha_high, help="default: %(default)s")
    rule.add_argument("--alpha-low", type=float, default=DEFAULT.alpha_low, help="default: %(default)s")
    rule.add_argument("--window", type=int, default=DEFAULT.window, help="default: %(default)s")
    rule.add_argument("--sinks", type=int, default=DEFAULT.sinks, help="default: %(default)s")
    rule.add_argument("--rotate", choices=("none", "keys"), default="none", help="default: %(default)s")
    add_selection_arguments(parser)
    parser.add_argument("--max-tokens", type=positive, default=4096, help="of a sequence (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    parser.set_defaults(n=24)
    args = parser.parse_args(argv)
    if args.n < 1:
        parser.error("--n is a number of sequences from 1 on")
    return args


def read_rule(args: argparse.Namespace) -> tuple[Rule, DiffKVConfig]:
    """The setting, checked as a configuration. Raises ConfigError."""
    policy = policy_fields(args.alpha_high, args.alpha_low, args.window, args.sinks)
    try:
        config = DiffKVConfig.model_validate({"tiers": args.tiers, "policy": policy, "rotate": args.rotate})
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if len(config.tiers) < 2:
        raise ConfigError(f"tier {config.tiers[0]} alone: factors move tokens between two tiers")
    high, low = config.parsed_tiers
    return Rule((high, low), args.alpha_high, args.alpha_low, args.window, args.sinks, args.rotate), config


def fit(args: argparse.Namespace) -> HeadScaleFile:
    """The factors. Raises ConfigError, TaskFileError and EvaluationError."""
    rule, config = read_rule(args)
    task = load_task(args.task, replace(question_options(args), n=None))
    if task.name.endswith(f"/{REPORTING}"):
        raise TaskFileError(f"{task.name} is for reporting: fit on another file")
    model = load_model(args.model)
    found = read(task, load_tokenizer(args.tokenizer or args.model))
    texts, skipped = choose(found, args.n, args.window, args.max_tokens)
    curves = collect(model, texts, rule)
    taken = curves.fit()
    prompts, total = sum(x.prompt for x in texts), sum(len(x.ids) for x in texts)
    file = task.fingerprint()
    return HeadScaleFile(
        head_scale=curves.scale(taken),
        provenance=HeadProvenance(
            date=datetime.now(timezone.utc).date().isoformat(),
            model=model_name(args.model),
            geometry=ModelGeometry.of(args.model),
            task_file=file["file"],
            task_sha256=file["sha256"],
            n=len(texts),
            skipped=skipped,
            selection={name: getattr(args, name) for name in ("seed", "levels", "only", "exclude", "max_tokens")},
            prompt_tokens=prompts,
            reply_tokens=total - prompts,
            rule=config.model_dump(include={"tiers", "policy", "rotate"}, exclude={"policy": {"head_scale"}}),
            factors=FACTORS,
            change=curves.change(taken),
            held_out=curves.held_out(),
            error_by_head=curves.error_by_head(),
            versions=report.environment()["versions"],
            device=device_name(),
        ),
    )


def table(content: HeadScaleFile) -> str:
    """Predicted error and bytes, then factors by layer, as Markdown."""

    def row(name: str, change: Change) -> list[str]:
        before, after = change.before, change.after
        errors = [f"{before.error:.3g}", f"{after.error:.3g}", f"{change.error_percent:+.1f}"]
        return [name, *errors, f"{before.ratio:.4f}", f"{after.ratio:.4f}", f"{change.bytes_percent:+.2f}"]

    found = content.provenance
    header = ["sequences", "error before", "after", "%", "ratio, tokens, before", "after", "%"]
    rows = [row(f"fitted to, n = {found.n}", found.change)]
    if found.held_out is not None:
        rows.append(row("held out, two halves", found.held_out))
    heads = range(len(content.head_scale[0]))
    factors = [[str(layer), *(f"{x:.3g}" for x in row)] for layer, row in enumerate(content.head_scale)]
    by_head = report.markdown(["layer", *(f"head {head}" for head in heads)], factors)
    return f"{report.markdown(header, rows)}\n\n{by_head}"


def main(argv: Sequence[str] | None = None) -> int:
    """Fit, print what is predicted, write the factors; 1 with the reason if that is not possible."""
    args = parse_args(argv)
    try:
        content = fit(args)
    except (ConfigError, TaskFileError, EvaluationError, OSError) as error:
        print(f"sglang_diffkv.calibrate.heads: {error}", file=sys.stderr)
        return 1
    args.output.write_text(content.model_dump_json(indent=1) + "\n", encoding="utf-8")
    print(table(content))
    print(f"\nwritten to {args.output}; no accuracy was measured")
    return 0
