"""What a task is: questions, how one is put to a server, and how the reply is graded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from sglang_diffkv.evaluate.client import Record
from sglang_diffkv.evaluate.endpoint import Endpoint

Metric = Literal["accuracy", "score", "perplexity"]
"""Questions are right or wrong, have a score from 0 to 1, or are text to be predicted."""


@dataclass(frozen=True)
class Question:
    """One question, ready to be sent.

    Attributes:
        id: unique within its task file.
        task: the line of the table that it counts in.
        prompt_ids: token ids of the whole prompt.
        answers: what the reply is compared with, as the task's grader understands it.
        cached_tokens: of a perplexity window, the tokens of the prompt that come from the prefix cache.
        reply_ids: of a forced reply, its tokens.
        sink: of a forced reply, see ``evaluate/forcing``.
        max_new_tokens: of its reply, if fewer than the task's; 0 for the task's.
    """

    id: str
    task: str
    prompt_ids: tuple[int, ...]
    answers: tuple[str, ...] = ()
    cached_tokens: int = 0
    reply_ids: tuple[int, ...] = ()
    sink: int = 0
    max_new_tokens: int = 0

    def limit(self, max_new_tokens: int) -> int:
        """Tokens of its reply, where the task allows ``max_new_tokens``."""
        return min(max_new_tokens, self.max_new_tokens or max_new_tokens)


@dataclass(frozen=True)
class Outcome:
    """What came of a question: ``right`` for accuracy, ``score`` from 0 to 1 for a score. For perplexity it is ``nll``
    (nats, summed over ``scored_tokens``) and ``tops``, the likeliest tokens at their positions, packed
    (``evaluate/distribution``; empty if not asked for). The first of them has ``scored_after`` tokens before it.

    ``error`` is set if the server ended the request; it then counts as wrong and is asked again by a later run.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    requests: int = 1
    latency: float = 0.0
    finish_reason: str = ""
    text: str = ""
    right: bool | None = None
    score: float | None = None
    nll: float | None = None
    scored_tokens: int = 0
    scored_after: int = 0
    tops: str = ""
    error: str | None = None

    @classmethod
    def of(cls, record: Record, **graded: Any) -> Outcome:
        """Of one request's record, and what it was graded by."""
        return cls(
            prompt_tokens=record.prompt_tokens,
            completion_tokens=record.completion_tokens,
            cached_tokens=record.cached_tokens,
            latency=record.latency,
            finish_reason=record.finish_reason,
            **graded,
        )


class Task(Protocol):
    """A file of questions. Implementations are in ``evaluate/tasks``."""

    @property
    def name(self) -> str:
        """Unique in a run, for example ``reference/dev``."""
        ...

    @property
    def metric(self) -> Metric: ...

    @property
    def server_args(self) -> tuple[str, ...]:
        """What a server must be started with for it."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """The file and the settings that an answer depends on, as JSON data; answers to another one are not reused."""
        ...

    def questions(self, tokenizer: Any) -> list[Question]:
        """The selected questions in the order of asking."""
        ...

    def ask(self, question: Question, endpoint: Endpoint) -> Outcome:
        """Put one question and grade the reply. Called from several threads."""
        ...
