"""MRCR (OpenAI, 2025, after Vodrahalli et al., 2024): of several alike replies in a long chat, one is to be repeated.

JSON Lines with the columns that were published: ``prompt`` (the chat's messages, a list or its JSON text), ``answer``
and ``random_string_to_prepend``; ``n_needles`` names the line of the table. The score is MRCR's own: 0 unless the reply
begins with the random string, else the similarity of what follows to the answer's.
"""

from __future__ import annotations

import json
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from typing import Any

from sglang_diffkv.evaluate.tasks.files import TaskFileError, read_lines
from sglang_diffkv.evaluate.tasks.generation import ByQuestion, Example, GenerationTask, Options, build, sample

ROLES = ("system", "user", "assistant")


def similarity(text: str, answer: str, beginning: str) -> float:
    """A reply's score, 0 to 1."""
    if not text.startswith(beginning):
        return 0.0
    return SequenceMatcher(None, text.removeprefix(beginning), answer.removeprefix(beginning)).ratio()


def messages_of(given: Any, where: str) -> tuple[tuple[str, str], ...]:
    """Roles and texts of a chat. Raises TaskFileError."""
    try:
        chat = json.loads(given) if isinstance(given, str) else given
        found = tuple((str(x["role"]), str(x["content"])) for x in chat)
    except (ValueError, TypeError, KeyError):
        raise TaskFileError(f"{where}: 'prompt' must be a list of messages with role and content") from None
    if not found or found[-1][0] != "user" or any(role not in ROLES for role, _ in found):
        raise TaskFileError(f"{where}: the chat must have roles of {', '.join(ROLES)} and end with the user's")
    return found


def load(path: Path, options: Options) -> GenerationTask:
    """A fixed random sample; chats count by their number of needles. Raises TaskFileError."""
    examples, grades = [], {}
    for line, record in read_lines(path, ("prompt", "answer", "random_string_to_prepend")):
        name = str(line)
        answer, beginning = str(record["answer"]), str(record["random_string_to_prepend"])
        grades[name] = partial(similarity, answer=answer, beginning=beginning)
        needles = record.get("n_needles")
        task = f"{needles} needles" if needles else "mrcr"
        chat = messages_of(record["prompt"], f"{path.name}, line {line}")
        examples.append(Example(name, task, "", (name,), messages=chat))
    return sample(build("mrcr", path, examples, ByQuestion(grades), options, "score"), options)
