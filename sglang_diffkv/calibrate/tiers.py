"""Give each layer a low tier of its own: few bytes that lose at most so much of what an FP8 cache loses.

The Hugging Face model reads passages of a text, with few bits for the keys, then the values, of one layer at a time. A
configuration with up to three low tiers is made from what that loses, and judged on these passages and on others that
nothing was chosen from. No server is started. Losses follow the text: take one like what will be served. Example:

    python -m sglang_diffkv.calibrate.tiers --model MODEL --text prose.txt --fp8-share 0.5 --output tiers.json
    python -m sglang.launch_server ... --diffkv-config tiers.json
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from sglang_diffkv import bounds
from sglang_diffkv.arguments import number, output_file
from sglang_diffkv.attention.emulated import Fp8, Stored, stored_of
from sglang_diffkv.calibrate.emulated import FP8, Judge, new_parser, parsed, table
from sglang_diffkv.calibrate.reading import windows
from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.evaluate.cli import positive
from sglang_diffkv.evaluate.endpoint import EvaluationError
from sglang_diffkv.evaluate.tasks.files import TaskFileError
from sglang_diffkv.ladder import LEAST_TOKENS, pair
from sglang_diffkv.layer_tiers import KEYS, VALUES, Given, LayerLoss, Parts, fewest_bytes
from sglang_diffkv.layout.page_format import Tier

HIGH = "K8V6"
LOW = ("K6V5", "K6V4", "K5V4", "K4V4", "K4V3", "K3V3", "K4V2", "K3V2")
MEASURED = "K8V8"
"""High tier while a layer is measured."""
ROUNDS, SPARE = 4, 0.97
"""Configurations that are judged at most, each with a smaller limit than the one before it, which lost too much; and
how much smaller than what that one's loss asks for."""
CHOSEN = "chosen"
ATTENDS, SLIDES = "full_attention", "sliding_attention"
"""Kinds of layers, as transformers names them."""


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = new_parser("calibrate.tiers", __doc__)
    parser.add_argument("--n", type=positive, default=4, help="passages to choose from (default: %(default)s)")
    parser.add_argument("--held-out", type=positive, default=4, help="others to judge on (default: %(default)s)")
    parser.add_argument(
        "--fp8-share", type=number(bounds.SomeFraction), default=1.0,
        help="of what FP8 loses, in prompts and in replies, at most (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--high", type=_tier, default=Tier.parse(HIGH), help=f"high tier (default: {HIGH})")
    parser.add_argument(
        "--low", type=_tier, nargs="+", default=[Tier.parse(x) for x in LOW],
        help=f"tiers that layers may take (default: {' '.join(LOW)})",
    )  # fmt: skip
    parser.add_argument(
        "--context",
        type=positive,
        default=4096,
        help="tokens of a sequence, for sliding windows (default: %(default)s)",
    )
    parser.add_argument("--noise-shaping", action="store_true", help="the server will shape noise")
    parser.add_argument("--output", type=output_file, required=True, help="configuration to write, .json")
    args = parsed(parser, argv)
    for tier in args.low:
        if tier.token_bytes(64, 64) >= args.high.token_bytes(64, 64):
            parser.error(f"--low {tier.name} takes no fewer bytes than the high tier {args.high.name}")
    return args


