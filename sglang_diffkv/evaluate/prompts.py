"""Token ids of prompts, as the server's chat endpoint would make them."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def load_tokenizer(model: str | Path) -> Any:
    """The model's Hugging Face tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(model))


def chat_ids(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of one user turn in the tokenizer's chat template, ready for the reply.

    The template writes the special tokens itself, so none are added here. They are what the server's
    ``/v1/chat/completions`` feeds the model for the same message.
    """
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
    )
    return list(tokenizer.encode(text, add_special_tokens=False))


def prompt_ids(tokenizer: Any, prompt: str, reply_prefix: str = "") -> list[int]:
    """As ``chat_ids``, the reply begun with ``reply_prefix``; plain text where the tokenizer has no chat template."""
    if not tokenizer.chat_template:
        return list(tokenizer.encode(prompt + reply_prefix))
    return chat_ids(tokenizer, prompt) + list(tokenizer.encode(reply_prefix, add_special_tokens=False))
