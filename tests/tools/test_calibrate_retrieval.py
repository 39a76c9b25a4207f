"""Which heads look far back: measured as transformers' own attention says it, and written as a server reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.paths import NANO
from sglang_diffkv.attention import whole
from sglang_diffkv.calibrate import retrieval
from sglang_diffkv.config import load_config
from sglang_diffkv.evaluate.prompts import load_tokenizer
from sglang_diffkv.policies.duo import DuoPolicyConfig

TEXT = "The quick brown fox jumps over the lazy dog. 12 + 30 = 42; sorted: 1 2 3 5 8.\n" * 12
PASSAGE, WINDOW, SINKS = 40, 12, 3


def test_shares_are_those_of_the_model_s_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two passages, each read twice in a row; queries in more than one block."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(whole, "QUERIES", 16)
    text, output = tmp_path / "text.txt", tmp_path / "full_attention_heads.tsv"
    text.write_text(TEXT, encoding="utf-8")
    args = ["--model", str(NANO), "--text", str(text), "--tokens", "90", "--window-tokens", str(PASSAGE)]
    limits = ["--window", str(WINDOW), "--sinks", str(SINKS)]
    assert retrieval.main([*args, *limits, "--output", str(output)]) == 0
    ids = load_tokenizer(str(NANO))(TEXT, add_special_tokens=False)["input_ids"][:90]
    model = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.bfloat16, attn_implementation="eager").eval()
    found = []
    for passage in (ids[:PASSAGE], ids[PASSAGE : 2 * PASSAGE]):
        with torch.inference_mode():
            attention = model(torch.tensor([passage * 2]), output_attentions=True).attentions
        layers = torch.stack([x[0, :, PASSAGE:].float() for x in attention])  # [L, Hq, M, N]
        query, key = torch.arange(PASSAGE, 2 * PASSAGE)[:, None], torch.arange(2 * PASSAGE)
        found.append((layers * ((key >= SINKS) & (key <= query - WINDOW))).sum(3).mean(2))
    mean = torch.stack(found).mean(0)  # [L, Hq]
    policy = load_config(json.dumps({"tiers": ["BF16"], "policy": {"name": "duo", "pattern": str(output)}})).policy
    assert isinstance(policy, DuoPolicyConfig)
    expected = mean.view(len(mean), len(policy.pattern[0]), -1).amax(2)
    got = torch.tensor(policy.pattern)
    assert got.shape == expected.shape and (got - expected).abs().max() < 0.02 and expected.max() > 0.1


def test_what_cannot_be_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a few words", encoding="utf-8")
    args = ["--model", str(NANO), "--text", str(text), "--output", str(tmp_path / "heads.tsv")]
    assert retrieval.main(args) == 1 and "too few" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        retrieval.main([*args, "--window-tokens", "100", "--window", "101"])
    assert not (tmp_path / "heads.tsv").exists()
