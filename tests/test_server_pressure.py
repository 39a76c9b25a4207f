"""A pool far too small for the load: every request completes, with the tokens of a roomy pool, and nothing leaks."""

from __future__ import annotations

import random
import re
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


def test_room_that_compression_frees_is_admitted_again() -> None:
    """At the high tier two requests of 670 tokens fill the pool. Nobody ends early, so only a look at the waiting
    requests while others run can admit a third."""
    config = {"policy": {"name": "diffkv", "alpha_high": 50.0}}
    args = ["--max-total-tokens", "1500", "--decode-log-interval", "5"]
    with Server(NANO, "diffkv", args, diffkv_config=config, env=STRICT) as server:
        parameters = {"temperature": 0, "max_new_tokens": 520, "min_new_tokens": 520}

        def ask(index: int) -> int:
            ids = [random.Random(index).randrange(300, 8000) for _ in range(150)]
            return len(server.generate({"input_ids": ids, "sampling_params": parameters})["output_ids"])

        with ThreadPoolExecutor(6) as threads:
            assert list(threads.map(ask, range(6))) == [520] * 6
        running = [int(x) for x in re.findall(r"Decode batch, #running-req: (\d+)", server.log_text())]
    assert max(running) >= 3


def test_small_pool_under_compression_completes_all() -> None:
    replies, _ = _run(POOL, "--schedule-conservativeness", "0.1")
    assert [len(x) for x in replies] == [NEW_TOKENS] * REQUESTS
