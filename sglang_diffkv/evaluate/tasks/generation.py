"""Tasks whose reply is generated greedily and graded: right or wrong, or by a score."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sglang_diffkv.evaluate.client import RequestError
from sglang_diffkv.evaluate.endpoint import Endpoint
from sglang_diffkv.evaluate.prompts import messages_ids, prompt_ids, without_middle
from sglang_diffkv.evaluate.task import Metric, Outcome, Question
from sglang_diffkv.evaluate.tasks.files import TaskFileError, sha256, stem


@dataclass(frozen=True)
class Options:
    """What a user may choose; a task uses what applies to it.

    Attributes:
        n: questions of each file, a fixed random sample; None for all.
        levels, only, exclude: of files whose questions have a task and a level.
        prefix_tokens, window_tokens: of perplexity, the tokens in the cache and those scored after them. turn_tokens:
            the former come in turns of so many, as those of a chat; 0: in one prompt.
        top_logprobs: likeliest tokens at each scored position, from which distributions are compared; 0 for none.
        max_prompt_tokens: of LongBench; longer prompts lose their middle. None for no limit.
        run_generated_code: whether code that the model wrote may be run to grade it.
    """

    n: int | None = None
    seed: int = 0
    max_new_tokens: int = 4096
    levels: Sequence[str] | None = None
    only: Sequence[str] | None = None
    exclude: Sequence[str] = ()
    prefix_tokens: int = 1024
    window_tokens: int = 128
    turn_tokens: int = 0
    top_logprobs: int = 32
    max_prompt_tokens: int | None = None
    run_generated_code: bool = False


@dataclass(frozen=True)
class Example:
    """A question as its file has it. ``reply_prefix`` is text that the reply is made to begin with; ``reply`` is the
    text of a right one, empty where the file has none. ``max_new_tokens`` bounds the reply, 0 leaves it to the task;
    ``plain`` is a prompt to be continued as it is, without the chat template. ``messages``, roles and texts of a chat,
    stand for ``prompt``."""

    id: str
    task: str
    prompt: str
    answers: tuple[str, ...]
    level: str = ""
    group: str | None = None
    reply_prefix: str = ""
    reply: str = ""
    max_new_tokens: int = 0
    plain: bool = False
    messages: tuple[tuple[str, str], ...] = ()


Grader = Callable[[str, tuple[str, ...]], float]
"""Of a reply's text and a question's ``answers``: a bool, or a score from 0 to 1."""


@dataclass(frozen=True)
class ByQuestion:
    """A grade for each question by its id, which is the question's only answer."""

    grades: Mapping[str, Callable[[str], float]]

    def __call__(self, text: str, answers: tuple[str, ...]) -> float:
        return self.grades[answers[0]](text)


@dataclass(frozen=True)
class GenerationTask:
    """Chosen examples of a file; ``grade`` says whether a reply is right, or its score where ``metric`` is one."""

    name: str
    path: Path
    examples: tuple[Example, ...]
    grade: Grader
    max_new_tokens: int
    metric: Metric = "accuracy"
    max_prompt_tokens: int | None = None
    server_args: tuple[str, ...] = field(default=(), init=False)

    def fingerprint(self) -> dict[str, Any]:
        cut = {} if self.max_prompt_tokens is None else {"max_prompt_tokens": self.max_prompt_tokens}
        return {"file": self.path.name, "sha256": sha256(self.path), "max_new_tokens": self.max_new_tokens, **cut}

    def questions(self, tokenizer: Any) -> list[Question]:
        return [
            Question(x.id, x.task, self._prompt_ids(x, tokenizer), x.answers, max_new_tokens=x.max_new_tokens)
            for x in self.examples
        ]

    def _prompt_ids(self, example: Example, tokenizer: Any) -> tuple[int, ...]:
        prompt = example.prompt
        if example.messages:
            return tuple(messages_ids(tokenizer, example.messages))
        if self.max_prompt_tokens is not None:
            prompt = without_middle(tokenizer, prompt, self.max_prompt_tokens)
        return tuple(prompt_ids(tokenizer, prompt, example.reply_prefix, plain=example.plain))

    def ask(self, question: Question, endpoint: Endpoint) -> Outcome:
        try:
            record = endpoint.generate(question.prompt_ids, question.limit(self.max_new_tokens))
        except RequestError as error:
            return Outcome(len(question.prompt_ids), **self._graded(0.0), error=str(error))
        return Outcome.of(record, text=record.text, **self._graded(self.grade(record.text, question.answers)))

    def _graded(self, grade: float) -> dict[str, Any]:
        return {"score": float(grade)} if self.metric == "score" else {"right": bool(grade)}


def build(
    kind: str,
    path: Path,
    examples: Sequence[Example],
    grade: Grader,
    options: Options,
    metric: Metric = "accuracy",
) -> GenerationTask:
    """A task of all ``examples``, named ``kind/file``. Raises TaskFileError for no or repeated questions."""
    if not examples:
        raise TaskFileError(f"{path.name}: no questions")
    seen: set[str] = set()
    for example in examples:
        if example.id in seen:
            raise TaskFileError(f"{path.name}: two questions have the id {example.id!r}")
        seen.add(example.id)
    return GenerationTask(f"{kind}/{stem(path)}", path, tuple(examples), grade, options.max_new_tokens, metric)


def sample(task: GenerationTask, options: Options) -> GenerationTask:
    """A fixed random sample of ``options.n`` examples; a smaller one is the head of a larger one."""
    examples = list(task.examples)
    random.Random(options.seed).shuffle(examples)
    return replace(task, examples=tuple(examples[: options.n]))
