"""A chart that cannot be drawn: what is said, and that the numbers stay."""

from __future__ import annotations

import json

import matplotlib.figure
import pytest

from benchmarks.figures import cli as figures
from benchmarks.serving import stationary
from sglang_diffkv.drawing import drawn
from tests.tools.evaluation import REFERENCE


@pytest.fixture
def no_figures(monkeypatch):
    """As matplotlib beside a package that calls itself IPython."""

    def broken(*args, **kwargs):
        raise AttributeError("module 'IPython' has no attribute 'version_info'\nmore")

    monkeypatch.setattr(matplotlib.figure.Figure, "__init__", broken)


def test_what_is_said(capsys):
    assert drawn(lambda: None) and not drawn(lambda: 1 / 0, "redraw it")
    said = capsys.readouterr().err
    assert said == "no chart: ZeroDivisionError: division by zero; where charts can be drawn: redraw it\n"


def test_a_figure_keeps_its_numbers(no_figures, tmp_path, capsys):
    assert figures.main(["fig3", "--task", REFERENCE, "--n", "1", "--output", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "no chart: AttributeError: module 'IPython' has no attribute 'version_info'; where" in err
    assert "fig3.md" in out and "fig3.png" not in out
    assert json.loads((tmp_path / "fig3.json").read_text())["model"] == "nano"


def test_a_benchmark_of_servers_keeps_its_status(no_figures, tmp_path, monkeypatch, capsys):
    record = {"backend": "a", "status": "ok", "running": [(0, 1), (1, 2)]}
    monkeypatch.setattr(stationary, "measure_each", lambda args, data, *more: data.update(records=[record]) or 0)
    assert stationary.main(["--output", str(tmp_path), "--backends", "triton:bf16"]) == 0
    assert capsys.readouterr().err.startswith("no chart: AttributeError: ")
