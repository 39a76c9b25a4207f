"""Tasks whose reply is generated greedily and judged right or wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sglang_diffkv.evaluate.client import RequestError
from sglang_diffkv.evaluate.endpoint import Endpoint
from sglang_diffkv.evaluate.prompts import prompt_ids
from sglang_diffkv.evaluate.task import Metric, Outcome, Question
from sglang_diffkv.evaluate.tasks.files import TaskFileError, sha256, stem


@dataclass(frozen=True)
class Options:
    """What a user may choose; a task uses what applies to it.

    Attributes:
        n: questions of each file, a fixed random sample; None for all.
        levels, only, exclude: of files whose questions have a task and a level.
        prefix_tokens, window_tokens: of perplexity, the tokens in the cache and those scored after them.
        top_logprobs: likeliest tokens at each scored position, from which distributions are compared; 0 for none.
        run_generated_code: whether code that the model wrote may be run to judge it.
    """

    n: int | None = None
    seed: int = 0
    max_new_tokens: int = 4096
    levels: Sequence[str] | None = None
    only: Sequence[str] | None = None
    exclude: Sequence[str] = ()
    prefix_tokens: int = 1024
    window_tokens: int = 128
    top_logprobs: int = 32
    run_generated_code: bool = False


@dataclass(frozen=True)
class Example:
    """A question as its file has it. ``reply_prefix`` is text that the reply is made to begin with; ``reply`` is the
    text of a right one, empty where the file has none."""

    id: str
    task: str
    prompt: str
    answers: tuple[str, ...]
    level: str = ""
    group: str | None = None
    reply_prefix: str = ""
    reply: str = ""


@dataclass(frozen=True)
class GenerationTask:
    """Chosen examples of a file; ``judge(text, answers)`` says whether a reply is right."""

    name: str
    path: Path
    examples: tuple[Example, ...]
    judge: Callable[[str, tuple[str, ...]], bool]
    max_new_tokens: int
    metric: Metric = field(default="accuracy", init=False)
    server_args: tuple[str, ...] = field(default=(), init=False)

    def fingerprint(self) -> dict[str, Any]:
        return {"file": self.path.name, "sha256": sha256(self.path), "max_new_tokens": self.max_new_tokens}

    def questions(self, tokenizer: Any) -> list[Question]:
        return [
            Question(x.id, x.task, tuple(prompt_ids(tokenizer, x.prompt, x.reply_prefix)), x.answers)
            for x in self.examples
        ]

    def ask(self, question: Question, endpoint: Endpoint) -> Outcome:
        try:
            record = endpoint.generate(question.prompt_ids, self.max_new_tokens)
        except RequestError as error:
            return Outcome(len(question.prompt_ids), right=False, error=str(error))
        return Outcome.of(record, text=record.text, right=self.judge(record.text, question.answers))


def build(
    kind: str,
    path: Path,
    examples: Sequence[Example],
    judge: Callable[[str, tuple[str, ...]], bool],
    options: Options,
) -> GenerationTask:
    """A task of all ``examples``, named ``kind/file``. Raises TaskFileError for no or repeated questions."""
    if not examples:
        raise TaskFileError(f"{path.name}: no questions")
    seen: set[str] = set()
    for example in examples:
        if example.id in seen:
            raise TaskFileError(f"{path.name}: two questions have the id {example.id!r}")
        seen.add(example.id)
    return GenerationTask(f"{kind}/{stem(path)}", path, tuple(examples), judge, options.max_new_tokens)


def sample(task: GenerationTask, options: Options) -> GenerationTask:
    """A fixed random sample of ``options.n`` examples; a smaller one is the head of a larger one."""
    examples = list(task.examples)
    random.Random(options.seed).shuffle(examples)
    return replace(task, examples=tuple(examples[: options.n]))
