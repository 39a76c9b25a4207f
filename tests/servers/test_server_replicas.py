"""Several schedulers with a pool each: SGLang's replicas (``--dp-size``), and its router in front of two servers."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from benchmarks.paths import NANO
from sglang_diffkv.evaluate.server import Server
from tests.servers.sglang_router import needs_router, router
from tests.servers.shared import STRICT, check_idle, tokens

pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.timeout(1800)]

SHARED, QUESTION, FAMILIES, EACH, NEW = 400, 20, 2, 5, 64
"""Tokens that the prompts of a family share and of their own, families, prompts of each, and tokens generated."""


def _prompts(family: int) -> list[list[int]]:
    """Prompts that begin alike."""
    return [tokens(SHARED, seed=family) + tokens(QUESTION, seed=100 * (family + 1) + i) for i in range(EACH)]


def _request(ids: list[int], **more: Any) -> dict[str, Any]:
    return {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}, **more}


def _cached(reply: dict[str, Any]) -> int:
    return int(reply["meta_info"]["cached_tokens"])


def test_each_replica_has_a_prefix_cache_of_its_own(server_of: Callable[..., Server]) -> None:
    """Replicas that are asked the same in the same order reply alike; side by side all requests end, and no replica
    keeps pages."""
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|0", **STRICT}
    server = server_of("diffkv", ["--dp-size", "2", "--max-total-tokens", "1200"], env=env)
    replies = [[server.generate(_request(ids, routed_dp_rank=rank)) for ids in _prompts(0)] for rank in range(2)]
    assert [x["output_ids"] for x in replies[0]] == [x["output_ids"] for x in replies[1]]
    assert [[_cached(x) for x in of_rank] for of_rank in replies] == [[0] + [SHARED] * (EACH - 1)] * 2
    with ThreadPoolExecutor(8) as pool:  # more than the two pools hold
        mixed = list(pool.map(server.generate, [_request(ids) for f in range(1, 6) for ids in _prompts(f)]))
    assert {x["meta_info"]["completion_tokens"] for x in mixed} == {NEW}
    assert {x["meta_info"]["dp_rank"] for x in mixed} == {0, 1}
    server.flush_cache()
    assert [x["diffkv"]["pages_used"] for x in server.server_info()["internal_states"]] == [0, 0]


@needs_router
def test_the_router_sends_a_prompt_to_the_server_that_has_its_prefix(tmp_path: Path) -> None:
    """Of two families that come side by side each goes to one server, which finds it; the replies are that server's.
    A prefix that no server has goes to the one with fewest requests, so the second family finds the first running."""
    servers = [Server(NANO, "diffkv", ["--max-total-tokens", "4000"], diffkv_config={}, env=STRICT) for _ in range(2)]

    def ask(url: str, ids: list[int], wait: float) -> dict[str, Any]:
        time.sleep(wait)
        reply = requests.post(f"{url}/generate", json=_request(ids), timeout=600)
        reply.raise_for_status()
        return reply.json()

    with servers[0], servers[1]:
        args = ["--policy", "cache_aware", "--worker-urls", *(x.url for x in servers)]
        with router(args, 2, tmp_path / "router.log") as url, ThreadPoolExecutor(FAMILIES) as pool:
            turns = zip(*map(_prompts, range(FAMILIES)), strict=True)
            asked = [list(pool.map(ask, [url] * FAMILIES, turn, (0.0, 0.3))) for turn in turns]
        replies = list(zip(*asked, strict=True))
        for of_family in replies:
            assert [_cached(x) for x in of_family] == [0] + [SHARED] * (EACH - 1)
        found = [[_cached(x.generate(_request(_prompts(f)[0]))) for f in range(FAMILIES)] for x in servers]
        whole = SHARED + QUESTION - 1
        assert found in ([[whole, 0], [0, whole]], [[0, whole], [whole, 0]]), "each server has one family"
        for family, server in enumerate(servers if found[0][0] else reversed(servers)):
            server.flush_cache()
            direct = [server.generate(_request(ids))["output_ids"] for ids in _prompts(family)]
            assert direct == [x["output_ids"] for x in replies[family]]
        for server in servers:
            check_idle(server)
