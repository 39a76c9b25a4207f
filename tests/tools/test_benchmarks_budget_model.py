"""The played load of requests with a budget."""

from __future__ import annotations

import re
import sys

import pytest

from benchmarks.serving import budget_model
from benchmarks.serving.budget_model import Life, Load, run


def test_both_admissions_are_played(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--capacity", "3000", "--max-blocks", "4", "--block", "64", "--prompt", "40", "--reply", "700"]
    monkeypatch.setattr(sys, "argv", ["budget_model", *options, "--steps", "3000"])
    budget_model.main()
    told = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in told] == ["admitted one by one", "admitted together"]
    one_by_one, together = (float(re.findall(r"([\d.]+) running", line)[0]) for line in told)
    assert together > one_by_one > 3000 / 256 - 3


def test_a_request_is_compressed_when_it_is_full() -> None:
    """Its prompt is the prefix cache's until then, and what stays of it takes pages for the moment."""
    life = Life(Load(1000, 40, 300, keep=64, limit=96, page=8), prompt=40, left=300, late=2)
    held, taken = [], []
    for _ in range(130):
        pages = life.pages
        taken.append(life.step() - pages)
        held.append(life.held)
    assert held[:3] == [41, 42, 43] and held[55:59] == [96, 97, 64, 65], "two steps late"
    assert max(taken[:57]) == 1 and taken[57] == 0, "58 tokens take 8 pages, which take in what stays of the prompt"
    assert held[57 + 34] == 64 and life.left == 170


def test_no_more_run_than_may() -> None:
    assert max(run(Load(3000, 40, 700, 192, 256, most=5), 400).running) == 5
