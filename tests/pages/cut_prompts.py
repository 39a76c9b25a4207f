"""Prompts that a method cuts once, at their end: what both sets of ops make of them."""

from __future__ import annotations

import numpy as np
import torch

from sglang_diffkv.mem_pool.integrity import check_integrity
from sglang_diffkv.ops.triton import TritonOps
from sglang_diffkv.policies.base import Policy, prunes
from tests.dense import Session
from tests.helpers import make_format, make_manager, tier_map


def session_of(policy: Policy, tier: str, length: int, dtype: torch.dtype = torch.bfloat16) -> Session:
    """A prompt in two chunks that is not compacted yet."""
    manager = make_manager(make_format((tier,), 96, 64, page_tokens=5), policy=policy, dtype=dtype)
    session = Session(manager, spread=3.0)
    session.extend({1: length - length // 3}, check=False)
    session.extend({1: length // 3}, check=False)
    return session


def check_cut(session: Session, policy: Policy, length: int, expected: np.ndarray) -> None:
    """A copy of the prompt, and the prompt itself at its end, keep ``expected`` [L, H, length]; generated tokens
    stay."""
    manager = session.manager
    manager.space.extend(2, (length,))
    with manager.launching():
        manager.ops.copy_compact(2, [(1, 0, 17), (1, 17, length)], length, policy, None)
    assert np.array_equal(tier_map(manager.state, 2, length) == 0, expected)
    manager.device.release(2)
    session.end_prompt(1)
    assert np.array_equal(tier_map(manager.state, 1, length) == 0, expected) and prunes(policy, 1)
    for _ in range(6):
        session.step([1], check=False)
    after = tier_map(manager.state, 1, length + 6) == 0
    assert np.array_equal(after[..., :length], expected) and after[..., length:].all(), "generated tokens stay"
    check_integrity(manager)


def check_triton_cut(session: Session, policy: Policy, length: int, expected: np.ndarray) -> None:
    """The same of a copy and of the prompt by Triton's ops."""
    manager = session.manager
    ops = TritonOps(manager.state, policy, 4, 400)
    manager.space.extend(2, (length,))
    with manager.launching():
        ops.copy_compact(2, [(1, 0, 17), (1, 17, length)], length, policy, None)
        ops.compact_prompts([(1, length)], policy)
    for row in (1, 2):
        assert np.array_equal(tier_map(manager.state, row, length) == 0, expected)
