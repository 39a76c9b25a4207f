"""Attention sinks: one token takes most of the attention and has no value, so the output is what the others add.

Their weights are small numbers times small or large values; in fp16 they must neither vanish nor overflow.
"""

from __future__ import annotations

import math

import pytest
import torch

from sglang_diffkv.kernels.append.reference import append
from sglang_diffkv.kernels.decode_attention.reference import StepScores
from sglang_diffkv.kernels.decode_attention.reference import decode_attention as decode_reference
from sglang_diffkv.kernels.decode_attention.triton import FoundTokens, decode_attention
from sglang_diffkv.kernels.decode_attention.triton_workspace import DecodeConfig, DecodeWorkspace
from sglang_diffkv.kernels.extend_attention.reference import extend_attention as extend_reference
from sglang_diffkv.kernels.extend_attention.triton import extend_attention
from sglang_diffkv.layout.geometry import Geometry
from sglang_diffkv.mem_pool.page_manager import PageManager
from tests.helpers import begin_step
from tests.kernels.triton_helpers import BF16, DEVICE, clone_state, close, held_pages, make_format
from tests.policies import diffkv_policy

DIM, SCALE = 64, 0.125
SHARES = (0.5, 0.97, 0.999, 0.03)
"""What the sink receives from each query head of the group."""
BOUND = 1.5e-2
"""Queries rounded to fp16 cost 7e-3 at such logits; quantised values cost 9e-2."""
LARGEST = 12000.0
"""Standard deviation of values about the largest that fp16 holds."""


