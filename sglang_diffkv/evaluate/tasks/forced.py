"""Replies forced token by token, so that the generation phase of a configuration is measured.

A configuration's own reply soon says something else than another's, and then their distributions cannot be compared.
Here each is made to say the same (``evaluate/forcing``). The prompt is prefilled, and compressed at its end. The
reply's tokens are decoded one by one, while the compressed cache grows and is compressed as in serving. The first token
of a reply is not scored: its logits are the prefill pass's, to which compression did nothing.

Two kinds of files: ``replies``, JSON Lines of prompts with the replies that the uncompressed model gave
(``python -m sglang_diffkv.evaluate.replies`` writes them), and ``continuation``, a plain text, whose windows are
continued as the text goes on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_diffkv.evaluate import forcing
from sglang_diffkv.evaluate.distribution import pack
from sglang_diffkv.evaluate.endpoint import Endpoint
from sglang_diffkv.evaluate.task import Metric, Outcome, Question
from sglang_diffkv.evaluate.tasks.files import TaskFileError, read_lines, sha256, stem
from sglang_diffkv.evaluate.tasks.generation import Options
from sglang_diffkv.evaluate.tasks.wikitext import check_windows, windows


@dataclass(frozen=True)
class ForcedTask:
    """Questions with the reply that each gets; ``read(tokenizer)`` gives them."""

    name: str
    path: Path
    top_logprobs: int
    read: Callable[[Any], list[Question]]
    settings: dict[str, Any]
    metric: Metric = field(default="perplexity", init=False)
    server_args: tuple[str, ...] = field(default=forcing.SERVER_ARGS, init=False)

    def fingerprint(self) -> dict[str, Any]:
        return {"file": self.path.name, "sha256": sha256(self.path), "forced": True, **self.settings}

    def questions(self, tokenizer: Any) -> list[Question]:
        """Raises TaskFileError if a token is not the tokenizer's."""
        found = self.read(tokenizer)
        for question in found:
            if max((*question.prompt_ids, *question.reply_ids)) >= len(tokenizer):
                raise TaskFileError(f"{self.path.name}, {question.id}: tokens of another tokenizer")
        return found

    def ask(self, question: Question, endpoint: Endpoint) -> Outcome:
        prompt, reply = question.prompt_ids, question.reply_ids
        record = endpoint.force(prompt, reply, question.sink, self.top_logprobs)
        return Outcome.of(
            record,
            nll=-sum(record.logprobs[1:]),
            scored_tokens=len(reply) - 1,
            scored_after=len(prompt) + 1,
            tops=pack(record.top_logprobs[1:]) if self.top_logprobs else "",
        )


def _question(name: str, task: str, prompt: list[int], reply: list[int], vocabulary: int) -> Question:
    sink = forcing.sink_for(reply, vocabulary)
    return Question(name, task, tuple(prompt), reply_ids=tuple(reply), sink=sink)


def load_replies(path: Path, options: Options) -> ForcedTask:
    """Prompts and replies by token ids, a fixed random sample of ``options.n``. Raises TaskFileError."""
    lines = []
    for number, line in read_lines(path, ("id", "task", "prompt_ids", "reply_ids"), ("task",)):
        if not isinstance(line["id"], str | int):
            raise TaskFileError(f"{path.name}, line {number}: the field 'id' is no text or number")
        for name in ("prompt_ids", "reply_ids"):
            if not isinstance(line[name], list) or not all(type(x) is int and x >= 0 for x in line[name]):
                raise TaskFileError(f"{path.name}, line {number}: {name!r} is no list of token ids")
        if len(line["reply_ids"]) > 1:
            lines.append(line)
    if not lines:
        raise TaskFileError(f"{path.name}: no replies of two tokens or more")
    if len({x["id"] for x in lines}) < len(lines):
        raise TaskFileError(f"{path.name}: two replies have one id")
    random.Random(options.seed).shuffle(lines)

    def read(tokenizer: Any) -> list[Question]:
        size = len(tokenizer)
        return [_question(str(x["id"]), x["task"], x["prompt_ids"], x["reply_ids"], size) for x in lines[: options.n]]

    settings = {"top_logprobs": options.top_logprobs}
    return ForcedTask(f"replies/{stem(path)}", path, options.top_logprobs, read, settings)


def load_continuation(path: Path, options: Options) -> ForcedTask:
    """Windows of a plain text: ``prefix_tokens`` are the prompt, ``window_tokens`` more are scored. Raises
    TaskFileError."""
    check_windows(options)

    def read(tokenizer: Any) -> list[Question]:
        prefix = options.prefix_tokens
        return [
            _question(str(at), "perplexity", ids[:prefix], ids[prefix:], len(tokenizer))
            for at, ids in windows(path, tokenizer, options)
        ]

    names = ("prefix_tokens", "window_tokens", "top_logprobs")
    settings = {name: getattr(options, name) for name in names}
    return ForcedTask(f"continuation/{stem(path)}", path, options.top_logprobs, read, settings)
