r"""AIME 2024: JSON Lines with ``problem`` and ``answer``, a number from 0 to 999, under these names or with a capital.

A reply is right if the content of its last ``\boxed{}`` is the number, or without a box its last number.
"""

from __future__ import annotations

from pathlib import Path

from sglang_diffkv.evaluate.tasks.files import TaskFileError, check_fields, read_lines
from sglang_diffkv.evaluate.tasks.generation import Example, GenerationTask, Options, build, sample
from sglang_diffkv.evaluate.tasks.gsm8k import number
from sglang_diffkv.evaluate.tasks.math_problems import PROMPT, last_boxed


def grade(text: str, answers: tuple[str, ...]) -> bool:
    """Whether a reply's final number is the answer."""
    boxed = last_boxed(text)
    return number(text if boxed is None else boxed) == int(answers[0])


def load(path: Path, options: Options) -> GenerationTask:
    """A fixed random sample of the file."""
    examples = []
    for line, given in read_lines(path, ()):
        where = f"{path.name}, line {line}"
        record = {name.lower(): value for name, value in given.items()}
        check_fields(record, ("problem", "answer"), where, ("problem",))
        answer = str(record["answer"]).strip()
        if not answer.isdecimal():
            raise TaskFileError(f"{where}: the answer {answer!r} is no number from 0 on")
        prompt = PROMPT.format(problem=record["problem"].strip())
        examples.append(Example(str(record.get("id", line)), "aime", prompt, (answer,)))
    return sample(build("aime", path, examples, grade, options), options)
