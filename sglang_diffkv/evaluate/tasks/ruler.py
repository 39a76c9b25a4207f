"""RULER (Hsieh et al., 2024) with its own scores: JSON Lines with ``input`` and ``outputs``, as its scripts write them.

A folder has a file for each task, ``niah_multikey_1/validation.jsonl`` or ``niah_multikey_1.jsonl``: needles (``niah``),
variable tracking (``vt``), common and frequent words (``cwe``, ``fwe``) and questions (``qa``). A question's score is
the share of ``outputs`` that occur in the reply; for ``qa`` it is 1 if one of them does. Replies end after as many
tokens as RULER allows. ``input`` is a whole prompt; ``answer_prefix``, where there is one, begins the reply.
"""  # noqa: E501

from __future__ import annotations

from functools import partial
from pathlib import Path

from sglang_diffkv.evaluate.tasks.files import TaskFileError, line_files, read_lines, stem
from sglang_diffkv.evaluate.tasks.generation import ByQuestion, Example, GenerationTask, Options, build, sample
from sglang_diffkv.evaluate.tasks.scores import all_found, any_found

REPLY_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
"""By the beginning of a task's name."""
SPLITS = ("validation", "test")
"""Files that are named by their folder."""


def task_of(file: Path) -> str:
    """The task that a file is of. Raises TaskFileError for a name that is none of RULER's."""
    name = file.resolve().parent.name if stem(file) in SPLITS else stem(file)
    if name.partition("_")[0] not in REPLY_TOKENS:
        raise TaskFileError(
            f"{file.name}: {name!r} is no task of RULER, whose names begin with {', '.join(REPLY_TOKENS)}; "
            "needle= takes any file of this form"
        )
    return name


def load(path: Path, options: Options) -> GenerationTask:
    """A fixed random sample of a file or folder; questions count by task."""
    examples, grades = [], {}
    for file in line_files(path):
        task = task_of(file)
        family = task.partition("_")[0]
        score = any_found if family == "qa" else all_found
        for line, record in read_lines(file, ("input", "outputs"), ("input",)):
            outputs = record["outputs"]
            if not isinstance(outputs, list) or not outputs:
                raise TaskFileError(f"{file.name}, line {line}: 'outputs' must be a list of at least one value")
            name = f"{file.relative_to(path)}/{line}" if path.is_dir() else str(line)
            grades[name] = partial(score, values=[str(value).strip() for value in outputs])
            prefix = record.get("answer_prefix", "")
            limit = REPLY_TOKENS[family]
            examples.append(Example(name, task, record["input"], (name,), reply_prefix=prefix, max_new_tokens=limit))
    return sample(build("ruler", path, examples, ByQuestion(grades), options, "score"), options)
