"""Measure how a task's prompts spread their importance over the tokens of each layer, and find shares by layer.

The Hugging Face model reads a sample of a file's prompts. For each, layers share a size as with policy xkv: --keep of
the tokens outside the observation window, or what retains --min-retention of the importance, both means over layers.
The means over prompts are written to a calibration file, as policy xkv with layer_fractions in place of either. No
server is started and no accuracy measured. Example:

    python -m sglang_diffkv.calibrate.layers --model MODEL --task gsm8k=train.jsonl \\
        --sample 0.1 --keep 0.2 --output task.json
    python -m sglang.launch_server ... --diffkv-config '{"thresholds": "task.json"}'
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Sequence
from datetime import datetime, timezone

from sglang_diffkv import bounds
from sglang_diffkv.arguments import number, output_file
from sglang_diffkv.calibrate.arguments import load_calibration, new_parser, selection, tier_names
from sglang_diffkv.calibrate.layers.figure import draw
from sglang_diffkv.calibrate.layers.measure import SHARES, Rule, collect
from sglang_diffkv.calibrate.layers.result import LayerFractions, LayerProvenance
from sglang_diffkv.calibration import CalibratedPolicy, CalibrationFile, ModelGeometry, measured_policy, model_name
from sglang_diffkv.config import validated
from sglang_diffkv.drawing import drawn
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.evaluate import report
from sglang_diffkv.evaluate.cli import add_selection_arguments, positive
from sglang_diffkv.evaluate.configuration import device_name
from sglang_diffkv.evaluate.endpoint import EvaluationError
from sglang_diffkv.evaluate.prompts import load_tokenizer
from sglang_diffkv.evaluate.tasks import TaskFileError
from sglang_diffkv.policies.xkv import XKVPolicyConfig


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = new_parser("calibrate.layers", __doc__)
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument(
        "--keep", type=number(bounds.SomeFraction), help="share of the tokens outside the window, mean over layers"
    )
    size.add_argument(
        "--min-retention", type=number(bounds.SomeFraction), help="share of the importance, mean over layers"
    )
    fields = XKVPolicyConfig.model_fields
    for name, kind in (("window", bounds.Window), ("pool", bounds.Pool)):
        parser.add_argument(
            f"--{name}", type=number(kind), default=fields[name].default, help="as xkv's (default: %(default)s)"
        )
    parser.add_argument("--tiers", type=tier_names, default=("BF16",), help="of the server (default: BF16)")
    parser.add_argument(
        "--high",
        type=number(bounds.Fraction),
        default=fields["high"].default,
        help="with two tiers, the share of what is kept that stays in the high one (default: %(default)s)",
    )
    parser.add_argument(
        "--sample",
        type=number(bounds.SomeFraction),
        default=0.1,
        help="share of the file's questions to read (default: %(default)s)",
    )
    add_selection_arguments(parser)
    parser.add_argument("--max-tokens", type=positive, default=32768, help="of a prompt (default: %(default)s)")
    parser.add_argument("--output", type=output_file, required=True, help="file to write")
    parser.add_argument("--figure", type=output_file, help="image to write (default: beside --output, as PNG)")
    return parser.parse_args(argv)


def read_rule(args: argparse.Namespace) -> Rule:
    """The setting, checked as a server's configuration. Raises ConfigError."""
    given = {"window": args.window, "pool": args.pool, "keep": args.keep, "min_retention": args.min_retention}
    validated({"tiers": args.tiers, "policy": {"name": "xkv", **given, "high": args.high}}, "this setting")
    return Rule(**given)


Prompt = Sequence[int]


def choose(prompts: Sequence[Prompt], n: int, rule: Rule, args: argparse.Namespace) -> tuple[list[Prompt], int]:
    """So many prompts at random that something can be measured on, and how many were passed over. Raises
    TaskFileError."""
    chosen: list[Prompt] = []
    skipped = 0
    for ids in random.Random(args.seed).sample(prompts, len(prompts)):
        if len(chosen) == n:
            break
        if rule.window < len(ids) <= args.max_tokens:
            chosen.append(ids)
        else:
            skipped += 1
    if not chosen:
        raise TaskFileError(f"no prompt is longer than the window of {rule.window} tokens and within {args.max_tokens}")
    return chosen, skipped


