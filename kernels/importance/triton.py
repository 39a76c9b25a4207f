"""Parts of a layer's importance on the GPU: means, largest, integer sums, quotients; no host synchronisation."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_diffkv.kernels.importance import reference

POSITIONS = 1024
"""Positions of a program."""
MOST_SCALE = tl.constexpr(reference.MOST_SCALE)
SCALE = tl.constexpr(float(1 << reference.SUM_BITS))


@triton.jit
def scaled(mean, top):
    """A mean relative to its layer's largest, [N] float32."""
    scale = tl.where(top > 0, tl.div_rn(SCALE, tl.where(top > 0, top, 1.0)), 0.0)
    return mean * tl.minimum(scale, MOST_SCALE)


@triton.jit(do_not_specialize=["length"])
def mean_kernel(values, out, top, tokens, length, H: tl.constexpr, N: tl.constexpr):
    """Grid (layers, ceil(length / N)): means over heads to out [layers, length], NaN where no head has a finite value.
    The bits of the largest go to top [layers] int32: means are not negative, so bits are in their order."""
    layer = tl.program_id(0)
    at = tl.program_id(1) * N + tl.arange(0, N)
    total = tl.zeros([N], tl.float32)
    known = tl.zeros([N], tl.int32)
    for head in range(H):
        line = values + (layer.to(tl.int64) * H + head) * length
        value = tl.load(line + at, mask=at < length, other=float("nan"))
        finite = tl.abs(value) < float("inf")
        total += tl.where(finite, value, 0.0)
        known |= finite.to(tl.int32)
    mean = tl.div_rn(total, tl.full([N], H, tl.float32))
    tl.store(out + layer.to(tl.int64) * length + at, tl.where(known > 0, mean, float("nan")), mask=at < length)
    largest = tl.max(tl.where(known > 0, mean, 0.0), 0)
    tl.atomic_max(top + layer, largest.to(tl.int32, bitcast=True))
    tl.atomic_add(tokens + layer, tl.sum(known.to(tl.int64), 0))


@triton.jit(do_not_specialize=["length"])
def sum_kernel(out, top, sums, length, N: tl.constexpr):
    """Grid (layers, ceil(length / N)): sums [layers] int64 gets the weights of means."""
    layer = tl.program_id(0)
    at = tl.program_id(1) * N + tl.arange(0, N)
    mean = tl.load(out + layer.to(tl.int64) * length + at, mask=at < length, other=0.0)
    mean = tl.where(mean == mean, mean, 0.0)
    weight = scaled(mean, tl.load(top + layer).to(tl.float32, bitcast=True))
    tl.atomic_add(sums + layer, tl.sum(tl.floor(weight).to(tl.int64), 0))


@triton.jit(do_not_specialize=["length"])
def part_kernel(out, top, sums, length, N: tl.constexpr):
    """Grid (layers, ceil(length / N)): means become parts of their layer's sum."""
    layer = tl.program_id(0)
    at = tl.program_id(1) * N + tl.arange(0, N)
    mean = tl.load(out + layer.to(tl.int64) * length + at, mask=at < length, other=0.0)
    total = tl.maximum(tl.load(sums + layer), 1).to(tl.float32)
    weight = scaled(mean, tl.load(top + layer).to(tl.float32, bitcast=True))
    tl.store(out + layer.to(tl.int64) * length + at, tl.div_rn(weight, total + tl.zeros([N], tl.float32)), at < length)


def importance(values: torch.Tensor, out: torch.Tensor, shared: reference.Shared | None = None) -> torch.Tensor:
    """``reference.importance``."""
    layers, heads, length = values.shape
    assert values.dtype == out.dtype == torch.float32 and values.is_contiguous() and out.is_contiguous()
    assert out.shape == (layers, 1, length)
    top = torch.zeros(layers, dtype=torch.int32, device=values.device)
    tokens, sums = (torch.zeros(layers, dtype=torch.int64, device=values.device) for _ in range(2))
    grid = (layers, max(1, triton.cdiv(length, POSITIONS)))
    mean_kernel[grid](values, out, top, tokens, length, H=heads, N=POSITIONS, num_warps=4)
    if shared is not None and length:
        tokens = reference.mean_over_ranks(out.squeeze(1), shared)
        top = shared.room[0].amax(1).view(torch.int32)  # the means, 0 where there is none
    sum_kernel[grid](out, top, sums, length, N=POSITIONS, num_warps=4)
    part_kernel[grid](out, top, sums, length, N=POSITIONS, num_warps=4)
    return tokens
