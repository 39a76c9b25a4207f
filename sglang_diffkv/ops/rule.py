"""What the Triton kernels, into which DiffKV's policy is fused, take of it."""

from __future__ import annotations

from typing import Any

import torch

from sglang_diffkv.mem_pool.state import PageState
from sglang_diffkv.policies.base import Policy
from sglang_diffkv.policies.diffkv import DiffKVPolicy


def head_scales(policy: Policy | None, state: PageState) -> torch.Tensor:
    """[L, H] float32, the factors of a policy's thresholds; 1 where it has none."""
    shape = (state.num_layers, state.num_heads)
    if not isinstance(policy, DiffKVPolicy) or policy.head_scale is None:
        return torch.ones(shape, device=state.device)
    return torch.tensor(policy.head_scale, dtype=torch.float32, device=state.device)


def thresholds(policy: Policy, head_scale: torch.Tensor) -> dict[str, Any]:
    """What the kernels of a step take of a policy, which is DiffKV's."""
    assert isinstance(policy, DiffKVPolicy)
    return {"alpha_high": policy.alpha_high, "alpha_low": policy.alpha_low, "head_scale": head_scale}


def prompt_rule(policy: Policy, head_scale: torch.Tensor) -> dict[str, Any]:
    """What the kernels of prompts take."""
    return {**thresholds(policy, head_scale), "window": policy.window, "sinks": policy.sinks}
