"""Models of random weights whose layers have sliding windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.quality.random_hybrids import save_random

WINDOW = 64
"""Tokens that a query of a sliding layer sees, itself included."""

SIZES: dict[str, Any] = {
    "vocab_size": 8256, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 8192, "sliding_window": WINDOW,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def make_gemma3(folder: Path) -> None:
    """Six layers, of which the last sees everything; the others slide."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    save_random(folder, Gemma3ForCausalLM, Gemma3TextConfig(**SIZES, num_hidden_layers=6, layer_types=kinds))


def make_gemma2(folder: Path, cap: float | None) -> None:
    """Four layers, of which every other slides, with capped logits, and attention's logits capped by ``cap``."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    caps = {"attn_logit_softcapping": cap, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 64}
    more = {"hidden_act": "gelu_pytorch_tanh"}  # SGLang reads it, as Gemma-2's own files have it
    save_random(folder, Gemma2ForCausalLM, Gemma2Config(**SIZES, **caps, **more, num_hidden_layers=4))


def make_gpt_oss(folder: Path) -> None:
    """Four layers, of which every other slides, with attention sinks and experts."""
    from transformers import GptOssConfig, GptOssForCausalLM

    kinds = ["sliding_attention", "full_attention"] * 2
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 7.0}
    save_random(folder, GptOssForCausalLM, GptOssConfig(**SIZES, **experts, num_hidden_layers=4, layer_types=kinds))
