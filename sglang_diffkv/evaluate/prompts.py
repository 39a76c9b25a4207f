"""Token ids of prompts, as the server's chat endpoint would make them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_diffkv.errors import ConfigError
from sglang_diffkv.files import missing_model, named


def load_tokenizer(model: str | Path) -> Any:
    """The model's Hugging Face tokenizer. Raises ConfigError where there is none."""
    from transformers import AutoTokenizer

    if missing := missing_model(str(model)):
        raise ConfigError(missing)
    try:
        return AutoTokenizer.from_pretrained(str(model))
    except (OSError, ValueError) as error:
        why = (str(error).splitlines() or [""])[0]
        raise ConfigError(f"{named(model)} has no tokenizer that transformers can load: {why}") from None


def chat_ids(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of one user turn in the tokenizer's chat template, ready for the reply.

    The template writes the special tokens itself, so none are added here. They are what the server's
    ``/v1/chat/completions`` feeds the model for the same message.
    """
    return messages_ids(tokenizer, [("user", prompt)])


def messages_ids(tokenizer: Any, messages: Sequence[tuple[str, str]]) -> list[int]:
    """As ``chat_ids``, of a chat's roles and texts. Without a chat template each text follows its role's name."""
    if not tokenizer.chat_template:
        return list(tokenizer.encode("\n\n".join(f"{role}: {x}" for role, x in messages) + "\n\nassistant:"))
    chat = [{"role": role, "content": x} for role, x in messages]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(text, add_special_tokens=False))


def without_middle(tokenizer: Any, text: str, tokens: int) -> str:
    """A text of more than ``tokens`` tokens without those in its middle, as LongBench cuts what does not fit."""
    ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    if len(ids) <= tokens:
        return text
    kept = tokenizer.decode(ids[: tokens // 2]), tokenizer.decode(ids[len(ids) - (tokens - tokens // 2) :])
    return "".join(kept)


def prompt_ids(tokenizer: Any, prompt: str, reply_prefix: str = "", *, plain: bool = False) -> list[int]:
    """As ``chat_ids``, the reply begun with ``reply_prefix``; the plain text if ``plain``, or where the tokenizer has
    no chat template."""
    if plain or not tokenizer.chat_template:
        return list(tokenizer.encode(prompt + reply_prefix))
    return chat_ids(tokenizer, prompt) + list(tokenizer.encode(reply_prefix, add_special_tokens=False))
