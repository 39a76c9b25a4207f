"""Queries, keys and values of every layer, as the cache gets them, from a forward pass of the Hugging Face model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from sglang_diffkv.evaluate.endpoint import EvaluationError
from sglang_diffkv.evaluate.server import has_gpu

MODEL_TYPES = ("llama", "qwen2", "qwen3")
"""Decoders whose layers are ``x += o_proj(attention)``, then ``x += mlp(post_attention_layernorm(x))``."""
ATTENTION = "diffkv_heads"


@dataclass(frozen=True)
class LayerPass:
    """What one layer's attention got and gave, for N tokens; ``Hq / H = G`` query heads share a KV head.

    Attributes:
        q: [Hq, N, D]. k: [H, N, D]. v: [H, N, Dv]; q and k after normalisation and position embedding.
        out_weight: [hidden, Hq * Dv], of the output projection.
        stream: [N, hidden], the residual stream behind the attention.
    """

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    out_weight: torch.Tensor
    stream: torch.Tensor


def check_model(config: Any) -> None:
    """Raise EvaluationError for a model whose attention is not what is measured here, by name."""
    kind = config.model_type
    if kind not in MODEL_TYPES:
        raise EvaluationError(f"{kind} models are not supported: heads are fitted for {', '.join(MODEL_TYPES)}")
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise EvaluationError(
            f"{kind} with sliding-window layers is not supported: these keep their window in the high tier, whatever "
            "the factors by head"
        )


def load_model(path: str) -> Any:
    """The model in bfloat16, as a server has it, on the GPU if there is one; nothing is downloaded."""
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    check_model(AutoConfig.from_pretrained(path, local_files_only=True))
    AttentionInterface.register(ATTENTION, _attend)
    options = {"dtype": torch.bfloat16, "attn_implementation": ATTENTION, "local_files_only": True}
    return AutoModelForCausalLM.from_pretrained(path, **options).to("cuda" if has_gpu() else "cpu").eval()


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of one sequence in transformers' shapes [1, heads, N, dim]; keeps what it was given."""
    module.attended = (query[0], key[0], value[0], scaling)
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


@contextmanager
def _visiting(model: Any, visit: Callable[[LayerPass], None]) -> Iterator[None]:
    def hook(number: int, attention: Any) -> Callable[..., None]:
        def before_norm(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            q, k, v, scale = attention.attended
            del attention.attended
            visit(LayerPass(number, q, k, v, scale, attention.o_proj.weight, inputs[0][0]))

        return before_norm

    layers = model.model.layers
    handles = [
        layer.post_attention_layernorm.register_forward_pre_hook(hook(number, layer.self_attn))
        for number, layer in enumerate(layers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def run(model: Any, ids: Sequence[int], visit: Callable[[LayerPass], None]) -> None:
    """One pass over a sequence; ``visit`` is given each layer in turn."""
    with _visiting(model, visit):
        model.model(torch.tensor([list(ids)], device=model.device), use_cache=False)
