r"""Questions with lettered choices: MMLU, MMLU-Pro, GPQA and LongBench v2, in the forms in which they were published.

| kind | file |
|---|---|
| ``mmlu`` (Hendrycks et al., 2021) | CSV without a header: question, four choices, letter; a folder of those, a subject each; or JSON Lines: ``question``, ``choices``, ``answer`` (its number) |
| ``mmlu_pro`` (Wang et al., 2024) | JSON Lines: ``question``, ``options`` (up to ten), ``answer`` (letter) |
| ``longbench_v2`` (Bai et al., 2024) | its ``data.json``, a list, or JSON Lines: ``_id``, ``context``, ``question``, ``choice_A`` to ``choice_D``, ``answer`` (letter) |
| ``gpqa`` (Rein et al., 2023) | CSV with the columns ``Question``, ``Correct Answer`` and ``Incorrect Answer 1`` to ``3`` |

A reply is right if the letter that it names last is the answer's: after *answer is* or *answer:*, in a
``\boxed{}``, or if it is a letter and nothing else. GPQA's choices are put in an order that is drawn for each question
and is the same in every run. All questions are asked without examples and with a chain of thought, as the DiffKV paper
does; its prompts are not published, so its figures are not reproduced to the digit.
"""  # noqa: E501

from __future__ import annotations

import csv
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from string import ascii_uppercase

from sglang_diffkv.evaluate.tasks.files import TaskFileError, open_text, read_lines, read_records, stem
from sglang_diffkv.evaluate.tasks.generation import Example, GenerationTask, Options, build, sample

PROMPT = "{question}\n\n{choices}\n\nReason step by step and end with: The answer is (X), where X is the letter."
_OPENED = r"(?:\*\*|\$|\\text\{|\\boxed\{|\()+([A-J])(?![A-Za-z])"
_BARE = r"([B-HJ])(?![A-Za-z])|([AI])(?=\s*(?:[.,:;)]|\n|$))"  # A and I are words too
_NAMED = re.compile(rf"(?i:answer(?:\s+is)?)\s*:?\s*(?:{_OPENED}|{_BARE})")
_BOXED = re.compile(r"\\boxed\{\s*(?:\\text\{)?\s*\(?([A-J])\)?\s*\}")
LONG_PROMPT = "Read the text, then answer the question behind it.\n\n{context}\n\n"
LONGBENCH_V2 = ("_id", "context", "question", "choice_A", "choice_B", "choice_C", "choice_D", "answer")
GPQA = ("Question", "Correct Answer", *(f"Incorrect Answer {n}" for n in (1, 2, 3)))


def letter(text: str) -> str | None:
    """The letter that a reply names last, None if it names none."""
    named = [match for form in (_NAMED, _BOXED) for match in form.finditer(text)]
    if named:
        last = max(named, key=lambda match: match.start())
        return next(x for x in last.groups() if x)
    alone = text.strip().strip("().*").upper()
    return alone if len(alone) == 1 and alone in ascii_uppercase[:10] else None


def grade(text: str, answers: tuple[str, ...]) -> bool:
    """Whether a reply names the right letter."""
    return letter(text) == answers[0]


def _example(name: str, task: str, question: str, choices: Sequence[str], answer: str, where: str) -> Example:
    if not isinstance(question, str) or not isinstance(choices, list):
        raise TaskFileError(f"{where}: the question is text, and its choices are a list")
    letters = ascii_uppercase[: len(choices)]
    if len(choices) < 2 or len(answer) != 1 or answer not in letters:
        raise TaskFileError(f"{where}: the answer is {answer!r} of {len(choices)} choices")
    lines = "\n".join(f"({x}) {choice}" for x, choice in zip(letters, map(str.strip, map(str, choices))))
    return Example(name, task, PROMPT.format(question=question.strip(), choices=lines), (answer,))


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    with open_text(path) as file:
        yield from enumerate(csv.reader(file), 1)


