"""Cuts of whole heads: by hand, against a sort of each head's tokens, and Triton against the reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sglang_diffkv.kernels.select import reference
from tests.kernels.triton_helpers import DEVICE

from sglang_diffkv.kernels.select import triton as on_gpu  # isort: skip

NAN, INF = float("nan"), float("inf")


def random_values(kind: str, layers: int, heads: int, length: int) -> torch.Tensor:
    """[layers, heads, length] with gaps and window, by the kind of numbers."""
    random = torch.Generator().manual_seed(length)
    values = torch.rand(layers, heads, length, generator=random) ** 4
    if kind == "ties":
        values = (values * 5).round() / 5
    if kind == "zeros":
        values = values.masked_fill(values < 0.3, 0.0)
    if kind == "tiny":
        values = values * 1e-42  # below the least normal number
    if kind == "sums":
        values = values * 1e6
    values[torch.rand(values.shape, generator=random) < 0.2] = NAN
    values[..., max(length - 3, 0) :] = INF
    values[0, 0] = NAN
    return values


def chosen(values: torch.Tensor, cut: torch.Tensor, tie: torch.Tensor) -> torch.Tensor:
    """The tokens above a cut, as the kernels compare."""
    position = torch.arange(values.shape[2])
    above = values > cut.unsqueeze(2)
    return above | ((values == cut.unsqueeze(2)) & (position <= tie.unsqueeze(2)))


def first_of(pairs: list[tuple[float, int]], count: int) -> list[int]:
    """Places of the largest values, of equals the first."""
    return [at for _, at in sorted(pairs, key=lambda x: (-x[0], x[1]))[:count]]


KINDS = ["plain", "ties", "zeros", "sums"]
LENGTHS = [1, 2, 3, 40, 517]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_counts_are_those_of_a_sort(kind, length):
    values = random_values(kind, 2, 3, length)
    for wanted in (0, 1, 3, length // 2, length):
        count = torch.full((2, 3), wanted)
        got = chosen(values, *reference.select_count(values, count))
        together = chosen(values, *reference.select_count(values, torch.tensor([[6 * wanted // 2]])))
        everything = []
        for head, (layer, number) in enumerate(np.ndindex(2, 3)):
            line = values[layer, number]
            pairs = [(float(line[at]), at) for at in range(length) if not math.isnan(line[at])]
            assert sorted(first_of(pairs, wanted)) == got[layer, number].nonzero().flatten().tolist()
            everything += [(value, head * length + at) for value, at in pairs]
        assert sorted(first_of(everything, 3 * wanted)) == together.flatten().nonzero().flatten().tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.9, 1.0])
def test_a_mass_is_reached_by_no_fewer_tokens(kind, share):
    """Sums are good to 24 bits of the largest value for each token, shares to 16."""
    values = random_values(kind, 2, 3, 200)
    got = chosen(values, *reference.select_mass(values, share)) & values.isfinite()
    for layer, number in np.ndindex(2, 3):
        line, here = values[layer, number].double(), got[layer, number]
        finite = line[line.isfinite()]
        reached, target = float(line[here].sum()), share * float(finite.sum())
        slack = float(finite.sum()) * (2.0**-16 + 200 * 2.0**-24) if len(finite) else 0.0
        assert reached >= target - slack
        if here.any():
            assert reached - float(line[here].min()) <= target + slack, "one token fewer would have done"
            left = line[line.isfinite() & ~here]
            assert not len(left) or float(left.max()) <= float(line[here].min())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 0.5, 1.0])
def test_the_least_sum_to_less_than_a_share(kind, share):
    """The paper's cumulative sum: sorted ascending, a token goes while the sum up to it is below the share of all
    tokens' sum, those of window and sinks included."""
    values = random_values(kind, 2, 3, 200).masked_fill(torch.arange(200) >= 197, 0.5)
    values[0, 0] = NAN
    whole, window, sinks = values.clone(), 16, 2
    ((cut, tie),) = reference.select_least(values, [share], window=window, sinks=sinks)
    stays = chosen(values, cut, tie)
    lasting = (torch.arange(200) < sinks) | (torch.arange(200) >= 200 - window)
    assert values[:, :, lasting].isinf().equal(~whole[:, :, lasting].isnan()), "window and sinks are no candidates"
    for layer, number in np.ndindex(2, 3):
        line, here = whole[layer, number].double(), stays[layer, number]
        candidates = ~line.isnan() & ~lasting
        gone, left = line[candidates & ~here], line[candidates & here]
        limit = share * float(line.nansum())
        slack = float(line.nansum()) * (2.0**-16 + 200 * 2.0**-24)
        assert share or not len(gone), "below nothing there is nothing, tokens of no significance included"
        assert float(gone.sum()) < limit + slack or not len(gone)
        if len(left):
            assert float(gone.sum()) + float(left.min()) >= limit - slack, "one more would have gone"
            assert not len(gone) or float(gone.max()) <= float(left.min())


