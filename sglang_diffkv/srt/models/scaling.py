"""What a model's attention layers do to products of queries and keys, and how far they see: kernels and pools are made
ready for it at start."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from sglang_diffkv.ops.base import Scaling

logger = logging.getLogger(__name__)


def scaling_of(layer: Any) -> Scaling:
    """An attention layer's, in floats: for an integer Triton would compile another kernel."""
    return Scaling(float(layer.scaling), float(layer.logit_cap or 0.0))


def layer_scalings(model: Any) -> tuple[Scaling, ...]:
    """The different scalings of the attention layers of SGLang's loaded ``model``."""
    return tuple(dict.fromkeys(scaling_of(layer) for layer in attention_layers(model)))


def sinks_of(model: Any) -> torch.dtype | None:
    """The type of the attention sinks of SGLang's loaded ``model``; None if it has none."""
    found = (getattr(module, "sinks", None) for module in model.modules())
    return next((x.dtype for x in found if isinstance(x, torch.Tensor)), None)


def configured_spans(config: Any) -> tuple[int, ...]:
    """``layer_spans`` as far as a model's ``config.json`` tells, for a model of which SGLang reads it
    (``reads_window``)."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None) or ()
    return tuple(window if x == "sliding_attention" else 0 for x in kinds) if window else ()


def reads_window(model_class: type) -> bool | None:
    """Whether SGLang's layers of this class have the sliding window that ``config.json`` states, of tokens that include
    the query; None if only loaded layers tell.

    A class that has a window says so to SGLang, by the method. Without it, Qwen2 and Qwen3 for example, the module
    that has the layers shows whether it passes one to them in a way of its own."""
    if hasattr(model_class, "get_attention_sliding_window_size"):
        return True
    modules = [sys.modules[x.__module__] for x in model_class.__mro__ if x.__module__.startswith("sglang.")]
    return None if any("sliding_window_size" in inspect.getsource(x) for x in modules) else False


def stated_spans(server_args: Any) -> tuple[int, ...]:
    """``layer_spans`` of the model that SGLang's arguments name, before it is loaded: empty also where only loaded
    layers tell."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.models.registry import ModelRegistry

    try:
        model = ModelConfig.from_server_args(server_args)
        stated = configured_spans(model.hf_text_config)
        read = any(stated) and reads_window(ModelRegistry.resolve_model_cls(model.hf_config.architectures)[0])
    except Exception as error:
        logger.info("DiffKV: the model's layers are checked once they are loaded, since SGLang says: %s", error)
        return ()
    return stated if read else ()


def layer_spans(model: Any, layers: Sequence[int]) -> tuple[int, ...]:
    """Of the attention layers with these ids, in SGLang's loaded ``model``, how many tokens a query may see, itself
    included, 0 for all; empty if all see all. SGLang's window is without the query itself."""
    attention_spans = dict.fromkeys(layers, 0)
    for layer in attention_layers(model):
        window = getattr(layer, "sliding_window_size", None)
        if window is not None and window > -1 and layer.layer_id in attention_spans:
            attention_spans[layer.layer_id] = window + 1
    return tuple(attention_spans.values()) if any(attention_spans.values()) else ()


def attention_layers(model: Any) -> Iterator[Any]:
    """The layers of SGLang's loaded ``model`` that call an attention backend. Its wrapper of Transformers models keeps
    them in a dictionary, which ``modules`` does not find."""
    from sglang.srt.layers.radix_attention import RadixAttention

    for module in model.modules():
        if isinstance(module, RadixAttention):
            yield module
        instances = getattr(module, "attention_instances", None)
        if isinstance(instances, dict):
            yield from instances.values()
