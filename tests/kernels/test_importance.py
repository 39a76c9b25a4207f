"""Parts of a layer's importance: by hand, in float64, and Triton against the reference bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sglang_diffkv.kernels.importance import reference
from sglang_diffkv.layout.ranks import Ranks
from tests.kernels.test_select import KINDS, random_values
from tests.kernels.triton_helpers import DEVICE
from tests.ranks import with_one_sum

from sglang_diffkv.kernels.importance import triton as on_gpu  # isort: skip

NAN, INF = float("nan"), float("inf")


def test_by_hand() -> None:
    """The second layer's heads do not have the same tokens, the third's have no importance."""
    values = torch.tensor(
        [
            [[0.5, 0.25, 0.25, INF], [0.5, 0.25, 0.25, INF]],
            [[1.0, NAN, 3.0, INF], [2.0, NAN, NAN, INF]],
            [[0.0, 0.0, 0.0, INF], [0.0, 0.0, 0.0, INF]],
        ]
    )
    out = torch.empty(3, 1, 4)
    assert reference.importance(values, out).tolist() == [3, 2, 3]
    expected = torch.tensor([[0.5, 0.25, 0.25, NAN], [0.5, NAN, 0.5, NAN], [0.0, 0.0, 0.0, NAN]])
    torch.testing.assert_close(out[:, 0], expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", [*KINDS, "tiny"])
@pytest.mark.parametrize("length", [1, 3, 40, 517, 2500])
def test_parts_are_shares_of_a_layer_s_sum(kind: str, length: int) -> None:
    values = random_values(kind, 3, 3, length)
    out = torch.empty(3, 1, length)
    tokens = reference.importance(values, out)
    line = values.numpy().astype(np.float64)
    finite = np.isfinite(line)
    mean = np.where(finite, line, 0.0).sum(1) / 3
    total = mean.sum(1, keepdims=True)
    expected = np.divide(mean, total, out=np.zeros_like(mean), where=total > 0)
    known = finite.any(1)
    assert tokens.tolist() == known.sum(1).tolist()
    assert np.array_equal(~np.isnan(out[:, 0].numpy()), known)
    got = out[:, 0].numpy()[known]
    if kind == "tiny":
        assert (got >= 0).all() and (got < 1e-9).all(), "numbers that are hardly any are as good as 0"
    else:
        np.testing.assert_allclose(got, expected[known], rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", [*KINDS, "tiny"])
def test_ranks_exchange_their_heads(kind: str, ranks: int) -> None:
    """What the reference and Triton make of a rank's two heads and the others' is the same, and close to one rank's of
    all heads."""
    values = random_values(kind, 3, 2 * ranks, 300)
    alone = torch.empty(3, 1, 300)
    tokens = reference.importance(values, alone)

    def parts(kernel: Any, device: str) -> list[tuple[list[int], torch.Tensor]]:
        def score(of: Ranks) -> tuple[list[int], torch.Tensor]:
            mine = values[:, 2 * of.rank : 2 * of.rank + 2].contiguous().to(device)
            out = torch.empty(3, 1, 300, device=device)
            room = torch.empty(2, 3, 300, device=device)
            return kernel(mine, out, reference.Shared(of.size, of.add, room)).tolist(), out.cpu()

        return with_one_sum(score, ranks)

    expected = parts(reference.importance, "cpu")
    for found, out in [*expected, *parts(on_gpu.importance, DEVICE)]:
        assert found == tokens.tolist()
        torch.testing.assert_close(out, expected[0][1], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(expected[0][1], alone, rtol=1e-5, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("kind", [*KINDS, "tiny"])
@pytest.mark.parametrize("length", [0, 1, 40, 2500])
@pytest.mark.parametrize("heads", [1, 3])
def test_triton_computes_what_the_reference_does(kind: str, length: int, heads: int) -> None:
    values = random_values(kind, 2, heads, length) if length else torch.zeros(2, heads, 0)
    expected, got = torch.empty(2, 1, length), torch.empty(2, 1, length, device=DEVICE)
    tokens = reference.importance(values, expected)
    assert torch.equal(on_gpu.importance(values.to(DEVICE), got).cpu(), tokens)
    assert torch.equal(got.cpu().nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))


def test_a_long_layer_s_small_values_are_not_lost() -> None:
    """Beside one token with most of the importance, a million others keep their sum to 2^-15."""
    values = torch.full((1, 1, 1 << 20), 2.0**-24)
    values[0, 0, 5] = 1.0
    out = torch.empty_like(values)
    reference.importance(values, out)
    assert float(out.double().sum()) == pytest.approx(1.0, abs=2.0**-15)
