"""Checkpoints made of the nano model: SGLang's own decoders give weights back, and transformers loads the experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.paths import NANO
from benchmarks.quality import make_checkpoints

INNER, PADDED = 704, 768
ROUNDING = 0.51
"""Of a step: half of one, and the rounding of steps to fp16 at the ends of the range."""


def _gptq(parts: dict[str, torch.Tensor], group_size: int) -> torch.Tensor:
    from sglang.srt.hardware_backend.xpu.quantization.int4pack_utils import unpack_gptq_qweight, unpack_gptq_qzeros

    groups = parts["g_idx"].long()
    codes, zeros = unpack_gptq_qweight(parts["qweight"]), unpack_gptq_qzeros(parts["qzeros"]) + 1
    assert groups.tolist() == [i // group_size for i in range(len(codes))]
    return (codes - zeros[groups]) * parts["scales"].float()[groups]


def _awq(parts: dict[str, torch.Tensor], group_size: int) -> torch.Tensor:
    from sglang.kernels.ops.quantization.awq_triton import awq_dequantize_decomposition

    assert "g_idx" not in parts
    return awq_dequantize_decomposition(parts["qweight"], parts["scales"].float(), parts["qzeros"])


@pytest.mark.parametrize("group_size", [64, 128])
@pytest.mark.parametrize(("kind", "decode"), [("gptq", _gptq), ("awq", _awq)])
def test_weights_come_back_as_round_to_nearest_leaves_them(
    kind: str, decode: Any, group_size: int, tmp_path: Path
) -> None:
    folder = tmp_path / kind
    make_checkpoints.main([str(folder), "--kind", kind, "--group-size", str(group_size)])
    config = json.loads((folder / "config.json").read_text())
    assert config["intermediate_size"] == PADDED
    assert config["quantization_config"]["quant_method"] == kind
    assert config["quantization_config"]["group_size"] == group_size
    made, given = load_file(folder / "model.safetensors"), load_file(NANO / "model.safetensors")
    for name, weight in given.items():
        if not name.endswith("_proj.weight"):
            assert torch.equal(made[name], weight.half())
            continue
        layer = name.removesuffix("weight")
        parts = {x.removeprefix(layer): value for x, value in made.items() if x.startswith(layer)}
        assert {x.dtype for x in parts.values()} == {torch.int32, torch.float16}
        back = decode(parts, group_size).t()
        steps = parts["scales"].float().repeat_interleave(group_size, 0).t()
        wide, high = weight.shape[1], weight.shape[0]
        assert back.shape == (PADDED if high == INNER else high, PADDED if wide == INNER else wide)
        error = (back[:high, :wide] - weight.float()).abs() / steps[:high, :wide]
        assert 0.45 < error.max() < ROUNDING and 0.2 < error.mean() < 0.3, name
        assert not back[high:].any() and not back[:, wide:].any(), "what pads a matrix is not zero"


@pytest.mark.parametrize("noise", [0.0, make_checkpoints.NOISE])
def test_transformers_loads_the_experts(noise: float, tmp_path: Path) -> None:
    """All weights have a place, and experts that are all the model's MLP compute what it computes."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "moe"
    make_checkpoints.main([str(folder), "--kind", "qwen3-moe"])
    if not noise:
        config, weights = json.loads((NANO / "config.json").read_text()), load_file(NANO / "model.safetensors")
        save_file(make_checkpoints.with_experts(config, weights, 0, noise)[1], folder / "model.safetensors")
    made, loading = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert type(made).__name__ == "Qwen3MoeForCausalLM"
    assert "lm_head.weight" in load_file(folder / "model.safetensors"), "SGLang ties no embeddings of this model"
    assert not any(loading[x] for x in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading
    ids = torch.randint(100, 1900, (1, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32)(ids).logits
        logits = made(ids).logits
    far = (logits - expected).abs().max() / expected.std()
    assert far < 1e-4 if noise == 0 else 1e-2 < far < 2


def test_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError):
        make_checkpoints.make(tmp_path, "awq")
