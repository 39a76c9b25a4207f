"""What a model's attention layers do to products of queries and keys: kernels are made ready for it at start."""

from __future__ import annotations

from typing import Any

from sglang_diffkv.ops.base import Scaling
from sglang_diffkv.srt.validation import attention_layers


def scaling_of(layer: Any) -> Scaling:
    """An attention layer's, in floats: for an integer Triton would compile another kernel."""
    return Scaling(float(layer.scaling), float(layer.logit_cap or 0.0))


def layer_scalings(model: Any) -> tuple[Scaling, ...]:
    """The different scalings of the attention layers of SGLang's loaded ``model``."""
    return tuple(dict.fromkeys(scaling_of(layer) for layer in attention_layers(model)))
