"""Stored tokens read back from pages: the kernel against its reference, and this against what was appended."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sglang_diffkv.kernels.append.reference import append
from sglang_diffkv.kernels.read_back.reference import read_back as reference
from sglang_diffkv.kernels.read_back.triton import read_back
from sglang_diffkv.kernels.rotate.reference import Rotation, rotated
from tests.helpers import begin_step
from tests.kernels.triton_helpers import (
    BF16,
    DEVICE,
    FOUR,
    THREE,
    add_prompt,
    clone_state,
    close,
    make_format,
    make_manager,
    vectors,
    with_between,
)
from tests.policies import diffkv_policy

KEEPS_ALL = diffkv_policy(1.0, 0.0, 6)
ROTATIONS = ["none", "keys", "values", "both"]


def parts_of(lens: list[int]) -> torch.Tensor:
    """Where each of so many tokens begins, one request after the other."""
    each = torch.tensor(lens, device=DEVICE)
    return each.cumsum(0) - each


@pytest.mark.cover(2)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("turns", ROTATIONS)
@pytest.mark.parametrize(
    ("tiers", "dim", "v_dim", "page_tokens", "position_bytes"),
    [
        ("K8V4 K4V2", 64, 64, 8, 2),
        ("K8V4 K4V2", 128, 128, 16, 2),
        ("K8V2 K4V1", 96, 128, 5, 4),
        ("BF16 K8V4", 64, 96, 7, 2),
        ("K8V4", 256, 64, 8, 2),
        (FOUR, 64, 64, 40, 4),
        ("K6V3 K3V2", 96, 128, 8, 2),
        pytest.param(THREE, 128, 64, 32, 2, marks=pytest.mark.full),
    ],
)
def test_matches_reference(tiers, dim, v_dim, page_tokens, position_bytes, turns, dtype):
    """Prompts sorted into tiers, one shared in part, one with a single new token, one without any stored."""
    fmt = make_format(tiers, dim, v_dim, page_tokens, position_bytes=position_bytes)
    policy = with_between(KEEPS_ALL, len(fmt.tiers))
    manager = make_manager(fmt, layers=2, dtype=dtype, policy=policy)
    generator = torch.Generator().manual_seed(dim + len(turns))
    state, owners, prefix, new = manager.state, [2, 5, 3, 4], [45, 26, 13, 0], [9, 70, 1, 30]
    add_prompt(manager, 2, 45, generator)
    add_prompt(manager, 1, 37, generator)
    segment = manager.segments.share(1, 0, 37)
    assert segment is not None
    manager.attach_prefix(5, [(segment, 0, 26)])
    add_prompt(manager, 3, 13, generator, compact=False)
    begin_step(manager, owners, new, prefix)
    key, value = vectors(state, sum(new), generator)
    rows, extend_lens, prefix_lens = (torch.tensor(x, device=DEVICE) for x in (owners, new, prefix))
    starts, into = parts_of(new), parts_of([a + b for a, b in zip(prefix, new, strict=True)])
    lens = (rows, starts, extend_lens, prefix_lens, into)
    rotation = Rotation.named(turns)
    means = torch.randn(2, dim, generator=generator).to(DEVICE) if turns == "both" else None
    total = sum(prefix) + sum(new)
    outs = [[torch.full((total, 2, n), torch.nan, dtype=dtype, device=DEVICE) for n in (dim, v_dim)] for _ in range(2)]
    fused = torch.full((sum(new), 5, max(dim, v_dim)), torch.nan, dtype=dtype, device=DEVICE)  # a projection's slices
    fused[:, :2, :dim], fused[:, 3:, :v_dim] = key, value
    given = (fused[:, :2, :dim], fused[:, 3:, :v_dim])
    read_back(state, 1, *given, *lens, *outs[0], 70, rotation=rotation, key_means=means)
    reference(state, 1, key, value, *lens, *outs[1], rotation=rotation, key_means=means)
    limit = 4e-3 if dtype == BF16 else 5e-4  # the interpreter cuts off where it rounds
    for got, expected in zip(*outs, strict=True):
        assert not expected.isnan().any(), "the reference fills all places"
        assert close(got, expected) < limit
        error = (got.float() - expected.float()).norm(dim=2) / expected.float().norm(dim=2).clamp(min=1e-3)
        assert error.max() < 2 * limit, "each vector by itself"


@pytest.mark.parametrize("turns", ROTATIONS)
def test_is_what_was_appended(turns):
    """Of a raw tier: as it was given, up to rounding where it was rotated or less a mean."""
    rotation = Rotation.named(turns)
    manager = make_manager(make_format("BF16", 64), layers=1, policy=replace(KEEPS_ALL, window=4))
    generator = torch.Generator().manual_seed(3)
    state = manager.state
    begin_step(manager, [1], [40], [0])
    key, value = vectors(state, 40, generator)
    place, row = torch.arange(40, device=DEVICE), torch.tensor([1], device=DEVICE)
    means = torch.randn(2, 64, generator=generator).to(DEVICE)
    stored = rotated(means) if rotation.keys else means
    append(state, 0, key, value, row.expand(40), place, place, rotation=rotation, key_means=stored)
    begin_step(manager, [1], [6], [40])
    new_key, new_value = vectors(state, 6, generator)
    expected = (torch.cat([key, new_key]), torch.cat([value, new_value]))
    for read, more in ((read_back, (40,)), (reference, ())):
        outs = [torch.full_like(x, torch.nan) for x in expected]
        zero = row * 0
        read(
            state, 0, new_key, new_value, row, zero, zero + 6, zero + 40, zero, *outs, *more,
            rotation=rotation, key_means=means,
        )  # fmt: skip
        assert torch.equal(outs[0][40:], new_key) and torch.equal(outs[1][40:], new_value)
        if turns == "none":
            assert torch.equal(outs[1], expected[1])
        for got, given in zip(outs, expected, strict=True):
            assert close(got, given) < 6e-3


def test_nothing_is_written_elsewhere():
    """Neither pages nor places of tokens that a head does not hold."""
    manager = make_manager(make_format("K8V4 K4V2"), layers=1, policy=diffkv_policy(1.0, 0.3, 4))
    generator = torch.Generator().manual_seed(5)
    state = manager.state
    add_prompt(manager, 1, 50, generator)
    begin_step(manager, [1], [3], [50])
    key, value = vectors(state, 3, generator)
    before = clone_state(state)
    one = torch.tensor([1], device=DEVICE)
    outs = [[torch.full((60, 2, 64), 7.0, dtype=BF16, device=DEVICE) for _ in range(2)] for _ in range(2)]
    lens = (one, one * 0, one * 3, one * 50, one * 4)
    read_back(state, 0, key, value, *lens, *outs[0], 50)
    reference(state, 0, key, value, *lens, *outs[1])
    assert torch.equal(state.pages.view(torch.int16), before.pages.view(torch.int16))
    for got, expected in zip(*outs, strict=True):
        assert torch.equal(got == 7.0, expected == 7.0) and (got[:4] == 7.0).all() and (got[57:] == 7.0).all()
        assert 0 < (got[4:54] == 7.0).all(2).sum() < 100, "some tokens were dropped"


def test_a_row_that_found_no_page_has_zeros():
    """Its stored tokens that were lost have no number of who had the memory before; others are read."""
    manager = make_manager(make_format("K8V4 K4V2"), layers=1, policy=KEEPS_ALL, pages=14)
    generator = torch.Generator().manual_seed(6)
    state, owners, prefix, new = manager.state, [1, 2], [20, 90], [3, 70]
    for row, count in zip(owners, prefix, strict=True):
        add_prompt(manager, row, count, generator, compact=False)
    assert state.fault[owners].tolist() == [0, 1]
    begin_step(manager, owners, new, prefix)
    state.fault[1] = 0  # its new tokens alone found none
    key, value = vectors(state, sum(new), generator)
    rows, extend_lens, prefix_lens = (torch.tensor(x, device=DEVICE) for x in (owners, new, prefix))
    lens = (rows, parts_of(new), extend_lens, prefix_lens, parts_of([23, 160]))
    outs = [[torch.full((183, 2, 64), torch.nan, dtype=BF16, device=DEVICE) for _ in range(2)] for _ in range(2)]
    read_back(state, 0, key, value, *lens, *outs[0], 90)
    reference(state, 0, key, value, *lens, *outs[1])
    for got, expected, given in zip(*outs, (key, value), strict=True):
        assert close(got, expected) < 4e-3 and torch.equal(got[113:], given[3:])
        assert (got[23:113] == 0).all() and not (got[:20] == 0).any(2).all(1).any()


@pytest.mark.parametrize(("before", "position_bytes"), [(65_480, 2), (65_520, 4), (131_050, 4)])
def test_positions_of_long_sequences(before, position_bytes):
    """Tokens around positions that 16 bits do not hold, behind others that are taken for granted."""
    fmt = make_format("K8V4 K4V2", 64, page_tokens=8, position_bytes=position_bytes)
    manager = make_manager(fmt, layers=1, policy=KEEPS_ALL)
    generator = torch.Generator().manual_seed(before)
    manager.rows.grow(1, before, in_prompt=True)
    begin_step(manager, [1], [40], [before])
    place, row = torch.arange(40, device=DEVICE), torch.tensor([1], device=DEVICE)
    key, value = vectors(manager.state, 40, generator)
    append(manager.state, 0, key, value, row.expand(40), place, before + place)
    begin_step(manager, [1], [3], [before + 40])
    lens = (row, row * 0, row * 0 + 3, row * 0 + before + 40, row * 0)
    new = vectors(manager.state, 3, generator)
    outs = [[torch.full((before + 43, 2, 64), torch.nan, dtype=BF16, device=DEVICE) for _ in new] for _ in range(2)]
    read_back(manager.state, 0, *new, *lens, *outs[0], before + 40)
    reference(manager.state, 0, *new, *lens, *outs[1])
    for got, expected, given in zip(*outs, (key, value), strict=True):
        assert got[:before].isnan().all() and not got[before:].isnan().any()
        assert close(got[before:], expected[before:]) < 4e-3 and close(got[before:-3], given) < 0.1
