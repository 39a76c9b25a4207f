"""Few variants of a parametrised test that together show what all of them show."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence


def covering(variants: Sequence[Mapping[str, object]], k: int) -> list[int]:
    """Indices of variants, given by their parameters' values, among which every ``k`` values of different parameters
    occur together that do so in any variant; greedy, so not always the fewest."""
    shown = []
    for variant in variants:
        values = sorted((name, repr(value)) for name, value in variant.items())
        shown.append(set(itertools.combinations(values, min(k, len(values)))))
    missing = set().union(*shown)
    chosen = []
    while missing:
        best = max(range(len(shown)), key=lambda i: len(shown[i] & missing))
        missing -= shown[best]
        chosen.append(best)
    return sorted(chosen)
