"""The Triton rotation against its reference, and both against what a rotation is for."""

from __future__ import annotations

import pytest
import torch

from sglang_diffkv.kernels.quantize.reference import dequantize, quantize
from sglang_diffkv.kernels.rotate.reference import block_size, hadamard
from sglang_diffkv.kernels.rotate.reference import rotate as reference
from sglang_diffkv.kernels.rotate.triton import rotate
from tests.kernels.triton_helpers import BF16, DEVICE, close

ROUNDING = {torch.float32: 1e-6, torch.float16: 1e-3, BF16: 8e-3}
DIMS = [64, 96, 128, 256]


def draw(tokens: int, heads: int, dim: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(tokens, heads, dim, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("tokens", [1, 7, 33])
def test_matches_reference(tokens, dim, dtype):
    tensors = [draw(tokens, heads, dim, dtype, heads) for heads in (6, 3, 5)]
    tensors[0][0, 0, 0] = 300.0
    for count in (1, 2, 3):
        for got, expected in zip(rotate(*tensors[:count]), reference(*tensors[:count]), strict=True):
            assert got.dtype == dtype and got.shape == expected.shape and got.is_contiguous()
            assert close(got, expected) < ROUNDING[dtype]


@pytest.mark.parametrize("dim", [64, 96])
def test_slices_of_a_fused_projection(dim):
    """Queries and keys as a model cuts them out of one tensor, beside tokens of NaN that must not be read."""
    fused = draw(20, 9, dim, BF16, 3)
    fused[11:], fused[:, 8:] = torch.nan, torch.nan
    q, key = fused[:11, :6], fused[:11, 6:8]
    assert not q.is_contiguous()
    for got, expected in zip(rotate(q, key), reference(q.contiguous(), key.contiguous()), strict=True):
        assert close(got, expected) < ROUNDING[BF16]


def test_attention_of_rotated_values_is_rotated_attention():
    weights, value = torch.rand(7, 9).softmax(1), draw(9, 1, 96, torch.float32, 3).cpu()
    there = torch.einsum("qk,khd->qhd", weights, reference(value)[0])
    assert close(reference(there)[0], torch.einsum("qk,khd->qhd", weights, value)) < 1e-5


def test_no_tokens():
    q, key = rotate(draw(0, 4, 64, BF16, 1), draw(0, 2, 64, BF16, 1))
    assert q.shape == (0, 4, 64) and key.shape == (0, 2, 64)


@pytest.mark.parametrize("dim", DIMS)
def test_products_are_kept(dim):
    q, key = draw(5, 2, dim, torch.float32, 4), draw(5, 2, dim, torch.float32, 5)
    for rotated in (reference(q, key), rotate(q, key)):
        assert close((rotated[0] * rotated[1]).sum(2), (q * key).sum(2)) < 1e-5
        assert close(rotated[1].norm(dim=2), key.norm(dim=2)) < 1e-5
    matrix = hadamard(block_size(dim), torch.device("cpu"))
    assert torch.allclose(matrix @ matrix, torch.eye(block_size(dim)), atol=1e-6)


def test_outliers_cost_less_after_rotation():
    """Keys with a few large channels, as models have them: at 4 bits the error of the others falls by far."""
    key = draw(200, 2, 128, torch.float32, 6)
    key[..., :2] *= 20

    def error(x: torch.Tensor) -> float:
        return close(dequantize(*quantize(x, 4), 4), x)

    assert error(reference(key, key)[1]) < 0.5 * error(key)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")
def test_in_a_cuda_graph():
    q, key = draw(4, 8, 128, BF16, 1), draw(4, 2, 128, BF16, 2)
    rotate(q, key)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = rotate(q, key)
    q.copy_(draw(4, 8, 128, BF16, 3))
    graph.replay()
    for got, expected in zip(outs, reference(q, key), strict=True):
        assert close(got, expected) < ROUNDING[BF16]
