"""The reference tasks: JSON Lines with ``id``, ``task``, ``level``, ``prompt``, ``answer``, and perhaps ``group`` and
``reference``, a whole right reply.

A reply is right if the text after its last ``Answer:`` equals ``answer``.

The questions of a ``group`` share one long prefix. The kind ``shared`` asks those of a group together, so all but the
first to arrive should find it in the prefix cache, compressed by the question that cached it. The share of prompt
tokens that came from there is part of the result.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

from sglang_diffkv.evaluate.tasks.files import TaskFileError, read_lines
from sglang_diffkv.evaluate.tasks.generation import Example, GenerationTask, Options, build

FIELDS = ("id", "task", "level", "prompt", "answer")
LEVELS = ("easy", "medium", "hard")
_MARK = "Answer:"


def read(path: Path) -> list[Example]:
    """All questions of a file. Raises TaskFileError."""
    found = []
    for line, x in read_lines(path, FIELDS, FIELDS[1:]):
        for name in ("id", "group"):
            if not isinstance(x.get(name), str | int | None):
                raise TaskFileError(f"{path.name}, line {line}: the field {name!r} is no text or number")
        reply = x.get("reference", "")
        if not isinstance(reply, str):
            raise TaskFileError(f"{path.name}, line {line}: the field 'reference' is not text")
        found.append(Example(x["id"], x["task"], x["prompt"], (x["answer"],), x["level"], x.get("group"), reply=reply))
    return found


def grade(text: str, answers: tuple[str, ...]) -> bool:
    """Whether the text after the last ``Answer:`` of a reply equals the right answer."""
    _, mark, given = text.rpartition(_MARK)
    return bool(mark) and given.strip() == answers[0].strip()


def select(
    items: Iterable[Example],
    *,
    tasks: Collection[str] | None = None,
    levels: Collection[str] | None = None,
    exclude: Collection[str] = (),
    n: int | None = None,
    seed: int = 0,
) -> list[Example]:
    """A fixed random sample: the questions of ``tasks`` and ``levels`` without ``exclude``, at most ``n``.

    The order depends on ``seed`` and the filters only, so a smaller ``n`` takes the head of a larger one's.
    Raises ValueError for a task or level that there is none of.
    """
    items = list(items)
    known = {item.task for item in items}
    unknown = sorted((set(tasks or ()) | set(exclude)) - known)
    if unknown:
        raise ValueError(f"unknown tasks: {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    if levels is not None and (unknown := sorted(set(levels) - set(LEVELS))):
        raise ValueError(f"unknown levels: {', '.join(unknown)}; known: {', '.join(LEVELS)}")
    chosen = [
        item
        for item in items
        if (tasks is None or item.task in tasks)
        and (levels is None or item.level in levels)
        and item.task not in exclude
    ]
    random.Random(seed).shuffle(chosen)
    return chosen[:n]


def groups(items: Iterable[Example]) -> dict[str, list[Example]]:
    """The questions that share a long prefix, by group."""
    result: dict[str, list[Example]] = {}
    for item in items:
        if item.group is not None:
            result.setdefault(item.group, []).append(item)
    return result


def load(path: Path, options: Options) -> GenerationTask:
    """A fixed random sample of the questions that the options name."""
    task = build("reference", path, read(path), grade, options)
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


def load_shared(path: Path, options: Options) -> GenerationTask:
    """Groups in a fixed random order, each with its questions in file order, cut after ``options.n`` questions."""
    grouped = [example for example in read(path) if example.group is not None]
    if not grouped:
        raise TaskFileError(f"{path.name}: no question has a group, so none share a prefix")
    try:
        chosen = select(grouped, tasks=options.only, levels=options.levels)
    except ValueError as error:
        raise TaskFileError(f"{path.name}: {error}") from None
    kept = set(chosen)
    together = groups(example for example in grouped if example in kept)
    names = sorted(together)
    random.Random(options.seed).shuffle(names)
    ordered = [example for name in names for example in together[name]]
    task = build("shared", path, ordered, grade, options)
    return replace(task, examples=task.examples[: options.n])
