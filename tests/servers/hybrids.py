"""Models of random weights whose layers are mostly linear attention or convolutions, with states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.paths import NANO

STATES_ENV = {"TRITON_INTERPRET": "1"}
"""Some of SGLang's layers with states call Triton on a CPU, others the placeholder of ``sgl_kernel``."""
HALF = {"SGLANG_MAMBA_CONV_DTYPE": "float16"}
"""For states of convolutions that run in Triton's interpreter, which makes NaN of bfloat16 there: with --dtype float16."""

SIZES: dict[str, Any] = {
    "vocab_size": 8256, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 8192, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PAGED = (1, 3)
"""Layers of the models here that attend; the other two of four have states."""


def make_qwen3_next(folder: Path) -> None:
    """Gated delta rule and gated attention with heads of 256, of which a quarter is rotated by position; experts."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    linear = {
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    }  # fmt: skip
    experts = {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    }  # fmt: skip
    kinds = ["linear_attention", "full_attention"] * 2
    config = Qwen3NextConfig(**SIZES, **linear, **experts, head_dim=256, num_hidden_layers=4, layer_types=kinds)
    _make(folder, Qwen3NextForCausalLM, config)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "full_attention_interval": 2}))


def make_lfm2(folder: Path) -> None:
    """Short convolutions."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    kinds = ["conv", "full_attention"] * 2
    more = {"conv_L_cache": 3, "block_auto_adjust_ff_dim": False, "head_dim": 64}
    _make(folder, Lfm2ForCausalLM, Lfm2Config(**SIZES, **more, num_hidden_layers=4, layer_types=kinds))


def _make(folder: Path, kind: Any, config: Any) -> None:
    from transformers import AutoTokenizer

    torch.manual_seed(0)
    model = kind(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "embed" not in name:
                weight.mul_(4)  # so that attention and logits are apart
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(NANO).save_pretrained(folder)