def _mmlu(path: Path) -> Iterator[Example]:
    if path.is_dir():
        files = sorted(path.rglob("*.csv"))
        if not files:
            raise TaskFileError(f"{path.name}: no CSV file")
        for file in files:
            subject = re.sub(r"_(test|val|dev)$", "", stem(file))
            yield from _mmlu_rows(file, subject, f"{stem(file)}/")
    elif ".csv" in path.suffixes:
        yield from _mmlu_rows(path, "mmlu", "")
    else:
        for line, x in read_lines(path, ("question", "choices", "answer")):
            where, given = f"{path.name}, line {line}", x["answer"]
            answer = ascii_uppercase[given] if isinstance(given, int) and 0 <= given < 10 else str(given)
            yield _example(str(line), str(x.get("subject") or "mmlu"), x["question"], x["choices"], answer, where)


def _mmlu_rows(file: Path, subject: str, prefix: str) -> Iterator[Example]:
    for line, row in _rows(file):
        where = f"{file.name}, line {line}"
        if len(row) != 6:
            raise TaskFileError(f"{where}: expected a question, four choices and a letter, got {len(row)} columns")
        yield _example(f"{prefix}{line}", subject, row[0], row[1:5], row[5].strip(), where)


def _mmlu_pro(path: Path) -> Iterator[Example]:
    for line, x in read_lines(path, ("question", "options", "answer")):
        where = f"{path.name}, line {line}"
        yield _example(
            str(line), str(x.get("category") or "mmlu_pro"), x["question"], x["options"], str(x["answer"]), where
        )


def _gpqa(path: Path) -> Iterator[Example]:
    rows = _rows(path)
    _, header = next(rows, (0, []))
    if missing := [name for name in GPQA if name not in header]:
        raise TaskFileError(f"{path.name}: no column {', '.join(map(repr, missing))}")
    for line, row in rows:
        if len(row) != len(header):
            raise TaskFileError(f"{path.name}, line {line}: {len(row)} columns, the header has {len(header)}")
        record = dict(zip(header, row))
        right, *wrong = (record[name] for name in GPQA[1:])
        choices = [right, *wrong]
        random.Random(record[GPQA[0]]).shuffle(choices)
        task = record.get("High-level domain") or "gpqa"
        answer = ascii_uppercase[choices.index(right)]
        yield _example(str(line), task, record[GPQA[0]], choices, answer, f"{path.name}, line {line}")


def _longbench_v2(path: Path) -> Iterator[Example]:
    for line, x in read_records(path, LONGBENCH_V2):
        where, options = f"{path.name}, {line}", [x[name] for name in LONGBENCH_V2[3:7]]
        task = f"{x['length']}" if x.get("length") else "longbench_v2"
        found = _example(str(x["_id"]), task, x["question"], options, str(x["answer"]), where)
        yield replace(found, prompt=LONG_PROMPT.format(context=str(x["context"]).strip()) + found.prompt)


def load_longbench_v2(path: Path, options: Options) -> GenerationTask:
    """A fixed random sample; questions count by length (short, medium, long). Longer prompts than
    ``max_prompt_tokens`` lose their middle."""
    task = build("longbench_v2", path, list(_longbench_v2(path)), grade, options)
    return sample(replace(task, max_prompt_tokens=options.max_prompt_tokens), options)


def load_mmlu(path: Path, options: Options) -> GenerationTask:
    """A fixed random sample; questions count by subject."""
    return sample(build("mmlu", path, list(_mmlu(path)), grade, options), options)


def load_mmlu_pro(path: Path, options: Options) -> GenerationTask:
    """A fixed random sample; questions count by category."""
    return sample(build("mmlu_pro", path, list(_mmlu_pro(path)), grade, options), options)


def load_gpqa(path: Path, options: Options) -> GenerationTask:
    """A fixed random sample; questions count by domain."""
    return sample(build("gpqa", path, list(_gpqa(path)), grade, options), options)