def _tier(name: str) -> Tier:
    try:
        tier = Tier.parse(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if tier.is_raw:
        raise argparse.ArgumentTypeError("BF16 rounds nothing: name tiers of 1 to 8 bits")
    return tier


class Calibration:
    """A model, passages of a text, and how tokens are stored."""

    def __init__(self, args: argparse.Namespace):
        """Raises EvaluationError and TaskFileError."""
        self.args = args
        passages = windows(args, LEAST_TOKENS)
        if len(passages) < args.n + args.held_out:
            raise TaskFileError(
                f"{args.text.name} has {len(passages)} passages of {args.window_tokens} tokens, and {args.n} + "
                f"{args.held_out} are asked for: give a longer text, or smaller --n, --held-out or --window-tokens"
            )
        self.fit, self.held = passages[: args.n], passages[args.n : args.n + args.held_out]
        self.judge = Judge(args.model, args.tokenizer, float32=True)
        text = self.judge.model.config.get_text_config()
        self.head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
        for tier in args.low:  # before the reading, which takes long
            self.config(pair(tier.name, args.high.name)).page_format(self.head_dim, self.head_dim, args.context)
        kinds = getattr(text, "layer_types", None) or [ATTENDS] * self.judge.layers
        if others := set(kinds) - {ATTENDS, SLIDES}:
            raise EvaluationError(f"{args.model} has layers of {', '.join(sorted(others))}, which are not emulated")
        span = getattr(text, "sliding_window", None) or args.context
        self.shares = [min(span / args.context, 1.0) if kind == SLIDES else 1.0 for kind in kinds]

    def config(self, fields: Mapping[str, Any]) -> DiffKVConfig:
        """``fields``, with the noise shaped if that was asked for. Raises ConfigError."""
        shaped = {"noise_shaping": "auto"} if self.args.noise_shaping else {}
        return DiffKVConfig.model_validate({**fields, **shaped})

    def stored(self, fields: Mapping[str, Any]) -> Stored:
        """How a server with this configuration stores tokens."""
        return stored_of(self.config(fields), self.judge.means, self.judge.shaping, self.judge.model.dtype)

    def layers(self) -> tuple[list[LayerLoss], Parts]:
        """What each layer loses, and FP8."""
        ways: dict[str, Stored] = {FP8: Fp8()}
        for tier in (KEYS, VALUES):
            stored = self.stored(pair(tier.name, MEASURED))
            ways |= {f"{tier.name} {x}": replace(stored, only=frozenset([x])) for x in range(self.judge.layers)}
        found = self.judge.on(self.fit, ways, f"each layer alone, {len(ways) + 1} times: ")
        lost = {name: means(x) for name, x in found.items()}
        if not all(math.isfinite(x) for parts in lost.values() for x in parts):
            raise EvaluationError(f"{self.args.model} gives numbers that are not finite, in float32")
        each = (LayerLoss(*(lost[f"{tier.name} {x}"] for tier in (KEYS, VALUES))) for x in range(self.judge.layers))
        return list(each), lost[FP8]


def means(passages: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Parts:
    """Over the passages' means, of prompts and of replies."""
    prompt, reply = (float(torch.stack([x[part].mean() for x in passages]).mean()) for part in range(2))
    return prompt, reply


def choose(calibration: Calibration) -> tuple[Given, Parts, Parts]:
    """What layers are given, what that loses on the passages it was chosen from, and what FP8 does. Raises
    EvaluationError where nothing holds the limit."""
    args, (layers, fp8) = calibration.args, calibration.layers()
    limit = most = (args.fp8_share * fp8[0], args.fp8_share * fp8[1])
    for _ in range(ROUNDS):
        given = fewest_bytes(layers, calibration.shares, args.low, calibration.head_dim, limit)
        if given is None:
            break
        stored = calibration.stored(given.fields(args.high))
        lost = means(calibration.judge.on(calibration.fit, {CHOSEN: stored}, "all together: ")[CHOSEN])
        if all(x <= y for x, y in zip(lost, most)):
            return given, lost, fp8
        less = SPARE * min(y / x for x, y in zip(lost, most) if x > y)
        limit = (limit[0] * less, limit[1] * less)
    raise EvaluationError(
        f"no tiers of --low were found that lose at most {args.fp8_share:g} of FP8's loss: name some with more bits"
    )


def said(given: Given, lost: Parts, fp8: Parts, head_dim: int) -> str:
    """What was chosen, and what it loses there, in words."""
    tiers = [f"{tier.name} in {given.of.count(at)}" for at, tier in enumerate(given.tiers) if at in given.of]
    by = ", ".join(f"{1e3 * x:.2f} in {part}" for x, part in zip(lost, ("prompts", "replies")))
    of_fp8 = " and ".join(f"{1e3 * x:.2f}" for x in fp8)
    size = given.size / (4 * head_dim)
    return (
        f"low tiers: {'; '.join(tiers)} of {len(given.of)} layers, {size:.3f} of bf16's bytes without the high tier. "
        f"Where they were chosen they lose {by}, in 0.001 nats a token; FP8 {of_fp8}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Choose, judge and write; 1 with the reason if that is not possible."""
    args = parse_args(argv)
    try:
        calibration = Calibration(args)
        given, lost, fp8 = choose(calibration)
        config = calibration.config(given.fields(args.high))
        ways = {FP8: Fp8(), CHOSEN: calibration.stored(given.fields(args.high))}
        held = calibration.judge.on(calibration.held, ways, "others: ")
        fields = config.model_dump(mode="json", exclude_unset=True)
        args.output.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
    except (ConfigError, TaskFileError, EvaluationError, OSError, ValueError) as error:
        print(f"sglang_diffkv.calibrate.tiers: {error}", file=sys.stderr)
        return 1
    print(said(given, lost, fp8, calibration.head_dim))
    print(f"\nOn {len(held[FP8])} other passages:\n\n{table(held)}\n\n--diffkv-config {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
