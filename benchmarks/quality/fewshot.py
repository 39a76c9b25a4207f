"""More questions for the groups of ``fewshot_shared``, whose rule can be read off the examples in their prompts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from sglang_diffkv.evaluate.tasks.generation import Example

_IN, _OUT, _LAST = "in: ", " out: ", "\nNow you.\nin: "


def read_rule(prompt: str) -> dict[str, str]:
    """What each word becomes, in a prompt whose examples map word for word.

    Raises:
        ValueError: the examples do not, or contradict each other.
    """
    examples, mark, _ = prompt.partition(_LAST)
    rule: dict[str, str] = {}
    for line in examples.splitlines():
        if not line.startswith(_IN):
            continue
        given, _, made = line.removeprefix(_IN).partition(_OUT)
        before, after = given.split(), made.split()
        if len(before) != len(after) or any(rule.setdefault(a, b) != b for a, b in zip(before, after, strict=True)):
            raise ValueError(f"no rule from word to word: {line!r}")
    if not mark or not rule:
        raise ValueError("not a few-shot prompt")
    return rule


def apply_rule(rule: dict[str, str], words: Sequence[str]) -> str:
    """The right answer for ``words``."""
    return " ".join(rule[word] for word in words)


def enlarge(items: Sequence[Example], count: int, seed: int = 0) -> list[Example]:
    """The questions of one group, then new ones over the same examples until there are ``count``.

    New questions are as long as those given and made of words that the examples show. The rule is checked against
    every given question.

    Raises:
        ValueError: the rule cannot be read off the examples, or a given answer contradicts it.
    """
    head, mark, _ = items[0].prompt.partition(_LAST)
    rule = read_rule(items[0].prompt)
    asked = []
    for item in items:
        examples, _, last = item.prompt.partition(_LAST)
        words = last.split()
        if examples != head or apply_rule(rule, words) != item.answers[0]:
            raise ValueError(f"{item.id} does not follow the rule of its group")
        asked.append(tuple(words))
    draw = random.Random(f"{seed} {items[0].group}")
    words_known, seen, result = sorted(rule), set(asked), list(items[:count])
    while len(result) < count:
        words = draw.choices(words_known, k=len(draw.choice(asked)))
        if tuple(words) in seen:
            continue
        seen.add(tuple(words))
        answer = apply_rule(rule, words)
        result.append(
            replace(
                items[0],
                id=f"{items[0].group}+{len(result)}",
                prompt=head + mark + " ".join(words),
                reply=f"Answer: {answer}",
                answers=(answer,),
            )
        )
    return result
