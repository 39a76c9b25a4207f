"""Checkpoints that say how their KV cache is to be quantised, as llm-compressor and ModelOpt write them.

Their scales, one for all keys or values of a layer, fit an FP8 cache to what a layer computes. Pages have a scale for
each vector, so nothing is left for them to do, and they are not applied.
"""

from __future__ import annotations

from typing import Any

from sglang_diffkv.calibration import model_file
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.files import quoted, read_json

MODELOPT = "hf_quant_config.json"
SCHEME, ALGORITHM = "kv_cache_scheme", "kv_cache_quant_algo"


def asked_cache(model: Any) -> str:
    """What cache the checkpoint of SGLang's ``ModelConfig`` asks for, and where it says so; empty if it does not."""
    given = getattr(model.hf_config, "quantization_config", None)
    if given is not None and not isinstance(given, dict):
        given = given.to_dict() if hasattr(given, "to_dict") else None
    if asked := _asked(given):
        return f"{asked} in config.json"
    path = model_file(model.model_path, MODELOPT)
    try:
        beside = None if path is None else read_json(path)
    except ConfigError:  # SGLang says what is wrong with it
        return ""
    section = beside.get("quantization") if isinstance(beside, dict) else None
    asked = _asked(section) or _asked(beside)
    return f"{asked} in {MODELOPT}" if asked else ""


def _asked(given: Any) -> str:
    if not isinstance(given, dict):
        return ""
    scheme, algorithm = given.get(SCHEME), given.get(ALGORITHM)
    if isinstance(scheme, dict):
        return f"{scheme.get('num_bits')}-bit {str(scheme.get('type'))[:20]} ({SCHEME}"[:60] + ")"
    if isinstance(algorithm, str) and algorithm.lower() not in ("", "none", "auto"):
        return f"{quoted(algorithm)} ({ALGORITHM})"
    return ""


def told(model: Any, tiers: tuple[str, ...]) -> str:
    """A line for the log of a server with these ``tiers``; empty if the checkpoint asks for nothing."""
    asked = asked_cache(model)
    if not asked:
        return ""
    return (
        f"this checkpoint asks for a KV cache of {asked}. It is served in the tiers {', '.join(tiers)}, whose vectors "
        "have scales of their own: scales of the checkpoint for its KV cache are not applied"
    )
