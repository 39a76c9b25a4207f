"""Critical tokens: the counts on attention made by hand, on a model, and the figures of them."""

from __future__ import annotations

import pytest
import torch

from benchmarks.figures import cli, critical_tokens
from benchmarks.figures.critical_tokens import CriticalTokens, critical_counts, significance
from benchmarks.paths import NANO
from tests.tools.evaluation import tokenizer, tokenizer_of
from tests.tools.figures import BASE


def test_significance_is_the_mean_from_later_tokens_and_the_largest_of_the_group():
    one = torch.tensor([[1.0, 0, 0], [0.25, 0.75, 0], [0.5, 0.25, 0.25]])
    two = torch.tensor([[1.0, 0, 0], [0.75, 0.25, 0], [0.25, 0.5, 0.25]])
    found = significance(torch.stack([one, two, one, one]), 2)
    assert found.tolist() == [[0.5, 0.5, 0.0], [0.375, 0.25, 0.0]]


@pytest.mark.parametrize(("mass", "counts"), [(0.5, [1, 2]), (0.6, [2, 3]), (0.95, [3, 4]), (1.0, [3, 4])])
def test_fewest_tokens_that_hold_a_share(mass, counts):
    scores = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.25, 0.25, 0.25, 0.25]])
    assert critical_counts(scores, mass).tolist() == counts


def test_a_forward_pass_gives_what_the_model_s_own_weights_give():
    model = critical_tokens.load_model(str(NANO))
    ids = tokenizer().encode("The cat sat on the mat, and the dog sat on the cat.")
    found = critical_tokens.measure(model, [ids], 0.9)
    assert torch.tensor(found).shape == (1, 6, 2)
    with torch.inference_mode():
        weights = model(torch.tensor([ids]), output_attentions=True, use_cache=False).attentions
    for layer, attention in zip(found[0], weights):
        assert layer == critical_counts(significance(attention[0], 2), 0.9).tolist()


def test_both_figures_share_one_pass(tmp_path, monkeypatch):
    passes = []

    def measure(model, prompts, mass):
        passes.append(len(prompts))
        return [[[1, 2], [3, 4]] for _ in prompts]

    monkeypatch.setattr(critical_tokens, "load_model", lambda path: None)
    monkeypatch.setattr(critical_tokens, "measure", measure)
    monkeypatch.setattr(cli, "load_tokenizer", tokenizer_of)
    args = [*BASE, "--n", "3", "--max-tokens", "8", "--output", str(tmp_path)]
    assert cli.main(["fig4", "fig5", *args]) == 0 and passes == [3]
    assert cli.main(["fig5", *args]) == 0 and passes == [3], "taken from the file"
    assert cli.main(["fig5", *args, "--mass", "0.5"]) == 0 and passes == [3, 3]
    data = CriticalTokens.model_validate_json((tmp_path / "fig4.json").read_text())
    assert data.tokens == [8, 8, 8] and data.settings["cut"] == 3
    assert data.percent()[0].tolist() == [[12.5, 25.0], [37.5, 50.0]]
    assert "n = 3" in critical_tokens.subject(data) and "(3 cut)" in critical_tokens.subject(data)
    for name in ("fig4", "fig5"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "answers.jsonl").exists(), "no server is asked"


def test_a_model_of_another_build_is_refused():
    with (
        pytest.raises(critical_tokens.EvaluationError, match="0 of 2 layers have a module self_attn"),
        critical_tokens.attention_of(_Other()),
    ):
        pass


class _Other(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1)
        self.config = type("Config", (), {"num_hidden_layers": 2})
