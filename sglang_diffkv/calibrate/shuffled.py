"""A task's questions in several random orders, and a part of them held out of a choice."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sglang_diffkv.evaluate.endpoint import Endpoint
from sglang_diffkv.evaluate.runner import Suite
from sglang_diffkv.evaluate.task import Metric, Outcome, Question, Task
from sglang_diffkv.evaluate.tasks import TaskFileError

HELD_OUT = "held out"


@dataclass(frozen=True)
class ShuffledTask:
    """One run over a part of a task's questions. ``about``: what chose them and their order, beside the task's own
    settings."""

    task: Task
    part: str
    run: int
    about: dict[str, Any]

    @property
    def name(self) -> str:
        part = f", {self.part}" if self.part else ""
        return f"{self.task.name}{part}, run {self.run}"

    @property
    def metric(self) -> Metric:
        return self.task.metric

    @property
    def server_args(self) -> tuple[str, ...]:
        return self.task.server_args

    def fingerprint(self) -> dict[str, Any]:
        return {**self.task.fingerprint(), **self.about, "run": self.run}

    def questions(self, tokenizer: Any) -> list[Question]:
        questions = self.task.questions(tokenizer)
        random.Random(f"{self.about['seed']} {self.run}").shuffle(questions)
        return questions

    def ask(self, question: Question, endpoint: Endpoint) -> Outcome:
        return self.task.ask(question, endpoint)


@dataclass(frozen=True)
class Runs:
    """The same questions in so many orders: those that a choice is made on, and those held out of it."""

    chosen_on: list[Suite]
    held_out: list[Suite]


def shuffled(task: Task, tokenizer: Any, runs: int, share: float, seed: int) -> Runs:
    """``share`` of the questions are held out, each by its id, so that more questions leave those there are in their
    part. Raises TaskFileError if a part that there should be has no question."""
    about = {"held_out": share, "seed": seed}
    parts: list[list[Suite]] = []
    for part in ("", HELD_OUT):
        suites = [Suite.of(ShuffledTask(task, part, run, about), tokenizer) for run in range(1, runs + 1)]
        parts.append([_part(suite, bool(part), share, seed) for suite in suites])
    fit, held = parts
    if not fit[0].questions or (share and not held[0].questions):
        raise TaskFileError(f"{task.name}: too few questions to hold out {share:g} of them")
    return Runs(fit, held if share else [])


def _part(suite: Suite, held: bool, share: float, seed: int) -> Suite:
    questions: Sequence[Question] = suite.questions
    return replace(suite, questions=tuple(x for x in questions if (_draw(x, seed) < share) == held))


def _draw(question: Question, seed: int) -> float:
    return random.Random(f"{seed} {question.id}").random()
