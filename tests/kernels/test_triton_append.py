"""The Triton quantise-and-append against its reference."""

from __future__ import annotations

import pytest
import torch

from sglang_diffkv.kernels.append.reference import append as reference
from sglang_diffkv.kernels.append.reference import read_tokens
from sglang_diffkv.kernels.append.triton import append
from sglang_diffkv.kernels.rotate.reference import Rotation, rotate
from sglang_diffkv.kernels.table import own_slot_location
from tests.helpers import begin_step
from tests.kernels.triton_helpers import BF16, DEVICE, clone_state, close, make_format, make_manager, vectors


def drawn(tiers, dim, v_dim, dtype, count):
    """A state in which row 4 has room for ``count`` new tokens behind 5, the generator, keys and values of these and of
    two that are padding."""
    raw = tiers.startswith("BF16")
    manager = make_manager(make_format(tiers, dim, v_dim), dtype=dtype if raw else BF16, pages=800)
    state, generator = manager.state, torch.Generator().manual_seed(count)
    begin_step(manager, [4], [5], [0])
    begin_step(manager, [4], [count], [5])
    key, value = (x.to(dtype) for x in vectors(state, count + 2, generator))
    key[0], value[1] = 3.0, 0.0  # vectors without a range
    key[1, :, 0] = 500.0
    return state, generator, key, value


def owners(count):
    """Rows and numbers of the tokens, and how many of them are not padding."""
    rows = torch.cat([torch.full((count,), 4), torch.zeros(2)]).long().to(DEVICE)
    return rows, torch.arange(count + 2, device=DEVICE), torch.tensor([count], dtype=torch.int32, device=DEVICE)


def check_other_pages(state, twin, written):
    """Raise AssertionError if pages that are not ``written`` differ."""
    held = torch.zeros(state.pages.shape[0], dtype=torch.bool, device=DEVICE)
    held[written.flatten()] = True
    assert torch.equal(state.pages[~held].view(-1), twin.pages[~held].view(-1))


@pytest.mark.parametrize("count", [3, 300])
@pytest.mark.parametrize(
    ("tiers", "dim", "v_dim", "dtype"),
    [
        ("K8V4 K4V2", 64, 64, BF16),
        ("K4V2", 96, 96, torch.float16),
        ("K8V2 K4V1", 128, 64, torch.float32),
        ("K4V1", 256, 256, BF16),
        ("BF16 K8V4", 96, 64, BF16),
        ("K6V3", 96, 256, BF16),
        pytest.param("K5V7", 128, 64, torch.float16, marks=pytest.mark.full),
    ],
)
def test_matches_reference(tiers, dim, v_dim, dtype, count):
    raw = tiers.startswith("BF16")
    state, _, key, value = drawn(tiers, dim, v_dim, dtype, count)
    rows, index, valid = owners(count)
    twin = clone_state(state)
    wide = torch.cat([key, key], 2)[:, :, :dim]  # rows that are not contiguous
    append(state, 1, wide, value, rows, index, 5 + index, valid)
    reference(twin, 1, key[:count], value[:count], rows[:count], index[:count], 5 + index[:count])
    if raw:
        assert torch.equal(state.pages, twin.pages)
    slot = 5 + torch.arange(count, device=DEVICE).view(1, 1, 1, -1).expand(1, 2, 2, -1)
    page, at = own_slot_location(state, rows[:1], 0, slot)
    view, ref = state.tiers[0], twin.tiers[0]
    for name in ("positions", "scores", "key_meta", "value_meta"):
        if getattr(view, name) is not None:
            assert torch.equal(getattr(view, name)[page, at][:, 1], getattr(ref, name)[page, at][:, 1]), name
    for name in ("keys", "values"):
        assert torch.equal(getattr(view, name)[page, at][:, 1], getattr(ref, name)[page, at][:, 1]), name
    check_other_pages(state, twin, page)


@pytest.mark.parametrize(
    ("tiers", "dim", "v_dim", "dtype", "rotation", "means"),
    [
        ("K8V4 K4V2", 128, 128, BF16, Rotation(True, True), True),
        ("K8V4 K4V2", 64, 64, BF16, Rotation(True, True), False),
        ("K8V2 K4V1", 128, 64, torch.float16, Rotation(keys=True), False),
        ("K4V2", 96, 96, BF16, Rotation(True, True), True),
        ("K8V4 K4V2", 96, 96, torch.float16, Rotation(values=True), True),
        ("K4V1", 256, 256, BF16, Rotation(True, True), True),
        ("K8V4", 64, 128, torch.float32, Rotation(), True),
        ("BF16 K8V4", 128, 64, BF16, Rotation(True, True), True),
        ("K6V3", 256, 96, BF16, Rotation(True, True), True),
    ],
)
@pytest.mark.parametrize("count", [3, 300])
def test_turned_on_the_way_as_the_reference(tiers, dim, v_dim, dtype, rotation, means, count):
    """Rotated, and less a head's vector, in one launch; the queries beside, from a slice of a wider tensor."""
    raw = tiers.startswith("BF16")
    state, generator, key, value = drawn(tiers, dim, v_dim, dtype, count)
    key[count:], value[count:] = torch.nan, torch.nan  # padding
    heads = state.num_heads
    key_means = torch.randn(heads, dim, generator=generator).to(DEVICE) * 4 if means else None
    query, key, value = (
        slice_of_more(x.to(dtype)) for x in (torch.randn(count + 2, 3 * heads, dim, generator=generator), key, value)
    )
    rows, index, valid = owners(count)
    twin, form = clone_state(state), {"rotation": rotation, "key_means": key_means}
    rotated = append(state, 1, key, value, rows, index, 5 + index, valid, **form, query=query)
    reference(twin, 1, key[:count], value[:count], rows[:count], index[:count], 5 + index[:count], **form)
    expected = rotate(query)[0] if rotation.keys else query
    assert rotated.dtype == dtype and close(rotated[:count], expected[:count]) < 8e-3
    assert append(state, 1, key, value, rows, index, 5 + index, valid, **form) is None
    slot = 5 + torch.arange(count, device=DEVICE).view(1, 1, 1, -1).expand(1, 2, 2, -1)
    page, at = (x[:, 1] for x in own_slot_location(state, rows[:1], 0, slot))
    view, ref = state.tiers[0], twin.tiers[0]
    for mine, theirs in zip(read_tokens(view, page, at), read_tokens(ref, page, at), strict=True):
        assert close(mine, theirs) < (8e-3 if raw else 2e-3)
    for name in ("positions", "scores"):
        assert torch.equal(getattr(view, name)[page, at], getattr(ref, name)[page, at]), name
    if not raw:
        for name in ("keys", "values"):
            differ = getattr(view, name)[page, at] != getattr(ref, name)[page, at]
            assert differ.float().mean() < 1e-2, name
    check_other_pages(state, twin, page)


