"""Key norms: which prompt tokens stay, by both sets of ops, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sglang_diffkv.config import load_config
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.mem_pool.integrity import check_integrity
from sglang_diffkv.ops.triton import TritonOps
from sglang_diffkv.policies.base import prunes
from sglang_diffkv.policies.budget import Budget
from sglang_diffkv.policies.knorm import KnormPolicy
from tests.dense import Session
from tests.helpers import make_format, make_manager, tier_map
from tests.kernels.test_running import keys_of
from tests.kernels.triton_helpers import DEVICE


def session_of(policy: KnormPolicy, tier: str, length: int, dtype: torch.dtype = torch.bfloat16) -> Session:
    """A prompt in two chunks that is not compacted yet."""
    manager = make_manager(make_format((tier,), 96, 64, page_tokens=5), policy=policy, dtype=dtype)
    session = Session(manager, spread=3.0)
    session.extend({1: length - length // 3}, check=False)
    session.extend({1: length // 3}, check=False)
    return session


def chosen(session: Session, length: int, kept: int, window: int, sinks: int) -> np.ndarray:
    """[L, H, length]: the smallest norms of each head, beside window and sinks."""
    found = np.zeros((2, 2, length), dtype=bool)
    for (layer, head), keys in keys_of(session.manager, 1).items():
        lasting = {p for p in keys if p < sinks or p >= length - window}
        others = sorted(keys.keys() - lasting, key=lambda p: (np.linalg.norm(keys[p]), p))
        found[layer, head, sorted(lasting) + others[: max(kept - len(lasting), 0)]] = True
    return found


@pytest.mark.parametrize(("budget", "window", "sinks"), [(Budget(13), 5, 3), (Budget(0, 0.4), 4, 0), (Budget(2), 9, 4)])
@pytest.mark.parametrize(
    ("tier", "dtype"), [("K8V4", torch.bfloat16), ("BF16", torch.float16), ("BF16", torch.bfloat16)], ids=str
)
def test_the_smallest_norms_stay(tier, dtype, budget, window, sinks):
    policy, length = KnormPolicy(budget, window, sinks), 37
    session = session_of(policy, tier, length, dtype)
    manager, kept = session.manager, max(budget.tokens, math.ceil(budget.fraction * length))
    expected = chosen(session, length, kept, window, sinks)
    manager.space.extend(2, (length,))
    with manager.launching():
        manager.ops.copy_compact(2, [(1, 0, 17), (1, 17, length)], length, policy, None)
    assert np.array_equal(tier_map(manager.state, 2, length) == 0, expected)
    manager.device.release(2)
    session.end_prompt(1)
    assert np.array_equal(tier_map(manager.state, 1, length) == 0, expected)
    assert (expected.sum(2) == max(kept, window + sinks)).all() and prunes(policy, 1)
    for _ in range(6):
        session.step([1], check=False)
    after = tier_map(manager.state, 1, length + 6) == 0
    assert np.array_equal(after[..., :length], expected) and after[..., length:].all(), "generated tokens stay"
    check_integrity(manager)


def test_a_prompt_within_the_budget_stays():
    session = session_of(KnormPolicy(Budget(40), 5, 3), "K8V4", 37)
    session.end_prompt(1)
    assert (tier_map(session.manager.state, 1, 37) == 0).all()


@pytest.mark.skipif(DEVICE != "cpu", reason="the map of tiers reads the CPU's memory")
def test_triton_cuts_prompts_and_copies():
    policy = KnormPolicy(Budget(11), 4, 2)
    session = session_of(policy, "K8V4", 31)
    manager, expected = session.manager, chosen(session, 31, 11, 4, 2)
    ops = TritonOps(manager.state, policy, 4, 400)
    manager.space.extend(2, (31,))
    with manager.launching():
        ops.copy_compact(2, [(1, 0, 17), (1, 17, 31)], 31, policy, None)
        ops.compact_prompts([(1, 31)], policy)
    for row in (1, 2):
        assert np.array_equal(tier_map(manager.state, row, 31) == 0, expected)


def test_configuration():
    config = load_config('{"tiers": ["BF16"], "policy": {"name": "knorm", "budget": 512, "window": 32}}')
    assert config.build_policy() == KnormPolicy(Budget(512), 32, 4) and not config.lossless
    assert config.page_format(128, 128, 4096).scored == 0, "no page has room for scores"
    config = load_config('{"tiers": ["K8V4"], "policy": {"name": "knorm", "fraction": 0.5, "sinks": 0}}')
    assert config.build_policy() == KnormPolicy(Budget(0, 0.5), 64, 0)
    for policy, message in (
        ("", "budget"),
        (', "budget": 64', "above window 64"),
        (', "budget": 68', "above window 64 and sinks 4 together"),
        (', "budget": 512, "pool": 3', "pool"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(f'{{"tiers": ["K8V4"], "policy": {{"name": "knorm"{policy}}}}}')
    with pytest.raises(ConfigError, match="policy knorm keeps tokens at one tier"):
        load_config('{"policy": {"name": "knorm", "budget": 512}}')
