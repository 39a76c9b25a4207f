"""Critical tokens: the counts on attention made by hand, on a model, and the figures of them."""

from __future__ import annotations

import pytest
import torch

from benchmarks.figures import attention, cli, critical_tokens
from benchmarks.figures.attention import significance
from benchmarks.figures.critical_tokens import CriticalTokens, critical_counts
from benchmarks.paths import NANO
from tests.tools.evaluation import tokenizer, tokenizer_of
from tests.tools.figures import BASE, make_llama


def test_significance_is_the_mean_from_later_tokens_and_the_largest_of_the_group():
    one = torch.tensor([[1.0, 0, 0], [0.25, 0.75, 0], [0.5, 0.25, 0.25]])
    two = torch.tensor([[1.0, 0, 0], [0.75, 0.25, 0], [0.25, 0.5, 0.25]])
    weights = torch.stack([one, two, one, one])
    found = significance([(0, weights[:, :2]), (2, weights[:, 2:])], 2)
    assert found.tolist() == [[0.5, 0.5, 0.0], [0.375, 0.25, 0.0]]
    assert significance([(0, weights)], 2, window=2)[0].tolist() == [1.0, 0.5, 0.0], "a token is seen by one other"


@pytest.mark.parametrize(("mass", "counts"), [(0.5, [1, 2]), (0.6, [2, 3]), (0.95, [3, 4]), (1.0, [3, 4])])
def test_fewest_tokens_that_hold_a_share(mass, counts):
    scores = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.25, 0.25, 0.25, 0.25]])
    assert critical_counts(scores, mass).tolist() == counts


def test_a_forward_pass_gives_what_the_model_s_own_weights_give(monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr("sglang_diffkv.attention.whole.QUERIES", 5)
    ids = tokenizer().encode("The cat sat on the mat, and the dog sat on the cat.")
    found = critical_tokens.measure(str(NANO), [ids, ids[:9]], 0.9)
    assert torch.tensor(found).shape == (2, 6, 2)
    model = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.bfloat16, attn_implementation="eager").eval()
    with torch.inference_mode():
        weights = model(torch.tensor([ids]), output_attentions=True, use_cache=False).attentions
    for layer, own in zip(found[0], weights):
        assert layer == critical_counts(significance([(0, own[0])], 2), 0.9).tolist()


def test_both_figures_share_one_pass(tmp_path, monkeypatch):
    passes = []

    def measure(path, prompts, mass):
        passes.append(len(prompts))
        return [[[1, 2], [3, 4]] for _ in prompts]

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


@pytest.mark.parametrize(
    ("dim", "heads", "kv_heads"), [(64, 9, 3), (96, 2, 2), (128, 7, 1), (128, 8, 2), (256, 4, 2), (80, 5, 5)]
)
def test_heads_of_any_dimension_and_group(tmp_path, dim, heads, kv_heads):
    """Against the attention weights of a model of random weights, as transformers works them out."""
    from transformers import AutoModelForCausalLM

    make_llama(tmp_path, head_dim=dim, num_attention_heads=heads, num_key_value_heads=kv_heads)
    ids, seen = list(range(3, 60)), []
    layers = attention.visit_layers(str(tmp_path), [ids], lambda layer, scores, values: seen.append((scores, values)))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager").eval()
    with torch.inference_mode():
        weights = model(torch.tensor([ids]), output_attentions=True, use_cache=False).attentions
    assert layers == len(weights) == len(seen) == 2
    for (scores, values), own in zip(seen, weights, strict=True):
        assert scores.shape == (kv_heads, 57) and values.shape == (kv_heads, 57, dim)
        expected = significance([(0, own[0])], kv_heads)
        assert (scores - expected).norm() < 0.02 * expected.norm(), "to the rounding of logits and weights"


def test_all_figures_of_a_model_with_heads_of_128(tmp_path, monkeypatch):
    model = make_llama(tmp_path / "heads128", head_dim=128, num_attention_heads=12, num_key_value_heads=12)
    monkeypatch.setattr(cli, "load_tokenizer", lambda path: tokenizer())
    out = ["--model", str(model), "--output", str(tmp_path / "out"), "--task", BASE[-1], "--n", "2"]
    assert cli.main(["fig2", "fig3", "fig4", "fig5", *out]) == 0
    for name in ("fig2", "fig3", "fig4", "fig5"):
        assert (tmp_path / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        text = (tmp_path / "out" / f"{name}.md").read_text()
        assert text.startswith(f"# {name}, heads128\n") and "benchmarks.figures fig2 fig3" in text
    assert text.count("\n| ") == 4 and "KV head 11" in text.splitlines()[-4], "a line for each of two layers"


def test_layers_with_other_heads_are_refused(monkeypatch):
    def visit_layers(path, prompts, visit):
        for layer, heads in enumerate((1, 2)):
            visit(layer, torch.ones(heads, 3), torch.ones(heads, 3, 4))

    monkeypatch.setattr(critical_tokens, "visit_layers", visit_layers)
    with pytest.raises(critical_tokens.EvaluationError, match="layers differ in their number of KV heads"):
        critical_tokens.measure("", [[1, 2, 3]], 0.5)
