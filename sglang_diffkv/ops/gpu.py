"""The Triton ops of a server, with all that they hold on the device."""

from __future__ import annotations

import logging

from sglang_diffkv.mem_pool.geometry import Geometry
from sglang_diffkv.mem_pool.state import PageState
from sglang_diffkv.ops.ragged import RaggedPrefill, workspace_bytes
from sglang_diffkv.ops.triton import TritonOps
from sglang_diffkv.policies.base import Policy

logger = logging.getLogger(__name__)


def build_ops(state: PageState, policy: Policy, geometry: Geometry, q_heads: int, prefill: str) -> TritonOps:
    """Ops for steps of as many requests as there are rows, with FlashInfer for new tokens where that can be.

    Args:
        state: on a GPU, or on the device "meta" for a plan.
        prefill: ``flashinfer``, ``triton`` or ``auto``, as configured. Raises RuntimeError for a FlashInfer that is not
            there.
    """
    fmt, heads = state.fmt, state.num_heads
    usable = RaggedPrefill.supports(fmt.head_dim, fmt.v_head_dim)
    if prefill == "flashinfer" and not usable:
        raise RuntimeError(f'"prefill": "flashinfer": not installed, or no kernel for head_dim {fmt.head_dim}')
    ragged = usable and prefill != "triton"
    least = workspace_bytes(q_heads, heads, fmt.v_head_dim, state.device) if ragged else 0
    ops = TritonOps(state, policy, q_heads, geometry.max_tokens, least_scratch=least)
    ops.prepare_graphs(state, max(geometry.num_rows - 1, 1))
    if ragged:
        ops.use_ragged(state, fmt.head_dim**-0.5)
    if not state.pages.is_meta:
        logger.info("DiffKV: new tokens attend among themselves by %s", "FlashInfer" if ragged else "Triton")
    return ops
