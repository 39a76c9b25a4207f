"""The Triton ops of a server, with all that they hold on the device."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sglang_diffkv.errors import UnsupportedError
from sglang_diffkv.mem_pool.geometry import Geometry
from sglang_diffkv.mem_pool.state import PageState
from sglang_diffkv.ops.base import Scaling, usual_scaling
from sglang_diffkv.ops.ragged import RaggedPrefill, workspace_bytes
from sglang_diffkv.ops.triton import TritonOps
from sglang_diffkv.policies.base import Policy

logger = logging.getLogger(__name__)


def build_ops(
    state: PageState,
    policy: Policy,
    geometry: Geometry,
    q_heads: int,
    prefill: str,
    scalings: Sequence[Scaling] = (),
) -> TritonOps:
    """Ops for steps of as many requests as there are rows, with FlashInfer for new tokens where that can be.

    Args:
        state: on a GPU, or on the device "meta" for a plan.
        prefill: ``flashinfer``, ``triton`` or ``auto``, as configured. Raises UnsupportedError for a FlashInfer that
            is not there or cannot compute the model's attention.
        scalings: the different ones of the model's layers; by default the usual one.
    """
    fmt, heads = state.fmt, state.num_heads
    scalings = scalings or (usual_scaling(fmt.head_dim),)
    obstacle = RaggedPrefill.obstacle(fmt.head_dim, fmt.v_head_dim, scalings)
    if prefill == "flashinfer" and obstacle:
        raise UnsupportedError(f'"prefill": "flashinfer": {obstacle}; set "prefill" to "triton" or "auto"')
    ragged = prefill != "triton" and not obstacle
    least = workspace_bytes(q_heads, heads, fmt.v_head_dim, state.device) if ragged else 0
    ops = TritonOps(state, policy, q_heads, geometry.max_tokens, least_scratch=least)
    ops.prepare_graphs(state, max(geometry.num_rows - 1, 1))
    if ragged:
        ops.use_ragged(state, scalings[0])
    if not state.pages.is_meta:
        reason = f" ({obstacle})" if prefill == "auto" and obstacle else ""
        logger.info("DiffKV: new tokens attend among themselves by %s%s", "FlashInfer" if ragged else "Triton", reason)
    return ops
