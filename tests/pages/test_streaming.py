"""StreamingLLM: the first tokens and the newest, in prompts, steps and copies, by both sets of ops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_diffkv.config import load_config
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.mem_pool.integrity import check_integrity
from sglang_diffkv.ops import Scaling
from sglang_diffkv.ops.triton import TritonOps
from sglang_diffkv.policies.base import prunes
from tests.dense import Session
from tests.helpers import make_format, make_manager, tier_map
from tests.kernels.triton_helpers import DEVICE
from tests.policies import streaming_policy


def stays(length: int, window: int, sinks: int) -> np.ndarray:
    position = np.arange(length)
    return (position < sinks) | (position >= length - window)


@pytest.mark.parametrize(("window", "sinks"), [(5, 3), (4, 0), (1, 1), (60, 4)])
@pytest.mark.parametrize("prompt", [2, 31])
def test_sinks_and_window_stay(prompt, window, sinks):
    policy = streaming_policy(window, sinks)
    manager = make_manager(make_format(("K8V4",)), policy=policy)
    session = Session(manager, spread=3.0)
    session.extend({1: prompt})
    session.end_prompt(1)
    for length in range(prompt + 1, prompt + 25):
        session.step([1])
        check_integrity(manager)
        kept = tier_map(manager.state, 1, length) == 0
        assert (kept == stays(length, window, sinks)).all()
    assert prunes(policy, 1)


@pytest.mark.skipif(DEVICE != "cpu", reason="the map of tiers reads the CPU's memory")
def test_triton_cuts_prompts_and_copies():
    policy = streaming_policy(6, 3)
    manager = make_manager(make_format(("K8V4",), page_tokens=4), policy=policy)
    session = Session(manager)
    session.extend({1: 40}, scores=False, check=False)
    ops = TritonOps(manager.state, policy, 4, 400)
    manager.space.extend(2, (40,))
    with manager.launching():
        ops.copy_compact(2, [(1, 0, 17), (1, 17, 40)], 40, policy, None)
        ops.compact_prompts([(1, 40)], policy)
    for row in (1, 2):
        assert ((tier_map(manager.state, row, 40) == 0) == stays(40, 6, 3)).all()


@pytest.mark.skipif(DEVICE != "cpu", reason="the map of tiers reads the CPU's memory")
def test_triton_steps():
    policy = streaming_policy(5, 2)
    manager = make_manager(make_format(("BF16",), page_tokens=4), policy=policy)
    session = Session(manager)
    session.extend({1: 20}, check=False)
    session.end_prompt(1)
    ops = TritonOps(manager.state, policy, 4, 400)
    rows = torch.tensor([1])
    for length in range(21, 24):
        manager.plan_step([1], [1], [length - 1])
        step = ops.decode_step(rows, torch.tensor([length]))
        with manager.launching():
            manager.launch_step()
            ops.begin(step, decode=True)
            for layer in range(2):
                q, key, value = (torch.randn(1, heads, 64).bfloat16() for heads in (4, 2, 2))
                ops.append(layer, key, value, step)
                ops.decode(layer, q, step, Scaling(0.1))
            ops.compact_step(rows, step.seq_lens, step.found, step.num_valid)
        check_integrity(manager)
        assert ((tier_map(manager.state, 1, length) == 0) == stays(length, 5, 2)).all()


def test_configuration():
    config = load_config('{"tiers": ["BF16"], "policy": {"name": "streaming", "window": 64}}')
    assert config.build_policy() == streaming_policy(64, 4) and not config.lossless
    for policy, message in (('"window": 0', "window"), ('"budget": 3', "budget")):
        with pytest.raises(ConfigError, match=message):
            load_config(f'{{"tiers": ["BF16"], "policy": {{"name": "streaming", {policy}}}}}')
    with pytest.raises(ConfigError, match="policy streaming keeps tokens at one tier"):
        load_config('{"policy": {"name": "streaming"}}')
