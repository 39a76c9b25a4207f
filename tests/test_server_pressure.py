"""A pool far too small for the load: every request completes, with the tokens of a roomy pool, and nothing leaks."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sglang_diffkv.testing.paths import NANO
from sglang_diffkv.testing.server import Server

pytestmark = pytest.mark.server

STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_DIFFKV_CHECK_INTEGRITY": "1"}
REQUESTS, NEW_TOKENS, POOL = 8, 320, 1100
"""Two requests of about 500 tokens fill the pool."""


def _ask(server: Server, index: int) -> Any:
    rng = random.Random(index)
    time.sleep(0.3 * index)
    ids = [rng.randrange(300, 8000) for _ in range(150 + 11 * index)]
    parameters = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    return server.generate({"input_ids": ids, "sampling_params": parameters})["output_ids"]


def _load(server: Server) -> list[Any]:
    with ThreadPoolExecutor(REQUESTS) as threads:
        return list(threads.map(lambda i: _ask(server, i), range(REQUESTS)))


def _run(pool: int, *args: str, **config: Any) -> tuple[list[Any], str]:
    with Server(NANO, "diffkv", ["--max-total-tokens", str(pool), *args], diffkv_config=config, env=STRICT) as server:
        replies = _load(server)
        server.flush_cache()
        stats = server.stats()
        assert stats is not None
        assert stats["pages_used"] == 0, "pages are lost"
        assert stats["segments"] == 0
        return replies, server.log_text()


def test_small_pool_completes_all_with_the_same_tokens() -> None:
    roomy, _ = _run(16384, tiers=["BF16"])
    tight, log = _run(POOL, "--schedule-conservativeness", "0.1", tiers=["BF16"])
    assert tight == roomy
    assert "Retract requests" in log, "the load did not exercise retraction"


def test_small_pool_under_compression_completes_all() -> None:
    replies, _ = _run(POOL, "--schedule-conservativeness", "0.1")
    assert [len(x) for x in replies] == [NEW_TOKENS] * REQUESTS
