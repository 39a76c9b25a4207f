r"""GSM8K (Cobbe et al., 2021): JSON Lines with ``question`` and ``answer``, which ends with ``#### N``.

A reply is right if its final number equals ``N``: the one after the last ``####``, else the content of the last
``\boxed{}``, else the last number of the reply. Numbers are compared by value.
"""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path

from sglang_diffkv.evaluate.tasks.files import TaskFileError, read_lines
from sglang_diffkv.evaluate.tasks.generation import Example, GenerationTask, Options, build, sample
from sglang_diffkv.evaluate.tasks.math_problems import last_boxed

PROMPT = "{question}\nReason step by step and write the final answer on the last line as: #### number"
MARK = "####"
_NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def number(text: str) -> Decimal | None:
    """The value of a text's last number, thousands separators ignored; None without one."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def final_number(text: str) -> Decimal | None:
    """The number that a reply ends in."""
    _, mark, after = text.rpartition(MARK)
    if mark:
        first = _NUMBER.search(after)
        return number(first.group()) if first else None
    boxed = last_boxed(text)
    return number(text if boxed is None else boxed)


def grade(text: str, answers: tuple[str, ...]) -> bool:
    """Whether a reply's final number is the answer."""
    return final_number(text) == Decimal(answers[0])


def load(path: Path, options: Options) -> GenerationTask:
    """A fixed random sample of the file."""
    examples = []
    for line, record in read_lines(path, *[("question", "answer")] * 2):
        value = final_number(record["answer"]) if MARK in record["answer"] else None
        if value is None:
            raise TaskFileError(f"{path.name}, line {line}: the answer does not end with {MARK} and a number")
        prompt = PROMPT.format(question=record["question"].strip())
        examples.append(Example(str(line), "gsm8k", prompt, (str(value),), reply=record["answer"]))
    return sample(build("gsm8k", path, examples, grade, options), options)
