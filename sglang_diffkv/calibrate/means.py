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
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from sglang_diffkv import __version__
from sglang_diffkv.calibration import model_name
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.evaluate.cli import positive
from sglang_diffkv.evaluate.endpoint import EvaluationError
from sglang_diffkv.evaluate.prompts import load_tokenizer
from sglang_diffkv.evaluate.server import has_gpu
from sglang_diffkv.evaluate.tasks.files import TaskFileError, open_text, sha256
from sglang_diffkv.key_means import write_key_means

ATTENTION = "diffkv_keys"
SINKS = 4
"""First tokens of a sequence, whose keys are unlike all others."""
MOST_CHARACTERS = 16
"""Of a text that are read for each token."""


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
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    @torch.inference_mode()
    def read(self, model: Any, ids: Sequence[int]) -> None:
        """One pass over a sequence."""
        model.model(torch.tensor([list(ids)], device=model.device), use_cache=False)
        self.tokens += len(ids) - SINKS

    def means(self) -> torch.Tensor:
        """[layers, KV heads, head_dim] float32. Raises EvaluationError where layers differ in heads."""
        shapes = {tuple(x.shape) for x in self.sums.values()}
        if len(shapes) != 1:
            raise EvaluationError(f"layers have keys of {sorted(shapes)}: one shape for all is needed")
        return torch.stack([self.sums[layer] for layer in sorted(self.sums)]).div(self.tokens).float()


def load(path: str, sums: KeySums) -> Any:
    """The model in bfloat16, as a server has it, on the GPU if there is one; nothing is downloaded. Raises
    EvaluationError."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(ATTENTION, sums.attend)
    options = {"dtype": torch.bfloat16, "attn_implementation": ATTENTION, "local_files_only": True}
    try:
        model = AutoModelForCausalLM.from_pretrained(path, **options)
    except (OSError, ValueError) as error:
        raise EvaluationError(f"{path} cannot be loaded by transformers: {error}") from None
    return model.to("cuda" if has_gpu() else "cpu").eval()


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_diffkv.calibrate.means",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True, help="plain text, perhaps .xz or .gz")
    parser.add_argument("--tokens", type=positive, default=16384, help="to read at most (default: %(default)s)")
    parser.add_argument(
        "--window-tokens",
        type=positive,
        default=4096,
        help="of a sequence; keys of later positions count as these (default: %(default)s)",
    )
    parser.add_argument("--tokenizer", help="its folder (default: the model's)")
    parser.add_argument("--output", type=Path, required=True, help="file to write, .safetensors")
    args = parser.parse_args(argv)
    if args.window_tokens <= SINKS:
        parser.error(f"--window-tokens must be above {SINKS}, the tokens of each sequence that are passed over")
    return args


def measure(args: argparse.Namespace) -> tuple[torch.Tensor, dict[str, str]]:
    """The means, and how they were found. Raises TaskFileError and EvaluationError."""
    with open_text(args.text) as file:
        text = file.read(args.tokens * MOST_CHARACTERS)
    ids = load_tokenizer(args.tokenizer or args.model)(text, add_special_tokens=False)["input_ids"][: args.tokens]
    windows = [ids[at : at + args.window_tokens] for at in range(0, len(ids), args.window_tokens)]
    windows = [x for x in windows if len(x) > SINKS]
    if not windows:
        raise TaskFileError(f"{args.text.name}: {len(ids)} tokens are too few")
    sums = KeySums()
    model = load(args.model, sums)
    for window in windows:
        sums.read(model, window)
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
