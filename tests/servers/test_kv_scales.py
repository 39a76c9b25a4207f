"""What a checkpoint says of its KV cache's quantisation, and that it is told and not applied; without a server."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_diffkv.srt.models.kv_scales import ALGORITHM, MODELOPT, asked_cache, told

COMPRESSED = {
    "quant_method": "compressed-tensors",
    "kv_cache_scheme": {"type": "float", "num_bits": 8, "dynamic": False},
}
TIERS = ("K8V4", "K4V2")


def _model(folder: Path, quantisation: Any = None, beside: Any = None) -> Any:
    """SGLang's model configuration, of a ``config.json`` and a ModelOpt file beside it."""
    if beside is not None:
        (folder / MODELOPT).write_text(beside if isinstance(beside, str) else json.dumps(beside))
    return SimpleNamespace(hf_config=SimpleNamespace(quantization_config=quantisation), model_path=str(folder))


@pytest.mark.parametrize(
    ("quantisation", "beside", "asked"),
    [
        (COMPRESSED, None, "8-bit float (kv_cache_scheme) in config.json"),
        (SimpleNamespace(to_dict=lambda: COMPRESSED), None, "8-bit float (kv_cache_scheme) in config.json"),
        ({"quant_method": "modelopt", ALGORITHM: "FP8"}, None, f'"FP8" ({ALGORITHM}) in config.json'),
        (None, {"quantization": {"quant_algo": "FP8", ALGORITHM: "NVFP4"}}, f'"NVFP4" ({ALGORITHM}) in {MODELOPT}'),
        (None, {"quantization": {"quant_algo": "FP8", ALGORITHM: None}}, ""),
        ({"quant_method": "modelopt", ALGORITHM: "none"}, None, ""),
        ({"quant_method": "fp8"}, None, ""),
        (None, None, ""),
        (None, "{broken", ""),
        (None, [], ""),
    ],
)  # fmt: skip
def test_what_a_checkpoint_asks_for(quantisation: Any, beside: Any, asked: str, tmp_path: Path) -> None:
    model = _model(tmp_path, quantisation, beside)
    assert asked_cache(model) == asked
    line = told(model, TIERS)
    assert bool(line) == bool(asked)
    if asked:
        assert asked in line and "K8V4, K4V2" in line and "are not applied" in line
