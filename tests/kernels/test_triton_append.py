"""The Triton quantise-and-append against its reference."""

from __future__ import annotations

import pytest
import torch

from sglang_diffkv.kernels.append.reference import append as reference
from sglang_diffkv.kernels.append.triton import append
from sglang_diffkv.kernels.table import own_slot_location
from tests.helpers import begin_step
from tests.kernels.triton_helpers import BF16, DEVICE, clone_state, make_format, make_manager, vectors


@pytest.mark.parametrize("count", [3, 300])
@pytest.mark.parametrize(
    ("tiers", "dim", "v_dim", "dtype"),
    [
        ("K8V4 K4V2", 64, 64, BF16),
        ("K4V2", 96, 96, torch.float16),
        ("K8V2 K4V1", 128, 64, torch.float32),
        ("K4V1", 256, 256, BF16),
        ("BF16 K8V4", 96, 64, BF16),
    ],
)
def test_matches_reference(tiers, dim, v_dim, dtype, count):
    raw = tiers.startswith("BF16")
    manager = make_manager(make_format(tiers, dim, v_dim), dtype=dtype if raw else BF16, pages=800)
    state, generator = manager.state, torch.Generator().manual_seed(count)
    begin_step(manager, [4], [5], [0])
    begin_step(manager, [4], [count], [5])
    key, value = (x.to(dtype) for x in vectors(state, count + 2, generator))
    key[0], value[1] = 3.0, 0.0  # vectors without a range
    key[1, :, 0] = 500.0
    rows = torch.cat([torch.full((count,), 4), torch.zeros(2)]).long().to(DEVICE)
    index = torch.arange(count + 2, device=DEVICE)
    valid = torch.tensor([count], dtype=torch.int32, device=DEVICE)
    twin = clone_state(state)
    wide = torch.cat([key, key], 2)[:, :, :dim]  # rows that are not contiguous
    append(state, 1, wide, value, rows, index, 5 + index, valid)
    reference(twin, 1, key[:count], value[:count], rows[:count], index[:count], 5 + index[:count])
    if raw:
        assert torch.equal(state.pages, twin.pages)
    slot = 5 + torch.arange(count, device=DEVICE).view(1, 1, 1, -1).expand(1, 2, 2, -1)
    page, at = own_slot_location(state, rows[:1], 0, slot)
    seg, ref = state.tiers[0], twin.tiers[0]
    for name in ("positions", "scores", "key_meta", "value_meta"):
        if getattr(seg, name) is not None:
            assert torch.equal(getattr(seg, name)[page, at][:, 1], getattr(ref, name)[page, at][:, 1]), name
    for name in ("keys", "values"):
        assert torch.equal(getattr(seg, name)[page, at][:, 1], getattr(ref, name)[page, at][:, 1]), name
    held = torch.zeros(state.pages.shape[0], dtype=torch.bool, device=DEVICE)
    held[page.flatten()] = True
    assert torch.equal(state.pages[~held].view(-1), twin.pages[~held].view(-1))
