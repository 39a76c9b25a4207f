"""Key norms: which prompt tokens stay, by both sets of ops, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sglang_diffkv.config import load_config
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.policies.budget import Budget
from sglang_diffkv.policies.knorm import KnormPolicy
from tests.dense import Session
from tests.helpers import tier_map
from tests.kernels.test_running import keys_of
from tests.kernels.triton_helpers import DEVICE
from tests.pages.cut_prompts import check_cut, check_triton_cut, session_of


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
    kept = max(budget.tokens, math.ceil(budget.fraction * length))
    expected = chosen(session, length, kept, window, sinks)
    assert (expected.sum(2) == max(kept, window + sinks)).all()
    check_cut(session, policy, length, expected)


def test_a_prompt_within_the_budget_stays():
    session = session_of(KnormPolicy(Budget(40), 5, 3), "K8V4", 37)
    session.end_prompt(1)
    assert (tier_map(session.manager.state, 1, 37) == 0).all()


@pytest.mark.skipif(DEVICE != "cpu", reason="the map of tiers reads the CPU's memory")
def test_triton_cuts_prompts_and_copies():
    policy = KnormPolicy(Budget(11), 4, 2)
    session = session_of(policy, "K8V4", 31)
    expected = chosen(session, 31, 11, 4, 2)
    check_triton_cut(session, policy, 31, expected)


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
