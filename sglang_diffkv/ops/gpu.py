"""The Triton ops of a server, with all that they hold on the device."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sglang_diffkv.errors import UnsupportedError
from sglang_diffkv.kernels.decode_attention import cuda
from sglang_diffkv.kernels.decode_attention.triton_workspace import DecodeConfig
from sglang_diffkv.layout.geometry import Geometry
from sglang_diffkv.layout.page_format import PageFormat
from sglang_diffkv.layout.state import PageState
from sglang_diffkv.ops.base import Scaling, usual_scaling
from sglang_diffkv.ops.ragged import RaggedPrefill, backend_of, workspace_bytes
from sglang_diffkv.ops.triton import TritonOps
from sglang_diffkv.policies.base import Policy

logger = logging.getLogger(__name__)


def build_ops(
    state: PageState, policy: Policy, geometry: Geometry, q_heads: int, prefill: str, decode: str = "auto", *,
    mixed_chunks: bool = False,
) -> TritonOps:  # fmt: skip
    """Ops for steps of as many requests as there are rows, with room for FlashInfer where it may compute the attention
    of new tokens. ``choose_prefill`` decides that, once the model is loaded.

    Args:
        state: on a GPU, or on the device "meta" for a plan.
        prefill: ``flashinfer``, ``triton`` or ``auto``, as configured. Raises UnsupportedError for a FlashInfer that
            is not there or has no kernel for the model's heads.
        decode: ``cuda``, ``triton`` or ``auto``, as configured. Raises UnsupportedError where the kernel that is asked
            for cannot be used.
        mixed_chunks: whether requests decode in passes over prompts too, whose memory FlashInfer then cannot use.
    """
    fmt, heads = state.fmt, state.num_heads
    ragged = prefill != "triton" and not prefill_obstacle(fmt, prefill, (), state.attention_spans)
    least = 0
    if ragged:
        backend = backend_of(fmt.head_dim, fmt.v_head_dim, state.dtype, state.device)
        least = workspace_bytes(q_heads, heads, fmt.v_head_dim, state.device, backend)
    obstacle = decode_obstacle(fmt, q_heads // heads, decode)
    config = DecodeConfig(cuda=decode != "triton" and not obstacle)
    if not state.pages.is_meta:
        reason = f" ({obstacle})" if decode == "auto" and obstacle else ""
        logger.info("DiffKV: decode steps attend by %s%s", "CUDA C++" if config.cuda else "Triton", reason)
    ops = TritonOps(
        state, policy, q_heads, geometry.max_tokens, config=config,
        least_scratch=0 if mixed_chunks else least, prefill_bytes=least if mixed_chunks else 0,
    )  # fmt: skip
    ops.prepare_graphs(max(geometry.num_rows - 1, 1))
    return ops


def decode_obstacle(fmt: PageFormat, group: int, decode: str) -> str:
    """Why the kernel in CUDA C++ cannot compute the attention of decode steps of ``group`` query heads of a KV head;
    empty if it can. Raises UnsupportedError if it is asked for nevertheless."""
    obstacle = cuda.missing() or cuda.unsupported(fmt, group) or ""
    if decode == "cuda" and obstacle:
        raise UnsupportedError(f'"decode": "cuda": {obstacle}; set "decode" to "triton" or "auto"')
    return obstacle


def prefill_obstacle(
    fmt: PageFormat, prefill: str, scalings: Sequence[Scaling], attention_spans: Sequence[int] = ()
) -> str:
    """Why FlashInfer cannot compute the attention of new tokens for layers of these ``scalings`` and
    ``attention_spans`` (as of ``Geometry``); empty if it can. Raises UnsupportedError if it is asked for
    nevertheless."""
    obstacle = RaggedPrefill.obstacle(fmt.head_dim, fmt.v_head_dim, scalings)
    if attention_spans and all(attention_spans):
        obstacle = obstacle or "all layers have a sliding window"
    if prefill == "flashinfer" and obstacle:
        raise UnsupportedError(f'"prefill": "flashinfer": {obstacle}; set "prefill" to "triton" or "auto"')
    return obstacle


def choose_prefill(
    ops: TritonOps, state: PageState, prefill: str, scalings: Sequence[Scaling], *, sinks: bool = False
) -> None:
    """Let FlashInfer compute the attention of new tokens if it can for layers of these ``scalings``. ``sinks``: whether
    any layers have attention sinks. Raises UnsupportedError as ``build_ops`` does."""
    obstacle = prefill_obstacle(state.fmt, prefill, scalings, state.attention_spans)
    ragged = prefill != "triton" and not obstacle
    ops.prefill_bytes = ops.prefill_bytes if ragged else 0
    if ragged:
        ops.use_ragged(scalings[0] if scalings else usual_scaling(state.fmt.head_dim), sinks=sinks)
    reason = f" ({obstacle})" if prefill == "auto" and obstacle else ""
    by = "FlashInfer" if ragged else "Triton"
    if ragged and state.slides:
        by += ", in layers with a sliding window by Triton"
    logger.info("DiffKV: new tokens attend by %s%s", by, reason)
