"""Attention of a prefill's new tokens by FlashAttention-3, as SGLang's package of kernels for Hopper GPUs has it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sglang_diffkv.kernels.device import capability_of, processors_of
from sglang_diffkv.layout.transfer import to_device
from sglang_diffkv.ops.base import Scaling, Step

HEAD_DIMS = (64, 128)
"""With which it was seen to be right; it has others."""
LOG2E = math.log2(math.e)
TILE = 128
"""Queries of a KV head, all its query heads counted, that a multiprocessor attends with at a time."""
ONE, AS_IT_FINDS = 1, 0
"""Parts that keys are split into, as ``num_splits`` takes them."""


def attention_function() -> Callable[..., Any] | None:
    """``flash_attn_varlen_func`` of ``sgl_kernel``; None if there is none."""
    try:
        from sgl_kernel.flash_attn import flash_attn_varlen_func
    except (ImportError, OSError, RuntimeError):
        return None
    found: Callable[..., Any] = flash_attn_varlen_func
    return found


class FlashPrefill:
    """FlashAttention-3 over the tensors of a pass. It has no memory of its own."""

    lse_unit = LOG2E

    def __init__(self) -> None:
        function = attention_function()
        assert function is not None, "there is no FlashAttention-3"
        self._attend = function
        self._ends: tuple[torch.Tensor, torch.Tensor] | None = None
        self._longest = (0, 0)
        self._counts: Sequence[int] = ()
        self._parts: dict[torch.Size, int] = {}

    @staticmethod
    def obstacle(
        head_dim: int, v_head_dim: int, dtype: torch.dtype, device: torch.device, scalings: Sequence[Scaling]
    ) -> str:
        """Why it cannot serve a model with such heads on this GPU, whose layers have these scalings; empty if it can.
        ``device``: "meta" for the current GPU."""
        if capability_of(device)[0] != 9:
            return "FlashAttention-3 needs a Hopper GPU"
        if head_dim != v_head_dim or head_dim not in HEAD_DIMS:
            return f"FlashAttention-3 was not tried with head_dim {head_dim} and v_head_dim {v_head_dim}"
        if dtype != torch.bfloat16:
            return f"FlashAttention-3 was not tried with {str(dtype).removeprefix('torch.')}"
        if any(scaling.cap for scaling in scalings):
            return "FlashAttention-3 was not tried with a logit cap"
        if attention_function() is None:
            return "sgl_kernel has no FlashAttention-3"
        return ""

    def serves(self, scaling: Scaling) -> bool:
        """Whether layers of this scaling can attend by it."""
        return not scaling.cap

    def plan(self, step: Step) -> None:
        """As ``RaggedPrefill.plan``; nothing waits for the device."""
        key_lens = step.counts if step.whole is None else step.whole.lens
        self._longest = max(step.counts), max(key_lens)
        self._counts, self._parts = step.counts, {}
        self._ends = None
        if len(step.counts) > 1:  # a single request needs no table of ends, nor the launch that reads it
            ends = torch.tensor([(0, *step.counts), (0, *key_lens)]).cumsum(1)
            queries, keys = to_device(ends, step.rows.device).int()
            self._ends = queries, keys

    def run(
        self, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: Scaling, *, lse: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As ``RaggedPrefill.run``."""
        lens, alone = (*(self._ends or (None, None)), *self._longest), self._ends is None
        tensors = (x.unsqueeze(0) if alone else x for x in (q, key, value))
        out, norm, *_ = self._attend(
            *tensors, *lens, softmax_scale=scaling.scale, causal=True, return_softmax_lse=True,
            num_splits=self._key_parts(q, key),
        )  # fmt: skip
        if alone:
            out, norm = out.squeeze(0), norm.squeeze(0)
        return out, norm.t() if lse else None  # from [Hq, tokens], base e

    def _key_parts(self, q: torch.Tensor, key: torch.Tensor) -> int:
        """Few new tokens behind many others leave most of a GPU without work, unless their keys are split. Where new
        tokens are many, it is slower with the choice left to it than with one part."""
        parts = self._parts.get(q.shape)
        if parts is None:
            heads = key.shape[1]
            tiles = heads * sum(-(-count * (q.shape[1] // heads) // TILE) for count in self._counts)
            parts = self._parts[q.shape] = AS_IT_FINDS if 2 * tiles <= processors_of(q.device) else ONE
        return parts
