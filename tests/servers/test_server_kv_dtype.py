"""Checkpoints that ask for an FP8 KV cache are served from the tiers, as the same model without that wish is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.paths import NANO
from sglang_diffkv.evaluate.server import Server
from sglang_diffkv.srt.versions.compat import installed
from tests.servers.shared import STRICT, tokens

pytestmark = [pytest.mark.server, pytest.mark.versions]

CONFIG = {"tiers": ["K8V4", "K4V2"]}
KV_SCHEME = {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True, "dynamic": False}
"""An FP8 cache with a scale a layer, as compressed-tensors writes it."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The nano model with such a wish, and scales far from 1 for its cache; its weights stay bf16."""
    folder = tmp_path_factory.mktemp("kv") / "nano"
    shutil.copytree(NANO, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {},
        "ignore": ["re:.*"],
        "kv_cache_scheme": KV_SCHEME,
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        for scale in ("k_scale", "v_scale"):
            weights[f"model.layers.{layer}.self_attn.{scale}"] = torch.tensor(7.0)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _replies(server: Server) -> list[list[int]]:
    prompts = [tokens(300, 1), tokens(300, 2), tokens(300, 1)[:200] + tokens(60, 3)]
    parameters = {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}
    return [server.generate({"input_ids": x, "sampling_params": parameters})["output_ids"] for x in prompts]


def test_a_checkpoint_that_asks_for_an_fp8_cache_gets_the_tiers(
    server_of: Callable[..., Server], checkpoint: Path
) -> None:
    size = ["--max-total-tokens", "2000"]
    expected = _replies(server_of("diffkv", [*size, "--kv-cache-dtype", "bf16"], config=CONFIG, env=STRICT))
    server = server_of("diffkv", size, model=checkpoint, config=CONFIG, env=STRICT)
    assert _replies(server) == expected
    before, loading, _ = server.log_text().partition("Load weight begin")
    assert loading and "asks for a KV cache of 8-bit float (kv_cache_scheme) in config.json" in before
    if installed().declared_arguments:  # SGLang 0.5.17 does not ask checkpoints of this kind
        assert "was to be torch.float8_e4m3fn" in server.log_text()
