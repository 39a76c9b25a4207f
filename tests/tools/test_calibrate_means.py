"""What keys have in common: measured on the model's own cache, and written as a server reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from benchmarks.paths import NANO
from sglang_diffkv.calibrate import means
from sglang_diffkv.evaluate.prompts import load_tokenizer
from sglang_diffkv.key_means import read_key_means

TEXT = "The quick brown fox jumps over the lazy dog. 12 + 30 = 42; sorted: 1 2 3 5 8.\n" * 12


def test_means_are_those_of_the_model_s_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two sequences of 40 tokens, of which the first four do not count."""
    from transformers import AutoModelForCausalLM

    text, output = tmp_path / "text.txt", tmp_path / "means.safetensors"
    text.write_text(TEXT, encoding="utf-8")
    args = ["--model", str(NANO), "--text", str(text), "--tokens", "80", "--window-tokens", "40"]
    assert means.main([*args, "--output", str(output)]) == 0
    assert "over 72 tokens" in capsys.readouterr().out
    ids = load_tokenizer(str(NANO))(TEXT, add_special_tokens=False)["input_ids"][:80]
    model = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.bfloat16).eval()
    found: list[list[torch.Tensor]] = []
    for window in (ids[:40], ids[40:]):
        with torch.inference_mode():
            cache = model(torch.tensor([window]), use_cache=True).past_key_values
        found.append([layer.keys[0, :, 4:].float() for layer in cache.layers])
    expected = torch.stack([torch.cat(pair, 1).mean(1) for pair in zip(*found, strict=True)])
    got = read_key_means(str(output), *expected.shape)
    assert (got - expected).norm() < 0.02 * expected.norm()
    with safe_open(output, "pt") as file:
        facts = file.metadata()
    assert facts["model"] == NANO.name and facts["tokens"] == "72" and len(facts["text_sha256"]) == 64


def test_a_text_that_is_too_short_or_a_model_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a", encoding="utf-8")
    output = ["--output", str(tmp_path / "out.safetensors")]
    assert means.main(["--model", str(NANO), "--text", str(text), *output]) == 1
    assert "too few" in capsys.readouterr().err
    text.write_text(TEXT, encoding="utf-8")
    empty = tmp_path / "model"
    empty.mkdir()
    args = ["--model", str(empty), "--tokenizer", str(NANO), "--text", str(text)]
    assert means.main([*args, *output]) == 1 and "transformers" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        means.main(["--model", str(NANO), "--text", str(text), "--window-tokens", "4", *output])
