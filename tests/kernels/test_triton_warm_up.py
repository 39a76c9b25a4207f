"""Launching every kernel on nothing leaves the state as it was."""

from __future__ import annotations

import pytest
import torch

from sglang_diffkv.kernels.rotate.reference import Rotation
from sglang_diffkv.mem_pool.integrity import check_integrity
from sglang_diffkv.ops.triton import TritonOps
from sglang_diffkv.ops.warm_up import warm_up
from sglang_diffkv.policies.base import Policy, Random, Redundancy
from sglang_diffkv.policies.budget import Budget
from sglang_diffkv.policies.knorm import KnormPolicy
from sglang_diffkv.policies.random_eviction import RandomPolicy
from tests.kernels.triton_helpers import BF16, FOUR, add_prompt, clone_state, make_format, make_manager
from tests.policies import h2o_policy, leankv_policy, snapkv_policy, xkv_policy, zipage_policy

COUNTS = ("entries", "kept_entry", "own_entry", "own_tokens", "hole", "fault", "write_slot", "page_table")


@pytest.mark.parametrize(
    ("tiers", "policy"),
    [
        ("K8V4 K4V2", None),
        ("BF16", None),
        (FOUR, None),
        ("K8V4", snapkv_policy(Budget(0, 0.5), window=4)),
        ("K8V4", KnormPolicy(Budget(0, 0.5), 4, 2)),
        ("K8V4", RandomPolicy(Budget(0, 0.5), 4, 2, Random(0))),
        ("K8V4", h2o_policy(Budget(20), window=4)),
        ("K8V4 K4V2", leankv_policy(0.1, 0.01, window=4)),
        ("K8V4 K4V2", xkv_policy(window=4, keep=0.3, high=0.5)),
        ("K8V4", xkv_policy(window=4, min_retention=0.9)),
        ("BF16", zipage_policy(20, 30, window=4, redundancy=Redundancy(0.2, 0.4))),
        ("K8V4 K4V2", zipage_policy(20, 30, window=4, high=10)),
        ("BF16", zipage_policy(20, 30, window=4, layer_stride=1)),
    ],
)
def test_warm_up_changes_nothing(tiers: str, policy: Policy | None) -> None:
    manager = make_manager(make_format(tiers, page_tokens=4), pages=300, layers=2, heads=2, policy=policy)
    state = manager.state
    add_prompt(manager, 4, 45, torch.Generator().manual_seed(3))
    before = clone_state(state)
    policy = policy or manager.policy
    queries = None if manager.running is None else manager.running.cache
    ops = TritonOps(state, policy, 4 if queries is None else 2, 400)
    rotated = len(state.fmt.tiers) > 1
    means = torch.zeros(2, 2, 64, device=state.device) if rotated and queries is None else None
    warm_up(
        ops, state, policy, dtype=BF16, rotation=Rotation(rotated, rotated), copies=policy.compresses, queries=queries,
        key_means=means, drafts=3 if queries is None else 0, trees=rotated,
    )  # fmt: skip
    for name in COUNTS:
        assert torch.equal(getattr(state, name), getattr(before, name)), name
    used = before.refcount > 0
    assert int(used.sum()) > 0 and torch.equal(state.refcount, before.refcount)
    assert torch.equal(state.pages[used], before.pages[used])
    assert int(state.counters.diff()) == int(before.counters.diff())
    check_integrity(manager)
