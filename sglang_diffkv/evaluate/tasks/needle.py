"""Retrieval in RULER's format (Hsieh et al., 2024): JSON Lines with ``input`` and ``outputs``.

``input`` is a whole prompt, its question included; ``answer_prefix``, where there is one, begins the reply. A
reply is right if every one of ``outputs`` occurs in it, letter case ignored. (RULER itself gives partial
credit for some of them.)
"""

from __future__ import annotations

from pathlib import Path

from sglang_diffkv.evaluate.tasks.files import TaskFileError, read_lines, stem
from sglang_diffkv.evaluate.tasks.generation import Example, GenerationTask, Options, build, sample


def grade(text: str, answers: tuple[str, ...]) -> bool:
    """Whether a reply has all the values."""
    return all(answer.lower() in text.lower() for answer in answers)


def load(path: Path, options: Options) -> GenerationTask:
    """A fixed random sample of the file."""
    examples = []
    for line, record in read_lines(path, ("input", "outputs"), ("input",)):
        outputs = record["outputs"]
        if not isinstance(outputs, list) or not outputs:
            raise TaskFileError(f"{path.name}, line {line}: 'outputs' must be a list of at least one value")
        answers = tuple(str(value).strip() for value in outputs)
        prefix = record.get("answer_prefix", "")
        examples.append(Example(str(line), stem(path), record["input"], answers, reply_prefix=prefix))
    return sample(build("needle", path, examples, grade, options), options)
