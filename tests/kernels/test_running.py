"""What judges a running request: its newest queries kept and rotated into scores, keys that repeat others, scores
written back. References against loops over the papers' formulas, Triton against the references."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from sglang_diffkv.kernels.append.reference import read_tokens
from sglang_diffkv.kernels.put_scores import reference as put_reference
from sglang_diffkv.kernels.put_scores import triton as put_triton
from sglang_diffkv.kernels.query_cache import reference as store_reference
from sglang_diffkv.kernels.query_cache import triton as store_triton
from sglang_diffkv.kernels.redundancy import reference as redundancy_reference
from sglang_diffkv.kernels.redundancy import triton as redundancy_triton
from sglang_diffkv.kernels.window_scores import reference as scores_reference
from sglang_diffkv.kernels.window_scores import triton as scores_triton
from sglang_diffkv.layout.query_cache import QueryCache
from sglang_diffkv.mem_pool.page_manager import PageManager
from tests.helpers import visible
from tests.kernels.test_whole_heads import two_parts
from tests.kernels.triton_helpers import DEVICE, clone_state

LENGTH = 61
SHAPES = [("K8V4 K4V2", 64, 4, 6), ("BF16", 96, 1, 16), ("K8V2 K4V1", 128, 3, 5), ("K8V4", 64, 2, 61)]
"""Tiers, head dimension, query heads of a KV head, queries."""


def queries_of(manager: PageManager, group: int, window: int) -> torch.Tensor:
    state = manager.state
    shape = (state.num_layers, window, state.num_heads * group, state.fmt.head_dim)
    generator = torch.Generator().manual_seed(group)
    return torch.randn(shape, generator=generator).to(DEVICE, state.dtype)


def keys_of(manager: PageManager, row: int) -> dict[tuple[int, int], dict[int, np.ndarray]]:
    """(layer, head) -> position -> key, of all that a row holds, as a scan of its pages finds it."""
    found: dict[tuple[int, int], dict[int, np.ndarray]] = {}
    seen = visible(manager.state, row)
    for tier, view in enumerate(manager.state.tiers):
        mine = seen.pick(seen.tier == tier)
        key, _ = read_tokens(view, torch.as_tensor(mine.page).long(), torch.as_tensor(mine.slot).long())
        for layer, head, position, vector in zip(mine.layer, mine.head, mine.position, key.numpy(), strict=True):
            found.setdefault((int(layer), int(head)), {})[int(position)] = vector.astype(np.float64)
    return found


@pytest.mark.skipif(DEVICE != "cpu", reason="the scan of pages reads the CPU's memory")
@pytest.mark.parametrize(("tiers", "dim", "group", "window"), SHAPES)
@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_scores_are_the_papers(tiers, dim, group, window, cap):
    manager, _ = two_parts(tiers, dim)
    queries, scale = queries_of(manager, group, window), 0.1
    values = torch.empty(2, 2, LENGTH)
    scores_reference.window_scores(manager.state, 2, LENGTH, queries, values, scale, logit_cap=cap)
    expected = np.full(values.shape, np.nan)
    for (layer, head), keys in keys_of(manager, 2).items():
        total = dict.fromkeys(keys, 0.0)
        for asked in range(LENGTH - window, LENGTH):
            best = dict.fromkeys(keys, 0.0)
            for member in range(group):
                q = queries[layer, asked % window, head * group + member].double().numpy()
                logits = {p: scale * float(q @ k) for p, k in keys.items() if p <= asked}
                if cap:
                    logits = {p: cap * math.tanh(x / cap) for p, x in logits.items()}
                norm = sum(map(math.exp, logits.values()))
                for p, x in logits.items():
                    best[p] = max(best[p], math.exp(x) / norm)
            total = {p: total[p] + best[p] for p in keys}
        for p, x in total.items():
            expected[layer, head, p] = x / window
    np.testing.assert_allclose(values.numpy(), expected, rtol=2e-4, atol=1e-7)
    assert np.isnan(expected).any() or "K4" not in tiers


@pytest.mark.parametrize(("tiers", "dim", "group", "window"), SHAPES)
@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_triton_scores_as_the_reference(tiers, dim, group, window, cap):
    manager, _ = two_parts(tiers, dim)
    queries = queries_of(manager, group, window)
    values = torch.empty(2, 2, 2, LENGTH + 3, device=DEVICE)
    for op, out in ((scores_reference, values[0]), (scores_triton, values[1])):
        op.window_scores(manager.state, 2, LENGTH, queries, out, 0.1, logit_cap=cap)
    tolerance = 1e-4 if DEVICE == "cpu" else 0.02
    torch.testing.assert_close(values[1], values[0], rtol=tolerance, atol=1e-6, equal_nan=True)
    assert (~values[0].isnan()).sum() > 100


@pytest.mark.parametrize(("tiers", "dim"), [("K8V4 K4V2", 64), ("BF16", 96)])
def test_scores_are_written_back_to_own_pages_only(tiers, dim):
    manager, _ = two_parts(tiers, dim)
    values = torch.rand(2, 2, LENGTH, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    values[..., 50:53] = float("nan")
    states = [clone_state(manager.state) for _ in range(2)]
    for op, state in zip((put_reference, put_triton), states, strict=True):
        op.put_scores(state, 2, values)
    assert torch.equal(states[0].pages, states[1].pages)
    changed = states[0].pages != manager.state.pages
    owned = torch.zeros_like(changed[:, 0])
    before, after = (visible(x, 2) for x in (manager.state, states[0]))
    owned[torch.as_tensor(before.page[before.own]).long()] = True
    assert not changed[~owned].any() and changed.any()
    for layer, head, position, own, old, new in zip(
        after.layer, after.head, after.position, after.own, before.score, after.score, strict=True
    ):
        given = float(values[layer, head, position])
        assert new == (old if not own or math.isnan(given) else np.float32(given))


def alike(manager: PageManager, row: int) -> None:
    """Make the row's keys few directions with a little noise, so that cosines lie far from any threshold."""
    view, generator = manager.state.tiers[0], torch.Generator().manual_seed(5)
    seen = visible(manager.state, row)
    mine = seen.pick(seen.tier == 0)
    directions = torch.randn(6, view.keys.shape[2], generator=generator)
    chosen = directions[torch.randint(6, (len(mine.page),), generator=generator)]
    noisy = (chosen + 0.02 * torch.randn(chosen.shape, generator=generator)).to(DEVICE, view.keys.dtype)
    view.keys[torch.as_tensor(mine.page).long(), torch.as_tensor(mine.slot).long()] = noisy


