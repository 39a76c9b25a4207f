"""Perplexity of a text, with compression at work while it is scored.

One long prompt scored in one request would not measure compression. In a prefill pass the prompt's tokens attend to
each other's keys and values as the model made them. Only the end of the prompt compresses them. Every configuration
would give the same perplexity. So each window takes two requests:

1. a prompt of ``prefix_tokens`` tokens without a reply. At its end it is compressed, and joins the prefix cache;
2. the same tokens and ``window_tokens + 1`` more, with ``logprob_start_len = prefix_tokens``. The prefix is found in
   the cache, so the new tokens attend to its compressed form, and to each other exactly.

SGLang gives no log-probability for the first token behind the cached prefix, whose logits belong to the prefix's last
token; the ``window_tokens`` after it are scored. Windows start ``window_tokens`` apart, so that no token is scored
twice. A small window sees more of the compressed tokens, and takes more requests. Only prompt-phase
compression is measured: no token is generated.

The same request tells the likeliest tokens at each scored position, by which whole distributions are compared with
those of another configuration (``evaluate/distribution``), at no further pass of the model.

With ``turn_tokens`` the prefix comes as the turns of a chat do: in prompts that each go on from the last one, by so
many tokens. What the cache has of a prompt may depend on whether it came in one or in many.

A window whose prefix was not found in the cache is an error, since it would measure an uncompressed cache.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_diffkv.evaluate.distribution import pack
from sglang_diffkv.evaluate.endpoint import Endpoint, EvaluationError
from sglang_diffkv.evaluate.task import Metric, Outcome, Question
from sglang_diffkv.evaluate.tasks.files import TaskFileError, open_text, sha256, stem
from sglang_diffkv.evaluate.tasks.generation import Options


@dataclass(frozen=True)
class PerplexityTask:
    """Windows over a plain text file."""

    name: str
    path: Path
    options: Options
    metric: Metric = field(default="perplexity", init=False)
    server_args: tuple[str, ...] = field(default=(), init=False)

    def fingerprint(self) -> dict[str, Any]:
        names = ("turn_tokens", "top_logprobs")
        given = {name: value for name in names if (value := getattr(self.options, name))}
        return {
            "file": self.path.name,
            "sha256": sha256(self.path),
            "prefix_tokens": self.options.prefix_tokens,
            "window_tokens": self.options.window_tokens,
            **given,
        }

    def questions(self, tokenizer: Any) -> list[Question]:
        return [
            Question(str(at), "perplexity", tuple(ids), cached_tokens=self.options.prefix_tokens)
            for at, ids in windows(self.path, tokenizer, self.options)
        ]

    def ask(self, question: Question, endpoint: Endpoint) -> Outcome:
        prefix = question.cached_tokens
        if len(question.prompt_ids) >= endpoint.context:
            raise EvaluationError(
                f"{self.name}: a window of {len(question.prompt_ids)} tokens does not fit in {endpoint.context}"
            )
        ends = [*range(self.options.turn_tokens or prefix, prefix, self.options.turn_tokens or prefix), prefix]
        before = [endpoint.cache(question.prompt_ids[:end]) for end in ends]
        record = endpoint.score(question.prompt_ids, prefix, self.options.top_logprobs)
        if record.cached_tokens < prefix:
            raise EvaluationError(
                f"{self.name}: only {record.cached_tokens} of {prefix} prefix tokens came from the prefix cache, so "
                "compression was not at work. Is the prefix cache on and large enough for the requests at once?"
            )
        return Outcome(
            prompt_tokens=record.prompt_tokens,
            cached_tokens=record.cached_tokens,
            requests=len(before) + 1,
            latency=sum(x.latency for x in before) + record.latency,
            finish_reason=record.finish_reason,
            nll=-sum(record.input_logprobs),
            scored_tokens=len(record.input_logprobs),
            scored_after=prefix + 1,
            tops=pack(record.input_top_logprobs) if self.options.top_logprobs else "",
        )


def windows(path: Path, tokenizer: Any, options: Options) -> list[tuple[int, list[int]]]:
    """A text's windows of ``prefix_tokens + 1 + window_tokens`` token ids, each with where it begins in the text, a
    fixed random sample of them. Raises TaskFileError for a text that is too short."""
    with open_text(path) as file:
        tokens = tokenizer.encode(file.read(), add_special_tokens=False, verbose=False)
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    taken = options.prefix_tokens - len(first) + 1 + options.window_tokens
    starts = list(range(0, len(tokens) - taken + 1, options.window_tokens))
    if not starts:
        raise TaskFileError(f"{path.name}: {len(tokens)} tokens, fewer than the {taken} of one window")
    random.Random(options.seed).shuffle(starts)
    return [(at, [*first, *tokens[at : at + taken]]) for at in starts[: options.n]]


def check_windows(options: Options) -> None:
    """Raise TaskFileError for windows that cannot be scored."""
    if min(options.prefix_tokens, options.window_tokens) < 1:
        raise TaskFileError("prefix and window of a perplexity need at least one token each")
    if options.top_logprobs < 0:
        raise TaskFileError("--top-logprobs is a number of tokens from 0 on")


def load(path: Path, options: Options) -> PerplexityTask:
    """Windows of a text file, a fixed random sample of them."""
    check_windows(options)
    return PerplexityTask(f"wikitext/{stem(path)}", path, options)
