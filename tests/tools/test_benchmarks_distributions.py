"""Figures 2 and 3: spreads by hand, the figures on the nano model, and drawn again."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import redraw
from benchmarks.figures import cli, distributions, token_scores
from benchmarks.figures.distributions import LOWEST, PER_DECADE, Distributions, Spread, bins_of
from benchmarks.figures.token_scores import TokenScores
from tests.tools.evaluation import DATA, tokenizer_of
from tests.tools.figures import BASE


def test_bins_are_powers_of_ten():
    counts = bins_of(torch.tensor([[1.0, 1.1], [0.0102, 1e-30], [0.0, 1e20]]))
    zero = -LOWEST * PER_DECADE
    assert counts[zero] == 2 and counts[zero - 2 * PER_DECADE] == 1 and counts[0] == 2 and counts[-1] == 1
    assert counts.sum() == 6


def test_spans_leave_out_the_outermost():
    """Of 10,000 numbers 4 are far below and 4 far above; the others lie in two bins, three decades apart."""
    counts = [4] + [0] * 99 + [5000] + [0] * (3 * PER_DECADE - 1) + [4992] + [0] * 50 + [4]
    x = Spread(layer=0, quantity="q", first=0, counts=counts)
    assert x.quantile(0.5) == pytest.approx(LOWEST + 101 / PER_DECADE)
    assert x.decades() == pytest.approx(3 + 1 / PER_DECADE)
    assert x.quantile(1.0) == pytest.approx(x.edges()[-1])


def test_figures_of_the_nano_model(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "load_tokenizer", tokenizer_of)
    args = [*BASE[:2], "--task", f"wikitext={DATA / 'prose.txt'}", "--prefix-tokens", "120", "--window-tokens", "40"]
    assert cli.main(["fig2", "fig3", *args, "--n", "2", "--output", str(tmp_path)]) == 0
    data = Distributions.model_validate_json((tmp_path / "fig2.json").read_text())
    tokens = sum(data.tokens)
    assert len(data.tokens) == 2 and [x.layer for x in data.of(distributions.SCORE)] == [0, 3, 5]
    assert {sum(x.counts) for x in data.of(distributions.NORM)} == {2 * tokens}, "two KV heads"
    assert {sum(x.counts) for x in data.of(distributions.SCORE)} == {2 * (tokens - 2)}, "last tokens have no score"
    assert max(x.decades() for x in data.of(distributions.NORM)) < min(
        x.decades() for x in data.of(distributions.SCORE)
    ), "what the paper found, on this model too"
    one = TokenScores.model_validate_json((tmp_path / "fig3.json").read_text())
    assert (one.layer, one.layers, len(one.scores)) == (1, 6, 2) and len(one.scores[0]) == max(data.tokens)
    assert all(head[-1] == 0 < head[0] < 1 for head in one.scores)
    rows = token_scores.table(one).splitlines()
    assert len(rows) == 4 and rows[2].startswith("| 0 | ")
    for name in ("fig2", "fig3"):
        image = tmp_path / f"{name}.png"
        image.unlink()
        redraw.main([str(tmp_path / f"{name}.json")])
        assert image.read_bytes().startswith(b"\x89PNG")


def test_a_layer_that_is_not_there(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "load_tokenizer", tokenizer_of)
    assert cli.main(["fig3", *BASE, "--n", "1", "--layer", "6", "--output", str(tmp_path)]) == 1
    assert "the model has layers 0 to 5 that attend" in capsys.readouterr().err


def test_shares_of_the_top_tokens_by_hand():
    data = {"figure": "fig3", "model": "m", "settings": {}, "question": "q", "layer": 0, "layers": 1}
    one = TokenScores.model_validate_json(json.dumps({**data, "scores": [[0.5] + [0.5 / 99] * 99]}))
    assert token_scores.table(one).splitlines()[2] == "| 0 | 50 | 52 | 60 | 75 | 1 |"
