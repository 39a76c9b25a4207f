"""Chats on a server that compresses earlier turns behind the window, in a pool and host memory that they outgrow."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.paths import NANO
from sglang_diffkv.evaluate.server import Server
from tests.servers.shared import STRICT, check_idle, stats_of, tokens

pytestmark = pytest.mark.server

SESSIONS, TURNS, NEW, REPLY, AT_ONCE = 3, 7, 80, 16, 2
PAGE_TOKENS = 8
ARGS = ["--max-total-tokens", "1200", "--enable-hierarchical-cache", "--hicache-size", "1"]
POLICY = {"name": "diffkv", "alpha_high": 1e9, "window": 96, "pressure_window": None, "turn_window": 8}


def _turn(server: Server, history: list[int]) -> int:
    """A chat's next turn; tokens that came from the cache."""
    sampling = {"max_new_tokens": REPLY, "temperature": 0, "ignore_eos": True}
    reply = server.generate({"input_ids": history, "sampling_params": sampling})
    assert len(reply["output_ids"]) == REPLY, reply
    history += [*reply["output_ids"], *tokens(NEW, len(history))]
    return int(reply["meta_info"]["cached_tokens"])


def test_chats_of_short_turns_take_less_room(server_of: Callable[..., Server]) -> None:
    """Without the rule all of their tokens would be in the high tier: no turn is longer than the window."""
    config = {"share_min_tokens": 32, "page_tokens": PAGE_TOKENS, "policy": POLICY}
    server = server_of("diffkv", ARGS, config=config, env=STRICT)
    source, histories = random.Random(1), [tokens(NEW, 100 + number) for number in range(SESSIONS)]
    found = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for _ in range(TURNS):
            some = source.sample(histories, SESSIONS)
            found.append(sum(pool.map(lambda history: _turn(server, history), some)))
    again = (NEW + REPLY) * SESSIONS * sum(range(TURNS))
    assert sum(found) > 0.9 * again, "host memory brings back what the pool has no room for"
    model, cache = json.loads((NANO / "config.json").read_text()), stats_of(server)["prefix_cache"]
    heads = model["num_hidden_layers"] * model["num_key_value_heads"]
    held = sum(depth["tokens"] for depth in cache["by_depth"])
    assert cache["settled"] > SESSIONS
    assert cache["pages"] < 0.9 * heads * held / PAGE_TOKENS, cache
    check_idle(server)
