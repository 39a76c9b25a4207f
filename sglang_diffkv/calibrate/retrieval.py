"""Measure how much each KV head looks far back, for ``duo``: which heads need all tokens and which the newest only.

The Hugging Face model reads passages of a text, each twice in a row. What a passage's second reading is told by the
first lies further back than a window: the share of attention that goes there is a head's number, the largest of its
query heads. DuoAttention's authors optimise a gate for each head on synthetic passkeys instead; files with their
numbers can be used as they are. No server is started and no accuracy measured. Example:

    python -m sglang_diffkv.calibrate.retrieval --model MODEL --text prose.txt --output full_attention_heads.tsv
    python -m sglang.launch_server ... --diffkv-config \\
        '{"tiers": ["BF16"], "policy": {"name": "duo", "pattern": "full_attention_heads.tsv", "sparsity": 0.5}}'
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch

from sglang_diffkv import bounds
from sglang_diffkv.arguments import number, output_file
from sglang_diffkv.attention.whole import attention_rows, causal
from sglang_diffkv.calibrate.reading import add_arguments, load, read, windows
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.evaluate.cli import positive
from sglang_diffkv.evaluate.endpoint import EvaluationError
from sglang_diffkv.evaluate.tasks.files import TaskFileError


class FarAttention:
    """Attention to tokens outside ``sinks`` and ``window``, by layer; its ``attend`` is what transformers calls."""

    def __init__(self, sinks: int, window: int):
        self.sinks, self.window = sinks, window
        self.sums: dict[int, torch.Tensor] = {}
        """Layer -> [H] float64."""
        self.queries = 0

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """Causal attention of one sequence in transformers' shapes [1, heads, N, dim]; of the queries in its second
        half, what goes far back."""
        for other in ("sliding_window", "softcap", "s_aux"):
            if kwargs.get(other) is not None:
                raise EvaluationError(f"this model's attention has a {other}, which is not measured here")
        heads, tokens = key.shape[1:3]
        total = torch.zeros(query.shape[1], dtype=torch.float64)
        column = torch.arange(tokens, device=key.device)
        for first, weights in attention_rows(query[0], key[0], scaling, start=tokens // 2):
            row = torch.arange(first, first + weights.shape[1], device=key.device)
            far = (column >= self.sinks) & (column <= row[:, None] - self.window)  # [M, N]
            total += (weights * far).sum((1, 2)).double().cpu()
        found = total.view(heads, -1).amax(1)
        self.sums[module.layer_idx] = self.sums.get(module.layer_idx, 0) + found
        return causal(query, key, value, scaling), None

    def shares(self) -> torch.Tensor:
        """[layers, KV heads], 0 to 1. Raises EvaluationError where layers differ in heads."""
        if len({len(x) for x in self.sums.values()}) != 1:
            raise EvaluationError("layers differ in their number of KV heads: one for all is needed")
        return torch.stack([self.sums[layer] for layer in sorted(self.sums)]) / self.queries


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_diffkv.calibrate.retrieval",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser, 8192, "of a passage, which is read twice in a row", 1024)
    parser.add_argument(
        "--window", type=positive, default=256, help="newest tokens that are near (default: %(default)s)"
    )
    parser.add_argument(
        "--sinks", type=number(bounds.Sinks), default=64, help="first tokens that count as near (default: %(default)s)"
    )
    parser.add_argument("--output", type=output_file, required=True, help="file to write, a line for each layer")
    args = parser.parse_args(argv)
    if args.window_tokens < args.window:
        parser.error("--window-tokens must be at least --window: a passage's first reading would be near")
    return args


def measure(args: argparse.Namespace) -> torch.Tensor:
    """[layers, KV heads]. Raises TaskFileError and EvaluationError."""
    passages = windows(args, args.window_tokens)
    far = FarAttention(args.sinks, args.window)
    model = load(args.model, far.attend)
    for passage in passages:
        read(model, [*passage, *passage])
        far.queries += len(passage)
    return far.shares()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write; 1 with the reason if that is not possible."""
    args = parse_args(argv)
    try:
        shares = measure(args)
        lines = ["\t".join(f"{x:.6f}" for x in layer) for layer in shares.tolist()]
        args.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except (ConfigError, TaskFileError, EvaluationError, OSError) as error:
        print(f"sglang_diffkv.calibrate.retrieval: {error}", file=sys.stderr)
        return 1
    low, middle, high = shares.flatten().quantile(torch.tensor([0.1, 0.5, 0.9], dtype=shares.dtype)).tolist()
    layers, heads = shares.shape
    print(
        f"attention beyond the newest {args.window} and first {args.sinks} tokens, {layers} layers x {heads} KV heads: "
        f"median {middle:.1%}, of a tenth of the heads below {low:.1%}, of a tenth above {high:.1%}: {args.output}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
