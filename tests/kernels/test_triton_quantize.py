"""Quantisation in Triton beside the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from sglang_diffkv.kernels.quantize.reference import LARGEST, LEAST, NEW, UNITS, quantize
from sglang_diffkv.kernels.quantize.triton import chunk_bytes, group_elements, quantize_groups, store_packed
from sglang_diffkv.kernels.triton_table import SAME_BITS, padded
from sglang_diffkv.layout.page_format import QUANTISED_BITS, RAW_BITS
from tests.kernels.triton_helpers import DEVICE


@triton.jit
def quantize_kernel(x, out, meta, N: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr, SOURCE_BITS: tl.constexpr):
    W: tl.constexpr = chunk_bytes(DIM, BITS)
    WP: tl.constexpr = padded(W)
    inside = (tl.arange(0, WP) < W)[None, None, :]
    vector = tl.program_id(0) * N + tl.arange(0, N)
    numbers = tl.load(x + vector[:, None, None] * DIM + group_elements(W, WP, BITS), mask=inside, other=0.0)
    packed, words = quantize_groups(numbers, inside, BITS, SOURCE_BITS)
    store_packed(out + tl.zeros_like(vector), vector, packed, vector >= 0, DIM, BITS, 0)
    tl.store(meta + vector, words)


def hard_vectors(dim: int) -> torch.Tensor:
    """[n, dim]: of ranges from the smallest to the largest, constant ones, with one number far out, and with many
    numbers midway between two codes or two units."""
    generator = torch.Generator().manual_seed(dim)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator) * 2 - 1

    sizes = [1e-44, 1e-38, LEAST / 3, LEAST * 1.1, 1e-20, 1e-7, 1e-3, 1, 40, 65000, 1e5, 1e30, LARGEST / 3, LARGEST]
    some = [uniform(2, dim) * size + shift for size in sizes for shift in (0, 3 * size if size < 1e30 else 0)]
    some += [torch.full((1, dim), number) for number in (0.0, -0.0, 1e-40, 6e-8, 3.14, -65520.0, 1e38)]
    far = uniform(2, dim)
    far[0, 3], far[1, -1] = 1e5, -300
    units = torch.randint(0, 2 * UNITS + 1, (4, dim), generator=generator) / (2 * UNITS)
    codes = torch.randint(0, 511, (4, dim), generator=generator) / 2
    return torch.cat([*some, far, units, codes, codes % 15, torch.randn(16, dim, generator=generator).exp()])


@pytest.mark.parametrize("dim", [64, 96])
@pytest.mark.parametrize("bits", QUANTISED_BITS)
def test_matches_reference(bits, dim):
    x = hard_vectors(dim)
    x = torch.cat([x, x[: -len(x) % 32]]).to(DEVICE)
    for source_bits in (NEW, bits, 8, RAW_BITS):
        packed = torch.zeros(len(x), dim * bits // 8, dtype=torch.uint8, device=DEVICE)
        meta = torch.zeros(len(x), 2, dtype=torch.float16, device=DEVICE)
        quantize_kernel[(len(x) // 32,)](x, packed, meta.view(torch.int32), 32, dim, bits, source_bits, **SAME_BITS)
        expected, numbers = quantize(x, bits, source_bits)
        assert torch.equal(packed, expected)
        assert torch.equal(meta.view(torch.int16), numbers.view(torch.int16))
