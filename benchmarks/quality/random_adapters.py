"""LoRA adapters of random weights for nano's attention."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.quality.random_drafts import DIM, HEADS, HIDDEN, KV_HEADS, NANO_CONFIG

RANK = 4
NAMES = ("a", "b")
WIDTHS = {"q_proj": HEADS * DIM, "k_proj": KV_HEADS * DIM, "v_proj": KV_HEADS * DIM, "o_proj": HIDDEN}
"""Numbers that a layer's projections give."""
READS = {"q_proj": HIDDEN, "k_proj": HIDDEN, "v_proj": HIDDEN, "o_proj": HEADS * DIM}


def adapter_args(folder: Path) -> tuple[str, ...]:
    """Arguments of a server that has the adapters of ``folder``, all of which and none may run in one batch."""
    paths = [f"{name}={folder / name}" for name in NAMES]
    ranks = ("--max-lora-rank", str(RANK), "--max-loras-per-batch", str(len(NAMES) + 1))
    return ("--enable-lora", "--lora-paths", *paths, *ranks)


def make_adapters(folder: Path, scale: float = 0.07) -> None:
    """One adapter for each of ``NAMES`` in a folder of that name. ``scale``: of the weights of its second factors."""
    for seed, name in enumerate(NAMES):
        _make(folder / name, seed, scale)


def _make(folder: Path, seed: int, scale: float) -> None:
    folder.mkdir(parents=True)
    draw = torch.Generator().manual_seed(seed)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK, "lora_dropout": 0.0,
        "target_modules": list(WIDTHS), "bias": "none",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weights = {}
    for layer in range(NANO_CONFIG["num_hidden_layers"]):
        for module, width in WIDTHS.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_"
            weights[prefix + "A.weight"] = torch.randn(RANK, READS[module], generator=draw) * 0.1
            weights[prefix + "B.weight"] = torch.randn(width, RANK, generator=draw) * scale
    save_file(weights, folder / "adapter_model.safetensors")