@pytest.mark.cover(1)
@pytest.mark.parametrize("length", [0, 1, 40, 517, 1300])
@pytest.mark.parametrize("kind", [*KINDS, "tiny"])
def test_triton_leaves_over_what_the_reference_does(kind, length):
    values = random_values(kind, 2, 2, length) if length else torch.zeros(2, 2, 0)
    other, shares = values.to(DEVICE, copy=True), [0.0, 0.004, 0.3, 1.0]
    expected = reference.select_least(values, shares, window=7, sinks=3)
    got = on_gpu.select_least(other, shares, window=7, sinks=3)
    assert torch.equal(other.cpu().nan_to_num(nan=-1), values.nan_to_num(nan=-1))
    for one, two in zip(got, expected, strict=True):
        if length:
            assert torch.equal(chosen(values, *(x.cpu() for x in one)), chosen(values, *two))


def test_by_hand():
    values = torch.tensor([[[0.5, NAN, 0.25, 0.125, 0.125, INF], [0.0, 0.0, NAN, 0.0, INF, INF]]])
    cut, tie = reference.select_count(values, torch.tensor([[4, 3]]))
    assert cut.tolist() == [[0.125, 0.0]] and tie.tolist() == [[3, 0]]
    cut, tie = reference.select_mass(values, 0.75)
    assert cut.tolist() == [[0.25, INF]] and tie.tolist() == [[2, -1]]
    cut, tie = reference.select_count(values, torch.tensor([[5]]))
    assert cut.tolist() == [[0.25, 0.25]] and tie.tolist() == [[2, -1]]


@pytest.mark.cover(2)
@pytest.mark.parametrize("length", [0, 1, 40, 517, 1300])
@pytest.mark.parametrize("kind", [*KINDS, "tiny"])
@pytest.mark.parametrize(
    "by", ["few", "most", "none", "more than there are", "together", "0.3", "1.0", "parts 0.3", "parts 1.0"]
)
def test_triton_selects_what_the_reference_does(kind, by, length):
    values = random_values(kind, 2, 2, length) if length else torch.zeros(2, 2, 0)
    if by[0] in "01":
        expected = reference.select_mass(values, float(by))
        got = on_gpu.select_mass(values.to(DEVICE), float(by))
    elif by.startswith("parts"):
        values = values / values.masked_fill(~values.isfinite(), 0.0).sum(2, keepdim=True).clamp(min=1e-30)
        share = float(by.split()[1])
        expected = reference.select_mass(values, share, together=True)
        got = on_gpu.select_mass(values.to(DEVICE), share, together=True)
    else:
        wanted = {"few": 3, "most": length * 3 // 5, "none": 0, "together": length}.get(by, 2 * length)
        count = torch.tensor([[wanted]]) if by == "together" else torch.tensor([[wanted, wanted + 1], [wanted, 2]])
        expected = reference.select_count(values, count)
        got = on_gpu.select_count(values.to(DEVICE), count.to(DEVICE))
    if length:
        assert torch.equal(chosen(values, *(x.cpu() for x in got)), chosen(values, *expected))
    assert torch.equal(got[0].cpu(), expected[0]) and torch.equal(got[1].cpu(), expected[1])
    above = chosen(values, *expected).sum(2)
    assert torch.equal(reference.count_above(values, *expected), above)
    assert torch.equal(on_gpu.count_above(values.to(DEVICE), *got).cpu(), above)