def presence(manager: PageManager, parts: Any) -> torch.Tensor:
    """Values with gaps: every fifth token is not compared."""
    from sglang_diffkv.kernels.gather_scores.reference import gather_scores

    values = torch.empty(2, 2, LENGTH, device=DEVICE)
    gather_scores(manager.state, parts, values, LENGTH, window=0)
    values[0, 1, ::5] = float("nan")
    return values


@pytest.mark.skipif(DEVICE != "cpu", reason="the scan of pages reads the CPU's memory")
@pytest.mark.parametrize("block", [0, 16, 7])
def test_redundancy_is_the_papers(block):
    manager, parts = two_parts("BF16")
    alike(manager, 2)
    values = presence(manager, parts)
    out = torch.empty_like(values)
    counts = redundancy_reference.redundancy(manager.state, parts, values, out, threshold=0.5, block=block)
    expected, zeroed = np.zeros(values.shape), 0
    for (layer, head), keys in keys_of(manager, 2).items():
        order = [p for p in sorted(keys) if not math.isnan(values[layer, head, p])]
        assert len(order) == counts[layer, head]
        size = block or len(order)
        for start in range(0, len(order), size):
            part = order[start : start + size]
            cosine = np.array(
                [[keys[a] @ keys[b] / np.linalg.norm(keys[a]) / np.linalg.norm(keys[b]) for b in part] for a in part]
            )
            np.fill_diagonal(cosine, 0.0)
            for column in range(len(part)):
                over = [row for row in range(len(part)) if cosine[row, column] > 0.5]
                if over:
                    cosine[over[-1], column] = 0.0
                    zeroed += 1
            expected[layer, head, part] = cosine.sum(1)
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-3, atol=1e-3)
    assert zeroed > 20 and expected.max() > 1


@pytest.mark.parametrize("tiers", ["BF16", "K8V4 K4V2"])
@pytest.mark.parametrize("block", [0, 16, 7])
def test_triton_redundancy_is_the_references(tiers, block, monkeypatch):
    monkeypatch.setattr(redundancy_triton, "SCRATCH_BYTES", 1)  # a layer at a time
    manager, parts = two_parts(tiers)
    if tiers == "BF16":
        alike(manager, 2)
    values = presence(manager, parts)
    out = torch.empty(2, *values.shape, device=DEVICE)
    threshold = 0.5 if tiers == "BF16" else 2.0  # nothing is that much alike: no cosine is near
    most = int((~values.isnan()).sum(2).max())
    counts = [
        op.redundancy(manager.state, parts, values, out[i], threshold=threshold, block=block, most=most)
        for i, op in enumerate((redundancy_reference, redundancy_triton))
    ]
    assert torch.equal(*counts)
    torch.testing.assert_close(out[1], out[0], rtol=0.0, atol=1e-4 if DEVICE == "cpu" else 0.1)
    assert (out[0][values.isnan()] == 0).all() and out[0].abs().max() > 1


def test_queries_are_kept_for_rows_with_a_slot():
    generator = torch.Generator().manual_seed(0)
    caches = [
        QueryCache.create(slots=3, rows=8, layers=2, window=5, q_heads=6, head_dim=96, device=DEVICE) for _ in range(2)
    ]
    rows = torch.tensor([4, 2, 7, 0], device=DEVICE)
    expected: dict[tuple[int, int, int], torch.Tensor] = {}
    for cache in caches:
        cache.slot_of[torch.tensor([2, 7], device=DEVICE)] = torch.tensor([2, 0], dtype=torch.int32, device=DEVICE)
    for step in range(7):
        lens = torch.tensor([30, 11, 4, 1], device=DEVICE) + step
        for layer in range(2):
            q = torch.randn(4, 6, 96, generator=generator).to(DEVICE, torch.bfloat16)
            for op, cache in zip((store_reference, store_triton), caches, strict=True):
                op.store_queries(cache, layer, q, rows, lens)
            expected |= {(2, layer, (10 + step) % 5): q[1], (0, layer, (3 + step) % 5): q[2]}
    assert torch.equal(caches[0].queries, caches[1].queries)
    for (slot, layer, place), q in expected.items():
        assert torch.equal(caches[0].queries[slot, layer, place], q)
    assert not caches[0].queries[1].any()