@pytest.mark.parametrize("rotation", [Rotation(), Rotation(True, True)])
def test_behind_pages_that_the_row_shares(rotation):
    """A row's own pages begin behind those that it refers to; a token without a page goes nowhere."""
    state, _, key, value = drawn("K8V4 K4V2", 64, 64, BF16, 300)
    state.own_entry[4, ..., 0] = 2
    twin, before, (rows, index, valid) = clone_state(state), clone_state(state), owners(300)
    few, valid = slice(0, 3), torch.full_like(valid, 3)
    arguments = (1, key[few], value[few], rows[few], index[few], 5 + index[few])
    append(state, *arguments, valid, rotation=rotation)
    reference(twin, *arguments, rotation=rotation)
    view, ref, old = (x.tiers[0].positions[:] for x in (state, twin, before))
    assert torch.equal(view, ref) and not torch.equal(view, old)
    homeless = clone_state(before)
    homeless.page_table.fill_(-1)
    append(homeless, *arguments, valid, rotation=rotation)
    assert torch.equal(homeless.pages.view(-1), before.pages.view(-1))


@pytest.mark.parametrize("tier", ["K6V3", pytest.param("K5V7", marks=pytest.mark.full)])
def test_large_and_small_numbers(tier: str) -> None:
    """To the last bit as the reference stores them, where float16 has no room or no precision for them."""
    state, _, key, value = drawn(tier, 64, 96, torch.float32, 12)
    sizes = torch.tensor([1e-30, 1e-8, 3e-6, 1e-5, 1e-3, 0.1, 300, 5e3, 6e4, 1e5, 1e30, 1e38, 0, 0], device=DEVICE)
    key, value = (x * sizes.view(-1, 1, 1) for x in (key, value))
    rows, index, valid = owners(12)
    twin = clone_state(state)
    append(state, 1, key, value, rows, index, 5 + index, valid)
    reference(twin, 1, key[:12], value[:12], rows[:12], index[:12], 5 + index[:12])
    slot = 5 + torch.arange(12, device=DEVICE).view(1, 1, 1, -1).expand(1, 2, 2, -1)
    page, at = (x[:, 1] for x in own_slot_location(state, rows[:1], 0, slot))
    view, ref = state.tiers[0], twin.tiers[0]
    for name in ("key_meta", "value_meta", "keys", "values"):
        got, expected = getattr(view, name)[page, at], getattr(ref, name)[page, at]
        assert torch.equal(got, expected), name
    assert all(x.isfinite().all() for x in read_tokens(view, page, at))


def slice_of_more(x: torch.Tensor) -> torch.Tensor:
    """The same heads between others, of NaN, as a model cuts them out of one projection."""
    wide = torch.full((x.shape[0], x.shape[1] + 3, x.shape[2]), torch.nan, dtype=x.dtype, device=DEVICE)
    wide[:, 1:-2] = x.to(DEVICE)
    return wide[:, 1:-2]


def test_a_rotation_of_pages_attends_as_no_rotation() -> None:
    """What is stored rotated has the products with rotated queries that it had before."""
    manager = make_manager(make_format("K8V8", 128, 128), pages=100)
    state, generator = manager.state, torch.Generator().manual_seed(1)
    begin_step(manager, [4], [9], [0])
    key, value = vectors(state, 9, generator)
    query = torch.randn(9, 6, 128, generator=generator).to(DEVICE, BF16)
    rows, index = torch.full((9,), 4, device=DEVICE), torch.arange(9, device=DEVICE)
    valid = torch.tensor([9], dtype=torch.int32, device=DEVICE)
    rotated = append(state, 0, key, value, rows, index, index, valid, rotation=Rotation(keys=True), query=query)
    page, at = own_slot_location(state, rows[:1], 0, index.view(1, 1, 1, -1).expand(1, 2, 2, -1))
    stored = read_tokens(state.tiers[0], page[0, 0], at[0, 0])[0]  # [H, tokens, dim]
    products = torch.einsum("thd,hnd->htn", rotated[:, :2].float(), stored)
    assert close(products, torch.einsum("thd,nhd->htn", query[:, :2].float(), key.float())) < 2e-2
