"""The reference tasks: JSON Lines with ``id``, ``task``, ``level``, ``prompt``, ``answer``, and perhaps ``group`` and
``reference``, a whole right reply.

A reply is right if the text after its last ``Answer:`` equals ``answer``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sglang_diffkv.evaluate.tasks.files import TaskFileError, read_lines
from sglang_diffkv.evaluate.tasks.generation import Example, GenerationTask, Options, build
from sglang_diffkv.testing.tasks import is_right, select

FIELDS = ("id", "task", "level", "prompt", "answer")


def read(path: Path) -> list[Example]:
    """All questions of a file."""
    return [
        Example(
            x["id"],
            x["task"],
            x["prompt"],
            (x["answer"],),
            x["level"],
            x.get("group"),
            reply=x.get("reference", ""),
        )
        for _, x in read_lines(path, FIELDS)
    ]


def judge(text: str, answers: tuple[str, ...]) -> bool:
    """Whether a reply ends with the answer."""
    return is_right(text, answers[0])


def load(path: Path, options: Options) -> GenerationTask:
    """A fixed random sample of the questions that the options name."""
    task = build("reference", path, read(path), judge, options)
    try:
        chosen = select(
            task.examples,
            tasks=options.only,
            levels=options.levels,
            exclude=options.exclude,
            n=options.n,
            seed=options.seed,
        )
    except ValueError as error:
        raise TaskFileError(f"{path.name}: {error}") from None
    return replace(task, examples=tuple(chosen))
