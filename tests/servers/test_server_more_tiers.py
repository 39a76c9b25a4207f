"""Servers of three and four tiers: prompts, shared prefixes and replies, with all structures checked. Two of the three
have numbers of bits that do not divide 8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sglang_diffkv.evaluate.server import Server
from tests.servers.shared import STRICT, stats_of, tokens

pytestmark = pytest.mark.server

CONFIGS = {
    "three": {
        "tiers": ["BF16", "K6V3", "K3V2"],
        "policy": {"name": "diffkv", "alpha_high": 2.0, "alpha_between": [0.9], "alpha_low": 0.1, "window": 16},
    },
    "four": {
        "tiers": ["K8V8", "K8V4", "K4V4", "K4V2"],
        "policy": {"name": "diffkv", "alpha_high": 2.0, "alpha_between": [1.2, 0.6], "alpha_low": 0.1, "window": 16},
        "prefix_fidelity": "exact",
    },
}


RAISED = (1, 4)
BY_LAYER = {
    "tiers": ["K8V6", "K6V4", "K5V4"],
    "rotate": "both",
    "key_means": "auto",
    "policy": {
        "name": "diffkv", "alpha_high": 20.0, "window": 16,
        "alpha_between": [[0.0 if layer in RAISED else 20.0 for layer in range(6)]],
    },
}  # fmt: skip
"""As a model chooses that needs more bits in two of its six layers."""


def test_layers_use_different_tiers_below_the_first(server_of: Callable[..., Server]) -> None:
    server = server_of("diffkv", ["--max-total-tokens", "3000"], config={**BY_LAYER, "page_tokens": 8}, env=STRICT)
    prompts = [tokens(200, 1) + tokens(150, seed) for seed in (2, 3, 2)] + [tokens(90, 4)]
    sampling = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    replies = server.generate({"input_ids": prompts, "sampling_params": sampling})
    assert [reply["meta_info"]["completion_tokens"] for reply in replies] == [40] * 4
    stats = stats_of(server)
    shares, low = stats["share_by_tier"], [sum(heads) for heads in stats["by_head"]["low"]]
    assert stats["faults"] == 0 and stats["share_pruned"] == 0 and all(low)
    of_raised = sum(low[layer] for layer in RAISED) / sum(low)
    assert shares["K6V4"] / (shares["K6V4"] + shares["K5V4"]) == pytest.approx(of_raised)
    assert shares["K8V6"] < 0.5


@pytest.mark.parametrize(
    "config", [CONFIGS["three"], pytest.param(CONFIGS["four"], marks=pytest.mark.full)], ids=["three", "four"]
)
def test_an_answer_from_all_tiers(server_of: Callable[..., Server], config: dict[str, Any]) -> None:
    server = server_of("diffkv", ["--max-total-tokens", "3000"], config={**config, "page_tokens": 8}, env=STRICT)
    shared = tokens(200, 1)
    prompts = [shared + tokens(150, seed) for seed in (2, 3, 2)] + [tokens(90, 4)]
    sampling = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    alone = server.generate({"input_ids": prompts[0], "sampling_params": sampling})["output_ids"]
    server.flush_cache()
    assert server.generate({"input_ids": prompts[0], "sampling_params": sampling})["output_ids"] == alone
    shares = stats_of(server)["share_by_tier"]
    assert list(shares) == config["tiers"] and all(shares.values()), shares
    replies = server.generate({"input_ids": prompts, "sampling_params": sampling})
    assert [reply["meta_info"]["completion_tokens"] for reply in replies] == [40] * 4
    stats = stats_of(server)
    assert stats["faults"] == 0 and stats["share_pruned"] > 0
    assert sum(stats["share_by_tier"].values()) + stats["share_pruned"] == pytest.approx(1)
    ended = stats["finished"]
    assert list(ended["by_tier"]) == config["tiers"] and all(ended["by_tier"].values())
    assert sum(ended["by_tier"].values()) == ended["high"] + ended["low"]
