"""Scores of a reply against a known answer, from 0 to 1, as LongBench (Bai et al., 2023) and RULER (Hsieh et al., 2024)
define them.

Two differ from LongBench's programs: Chinese is compared by characters where those cut it into words (jieba), and
ROUGE-L is of the whole texts where those take it sentence by sentence.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher
from string import punctuation


def all_found(text: str, values: Sequence[str]) -> float:
    """Share of the values that occur in a text, letter case ignored."""
    return sum(value.lower() in text.lower() for value in values) / len(values)


def any_found(text: str, values: Sequence[str]) -> float:
    """1 if one of the values occurs in a text, letter case ignored."""
    return float(any(value.lower() in text.lower() for value in values))


def _f1(shared: float, given: int, wanted: int) -> float:
    return 2 * shared / (given + wanted) if shared else 0.0


def words(text: str) -> list[str]:
    """Lower-case words without ASCII punctuation and articles."""
    bare = text.lower().translate(str.maketrans("", "", punctuation))
    return [word for word in bare.split() if word not in ("a", "an", "the")]


def characters(text: str) -> list[str]:
    """Lower-case characters without punctuation and space."""
    return [x for x in text.lower() if x not in punctuation and unicodedata.category(x)[0] not in "PZC"]


def f1(given: Sequence[str], wanted: Sequence[str]) -> float:
    """F1 of two bags of words."""
    return _f1(sum((Counter(given) & Counter(wanted)).values()), len(given), len(wanted))


def rouge_l(given: Sequence[str], wanted: Sequence[str]) -> float:
    """F1 of the longest common subsequence."""
    row = [0] * (len(wanted) + 1)
    for word in given:
        before = 0
        for at, other in enumerate(wanted, 1):
            above = row[at]
            row[at] = before + 1 if word == other else max(above, row[at - 1])
            before = above
    return _f1(row[-1], len(given), len(wanted))


def classified(text: str, wanted: str, classes: Sequence[str]) -> float:
    """1 over the number of classes that a text names, if the right one is among them. Names that are a part of the
    right one's do not count."""
    named = [x for x in classes if x in text and (x == wanted or x not in wanted)]
    return 1 / len(named) if wanted in named else 0.0


def numbered(text: str, wanted: str) -> float:
    """Share of a text's whole numbers that are the one in ``wanted``."""
    numbers, right = re.findall(r"\d+", text), re.findall(r"\d+", wanted)
    return numbers.count(right[0]) / len(numbers) if numbers else 0.0


def similar_line(text: str, wanted: str) -> float:
    """Similarity of the text's first line without a fence or comment to a line of code, to the percent."""
    lines = (line for line in text.lstrip("\n").split("\n") if not re.search("`|#|//", line))
    return round(SequenceMatcher(None, next(lines, ""), wanted).ratio(), 2)
