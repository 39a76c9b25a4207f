"""LongBench (Bai et al., 2023): JSON Lines with ``input``, ``context``, ``answers``, ``dataset`` and ``all_classes``, a
file or a folder of them. LongBench-E's files are read as well.

A question's score is the best over its ``answers``, by its data set's measure (``evaluate/tasks/scores``); replies end
after as many tokens as LongBench allows. Prompts ask for the same in words of our own; where the folder has LongBench's
``dataset2prompt.json``, they are its. Data sets of examples and of code are continued without the chat template, as
LongBench does. ``--max-prompt-tokens`` cuts the middle out of longer prompts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sglang_diffkv.evaluate.tasks import longbench_prompts as prompts
from sglang_diffkv.evaluate.tasks import scores
from sglang_diffkv.evaluate.tasks.files import TaskFileError, line_files, read_lines
from sglang_diffkv.evaluate.tasks.generation import ByQuestion, Example, GenerationTask, Options, build, sample

TEMPLATES = "dataset2prompt.json"
FIELDS = ("input", "context", "answers", "dataset")
Score = Callable[[str, str, Sequence[str]], float]
"""Of a reply, a right answer and the names of all classes."""


def _words_f1(text: str, wanted: str, classes: Sequence[str]) -> float:
    return scores.f1(scores.words(text), scores.words(wanted))


def _characters_f1(text: str, wanted: str, classes: Sequence[str]) -> float:
    return scores.f1(scores.characters(text), scores.characters(wanted))


def _rouge(text: str, wanted: str, classes: Sequence[str]) -> float:
    return scores.rouge_l(text.split(), wanted.split())


def _characters_rouge(text: str, wanted: str, classes: Sequence[str]) -> float:
    return scores.rouge_l(scores.characters(text), scores.characters(wanted))


def _number(text: str, wanted: str, classes: Sequence[str]) -> float:
    return scores.numbered(text, wanted)


def _line(text: str, wanted: str, classes: Sequence[str]) -> float:
    return scores.similar_line(text, wanted)


@dataclass(frozen=True)
class DataSet:
    """A data set's prompt, the most tokens of a reply and its score. ``plain`` prompts are continued without a chat
    template; of ``examples`` only the reply's first line counts."""

    prompt: str
    tokens: int
    score: Score
    plain: bool = False
    examples: bool = False


DATA_SETS = {
    "narrativeqa": DataSet(prompts.STORY, 128, _words_f1),
    "qasper": DataSet(prompts.PAPER, 128, _words_f1),
    "multifieldqa_en": DataSet(prompts.TEXT, 64, _words_f1),
    "multifieldqa_zh": DataSet(prompts.TEXT_ZH, 64, _characters_f1),
    "hotpotqa": DataSet(prompts.PASSAGES, 32, _words_f1),
    "2wikimqa": DataSet(prompts.PASSAGES, 32, _words_f1),
    "musique": DataSet(prompts.PASSAGES, 32, _words_f1),
    "dureader": DataSet(prompts.PASSAGES_ZH, 128, _characters_rouge),
    "gov_report": DataSet(prompts.REPORT, 512, _rouge),
    "qmsum": DataSet(prompts.MEETING, 512, _rouge),
    "multi_news": DataSet(prompts.NEWS, 512, _rouge),
    "vcsum": DataSet(prompts.MEETING_ZH, 512, _characters_rouge),
    "trec": DataSet(prompts.TYPES, 64, scores.classified, plain=True, examples=True),
    "triviaqa": DataSet(prompts.TRIVIA, 32, _words_f1, plain=True, examples=True),
    "samsum": DataSet(prompts.DIALOGUES, 128, _rouge, plain=True, examples=True),
    "lsht": DataSet(prompts.NEWS_TYPES_ZH, 64, scores.classified, plain=True, examples=True),
    "passage_count": DataSet(prompts.COUNT, 32, _number),
    "passage_retrieval_en": DataSet(prompts.WHICH, 32, _number),
    "passage_retrieval_zh": DataSet(prompts.WHICH_ZH, 32, _number),
    "lcc": DataSet(prompts.CODE, 64, _line, plain=True),
    "repobench-p": DataSet(prompts.CODE, 64, _line, plain=True),
}


def grade(text: str, *, dataset: DataSet, answers: Sequence[str], classes: Sequence[str]) -> float:
    """The best score of a reply over the answers."""
    given = text.lstrip("\n").partition("\n")[0] if dataset.examples else text
    return max(dataset.score(given, answer, classes) for answer in answers)


def templates(path: Path) -> dict[str, str]:
    """Prompts by data set: those of ``dataset2prompt.json`` in the folder, else our own. Raises TaskFileError."""
    own = {name: dataset.prompt for name, dataset in DATA_SETS.items()}
    file = path / TEMPLATES
    if not path.is_dir() or not file.exists():
        return own
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise TaskFileError(f"{file.name}: not valid JSON: {error}") from None
    if not isinstance(given, dict) or not all("{context}" in str(x) for x in given.values()):
        raise TaskFileError(f"{file.name}: expected an object of prompts by data set, each with {{context}}")
    return {**own, **given}


def _example(name: str, record: Mapping[str, Any], texts: Mapping[str, str], where: str) -> tuple[Example, Any]:
    key = str(record["dataset"]).removesuffix("_e")
    if key not in DATA_SETS:
        raise TaskFileError(f"{where}: unknown data set {key!r}; known: {', '.join(DATA_SETS)}")
    dataset, answers, classes = DATA_SETS[key], record["answers"], record.get("all_classes") or []
    if not isinstance(answers, list) or not answers:
        raise TaskFileError(f"{where}: 'answers' must be a list of at least one")
    answers = [str(x) for x in answers]
    if dataset.score is scores.classified and not set(answers) <= set(classes):
        raise TaskFileError(f"{where}: 'all_classes' does not have the answer {answers[0]!r}")
    if dataset.score is _number and not all(any(x.isdecimal() for x in answer) for answer in answers):
        raise TaskFileError(f"{where}: an answer of {key} has a number, got {answers[0]!r}")
    prompt = re.sub(r"\{(context|input)\}", lambda field: str(record[field[1]]), texts[key])
    example = Example(name, key, prompt, (name,), max_new_tokens=dataset.tokens, plain=dataset.plain)
    return example, partial(grade, dataset=dataset, answers=answers, classes=classes)


def load(path: Path, options: Options) -> GenerationTask:
    """A fixed random sample of a file or folder; questions count by data set."""
    texts = templates(path)
    examples, grades = [], {}
    for file in line_files(path):
        for line, record in read_lines(file, FIELDS):
            name = f"{file.relative_to(path)}/{line}" if path.is_dir() else str(line)
            example, grades[name] = _example(name, record, texts, f"{file.name}, line {line}")
            examples.append(example)
    task = build("longbench", path, examples, ByQuestion(grades), options, "score")
    return sample(replace(task, max_prompt_tokens=options.max_prompt_tokens), options)
