r"""MATH (Hendrycks et al., 2021): problems with a ``solution`` whose last ``\boxed{}`` holds the answer.

Read from JSON Lines with ``problem`` and ``solution``, or from a folder of one JSON file a problem, as the data set
was published. A reply is right if its last ``\boxed{}`` equals the answer after light normalisation: spaces, text
style, units in words and the ways to write a fraction make no difference. Equal values that are written
otherwise (``0.5`` and ``\frac{1}{2}``) count as different, as in the exact match of the paper.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_diffkv.evaluate.tasks.files import TaskFileError, check_fields, json_files, open_text, read_lines
from sglang_diffkv.evaluate.tasks.generation import Example, GenerationTask, Options, build, sample

PROMPT = "{problem}\nReason step by step and put the final answer within \\boxed{{}}."
FIELDS = ("problem", "solution")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")

_REWRITES: tuple[tuple[str, str], ...] = (
    (r"\\left(?![a-zA-Z])|\\right(?![a-zA-Z])", ""),
    (r"\\[!,;: ]|\\q?quad(?![a-zA-Z])|~", ""),
    (r"\\\$|\$|\\%|%", ""),
    (r"\^\{?\\circ\}?|\\degree(?![a-zA-Z])", ""),
    (r"\\[dt]frac(?![a-zA-Z])", r"\\frac"),
    (r"(?<=\d)\s*\\(?:text|mbox|mathrm)\{[^{}]*\}(?:\^\d)?$", ""),
    (r"\\(?:text|mbox|mathrm|textbf|mathbf)\{([^{}]*)\}", r"\1"),
    (r"\s+", ""),
    (r"^[a-zA-Z]=", ""),
    (r"(?<=\d),(?=\d{3}(?!\d))", ""),
    (r"\\frac(\d)(\d)", r"\\frac{\1}{\2}"),
    (r"\\frac(\d)\{", r"\\frac{\1}{"),
    (r"\\frac\{([^{}]*)\}(\d)", r"\\frac{\1}{\2}"),
    (r"\\sqrt(\d)", r"\\sqrt{\1}"),
    (r"^(-?\d+)/(\d+)$", r"\\frac{\1}{\2}"),
    (r"^-\\frac\{(\d+)\}", r"\\frac{-\1}"),
    (r"(?<!\d)\.(?=\d)", "0."),
    (r"(\.\d*?)0+$", r"\1"),
    (r"\.$", ""),
)


def last_boxed(text: str) -> str | None:
    r"""What stands in the last ``\boxed{}`` or ``\fbox{}`` whose braces close; None without one."""
    for match in reversed(list(_BOX.finditer(text))):
        depth = 1
        for end in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[match.end() : end]
    return None


def normalize(answer: str) -> str:
    """An answer in one of the forms that mean the same."""
    for pattern, replacement in _REWRITES:
        answer = re.sub(pattern, replacement, answer.strip())
    return answer


def grade(text: str, answers: tuple[str, ...]) -> bool:
    """Whether a reply's last box holds the answer."""
    given = last_boxed(text)
    return given is not None and normalize(given) == normalize(answers[0])


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if not path.is_dir():
        yield from ((str(line), record) for line, record in read_lines(path, FIELDS, FIELDS))
        return
    for file in json_files(path):
        name = file.relative_to(path).with_suffix("").as_posix()
        with open_text(file) as opened:
            text = opened.read()
        try:
            record = json.loads(text)
        except ValueError as error:
            raise TaskFileError(f"{file.name}: not valid JSON: {error}") from None
        check_fields(record, FIELDS, name, FIELDS)
        yield name, record


def load(path: Path, options: Options) -> GenerationTask:
    """A fixed random sample; questions count by ``type`` or ``subject`` where the file has one."""
    examples = []
    for name, record in _records(path):
        answer = last_boxed(record["solution"])
        if answer is None:
            raise TaskFileError(f"{path.name}, {name}: the solution has no \\boxed{{}}")
        subject = record.get("type") or record.get("subject") or "math"
        prompt = PROMPT.format(problem=record["problem"].strip())
        examples.append(Example(name, str(subject), prompt, (answer,), reply=record["solution"]))
    return sample(build("math", path, examples, grade, options), options)
