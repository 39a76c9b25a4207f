"""Fit factors of both thresholds for every layer and KV head: less error of attention in the same bytes.

The Hugging Face model reads questions of a calibration file with their right replies. For each head and each factor two
things are measured: the change of what attention adds to the residual stream, and the bytes. The factors chosen have
the least sum of changes at the bytes of factor 1 everywhere. No server is started and no accuracy measured: give the
file to calibrate --head-scale, or as policy.head_scale to a configuration, and compare. Example:

    python -m sglang_diffkv.calibrate.heads --model MODEL --task gsm8k=train.jsonl \\
        --alpha-high 3 --window 64 --rotate keys --max-tokens 2048 --output heads.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sglang_diffkv import bounds
from sglang_diffkv.arguments import number, output_file
from sglang_diffkv.calibrate.arguments import load_calibration, new_parser, selection, tier_names
from sglang_diffkv.calibrate.heads.capture import load_model
from sglang_diffkv.calibrate.heads.fit import Source, fit_factors, rule_of
from sglang_diffkv.calibrate.heads.result import Change, HeadScaleFile
from sglang_diffkv.calibration import policy_fields
from sglang_diffkv.config import DEFAULT_POLICY, ROTATIONS, DiffKVConfig, validated
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.evaluate import report
from sglang_diffkv.evaluate.cli import add_selection_arguments, positive
from sglang_diffkv.evaluate.endpoint import EvaluationError
from sglang_diffkv.evaluate.prompts import load_tokenizer
from sglang_diffkv.evaluate.tasks import TaskFileError


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = new_parser("calibrate.heads", __doc__)
    rule = parser.add_argument_group("what the factors are fitted at")
    rule.add_argument("--tiers", type=tier_names, default=DiffKVConfig().tiers)
    rule.add_argument(
        "--alpha-high", type=number(bounds.Alpha), default=DEFAULT_POLICY.alpha_high, help="default: %(default)s"
    )
    rule.add_argument(
        "--alpha-low", type=number(bounds.Alpha), default=DEFAULT_POLICY.alpha_low, help="default: %(default)s"
    )
    rule.add_argument(
        "--window", type=number(bounds.Window), default=DEFAULT_POLICY.window, help="default: %(default)s"
    )
    rule.add_argument("--sinks", type=number(bounds.Sinks), default=DEFAULT_POLICY.sinks, help="default: %(default)s")
    rule.add_argument("--rotate", choices=ROTATIONS, help="default: as a plain server has it with these tiers")
    add_selection_arguments(parser)
    parser.add_argument("--max-tokens", type=positive, default=4096, help="of a sequence (default: %(default)s)")
    parser.add_argument("--output", type=output_file, required=True, help="file to write")
    parser.set_defaults(n=24)
    return parser.parse_args(argv)


def read_config(args: argparse.Namespace) -> DiffKVConfig:
    """The setting, checked as a configuration. Raises ConfigError."""
    policy = policy_fields(args.alpha_high, args.alpha_low, args.window, args.sinks, DEFAULT_POLICY.horizon)
    rotate = {} if args.rotate is None else {"rotate": args.rotate}
    config = validated({"tiers": args.tiers, "policy": policy, **rotate}, "this setting")
    rule_of(config)
    return config


def fit(args: argparse.Namespace) -> HeadScaleFile:
    """The factors. Raises ConfigError, TaskFileError and EvaluationError."""
    config = read_config(args)
    task = load_calibration(args, whole=True)
    model = load_model(args.model)
    tokenizer = load_tokenizer(args.tokenizer or args.model)
    return fit_factors(Source(args.model, task, tokenizer, args.n, args.max_tokens, selection(args)), model, config)


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
