"""Measure what the keys of each layer and KV head have in common, which then need not be stored in every one of them.

The Hugging Face model reads a text, and the mean of each head's keys, after normalisation and position embedding, is
written to a file that a server takes with "key_means". Attention stays the same (see ``sglang_diffkv/key_means.py``);
keys at 4 bits lose about half of what they lost. No server is started and no accuracy measured. (A server measures
them itself with "key_means": "auto", of a short text of its own.) Example:

    python -m sglang_diffkv.calibrate.means --model MODEL --text prose.txt --output means.safetensors
    python -m sglang.launch_server ... --diffkv-config '{"key_means": "means.safetensors", "rotate": "keys"}'
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch

from sglang_diffkv import __version__
from sglang_diffkv.arguments import output_file
from sglang_diffkv.attention.whole import Sight, causal
from sglang_diffkv.calibrate.reading import add_arguments, load, read, windows
from sglang_diffkv.calibration import model_name
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.evaluate.endpoint import EvaluationError
from sglang_diffkv.evaluate.tasks.files import TaskFileError, sha256
from sglang_diffkv.key_means import SINKS, KeySums, write_key_means


class Reading:
    """Counts the keys of each layer; its ``attend`` is what transformers calls."""

    def __init__(self) -> None:
        self.sums = KeySums()

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """Causal attention of one sequence in transformers' shapes [1, heads, N, dim], and count its keys."""
        self.sums.add(module.layer_idx, key[0].transpose(0, 1))
        return causal(query, key, value, scaling, Sight.of(kwargs)), None


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_diffkv.calibrate.means",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser, 16384, "of a sequence; keys of later positions count as these", 4096)
    parser.add_argument("--output", type=output_file, required=True, help="file to write, .safetensors")
    args = parser.parse_args(argv)
    if args.window_tokens <= SINKS:
        parser.error(f"--window-tokens must be above {SINKS}, the tokens of each sequence that are passed over")
    return args


def measure(args: argparse.Namespace) -> tuple[torch.Tensor, dict[str, str]]:
    """The means, and how they were found. Raises TaskFileError and EvaluationError."""
    reading = Reading()
    passages = windows(args, SINKS + 1)
    model = load(args.model, reading.attend)
    for passage in passages:
        read(model, passage)
    try:
        means = reading.sums.means()
    except ValueError as error:
        raise EvaluationError(str(error)) from None
    facts = {"model": model_name(args.model), "tokens": str(reading.sums.tokens)}
    facts |= {"window_tokens": str(args.window_tokens), "text_sha256": sha256(args.text), "sglang_diffkv": __version__}
    return means, facts


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write; 1 with the reason if that is not possible."""
    args = parse_args(argv)
    try:
        means, facts = measure(args)
        write_key_means(args.output, means, facts)
    except (ConfigError, TaskFileError, EvaluationError, OSError) as error:
        print(f"sglang_diffkv.calibrate.means: {error}", file=sys.stderr)
        return 1
    layers, heads, dim = means.shape
    print(f"means of {layers} layers x {heads} KV heads of {dim}, over {facts['tokens']} tokens: {args.output}")
    print(f"""--diffkv-config '{{"key_means": "{args.output}", "rotate": "keys"}}'""")
    return 0


if __name__ == "__main__":
    sys.exit(main())
