"""Servers whose tokens are pruned, or shrink to a sixteenth: KV slots run out before pages, and nothing ends."""

from __future__ import annotations

import random
from typing import Any

import pytest

from benchmarks.paths import NANO
from sglang_diffkv.evaluate.server import Server

pytestmark = [pytest.mark.server, pytest.mark.full]

CONFIGS = {
    "pruned": {"tiers": ["K8V4"], "policy": {"name": "h2o", "budget": 96}, "page_tokens": 8},
    "one bit": {
        "tiers": ["BF16", "K1V1"],
        "policy": {"name": "diffkv", "alpha_high": 1000.0, "window": 1},
        "page_tokens": 8,
    },
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_many_long_replies_at_once(config: dict[str, Any]) -> None:
    source = random.Random(1)
    prompts = [[source.randrange(100, 1900) for _ in range(300)] for _ in range(24)]
    args = ["--max-total-tokens", "1600", "--max-running-requests", "24"]
    with Server(NANO, "diffkv", args, diffkv_config=config) as server:
        sampling = {"max_new_tokens": 1000, "temperature": 0, "ignore_eos": True}
        replies = server.generate({"input_ids": prompts, "sampling_params": sampling}, timeout=900)
        assert [reply["meta_info"]["completion_tokens"] for reply in replies] == [1000] * 24
        assert server.alive()
        server.flush_cache()
        stats = server.stats()
        assert stats is not None
        assert stats["pages_used"] == 0 and stats["faults"] == 0
