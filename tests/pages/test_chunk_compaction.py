"""Prompts that are compacted between chunks: attention stays that over the stored tokens, and counts stay bounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_diffkv.kernels.append.reference import append
from sglang_diffkv.mem_pool.integrity import check_bounds, check_integrity
from sglang_diffkv.mem_pool.steps import LaunchedStep
from sglang_diffkv.policies.uniform import UniformPolicy
from tests.dense import Session
from tests.helpers import make_format, make_manager, tier_map
from tests.policies import diffkv_policy

CHUNKS = [37, 64, 5, 40]


@pytest.mark.parametrize("alpha_high", [1.0, 50.0])
@pytest.mark.parametrize("freeze", [None, 20])
def test_a_prompt_in_compacted_chunks(alpha_high: float, freeze: int | None) -> None:
    """Each pass attends to what is stored, as the dense oracle checks; what went down stays down."""
    manager = make_manager(policy=diffkv_policy(alpha_high, 0.0, window=8))
    manager.prompts.share_min_tokens = freeze
    session = Session(manager, spread=2.0)
    length, low = 0, np.zeros(0)
    for count in CHUNKS:
        session.extend({1: count, 2: 3})
        length += count
        if length < sum(CHUNKS):
            manager.prompts.end_chunk(1)
        else:
            session.end_prompt(1)
        tiers = tier_map(manager.state, 1, length)
        assert (tiers[:, :, -8:] == 0).all() and (tiers < 2).all()
        assert (tiers[:, :, : low.shape[-1]] >= low).all()
        low = tiers
        manager.counts.settle()
        check_integrity(manager)
        check_bounds(manager)
    assert (low == 1).any()
    for _ in range(12):
        session.step([1, 2])
        check_bounds(manager)
    for row in (1, 2):
        session.release(row)
    check_integrity(manager)
    assert manager.device.free_pages() == manager.geometry.num_pages


def test_pages_of_a_compacted_chunk_return_before_the_next() -> None:
    manager = make_manager(policy=diffkv_policy(50.0, 0.0, window=8))
    session = Session(manager)
    session.extend({1: 200})
    full = manager.device.pages_of(1)
    manager.prompts.end_chunk(1)
    assert manager.device.pages_of(1) < 0.7 * full
    manager.counts.settle()
    assert manager.counts.free_bound() == manager.device.free_pages()


def test_a_launched_step_says_what_is_compacted_behind_it() -> None:
    manager = make_manager(policy=diffkv_policy(50.0, 0.0, window=8))
    Session(manager)
    step = manager.plan_step([1, 2, 3], [200, 200, 200], [0, 0, 0], ending=[2], compacting=[1])
    assert not isinstance(step, LaunchedStep) and manager.counts.upcoming is step
    launched = manager.launch_step()
    assert launched == step.launched() and manager.counts.upcoming is None and manager.launch_step() is None
    manager.ops.reserve(torch.tensor(step.rows), torch.tensor(step.new_tokens), 200)
    at = torch.arange(200).repeat(3)
    key = torch.randn(600, manager.geometry.num_heads, 64)
    for layer in range(manager.geometry.num_layers):
        append(manager.state, layer, key, key, torch.tensor([1, 2, 3]).repeat_interleave(200), at, at)
    full = manager.device.pages_of(1)
    manager.end_prompts(launched)
    assert manager.device.pages_of(1) < full == manager.device.pages_of(3)
    assert manager.device.pages_of(2) < full
    assert [manager.rows.in_prompt(row) for row in (1, 2, 3)] == [True, False, True]


def test_a_policy_that_compresses_nothing_leaves_a_chunk_as_it_is() -> None:
    manager = make_manager(make_format(("K8V4",)), policy=UniformPolicy())
    session = Session(manager)
    session.extend({1: 20, 2: 20}, scores=False)
    manager.prompts.end_chunk(1)
    assert manager.device.pages_of(1) == manager.device.pages_of(2)
