"""Tensors in 8 bits of floating point: the kernel against the reference."""

from __future__ import annotations

import pytest
import torch

from sglang_diffkv.kernels.to_e4m3 import reference
from sglang_diffkv.kernels.to_e4m3.triton import VECTORS, to_e4m3
from tests.kernels.triton_helpers import DEVICE

SHAPES = [(1, 1), (3, 20), (VECTORS, VECTORS), (37, 101)]
DIMS = [(64, 64), (128, 128), (96, 64)]


def compare(wide: torch.Tensor, tokens: int, keys: int, v_dim: int) -> None:
    """wide: [tokens, heads, dim], a projection, parts of which are queries, keys and values."""
    q, key, value = wide[:tokens, :4], wide[:keys, 4:6], wide[:keys, 6:, :v_dim]
    for mine, theirs in zip(to_e4m3(q, key, value), reference.to_e4m3(q, key, value), strict=True):
        assert mine.dtype == reference.E4M3 and mine.is_contiguous() and mine.shape == theirs.shape
        assert torch.equal(mine.float().nan_to_num(-7), theirs.float().nan_to_num(-7))


@pytest.mark.parametrize(("tokens", "keys"), SHAPES)
@pytest.mark.parametrize(("dim", "v_dim"), DIMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_each_vector_goes_to_its_place(tokens, keys, dim, v_dim, dtype):
    """Numbers that 8 bits hold, and some that are too large: Triton's interpreter rounds others wrongly."""
    generator = torch.Generator().manual_seed(tokens + dim)
    codes = torch.randint(0, 127, (max(tokens, keys), 8, dim), generator=generator, dtype=torch.uint8)
    wide = codes.view(reference.E4M3).float()
    wide[0, :, 0], wide[0, :, 1], wide[-1, :, -1] = torch.inf, -1e4, -wide[-1, :, -1]
    compare(wide.to(dtype).to(DEVICE), tokens, keys, v_dim)


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "keys"), SHAPES)
@pytest.mark.parametrize(("dim", "v_dim"), DIMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_any_number_is_rounded_as_by_the_reference(tokens, keys, dim, v_dim, dtype):
    generator = torch.Generator().manual_seed(tokens + dim)
    wide = torch.randn(max(tokens, keys), 8, dim, generator=generator) * torch.logspace(-9, 4, dim)
    wide[0, :, 0] = torch.nan
    compare(wide.to(dtype).to(DEVICE), tokens, keys, v_dim)


def test_what_is_too_large_is_the_largest():
    (found,) = reference.to_e4m3(torch.tensor([1e4, -1e4, 448.0, 0.3, torch.inf, torch.nan]))
    assert found.float()[:5].tolist() == [448, -448, 448, 0.3125, 448] and found[5].isnan()
