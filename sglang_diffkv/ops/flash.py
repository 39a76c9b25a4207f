"""Attention of a prefill's new tokens by FlashAttention-3, as SGLang's package of kernels for Hopper GPUs has it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sglang_diffkv.errors import UnsupportedError
from sglang_diffkv.kernels.device import capability_of, processors_of
from sglang_diffkv.kernels.to_e4m3.triton import to_e4m3
from sglang_diffkv.layout.transfer import to_device
from sglang_diffkv.ops.base import Scaling, Step

HEAD_DIMS = (64, 128)
"""With which it was seen to be right; it has others."""
LOG2E = math.log2(math.e)
TILE = 128
"""Queries of a KV head, all its query heads counted, that a multiprocessor attends with at a time."""
LEAST_WORK, LEAST_QUERIES = 1 << 23, 512
"""Pairs of a query and a key, and queries for each key on average, from which on attention in 8 bits gains more than
conversion takes."""
ONE, AS_IT_FINDS = 1, 0
"""Parts that keys are split into, as ``num_splits`` takes them."""


MOST_DIFFERS = 0.1
"""Share of their size by which results in 8 bits differ from those in 16; of normal numbers it is about .04."""
NOT_IN_8_BITS = '"prefill": "fa3_fp8": the FlashAttention-3 of sgl_kernel does not attend in 8 bits; set it to "fa3"'
NOT_AT_ALL = '"prefill": "fa3_fp8": the FlashAttention-3 of sgl_kernel does not attend here; set it to "auto"'


def attention_function() -> Callable[..., Any] | None:
    """``flash_attn_varlen_func`` of ``sgl_kernel``; None if there is none."""
    try:
        from sgl_kernel.flash_attn import flash_attn_varlen_func
    except (ImportError, OSError, RuntimeError):
        return None
    found: Callable[..., Any] = flash_attn_varlen_func
    return found


class FlashPrefill:
    """FlashAttention-3 over the tensors of a pass. It has no memory of its own.

    Args:
        eight_bits: passes of much work attend in e4m3, as stock SGLang's do whose cache is in FP8. What is stored, and
            scores but for their log-sum-exps, are of the tensors as they are.
    """

    lse_unit = LOG2E

    def __init__(self, *, eight_bits: bool = False) -> None:
        function = attention_function()
        assert function is not None, "there is no FlashAttention-3"
        self._attend = function
        self._ends: tuple[torch.Tensor, torch.Tensor] | None = None
        self._longest = (0, 0)
        self._counts: Sequence[int] = ()
        self._parts: dict[torch.Size, int] = {}
        self._eight_bits, self._converts = eight_bits, False
        self.copy_bytes = int(eight_bits)

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
        if step.ends is not None:  # of a pass that is not for 8 bits
            self._ends, self._converts = step.ends, False
            return
        self._converts = self.rounds(step.counts, key_lens)
        self._ends = None
        if len(step.counts) > 1:  # a single request needs no table of ends, nor the launch that reads it
            ends = torch.tensor([(0, *step.counts), (0, *key_lens)]).cumsum(1)
            queries, keys = to_device(ends, step.rows.device).int()
            self._ends = queries, keys

    def rounds(self, counts: Sequence[int], key_lens: Sequence[int]) -> bool:
        """Whether a pass attends in 8 bits, of requests with so many new tokens and so many in all."""
        work = sum(count * keys for count, keys in zip(counts, key_lens, strict=True))
        return self._eight_bits and work >= max(LEAST_WORK, LEAST_QUERIES * sum(key_lens))

    def run(
        self, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: Scaling, *, lse: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As ``RaggedPrefill.run``."""
        lens, alone = (*(self._ends or (None, None)), *self._longest), self._ends is None
        parts = self._key_parts(q, key)
        if self._converts:
            q, key, value = to_e4m3(q, key, value)
        tensors = (x.unsqueeze(0) if alone else x for x in (q, key, value))
        out, norm, *_ = self._attend(
            *tensors, *lens, softmax_scale=scaling.scale, causal=True, return_softmax_lse=True,
            num_splits=parts,
        )  # fmt: skip
        if alone:
            out, norm = out.squeeze(0), norm.squeeze(0)
        return out, norm.t() if lse else None  # from [Hq, tokens], base e

    def _key_parts(self, q: torch.Tensor, key: torch.Tensor) -> int:
        """Few new tokens behind many others leave most of a GPU without work, unless their keys are split. Where new
        tokens are many, it is slower with the choice left to it than with one part."""
        if self._converts:
            return ONE
        parts = self._parts.get(q.shape)
        if parts is None:
            heads = key.shape[1]
            tiles = heads * sum(-(-count * (q.shape[1] // heads) // TILE) for count in self._counts)
            parts = self._parts[q.shape] = AS_IT_FINDS if 2 * tiles <= processors_of(q.device) else ONE
        return parts

    def check(self, q_heads: int, kv_heads: int, head_dim: int, device: torch.device) -> None:
        """Attend to a few tokens in 8 bits and in 16. Raises UnsupportedError where results differ by more than
        ``MOST_DIFFERS``, or there is no such kernel: builds of ``sgl_kernel`` differ."""
        generator = torch.Generator(device).manual_seed(1)
        shapes = ((n, head_dim) for n in (q_heads, kv_heads, kv_heads))
        q, key, value = (torch.randn(77, *x, generator=generator, device=device).bfloat16() for x in shapes)
        self._counts, self._longest, self._ends, self._parts = (77,), (77, 77), None, {}
        found = []
        for self._converts in (False, True):
            try:
                out, lse = self.run(q, key, value, Scaling(head_dim**-0.5))
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, NotImplementedError) as error:
                raise UnsupportedError(f"{NOT_IN_8_BITS if self._converts else NOT_AT_ALL}: {error}") from error
            assert lse is not None
            found.append((out.float(), lse.float()))
        (out, lse), (rounded, rounded_lse) = found
        differs = max(float((x - y).norm() / x.norm()) for x, y in ((out, rounded), (lse, rounded_lse)))
        if not differs <= MOST_DIFFERS:
            raise UnsupportedError(f"{NOT_IN_8_BITS}: results differ by {differs:.2f} of their size")
