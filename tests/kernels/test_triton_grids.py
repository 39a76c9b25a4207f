"""Grids of launches over prompts of millions of tokens: CUDA's limits are 2^31 - 1 along x, 65,535 along y and z."""

from __future__ import annotations

import pytest
import torch

from sglang_diffkv.kernels.append import triton as append
from sglang_diffkv.kernels.extend_attention import triton as extend
from sglang_diffkv.kernels.rotate import triton as rotate
from sglang_diffkv.kernels.rotate.reference import Rotation
from tests.kernels.triton_helpers import BF16, make_format, make_manager

LIMITS = (2**31 - 1, 65535, 65535)


class Recorder:
    """Stands for a kernel, and keeps its launches' grids."""

    def __init__(self, grids: dict[str, tuple[int, ...]], name: str, arg_names: list[str]):
        self.grids, self.name, self.arg_names = grids, name, arg_names

    def __getitem__(self, grid: tuple[int, ...]):
        self.grids[self.name] = grid
        return lambda *args, **kwargs: None


@pytest.mark.parametrize(("dim", "group"), [(64, 16), (256, 8)])
@pytest.mark.parametrize("prefix", [0, 3_000_000])
def test_long_prompts(monkeypatch, dim, group, prefix):
    """Nine million new tokens of one request, on tensors without memory."""
    tokens, heads = 9_000_000, 2
    grids: dict[str, tuple[int, ...]] = {}
    for module in (append, extend, rotate):
        for name in [x for x in vars(module) if x.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Recorder(grids, name, getattr(module, name).arg_names))
    monkeypatch.setattr(append, "check_rows", lambda *args: None)
    state = make_manager(make_format("K8V4 K4V2", dim), heads=heads).state
    q, key, value = (torch.empty(tokens, n, dim, dtype=BF16, device="meta") for n in (heads * group, heads, heads))
    each, one = (torch.empty(n, dtype=torch.int64, device="meta") for n in (tokens, 1))
    rotate.rotate(q, key, value)
    append.append(state, 0, key, value, each, each, each, one)
    append.append(state, 0, key, value, each, each, each, one, rotation=Rotation(True, True), query=q)
    extend.extend_attention(
        state, 0, q, key, value, one, one, one, one, tokens, prefix, 0.1, update_scores=True,
        shared_scores={0: torch.empty(2, heads, 1, device="meta")},
    )  # fmt: skip
    assert {"rotate_kernel", "append_kernel", "rotated_append_kernel", "ragged_kernel", "new_scores_kernel"} <= set(
        grids
    )
    assert ({"paged_kernel", "page_scores_kernel"} <= set(grids)) == (prefix > 0)
    for name, grid in grids.items():
        assert all(0 < n <= limit for n, limit in zip(grid, LIMITS, strict=False)), (name, grid)
