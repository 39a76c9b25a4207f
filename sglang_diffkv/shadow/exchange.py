"""Requests that are looked at, and what of them is asked again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
PATHS = (GENERATE, COMPLETIONS, CHAT)
"""Of SGLang, those whose requests are looked at."""
MOST_BYTES = 4 << 20
"""Of a request that is looked at."""
OF_TEMPLATE = (
    "model", "messages", "tools", "tool_choice", "reasoning_effort", "continue_final_message", "chat_template_kwargs",
)  # fmt: skip
"""Fields of a chat that its template reads, as ``/v1/tokenize`` takes them."""
OF_CACHE = ("extra_key", "cache_salt")
"""Fields that say which cached prompts a request finds."""

Reason = Literal[
    "queue_full", "too_large", "unreadable", "not_text", "lora", "not_answered", "server_down", "server_refused",
    "empty", "reference_down", "reference_refused", "reference_unfit", "failed",
]  # fmt: skip

REASONS: dict[Reason, str] = {
    "queue_full": "the reference was too slow, and others waited already",
    "too_large": f"larger than {MOST_BYTES >> 20} MiB",
    "unreadable": "no JSON, or without a prompt",
    "not_text": "with images, audio or embeddings",
    "lora": "for a LoRA adapter",
    "not_answered": "the server answered with an error, or the client left",
    "server_down": "the server did not answer the second request",
    "server_refused": "the server refused the second request",
    "empty": "a reply without tokens",
    "reference_down": "the reference did not answer",
    "reference_refused": "the reference refused the request, for example as too long for it",
    "reference_unfit": "the reference compresses, or has another tokenizer",
    "failed": "an error of this tool",
}
"""Why a request that was sampled was not judged."""


class LeftOut(Exception):
    """A request is not judged, for one of ``REASONS``. What it says is in no message."""

    def __init__(self, reason: Reason):
        super().__init__(REASONS[reason])
        self.reason: Reason = reason


@dataclass(frozen=True)
class Exchange:
    """A request that the server has answered. It is in memory until it is judged, and nowhere else."""

    path: str
    body: bytes


@dataclass(frozen=True)
class Question:
    """What of a request is asked again.

    Attributes:
        ids: of the prompt, if the request has them. text, chat: else the prompt, or what a chat's template reads.
        most_tokens: of a reply, None if the request does not say. more: fields of ``/generate`` that it is asked with.
    """

    ids: tuple[int, ...] = ()
    text: str = ""
    chat: Mapping[str, Any] | None = None
    most_tokens: int | None = None
    more: Mapping[str, Any] | None = None


def question_of(exchange: Exchange) -> Question:
    """Raises LeftOut for a request that is not judged. Of several prompts in one request the first counts."""
    try:
        body = json.loads(exchange.body)
    except (ValueError, RecursionError):
        raise LeftOut("unreadable") from None
    if not isinstance(body, dict):
        raise LeftOut("unreadable")
    if body.get("lora_path") or (exchange.path != GENERATE and ":" in str(body.get("model") or "")):
        raise LeftOut("lora")
    if any(body.get(name) for name in ("image_data", "audio_data", "video_data", "input_embeds")):
        raise LeftOut("not_text")
    if exchange.path == CHAT:
        return _chat(body)
    sampling = body.get("sampling_params") if exchange.path == GENERATE else body
    sampling = _first(sampling) if isinstance(sampling, list) else sampling
    limit = "max_new_tokens" if exchange.path == GENERATE else "max_tokens"
    given = (body.get("input_ids") or body.get("text")) if exchange.path == GENERATE else body.get("prompt")
    more = _more(body, sampling)
    if isinstance(given, list) and given and not isinstance(given[0], int):
        given = given[0]
    if isinstance(given, str) and given:
        return Question(text=given, most_tokens=_count(sampling, limit), more=more)
    if not isinstance(given, list) or not given or not all(type(x) is int for x in given):
        raise LeftOut("unreadable")
    return Question(ids=tuple(given), most_tokens=_count(sampling, limit), more=more)


def _chat(body: Mapping[str, Any]) -> Question:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise LeftOut("unreadable")
    for message in messages:
        parts = message.get("content") if isinstance(message, dict) else None
        if isinstance(parts, list) and any(not isinstance(x, dict) or x.get("type") != "text" for x in parts):
            raise LeftOut("not_text")
    chat = {name: body[name] for name in OF_TEMPLATE if body.get(name) is not None}
    limits = [x for name in ("max_tokens", "max_completion_tokens") if (x := _count(body, name)) is not None]
    return Question(chat=chat, most_tokens=min(limits, default=None), more=_more(body, body))


def _more(body: Mapping[str, Any], sampling: Any) -> dict[str, Any]:
    """Which cached prompts it finds, and what it asks of its own cache."""
    found = {name: x for name in OF_CACHE if isinstance(x := _first(body.get(name)), str)}
    params = sampling.get("custom_params") if isinstance(sampling, dict) else None
    own = params.get("diffkv") if isinstance(params, dict) else None
    return {**found, **({} if own is None else {"custom_params": {"diffkv": own}})}


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else value


def _count(fields: Any, name: str) -> int | None:
    value = fields.get(name) if isinstance(fields, dict) else None
    return value if type(value) is int and value > 0 else None


def exchange_of_line(line: Mapping[str, Any]) -> Exchange:
    """Of a file: the body of a request, or one with ``url`` and ``body`` as in OpenAI's batches. Raises LeftOut."""
    body = line["body"] if isinstance(line.get("body"), dict) else line
    fields: Sequence[tuple[str, str]] = (("messages", CHAT), ("prompt", COMPLETIONS))
    path = line.get("url") if body is not line else next((path for name, path in fields if name in body), GENERATE)
    if path not in PATHS:
        raise LeftOut("unreadable")
    return Exchange(str(path), json.dumps(body).encode())
