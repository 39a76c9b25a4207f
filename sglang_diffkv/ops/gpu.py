"""The Triton ops of a server, with all that they hold on the device."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from sglang_diffkv.errors import UnsupportedError
from sglang_diffkv.kernels.decode_attention import cuda
from sglang_diffkv.kernels.decode_attention.triton_workspace import DecodeConfig
from sglang_diffkv.layout.geometry import Geometry
from sglang_diffkv.layout.page_format import PageFormat
from sglang_diffkv.layout.state import PageState
from sglang_diffkv.ops.base import Scaling, usual_scaling
from sglang_diffkv.ops.flash import FlashPrefill
from sglang_diffkv.ops.ragged import RaggedPrefill, backend_of, workspace_bytes
from sglang_diffkv.ops.triton import TritonOps
from sglang_diffkv.policies.base import Policy

logger = logging.getLogger(__name__)

LIBRARIES = {
    "fa3": "FlashAttention-3",
    "fa3_fp8": "FlashAttention-3, long prompts in 8 bits",
    "flashinfer": "FlashInfer",
    "triton": "Triton",
}
"""What computes the attention of new tokens, by the name that "prefill" has for it."""


def build_ops(
    state: PageState, policy: Policy, geometry: Geometry, q_heads: int, prefill: str, decode: str = "auto", *,
    mixed_chunks: bool = False,
) -> TritonOps:  # fmt: skip
    """Ops for steps of as many requests as there are rows, with room for FlashInfer where it may compute the attention
    of new tokens. ``choose_prefill`` decides that, once the model is loaded.

    Args:
        state: on a GPU, or on the device "meta" for a plan.
        prefill: ``fa3``, ``flashinfer``, ``triton`` or ``auto``, as configured. Raises UnsupportedError for a library
            that is asked for and is not there, or has no kernel for the model's heads.
        decode: ``cuda``, ``triton`` or ``auto``, as configured. Raises UnsupportedError where the kernel that is asked
            for cannot be used.
        mixed_chunks: whether requests decode in passes over prompts too, whose memory FlashInfer then cannot use.
    """
    fmt, heads = state.fmt, state.num_heads
    least = 0
    prefill_library(fmt, prefill, (), state.attention_spans, dtype=state.dtype, device=state.device)
    # With "auto" a layer's logit cap may turn out to need FlashInfer.
    if prefill in ("auto", "flashinfer") and not flashinfer_obstacle(fmt, (), state.attention_spans):
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


def flashinfer_obstacle(fmt: PageFormat, scalings: Sequence[Scaling], attention_spans: Sequence[int]) -> str:
    """Why FlashInfer cannot compute the attention of new tokens; empty if it can. Arguments as of
    ``prefill_library``."""
    return RaggedPrefill.obstacle(fmt.head_dim, fmt.v_head_dim, scalings) or all_slide(attention_spans)


def flash_obstacle(
    fmt: PageFormat, scalings: Sequence[Scaling], attention_spans: Sequence[int], dtype: torch.dtype,
    device: torch.device,
) -> str:  # fmt: skip
    """The same of FlashAttention-3."""
    found = FlashPrefill.obstacle(fmt.head_dim, fmt.v_head_dim, dtype, device, scalings)
    return found or all_slide(attention_spans)


def all_slide(attention_spans: Sequence[int]) -> str:
    """Why no library attends, if no layer sees all tokens."""
    return "all layers have a sliding window" if attention_spans and all(attention_spans) else ""


def prefill_library(
    fmt: PageFormat, prefill: str, scalings: Sequence[Scaling], attention_spans: Sequence[int] = (), *,
    dtype: torch.dtype, device: torch.device,
) -> tuple[str, str]:  # fmt: skip
    """What computes the attention of new tokens for layers of these ``scalings`` and ``attention_spans`` (as of
    ``Geometry``): a key of ``LIBRARIES``. Then, with "auto", why none that comes before it does. Raises
    UnsupportedError for a library that is asked for and cannot.

    Args:
        dtype: of the model. device: "meta" for the current GPU.
    """
    obstacles: dict[str, None] = {}
    if prefill in ("auto", "fa3", "fa3_fp8"):
        if not (obstacle := flash_obstacle(fmt, scalings, attention_spans, dtype, device)):
            return "fa3" if prefill == "auto" else prefill, ""
        obstacles[obstacle] = None
    if prefill in ("auto", "flashinfer"):
        if not (obstacle := flashinfer_obstacle(fmt, scalings, attention_spans)):
            return "flashinfer", "; ".join(obstacles)
        obstacles[obstacle] = None
    reason = "; ".join(obstacles)
    if prefill in ("fa3", "fa3_fp8", "flashinfer"):
        raise UnsupportedError(f'"prefill": "{prefill}": {reason}; set "prefill" to "triton" or "auto"')
    return "triton", reason


def choose_prefill(
    ops: TritonOps, state: PageState, prefill: str, scalings: Sequence[Scaling], *, sinks: bool = False
) -> None:
    """Let a library compute the attention of new tokens if it can for layers of these ``scalings``. ``sinks``: whether
    any layers have attention sinks. Raises UnsupportedError as ``build_ops`` does."""
    library, reason = prefill_library(
        state.fmt, prefill, scalings, state.attention_spans, dtype=state.dtype, device=state.device
    )  # fmt: skip
    ops.prefill_bytes = ops.prefill_bytes if library == "flashinfer" else 0
    if library == "flashinfer":
        ops.use_ragged(scalings[0] if scalings else usual_scaling(state.fmt.head_dim), sinks=sinks)
    elif library in ("fa3", "fa3_fp8"):
        ops.use_flash(sinks=sinks, eight_bits=library == "fa3_fp8")
    by = LIBRARIES[library] + (f" ({reason})" if reason else "")
    if library != "triton" and state.slides:
        by += ", in layers with a sliding window by Triton"
    logger.info("DiffKV: new tokens attend by %s", by)
