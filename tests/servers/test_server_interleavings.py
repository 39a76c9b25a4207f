"""Under the lossless tier no interleaving of sharing, forks, aborts, eviction and retraction changes a token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.quality import interleavings


@pytest.mark.server
@pytest.mark.parametrize("runs", [1, pytest.param(2, marks=pytest.mark.full)])
def test_any_interleaving_gives_the_tokens_of_no_sharing(runs: int, tmp_path: Path) -> None:
    output = tmp_path / "runs.json"
    args = ["--questions", "14", "--runs", str(runs), "--max-new-tokens", "40", "--pool", "560", "--check-integrity"]
    assert interleavings.main([*args, "--output", str(output)]) == 0
    found = json.loads(output.read_text())["runs"]
    replies, differ = (sum(n) for n in zip(*[(x["replies"], len(x["differences"])) for x in found], strict=True))
    assert replies > 8 * runs
    assert differ <= 0.25 * replies, "more replies differ than rounding explains"


def _run(**changes: Any) -> dict[str, Any]:
    good = {"run": 0, "differences": [], "ties": 0, "cached_tokens": 9, "retracted": 1, "pages_lost": 0, "faults": 0}
    return {**good, **changes}


def test_what_counts_as_a_fault() -> None:
    assert not interleavings.faults_of([_run(), _run(differences=[{}], ties=1, retracted=0)])
    assert "1 replies differ" in interleavings.faults_of([_run(differences=[{}, {}], ties=1)])[0]
    assert "3 pages are lost" in interleavings.faults_of([_run(pages_lost=3)])[0]
    assert "pool empty" in interleavings.faults_of([_run(faults=1)])[0]
    assert "no run had retracted" in interleavings.faults_of([_run(retracted=0)])[0]
