"""Attention of a prefill's new tokens by FlashInfer, where it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch

from sglang_diffkv.kernels.device import capability_of, processors_of
from sglang_diffkv.ops.base import Scaling, Step

MIB = 1 << 20

PLAN_BYTES = 8 << 20
"""Of FlashInfer's buffer for a pass's plan on the device; it has another of the size in pinned memory of the host."""
TILE_ROWS = 128
"""Query rows of FlashInfer's largest tile."""
RESIDENT = 2
"""Tiles that a multiprocessor works on at once."""
UNUSED_BYTES = MIB
"""Of the buffer for split results where there are none."""
HEAD_DIMS = (64, 128, 256)


def backend_of(head_dim: int, v_head_dim: int, dtype: torch.dtype, device: torch.device) -> str:
    """Which of FlashInfer's kernels compute attention: ``fa3`` on Hopper, where FlashInfer would choose it for such
    heads, else ``fa2``. On the device "meta" for a plan, of the current GPU.

    It is named, since "auto" of FlashInfer 0.7 may take libraries on GPUs after Hopper whose log-sum-exp is another.
    """
    if capability_of(device)[0] != 9:
        return "fa2"
    return flashinfer_choice(head_dim, v_head_dim, dtype, device)


def flashinfer_choice(head_dim: int, v_head_dim: int, dtype: torch.dtype, device: torch.device) -> str:
    """What FlashInfer itself would choose of ``fa3`` and ``fa2``."""
    from flashinfer.utils import PosEncodingMode, determine_attention_backend

    gpu = device if device.type == "cuda" else torch.device("cuda", torch.cuda.current_device())
    heads = {"head_dim_qk": head_dim, "head_dim_vo": v_head_dim}
    return determine_attention_backend(gpu, PosEncodingMode.NONE.value, False, False, dtype, dtype, **heads)


def workspace_bytes(q_heads: int, kv_heads: int, v_head_dim: int, device: torch.device, backend: str) -> int:
    """What FlashInfer's plan and split results take at most: ``fa2`` splits only as far as its tiles fill the GPU once,
    ``fa3`` does not split and is handed ``UNUSED_BYTES`` that it leaves alone."""
    if backend == "fa3":
        return PLAN_BYTES + UNUSED_BYTES
    tiles = RESIDENT * processors_of(device) // kv_heads
    results = q_heads * max(tiles, 1) * TILE_ROWS * (v_head_dim + 1) * 4
    return PLAN_BYTES + -(-results // MIB) * MIB + MIB


def _ends(lens: Sequence[int]) -> torch.Tensor:
    """[B + 1] int32, on the host."""
    return torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)


class RaggedPrefill:
    """FlashInfer's ragged prefill wrapper: planned once a pass, run once a layer, without waiting for the device.

    Args:
        scale: softmax scale of every layer. logit_cap: 0 for none.
        buffer: uint8, ``workspace_bytes`` at least, that nothing else uses between ``plan`` and the last ``run``.
    """

    lse_unit = 1.0
    copy_bytes = 0

    def __init__(
        self,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        v_head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        scale: float,
        logit_cap: float = 0.0,
        buffer: torch.Tensor | None = None,
    ):
        from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

        backend = backend_of(head_dim, v_head_dim, dtype, device)
        if buffer is None:
            size = workspace_bytes(q_heads, kv_heads, v_head_dim, device, backend)
            buffer = torch.empty(size, dtype=torch.uint8, device=device)
        plans, results = buffer[:PLAN_BYTES], buffer[PLAN_BYTES:]
        self._wrapper = BatchPrefillWithRaggedKVCacheWrapper(results, "NHD", backend=backend)
        self._wrapper.reset_workspace_buffer(results, plans)  # instead of memory of its own for plans
        self._shape = (q_heads, kv_heads, head_dim, v_head_dim)
        self._options = {"causal": True, "sm_scale": scale, "logits_soft_cap": logit_cap, "q_data_type": dtype}
        self._copied: torch.cuda.Event | None = None
        self.scale, self.logit_cap = scale, logit_cap

    @staticmethod
    def obstacle(head_dim: int, v_head_dim: int, scalings: Sequence[Scaling]) -> str:
        """Why FlashInfer cannot serve a model with such heads, whose layers have these scalings; empty if it can."""
        if importlib.util.find_spec("flashinfer") is None:
            return "FlashInfer is not installed (pip install 'sglang-diffkv[gpu]')"
        if head_dim != v_head_dim or head_dim not in HEAD_DIMS:
            return f"FlashInfer has no kernel for head_dim {head_dim} with v_head_dim {v_head_dim}"
        if len(set(scalings)) > 1:
            return "FlashInfer plans one scale and logit cap for all layers, and this model's differ"
        return ""

    def serves(self, scaling: Scaling) -> bool:
        """Whether it was planned for layers of this scaling."""
        return scaling == (self.scale, self.logit_cap)

    @classmethod
    def supports(cls, head_dim: int, v_head_dim: int) -> bool:
        """Whether FlashInfer is installed and has a kernel for these heads."""
        return not cls.obstacle(head_dim, v_head_dim, ())

    def plan(self, step: Step) -> None:
        """Plan for the requests of an extend step: for attention of new tokens among themselves, or, where the step has
        ``whole`` requests, to those before them too.

        FlashInfer copies a plan from one pinned buffer, so the last plan's copy has to be through.
        """
        if self._copied is not None:
            self._copied.synchronize()
        ends = _ends(step.counts)
        key_ends = ends if step.whole is None else _ends(step.whole.lens)
        q_heads, kv_heads, head_dim, v_head_dim = self._shape
        if step.whole is not None:
            q_heads, kv_heads = q_heads // kv_heads * step.whole.heads, step.whole.heads
        self._wrapper.plan(ends, key_ends, q_heads, kv_heads, head_dim, v_head_dim, **self._options)
        self._copied = self._copied or torch.cuda.Event()
        self._copied.record()

    def run(
        self, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: Scaling, *, lse: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Causal attention within each request, whose last tokens the queries are.

        Args:
            q: [tokens, Hq, head_dim]. key: [planned tokens, H, head_dim]. value: [planned tokens, H, v_head_dim]. The
                heads are all, or so many of them as the plan says (``WholeRequests``).
            scaling: one that it ``serves``. lse: whether the second result is wanted.

        Returns:
            out [tokens, Hq, v_head_dim], lse [tokens, Hq] float32, base 2, or None.
        """
        if lse:
            return self._wrapper.run(q, key, value, return_lse=True)
        return self._wrapper.run(q, key, value), None
