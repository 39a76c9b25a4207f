"""Scores drawn at random on the GPU; no host synchronisation."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_diffkv.kernels.random_scores import reference

POSITIONS = 1024
"""Positions of a program."""
FIRST, SECOND = tl.constexpr(reference.FIRST), tl.constexpr(reference.SECOND)
SHIFT = tl.constexpr(32 - reference.BITS)
ONE = tl.constexpr(2.0**-reference.BITS)


@triton.jit
def mixed(x):
    """``reference.mixed`` of uint32 numbers."""
    x = (x ^ (x >> 16)) * FIRST
    x = (x ^ (x >> 15)) * SECOND
    return x ^ (x >> 16)


@triton.jit(do_not_specialize=["length", "seed", "first_layer", "first_head"])
def draw_kernel(values, length, seed, first_layer, first_head, H: tl.constexpr, N: tl.constexpr):
    """Grid (layers * H, ceil(length / N)): ``N`` positions of values [layers * H, length]. ``seed``: int32, whose bits
    are the seed's."""
    flat = tl.program_id(0)
    layer, head = (flat // H + first_layer).to(tl.uint32), (flat % H + first_head).to(tl.uint32)
    state = mixed(mixed(mixed(seed.to(tl.uint32, bitcast=True)) ^ layer) ^ head)
    position = tl.program_id(1) * N + tl.arange(0, N)
    at = values + flat.to(tl.int64) * length + position
    value = tl.load(at, mask=position < length, other=float("nan"))
    drawn = mixed(state ^ position.to(tl.uint32)) >> SHIFT
    tl.store(at, drawn.to(tl.float32) * ONE, mask=tl.abs(value) < float("inf"))


def random_scores(values: torch.Tensor, seed: int, first_layer: int = 0, first_head: int = 0) -> None:
    """``reference.random_scores``."""
    assert values.dtype == torch.float32 and values.is_contiguous()
    layers, heads, length = values.shape
    bits = seed & reference.MASK
    draw_kernel[(layers * heads, max(1, triton.cdiv(length, POSITIONS)))](
        values, length, bits - (1 << 32) if bits >> 31 else bits, first_layer, first_head, H=heads, N=POSITIONS,
        num_warps=4,
    )  # fmt: skip
