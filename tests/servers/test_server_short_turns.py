"""A chat of many short turns fits where stock SGLang serves it, and the prefix cache wastes few pages on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.paths import NANO
from sglang_diffkv.evaluate import client
from sglang_diffkv.evaluate.client import Record
from sglang_diffkv.evaluate.server import Server, stock_backend
from sglang_diffkv.srt.tree.path_joining import ROOMY_WASTE
from tests.servers.identity import check_tokens
from tests.servers.second_plugin import install
from tests.servers.shared import SHALLOW, START_TIMEOUT, STRICT, check_idle, stats_of, tokens

pytestmark = pytest.mark.server

POOL, TURNS, NEW, REPLY = 1200, 120, 6, 3
"""The chat has 1,080 tokens in the end."""
MOST_WASTE = 1.3

LOSSLESS, COMPRESSED, EXACT = {"tiers": ["BF16"]}, {"prefix_fidelity": "compressed"}, {"prefix_fidelity": "exact"}
CONFIGS = [
    pytest.param(LOSSLESS, id="lossless", marks=pytest.mark.full),
    pytest.param(COMPRESSED, id="compressed"),
    pytest.param(EXACT, id="exact", marks=pytest.mark.full),
]


@pytest.fixture(params=CONFIGS)
def server(request: pytest.FixtureRequest, server_of: Callable[..., Server]) -> Server:
    return server_of("diffkv", ["--max-total-tokens", str(POOL), *SHALLOW], config=request.param, env=STRICT)


def _turn(server: Server, history: list[int], seed: int) -> int:
    """The chat's next turn; tokens that were found in the cache."""
    history += tokens(NEW, seed)
    sampling = {"max_new_tokens": REPLY, "temperature": 0, "ignore_eos": True}
    reply = server.generate({"input_ids": history, "sampling_params": sampling})
    assert len(reply["output_ids"]) == REPLY, reply
    history += reply["output_ids"]
    return int(reply["meta_info"]["cached_tokens"])


def test_short_turns_waste_few_pages(server: Server) -> None:
    """Of one long chat that fills the pool, then of three in turns that leave it room."""
    history: list[int] = []
    found = [_turn(server, history, seed) for seed in range(TURNS)]
    assert len(history) == TURNS * (NEW + REPLY)
    before = [turn * (NEW + REPLY) for turn in range(TURNS)]
    assert sum(found) > 0.9 * sum(before), "a chat finds its last turn in the cache"
    cache = stats_of(server)["prefix_cache"]
    assert cache["joined"] > 0
    assert cache["pages_over_needed"] <= MOST_WASTE, cache
    server.flush_cache()
    chats: list[list[int]] = [[] for _ in range(3)]
    for turn in range(20):
        for number, history in enumerate(chats):
            _turn(server, history, 1000 * number + turn)
    cache, shape = stats_of(server)["prefix_cache"], json.loads((NANO / "config.json").read_text(encoding="utf-8"))
    heads = shape["num_hidden_layers"] * shape["num_key_value_heads"]
    wasted = cache["pages"] - cache["pages_needed"]
    assert wasted <= len(chats) * (ROOMY_WASTE + 1) * heads < len(chats) * 20 * heads / 2, cache


def _chat(server: Server, turns: int) -> list[Record]:
    """Replies of a chat whose turns do not depend on them, so that one that differs changes no other."""
    history, replies = tokens(40, 5), []
    for seed in range(turns):
        history += tokens(NEW, seed)
        replies.append(client.ask(server.url, history, REPLY, top_logprobs=2))
        history += tokens(REPLY, 1000 + seed)
    return replies


def test_turns_over_joined_segments_have_stock_s_tokens(server_of: Callable[..., Server]) -> None:
    args = ["--max-total-tokens", str(POOL)]
    stock = _chat(server_of(stock_backend(), args), 60)
    server = server_of("diffkv", args, config=LOSSLESS, env=STRICT)
    found = _chat(server, 60)
    assert stats_of(server)["prefix_cache"]["joined"] > 0
    assert found[-1].cached_tokens > 500
    check_tokens([x.output_ids for x in found], stock, "over joined segments")


UNTIDY = """
from sglang_diffkv.srt.tree.path_joining import PathJoiner


def register():
    PathJoiner.tidy = lambda self, most=None: None
"""


def test_a_request_that_does_not_fit_alone_starts_over(tmp_path: Path) -> None:
    """Where small segments could not be joined, the last request of a batch computes its prompt as a whole once."""
    args = ["--max-total-tokens", str(POOL), *SHALLOW]
    env = {**STRICT, **install(tmp_path, "untidy_plugin", UNTIDY)}
    with Server(NANO, "diffkv", args, diffkv_config=COMPRESSED, env=env, timeout=START_TIMEOUT) as server:
        history: list[int] = []
        for seed in range(70):
            _turn(server, history, seed)
            if stats_of(server)["admission"]["started_over"] > 0:
                break
        assert stats_of(server)["admission"]["started_over"] > 0
        check_idle(server)
