"""Questions over long shared prefixes: those of a reference file that have a ``group``, a group's asked together.

The questions of a group share one long prefix, so all but the first to arrive should find it in the prefix cache,
compressed by the question that cached it. The share of prompt tokens that came from there is part of the result.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from sglang_diffkv.evaluate.tasks.files import TaskFileError
from sglang_diffkv.evaluate.tasks.generation import GenerationTask, Options, build
from sglang_diffkv.evaluate.tasks.reference import groups, judge, read, select


def load(path: Path, options: Options) -> GenerationTask:
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
    task = build("shared", path, ordered, judge, options)
    return replace(task, examples=task.examples[: options.n])
