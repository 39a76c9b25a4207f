"""Attention of the models that are read: what transformers' own gives, windows, caps and sinks included."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.quality.random_windows import WINDOW, make_gemma2, make_gemma3, make_gpt_oss
from sglang_diffkv.attention import whole
from sglang_diffkv.attention.whole import Sight, causal
from sglang_diffkv.calibrate import means
from sglang_diffkv.calibrate.layers import cli as layers
from sglang_diffkv.calibrate.reading import load
from sglang_diffkv.key_means import read_key_means

TEXT = "The quick brown fox jumps over the lazy dog. 12 + 30 = 42; sorted: 1 2 3 5 8.\n" * 12


def own(path: Path, ids: torch.Tensor) -> Any:
    """What transformers gives, with its own masks."""
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(path, **options).eval()
    with torch.inference_mode():
        return model.model(ids, use_cache=True)


@pytest.mark.parametrize(
    ("make", "has"),
    [
        (make_gemma3, ("window",)),
        (partial(make_gemma2, cap=5.0), ("window", "softcap")),
        (make_gpt_oss, ("window", "sinks")),
    ],
)
def test_attention_is_the_model_s(
    make: Callable[[Path], None], has: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path)
    monkeypatch.setattr(whole, "QUERIES", 32)
    seen: list[Sight] = []

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **kwargs: Any) -> Any:
        seen.append(Sight.of(kwargs))
        return causal(query, key, value, scaling, seen[-1]), None

    model = load(str(tmp_path), attend).float()
    ids = torch.arange(3, 3 + WINDOW + 20).unsqueeze(0)
    with torch.inference_mode():
        found = model.model(ids, use_cache=False).last_hidden_state
    expected = own(tmp_path, ids).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for name in has:
        assert any(getattr(x, name) is not None for x in seen)
    monkeypatch.setattr(Sight, "of", lambda kwargs: Sight())
    with torch.inference_mode():
        blind = model.model(ids, use_cache=False).last_hidden_state
    assert (blind - expected).norm() > 0.01 * expected.norm(), "the test sees what it is for"


def test_key_means_of_a_model_whose_layers_slide(tmp_path: Path) -> None:
    """The last layer sees all, so its keys are in the model's cache; they depend on five layers that slide."""
    from sglang_diffkv.evaluate.prompts import load_tokenizer

    model, text, output = tmp_path / "model", tmp_path / "text.txt", tmp_path / "means.safetensors"
    make_gemma3(model)
    text.write_text(TEXT, encoding="utf-8")
    args = ["--model", str(model), "--text", str(text), "--tokens", "160", "--window-tokens", "160"]
    assert means.main([*args, "--output", str(output)]) == 0
    ids = load_tokenizer(str(model))(TEXT, add_special_tokens=False)["input_ids"][:160]
    expected = own(model, torch.tensor([ids])).past_key_values.layers[5].keys[0, :, means.SINKS :].mean(1)
    got = read_key_means(str(output), 6, *expected.shape)[5]
    assert (got - expected).norm() < 0.02 * expected.norm()


def test_sizes_by_layer_are_not_measured_where_xkv_is_not_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, text = tmp_path / "model", tmp_path / "text.txt"
    make_gemma3(model)
    text.write_text(TEXT * 12, encoding="utf-8")
    args = ["--model", str(model), "--task", f"wikitext={text}", "--n", "1", "--keep", "0.5"]
    assert layers.main([*args, "--output", str(tmp_path / "layers.json")]) == 1
    assert "layers with a sliding window" in capsys.readouterr().err
