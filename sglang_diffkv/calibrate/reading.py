"""A text read by a Hugging Face model, with an attention of ours that sees queries, keys and values."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sglang_diffkv.evaluate.cli import positive
from sglang_diffkv.evaluate.endpoint import EvaluationError
from sglang_diffkv.evaluate.prompts import load_tokenizer
from sglang_diffkv.evaluate.server import has_gpu
from sglang_diffkv.evaluate.tasks.files import TaskFileError, open_text

ATTENTION = "diffkv_reading"
MOST_CHARACTERS = 16
"""Of a text that are read for each token."""
Attention = Callable[..., tuple[torch.Tensor, None]]
"""As transformers calls it: module, query, key and value [1, heads, N, dim], mask and scaling; gives
[1, N, heads, dim]."""


def load(path: str, attend: Attention) -> Any:
    """The model in bfloat16, as a server has it, on the GPU if there is one; nothing is downloaded. Raises
    EvaluationError."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(ATTENTION, attend)
    options = {"dtype": torch.bfloat16, "attn_implementation": ATTENTION, "local_files_only": True}
    try:
        model = AutoModelForCausalLM.from_pretrained(path, **options)
    except (OSError, ValueError) as error:
        raise EvaluationError(f"{path} cannot be loaded by transformers: {error}") from None
    return model.to("cuda" if has_gpu() else "cpu").eval()


@torch.inference_mode()
def read(model: Any, ids: list[int]) -> None:
    """One pass over a sequence."""
    model.model(torch.tensor([ids], device=model.device), use_cache=False)


def add_arguments(parser: argparse.ArgumentParser, tokens: int, window_help: str, window: int) -> None:
    """What names the model, the text and how much of it is read."""
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True, help="plain text, perhaps .xz or .gz")
    parser.add_argument("--tokens", type=positive, default=tokens, help="to read at most (default: %(default)s)")
    parser.add_argument("--window-tokens", type=positive, default=window, help=f"{window_help} (default: %(default)s)")
    parser.add_argument("--tokenizer", help="its folder (default: the model's)")


def windows(args: argparse.Namespace, least: int) -> list[list[int]]:
    """The text in sequences of ``--window-tokens`` tokens, those of fewer than ``least`` left out. Raises
    TaskFileError."""
    with open_text(args.text) as file:
        text = file.read(args.tokens * MOST_CHARACTERS)
    ids = load_tokenizer(args.tokenizer or args.model)(text, add_special_tokens=False)["input_ids"][: args.tokens]
    found = [list(ids[at : at + args.window_tokens]) for at in range(0, len(ids), args.window_tokens)]
    found = [x for x in found if len(x) >= least]
    if not found:
        raise TaskFileError(f"{args.text.name}: {len(ids)} tokens are too few")
    return found
