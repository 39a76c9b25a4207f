"""The weights behind a model's attention, as far as SGLang's layers show them."""

from __future__ import annotations

import logging
from typing import Any

import torch

from sglang_diffkv.noise_shaping import output_products

logger = logging.getLogger(__name__)


@torch.no_grad()
def products_behind_attention(model: Any, dtype: torch.dtype) -> dict[int, torch.Tensor]:
    """By layer of SGLang's loaded ``model``, ``output_products`` of this rank's heads: of layers that stand beside one
    projection which takes what they give. ``dtype``: of the model. A projection that fails at that, or has numbers
    that are not finite, is warned of, and no more are asked: values need those of all layers."""
    from sglang.srt.layers.linear import RowParallelLinear
    from sglang.srt.layers.radix_attention import RadixAttention

    found = {}
    for module in model.modules():
        children = list(module.children())
        layers = [x for x in children if isinstance(x, RadixAttention)]
        projections = [x for x in children if isinstance(x, RowParallelLinear)]
        if len(layers) != 1 or len(projections) != 1:
            continue
        (layer,), (projection,) = layers, projections
        if projection.input_size_per_partition == layer.tp_q_head_num * layer.v_head_dim:
            try:
                product = output_products(_weight(projection, dtype), layer.tp_v_head_num, layer.v_head_dim)
                if not product.isfinite().all():
                    raise ValueError("numbers that are not finite")
            except Exception as error:  # of any quantisation's kernels
                why = f"{type(error).__name__}: {error}"
                logger.warning(
                    "DiffKV: the weights behind attention of layer %d cannot be read: %s", layer.layer_id, why
                )
                break
            found[layer.layer_id] = product
    return found


def _weight(projection: Any, dtype: torch.dtype) -> torch.Tensor:
    """[out, in] as the layer computes with it, whatever form its weights are kept in: what it makes of unit vectors."""
    device = next(projection.parameters()).device
    units = torch.eye(projection.input_size_per_partition, dtype=dtype, device=device)
    return projection.quant_method.apply(projection, units, None).mT
