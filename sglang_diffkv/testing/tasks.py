"""The questions under ``benchmarks/data``: loading, selection, prompts and grading."""

from __future__ import annotations

import json
import lzma
import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from sglang_diffkv.testing.paths import DATA

SPLITS = ("calib", "dev")
LEVELS = ("easy", "medium", "hard")
_MARK = "Answer:"


@dataclass(frozen=True)
class Item:
    """One question and its right answer."""

    id: str
    task: str
    level: str
    prompt: str
    reference: str
    answer: str
    group: str | None = None


class Selectable(Protocol):
    """A question with a task, a level and perhaps a group."""

    @property
    def task(self) -> str: ...

    @property
    def level(self) -> str: ...

    @property
    def group(self) -> str | None: ...


Chosen = TypeVar("Chosen", bound=Selectable)


def load(split: str, folder: Path = DATA) -> list[Item]:
    """All items of a split (``calib`` to fit on, ``dev`` to report on), in file order."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}, expected one of {', '.join(SPLITS)}")
    with lzma.open(folder / f"{split}.jsonl.xz", "rt", encoding="utf-8") as lines:
        return [Item(**json.loads(line)) for line in lines]


def select(
    items: Iterable[Chosen],
    *,
    tasks: Collection[str] | None = None,
    levels: Collection[str] | None = None,
    exclude: Collection[str] = (),
    n: int | None = None,
    seed: int = 0,
) -> list[Chosen]:
    """A fixed random sample: the items of ``tasks`` and ``levels`` without ``exclude``, at most ``n``.

    The order depends on ``seed`` and the filters only, so a smaller ``n`` takes the head of a larger one's.
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


def groups(items: Iterable[Chosen]) -> dict[str, list[Chosen]]:
    """The items that share a long prefix, by group."""
    result: dict[str, list[Chosen]] = {}
    for item in items:
        if item.group is not None:
            result.setdefault(item.group, []).append(item)
    return result


def is_right(text: str, answer: str) -> bool:
    """Whether the text after the last ``Answer:`` of a reply equals the right answer."""
    _, mark, given = text.rpartition(_MARK)
    return bool(mark) and given.strip() == answer.strip()


def load_tokenizer(model: str | Path) -> Any:
    """The model's Hugging Face tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(model))


def chat_ids(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of one user turn in the tokenizer's chat template, ready for the reply.

    The template writes the special tokens itself, so none are added here. They are what the server's
    ``/v1/chat/completions`` feeds the model for the same message.
    """
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
    )
    return list(tokenizer.encode(text, add_special_tokens=False))


def prompt_ids(tokenizer: Any, prompt: str, reply_prefix: str = "") -> list[int]:
    """As ``chat_ids``, the reply begun with ``reply_prefix``; plain text where the tokenizer has no chat template."""
    if not tokenizer.chat_template:
        return list(tokenizer.encode(prompt + reply_prefix))
    return chat_ids(tokenizer, prompt) + list(tokenizer.encode(reply_prefix, add_special_tokens=False))
