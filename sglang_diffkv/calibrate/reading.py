"""A text read by a Hugging Face model, with an attention of ours that sees queries, keys and values."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from sglang_diffkv.evaluate.cli import positive
from sglang_diffkv.evaluate.endpoint import EvaluationError
from sglang_diffkv.evaluate.prompts import load_tokenizer
from sglang_diffkv.evaluate.server import has_gpu
from sglang_diffkv.evaluate.tasks.files import TaskFileError, open_text

ATTENTION = "diffkv_reading"
MOST_CHARACTERS = 16
"""Of a text that are read for each token."""
QUERIES = 256
"""Whose attention is worked out at once."""

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


@dataclass(frozen=True)
class Sight:
    """What a layer's attention has beside causality.

    Attributes:
        window: tokens that a query may see, itself included; None for all.
        softcap: bound of logits by ``softcap * tanh(logit / softcap)``; None for none.
        sinks: [query heads], a logit for each head that joins the softmax's sum and has no value; None for none.
    """

    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Sight:
        """From what transformers gives an attention beside queries, keys and values."""
        return cls(given.get("sliding_window"), given.get("softcap"), given.get("s_aux"))

    def plain(self, tokens: int) -> bool:
        """Whether so many tokens are attended to as if there were nothing but causality."""
        return self.softcap is None and self.sinks is None and (self.window is None or self.window >= tokens)


PLAIN = Sight()


def attention_rows(
    query: torch.Tensor, key: torch.Tensor, scaling: float, sight: Sight = PLAIN, start: int = 0
) -> Iterator[tuple[int, torch.Tensor]]:
    """Attention weights of one sequence from query ``start`` on, ``QUERIES`` queries at a time: the first one's
    position, and [Hq, M, N] float32. query: [Hq, N, D], key: [H, N, D], any whole number of query heads to a KV head.
    """
    heads, tokens = query.shape[:2]
    keys = key.float().repeat_interleave(heads // key.shape[0], 0).mT  # [Hq, D, N]
    column = torch.arange(tokens, device=key.device)
    for first in range(start, tokens, QUERIES):
        row = column[first : first + QUERIES, None]
        hidden = column > row  # [M, N]
        if sight.window is not None:
            hidden |= column <= row - sight.window
        logits = (query[:, first : first + QUERIES].float() @ keys) * scaling
        if sight.softcap is not None:
            logits = sight.softcap * torch.tanh(logits / sight.softcap)
        logits = logits.masked_fill(hidden, float("-inf"))
        if sight.sinks is None:
            yield first, logits.softmax(-1)
        else:
            sinks = sight.sinks.float().view(-1, 1, 1).expand(-1, logits.shape[1], 1)
            yield first, torch.cat([logits, sinks], 2).softmax(-1)[..., :-1]


def causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, sight: Sight = PLAIN
) -> torch.Tensor:
    """Attention of one sequence, in transformers' shapes."""
    if sight.plain(query.shape[2]):
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous()
    values = value[0].float().repeat_interleave(query.shape[1] // key.shape[1], 0)  # [Hq, N, D]
    rows = [weights @ values for _, weights in attention_rows(query[0], key[0], scaling, sight)]
    return torch.cat(rows, 1).transpose(0, 1).to(query.dtype).unsqueeze(0)


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