def measure(args: argparse.Namespace) -> LayerFractions:
    """The shares. Raises ConfigError, TaskFileError and EvaluationError."""
    rule = read_rule(args)
    task = load_calibration(args, whole=True)
    questions = task.questions(load_tokenizer(args.tokenizer or args.model))
    n = args.n or math.ceil(args.sample * len(questions))
    prompts, skipped = choose([x.prompt_ids[: x.cached_tokens or None] for x in questions], n, rule, args)
    found = collect(args.model, prompts, rule)
    fractions, file = found.fractions(), task.fingerprint()
    ratio = found.isr().tolist()
    return LayerFractions(
        layer_fractions=tuple(fractions.mean(0).tolist()),
        provenance=LayerProvenance(
            date=datetime.now(timezone.utc).date().isoformat(),
            model=model_name(args.model),
            geometry=ModelGeometry.of(args.model),
            task_file=file["file"],
            task_sha256=file["sha256"],
            questions=len(questions),
            n=len(prompts),
            skipped=skipped,
            selection={**selection(args), "n": args.n, "sample": args.sample, "max_tokens": args.max_tokens},
            tokens=sum(x.tokens for x in found.prompts),
            rule={name: value for name, value in vars(rule).items() if value is not None},
            spread=tuple(fractions.std(0, correction=0).tolist()),
            retained=tuple(found.retained().tolist()),
            shares=SHARES,
            retention=tuple(map(tuple, found.retention().tolist())),
            isr=tuple(tuple(None if math.isnan(x) else x for x in row) for row in ratio),
            versions=report.environment()["versions"],
            device=device_name(),
        ),
    )


def entry(args: argparse.Namespace, found: LayerFractions) -> CalibratedPolicy:
    """What is written: the shares as a method that a server can run."""
    policy = XKVPolicyConfig(layer_fractions=found.layer_fractions, window=args.window, pool=args.pool, high=args.high)
    return measured_policy(args.model, args.tiers, "none", policy, found.provenance)


def table(content: LayerFractions) -> str:
    """By layer: retention R and R / log2 n at several sizes, and what the layer keeps, as Markdown."""
    found = content.provenance
    header = ["layer", *(f"R at {share:.0%}" for share in found.shares), *(f"ISR at {x:.0%}" for x in found.shares)]
    header += ["kept %", "R of it"]
    rows = []
    for layer, fraction in enumerate(content.layer_fractions):
        retained = [f"{x:.3f}" for x in found.retention[layer]]
        ratios = ["" if x is None else f"{x:.4f}" for x in found.isr[layer]]
        kept = f"{100 * fraction:.1f} ± {100 * found.spread[layer]:.1f}"
        rows.append([str(layer), *retained, *ratios, kept, f"{found.retained[layer]:.3f}"])
    return report.markdown(header, rows)


def summary(content: LayerFractions) -> str:
    """One line of means over layers."""
    found, layers = content.provenance, len(content.layer_fractions)
    mean, retained = sum(content.layer_fractions) / layers, sum(found.retained) / layers
    return (
        f"{found.n} of {found.questions} prompts ({found.skipped} passed over), {found.tokens} tokens outside windows: "
        f"{mean:.1%} of them kept, {retained:.1%} of the importance retained, means over {layers} layers"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print what was found, write shares and figure; 1 with the reason if that is not possible."""
    args = parse_args(argv)
    try:
        content = measure(args)
        file = CalibrationFile(entries=(entry(args, content),))
        args.output.write_text(file.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except (ConfigError, TaskFileError, EvaluationError, OSError) as error:
        print(f"sglang_diffkv.calibrate.layers: {error}", file=sys.stderr)
        return 1
    print(table(content))
    image = args.figure or args.output.with_suffix(".png")
    written = f"{args.output} and {image}" if drawn(lambda: draw(content, image)) else str(args.output)
    print(f"\n{summary(content)}\nwritten to {written}; no accuracy was measured. To serve with it:")
    print(f"--diffkv-config '{json.dumps({'thresholds': str(args.output)})}'")
    return 0
