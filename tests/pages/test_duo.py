"""DuoAttention: streaming heads keep sinks and window, retrieval heads all, in prompts, steps and copies, by both sets
of ops."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sglang_diffkv.config import load_config
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.mem_pool.integrity import check_integrity
from sglang_diffkv.ops.triton import TritonOps
from sglang_diffkv.policies.base import prunes
from sglang_diffkv.policies.duo import streaming_heads
from tests.dense import Session
from tests.helpers import make_format, make_manager, tier_map
from tests.kernels.triton_helpers import DEVICE
from tests.policies import duo_policy

STREAMS = ((True, False), (False, True))


def tiers_of(length: int, window: int, sinks: int, lower: int) -> np.ndarray:
    """[L, H, length]: the tier of each token, ``lower`` where a streaming head does not keep it."""
    position = np.arange(length)
    kept = (position < sinks) | (position >= length - window)
    return np.where(np.array(STREAMS)[..., None] & ~kept, lower, 0)


@pytest.mark.parametrize(("tiers", "keep_low"), [(("K8V4",), False), (("BF16", "K4V2"), True)])
@pytest.mark.parametrize("prompt", [2, 31])
def test_streaming_heads_keep_sinks_and_window_and_the_others_all(tiers, keep_low, prompt):
    policy = duo_policy(STREAMS, 5, 3, keep_low)
    manager = make_manager(make_format(tiers), policy=policy)
    session = Session(manager, spread=3.0)
    session.extend({1: prompt})
    session.end_prompt(1)
    for length in range(prompt + 1, prompt + 25):
        session.step([1])
        check_integrity(manager)
        assert (tier_map(manager.state, 1, length) == tiers_of(length, 5, 3, lower=1)).all()
    assert prunes(policy, len(tiers)) != keep_low


@pytest.mark.skipif(DEVICE != "cpu", reason="the map of tiers reads the CPU's memory")
def test_triton_cuts_prompts_and_copies():
    policy = duo_policy(STREAMS, 6, 3)
    manager = make_manager(make_format(("K8V4",), page_tokens=4), policy=policy)
    session = Session(manager)
    session.extend({1: 40}, scores=False, check=False)
    ops = TritonOps(manager.state, policy, 4, 400)
    manager.space.extend(2, (40,))
    with manager.launching():
        ops.copy_compact(2, [(1, 0, 17), (1, 17, 40)], 40, policy, None)
        ops.compact_prompts([(1, 40)], policy)
    for row in (1, 2):
        assert (tier_map(manager.state, row, 40) == tiers_of(40, 6, 3, lower=1)).all()


def test_the_smallest_numbers_stream():
    pattern = ((0.5, 0.1, 0.5), (0.5, 0.9, 0.0))
    assert streaming_heads(pattern, 0.0) == ((False,) * 3,) * 2
    assert streaming_heads(pattern, 0.33) == ((False, True, False), (False, False, True))
    assert streaming_heads(pattern, 0.5) == ((True, True, False), (False, False, True)), "of equal ones the first"
    assert streaming_heads(pattern, 1.0) == ((True,) * 3,) * 2


def test_ranks_have_their_own_heads():
    policy = duo_policy(((True, False, False, True), (False, True, True, True)))
    assert policy.of_rank(1, 2, 2).streams == ((False, True), (True, True))
    assert policy.of_rank(5, 8, 1).streams == ((False,), (True,)), "two ranks have each head"


@pytest.mark.parametrize("form", ["tsv", "list", "object"])
def test_a_pattern_may_be_a_file(tmp_path, form):
    numbers = [[0.25, 1.0], [0.0, 0.5]]
    path = tmp_path / "heads"
    if form == "tsv":
        path.write_text("2.5e-01\t1.0\n0\t0.5\n")
    else:
        path.write_text(json.dumps(numbers if form == "list" else {"pattern": numbers, "model": "x"}))
    policy = {"name": "duo", "pattern": str(path), "sparsity": 0.5, "window": 16, "sinks": 2}
    config = load_config(json.dumps({"tiers": ["BF16"], "policy": policy}))
    assert config.build_policy() == duo_policy(((True, False), (True, False)), 16, 2)
    assert not config.lossless and config.policy is not None
    assert config.policy.obstacle(2, 2) == "" and "2 layers with 2 KV heads" in config.policy.obstacle(2, 4)


@pytest.mark.parametrize(
    ("tiers", "policy", "message"),
    [
        (["BF16"], {"pattern": "nothing.tsv"}, 'nothing.tsv" cannot be read'),
        (["BF16"], {"pattern": [[1.0], [1.0, 0.0]]}, "every layer needs a number"),
        (["BF16"], {"pattern": []}, "pattern"),
        (["BF16"], {"pattern": [[1.0]], "keep_low": True}, "keep_low takes two tiers"),
        (["BF16", "K4V2"], {"pattern": [[1.0]]}, "give one tier, or set keep_low"),
        (["BF16"], {"pattern": [[1.0]], "sparsity": 1.5}, "sparsity"),
    ],
)
def test_what_is_refused(tiers, policy, message):
    with pytest.raises(ConfigError, match=message):
        load_config(json.dumps({"tiers": tiers, "policy": {"name": "duo", **policy}}))


def test_a_file_of_other_words_is_refused(tmp_path):
    path = tmp_path / "heads"
    path.write_text("layer\thead\n")
    with pytest.raises(ConfigError, match=r"something else than numbers .* for layer 1"):
        load_config(json.dumps({"tiers": ["BF16"], "policy": {"name": "duo", "pattern": str(path)}}))
