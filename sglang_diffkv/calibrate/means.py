"""Measure what the keys of each layer and KV head have in common, which then need not be stored in every one of them.

The Hugging Face model reads a text, and the mean of each head's keys, after normalisation and position embedding, is
written to a file that a server takes with "key_means". Attention stays the same (see ``sglang_diffkv/key_means.py``);
keys at 4 bits lose about half of what they lost. No server is started and no accuracy measured. Example:

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
from sglang_diffkv.calibrate.reading import Sight, add_arguments, causal, load, read, windows
from sglang_diffkv.calibration import model_name
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.evaluate.endpoint import EvaluationError
from sglang_diffkv.evaluate.tasks.files import TaskFileError, sha256
from sglang_diffkv.key_means import write_key_means

SINKS = 4
"""First tokens of a sequence, whose keys are unlike all others."""


class KeySums:
    """Sums of keys by layer; its ``attend`` is what transformers calls."""

    def __init__(self) -> None:
        self.sums: dict[int, torch.Tensor] = {}
        """Layer -> [H, D] float64."""
        self.tokens = 0

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """Causal attention of one sequence in transformers' shapes [1, heads, N, dim], and count its keys."""
        found = key[0, :, SINKS:].double().sum(1).cpu()
        self.sums[module.layer_idx] = self.sums.get(module.layer_idx, 0) + found
        return causal(query, key, value, scaling, Sight.of(kwargs)), None

    def means(self) -> torch.Tensor:
        """[layers, KV heads, head_dim] float32. Raises EvaluationError where layers differ in heads."""
        shapes = {tuple(x.shape) for x in self.sums.values()}
        if len(shapes) != 1:
            raise EvaluationError(f"layers have keys of {sorted(shapes)}: one shape for all is needed")
        return torch.stack([self.sums[layer] for layer in sorted(self.sums)]).div(self.tokens).float()


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
    sums = KeySums()
    passages = windows(args, SINKS + 1)
    model = load(args.model, sums.attend)
    for passage in passages:
        read(model, passage)
        sums.tokens += len(passage) - SINKS
    facts = {"model": model_name(args.model), "tokens": str(sums.tokens), "window_tokens": str(args.window_tokens)}
    return sums.means(), {**facts, "text_sha256": sha256(args.text), "sglang_diffkv": __version__}


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
