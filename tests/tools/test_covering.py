"""Which variants ``make test`` runs of a test marked ``cover``."""

from __future__ import annotations

import itertools

import pytest

from tests.covering import covering

GRID = [
    dict(zip("abcd", values, strict=True)) for values in itertools.product(range(3), range(3), range(4), [None, {}])
]


@pytest.mark.parametrize(("k", "most"), [(1, 4), (2, 16), (3, 48), (4, 72), (9, 72)])
def test_what_occurs_together_is_kept(k: int, most: int) -> None:
    def shown(variants: list[dict]) -> set[str]:
        return {repr(x) for v in variants for x in itertools.combinations(v.items(), min(k, 4))}

    chosen = covering(GRID, k)
    assert shown([GRID[i] for i in chosen]) == shown(GRID)
    assert len(set(chosen)) == len(chosen) <= most


def test_values_that_never_meet_are_not_asked_for() -> None:
    cases = [{"tiers": "a", "dim": 64}, {"tiers": "b", "dim": 96}, {"tiers": "a", "dim": 64, "more": 1}]
    assert covering(cases, 2) == [1, 2]
    assert covering([{}, {}], 1) == [0]