def sink_and_others(tiers: str, std: float, count: int, dtype: torch.dtype, sink: int = 0) -> PageManager:
    """Row 1 of one head with a sink, without a value, at position ``sink``; with two tiers most others are low."""
    fmt = make_format(tiers, DIM, page_tokens=32)
    geometry = Geometry(fmt, 1, 1, count // 16 + 40, num_rows=4, num_segments=1, max_tokens=count + 100)
    manager = PageManager(geometry, diffkv_policy(1.0, 0.0, 16), dtype=dtype, device=DEVICE)
    generator = torch.Generator().manual_seed(count)
    key, value = (torch.randn(count, 1, DIM, generator=generator) for _ in range(2))
    key[..., 0] = 0.0
    key[sink] = 0.0
    key[sink, :, 0] = 16.0
    value = (value * std).clamp(-65000.0, 65000.0)
    value[sink] = 0.0
    begin_step(manager, [1], [count], [0])
    index = torch.arange(count, device=DEVICE)
    append(manager.state, 0, key.to(DEVICE, dtype), value.to(DEVICE, dtype), torch.ones_like(index), index, index)
    scores = manager.state.tiers[0].scores
    scores.copy_(torch.rand(scores.shape, generator=generator) * 1.1 / count)
    if len(fmt.tiers) > 1:
        manager.prompts.end(1)
        held = manager.state.entries[1, 0, 0]
        assert held.min() > 0, "the test is to have pages of both tiers"
    return manager


def queries(count: int, dtype: torch.dtype, tokens: int = 1) -> torch.Tensor:
    """[tokens, G, DIM], whose heads give the sink ``SHARES`` of their attention to ``count`` tokens."""
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(tokens, len(SHARES), DIM, generator=generator) * 0.5
    others = count * math.exp((0.5**2 * DIM * SCALE**2) / 2)
    for head, share in enumerate(SHARES):
        q[:, head, 0] = math.log(others * share / (1 - share)) / (16.0 * SCALE)
    return q.to(DEVICE, dtype)


def check(out: torch.Tensor, expected: torch.Tensor, tokens: int = 0) -> None:
    """``tokens`` that one program attends to: a tensor core truncates each that it adds to a sink's large sum, so the
    error grows with them."""
    assert out.isfinite().all()
    errors = [close(out[:, head], expected[:, head]) for head in range(len(SHARES))]
    assert max(errors) < BOUND * max(tokens / 8192, 1), errors


CASES = [
    # tiers, values' standard deviation, tokens, the sink's position, splits in decode, dtype
    ("K8V4", 0.01, 4096, 0, 1, BF16),
    ("K8V4", 0.03, 2048, 1000, 5, BF16),
    ("K8V4 K4V2", 0.01, 4096, 0, 4, BF16),
    ("K8V4 K4V2", 1.0, 800, 799, 1, BF16),
    ("K8V4 K4V2", 100.0, 800, 0, 3, BF16),
    ("K8V4 K4V2", LARGEST, 800, 0, 1, torch.float16),
    ("K8V4 K4V2", 0.0, 200, 0, 2, BF16),
    ("K8V2 K4V1", 0.01, 800, 0, 1, BF16),
    ("K8V2 K4V1", LARGEST, 800, 0, 2, BF16),
    ("K8V8 K4V4", 0.01, 800, 0, 2, BF16),
    ("BF16", 0.1, 1000, 0, 1, torch.float16),
    ("BF16", LARGEST, 1000, 500, 3, torch.float16),
    ("BF16", 0.01, 1000, 0, 1, BF16),
    ("BF16 K8V4", 0.1, 1000, 0, 1, torch.float16),
]


@pytest.mark.parametrize(
    ("tiers", "std", "count", "sink", "splits", "dtype"), [*CASES, ("K8V4 K4V2", 0.1, 16384, 0, 1, BF16)]
)
def test_decode(tiers, std, count, sink, splits, dtype):
    decode_with_a_sink(tiers, std, count, sink, splits, dtype)


def decode_with_a_sink(tiers, std, count, sink, splits, dtype, **config):
    manager = sink_and_others(tiers, std, count, dtype, sink)
    state, row, q = manager.state, torch.tensor([1], device=DEVICE), queries(count, dtype)
    lens, valid = torch.tensor([count], device=DEVICE), torch.tensor([1], dtype=torch.int32, device=DEVICE)
    settings = DecodeConfig(programs=splits * state.num_heads, **config)
    workspace = DecodeWorkspace.create(state, 1, len(SHARES), config=settings)
    workspace.plan(state, row, valid)
    out, lse = decode_attention(state, 0, q, row, lens, SCALE, workspace, valid)
    expected, expected_lse = decode_reference(state, 0, q, row, lens, SCALE)
    received = (q.float()[0, :, 0] * 16.0 * SCALE - expected_lse[0]).exp()
    assert (received - torch.tensor(SHARES, device=DEVICE)).abs().max() < 0.02, "the test is to have a sink"
    check(out, expected, count // splits)
    assert (lse - expected_lse).abs().max() < 5e-3


@pytest.mark.parametrize("std", [0.01, LARGEST])
def test_scores(std):
    scores_beside_a_sink(std)


def scores_beside_a_sink(std, **config):
    """The others' scores are of attention a million times less than the sink's."""
    manager = sink_and_others("K8V4 K4V2", std, 800, BF16)
    state, row, q = manager.state, torch.tensor([1], device=DEVICE), queries(800, BF16)
    q[:] = q[:, 2:3]
    lens, valid = torch.tensor([800], device=DEVICE), torch.tensor([1], dtype=torch.int32, device=DEVICE)
    chosen = DecodeConfig(programs=2 * state.num_heads, **config)
    workspace = DecodeWorkspace.create(state, 1, len(SHARES), max_tokens=900, config=chosen)
    found, expected, twin = FoundTokens.create(state, 1, chosen), StepScores.create(state, 1), clone_state(state)
    workspace.plan(state, row, valid)
    settings = {"window": 16, "horizon": 1}  # scores are this step's attention
    decode_attention(state, 0, q, row, lens, SCALE, workspace, valid, found=found, **settings)
    decode_reference(twin, 0, q, row, lens, SCALE, scores=expected, **settings)
    for tier, (view, ref) in enumerate(zip(state.tiers, twin.tiers, strict=True)):
        pages = held_pages(twin, row, tier)
        held = ref.positions[pages] >= 0
        assert 0 < ref.scores[pages][held].median() < 1e-5
        torch.testing.assert_close(view.scores[pages][held], ref.scores[pages][held], rtol=3e-2, atol=1e-9)
    assert (found.unpack().least_slot >= 0).all()


@pytest.mark.parametrize(("tiers", "std", "count", "sink", "splits", "dtype"), CASES)
def test_extend(tiers, std, count, sink, splits, dtype):
    """Three new tokens, without values of their own, after a prompt with a sink."""
    manager = sink_and_others(tiers, std, count, dtype, sink)
    begin_step(manager, [1], [3], [count])
    one, new = torch.tensor([1], device=DEVICE), torch.zeros(3, 1, DIM, dtype=dtype, device=DEVICE)
    q = queries(count, dtype, tokens=3)
    lens, prefix = one * 3, one * count
    out, _ = extend_attention(manager.state, 0, q, new, new, one, one * 0, lens, prefix, 3, count, SCALE)
    check(out, extend_reference(manager.state, 0, q, new, new, one, lens, prefix, SCALE))


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
def test_new_tokens_among_themselves(dtype):
    """The first of a prompt is the sink."""
    count, generator = 1024, torch.Generator().manual_seed(5)
    manager = PageManager(
        Geometry(make_format("K8V4", DIM), 1, 1, 8, num_rows=4, num_segments=1, max_tokens=64),
        diffkv_policy(1.0, 0.0, 16), dtype=dtype, device=DEVICE,
    )  # fmt: skip
    key, value = (torch.randn(count, 1, DIM, generator=generator) for _ in range(2))
    key[..., 0] = key[0] = value[0] = 0.0
    key[0, :, 0] = 16.0
    key, value = (x.to(DEVICE, dtype) for x in (key, value * 0.01))
    one, q = torch.tensor([1], device=DEVICE), queries(count, dtype, tokens=count)
    out, _ = extend_attention(manager.state, 0, q, key, value, one, one * 0, one * count, one * 0, count, 0, SCALE)
    expected = extend_reference(manager.state, 0, q, key, value, one, one * count, one * 0, SCALE)
    check(out[count // 2 :], expected[count // 2 :])
