"""A pool far too small for the load: every request completes, with the tokens of a roomy pool, and nothing leaks."""

from __future__ import annotations

import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sglang_diffkv.testing import client, tasks
from sglang_diffkv.testing.client import Record
from sglang_diffkv.testing.paths import NANO
from sglang_diffkv.testing.server import Server
from tests.identity import check_tokens

pytestmark = pytest.mark.server

STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_DIFFKV_CHECK_INTEGRITY": "1"}
REQUESTS, NEW_TOKENS, POOL = 10, 320, 800
"""Two or three requests fill the pool."""


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Questions with long replies, in pairs that share all but their last tokens."""
    items = [x for x in tasks.load("dev") if x.task == "recur" and x.level == "hard"][: REQUESTS // 2]
    ids = [tasks.chat_ids(tasks.load_tokenizer(NANO), x.prompt) for x in items]
    return [x for prompt in ids for x in (prompt, prompt[:-8] + prompt[-4:])]


def _load(server: Server, prompts: list[list[int]]) -> list[Record]:
    def ask(index: int) -> Record:
        time.sleep(0.2 * index)
        return client.ask(server.url, prompts[index], NEW_TOKENS, top_logprobs=2)

    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(ask, range(len(prompts))))


def _run(prompts: list[list[int]], pool: int, *args: str, **config: Any) -> tuple[list[Record], str]:
    with Server(NANO, "diffkv", ["--max-total-tokens", str(pool), *args], diffkv_config=config, env=STRICT) as server:
        replies = _load(server, prompts)
        server.flush_cache()
        stats = server.stats()
        assert stats is not None
        assert stats["pages_used"] == 0, "pages are lost"
        assert stats["segments"] == 0
        return replies, server.log_text()


def test_small_pool_completes_all_with_the_same_tokens(prompts: list[list[int]]) -> None:
    roomy, _ = _run(prompts, 16384, "--disable-radix-cache", tiers=["BF16"])
    tight, log = _run(prompts, POOL, "--schedule-conservativeness", "0.1", tiers=["BF16"])
    check_tokens([x.output_ids for x in tight], roomy, "shared, evicted and retracted")
    assert "Retract requests" in log, "the load did not exercise retraction"
    assert sum(x.completion_tokens for x in roomy) > 4 * POOL // 2


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


def test_long_prompts_are_compacted_between_chunks() -> None:
    """Each of these prompts takes half of the pool at the high tier, and much less once its chunks are compacted."""
    config = {"policy": {"name": "diffkv", "alpha_high": 50.0}}
    args = ["--max-total-tokens", "2000", "--chunked-prefill-size", "128", "--decode-log-interval", "2"]
    with Server(NANO, "diffkv", args, diffkv_config=config, env=STRICT) as server:
        parameters = {"temperature": 0, "max_new_tokens": 60, "min_new_tokens": 60}

        def ask(index: int) -> int:
            ids = [random.Random(index).randrange(300, 8000) for _ in range(700 + 40 * (index % 3))]
            return len(server.generate({"input_ids": ids, "sampling_params": parameters})["output_ids"])

        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(ask, range(8))) == [60] * 8
        stats = server.stats()
        assert stats is not None
        assert stats["admission"]["compacted_between_chunks"] > 0
        assert stats["faults"] == 0
        server.flush_cache()
        stats = server.stats()
        assert stats is not None
        assert stats["pages_used"] == 0 and stats["admission"]["promised_pages"] == 0


def test_a_prompt_that_needs_the_pool_gets_it_from_its_own_prefix() -> None:
    """It shares two tokens with a long cached prompt, whose segment it locks as a whole; nothing runs that could make
    room."""
    draw = random.Random(0)
    cached, wide = ([7, 8, *(draw.randrange(300, 8000) for _ in range(n))] for n in (500, 760))
    with Server(NANO, "diffkv", ["--max-total-tokens", "900"], diffkv_config={"tiers": ["BF16"]}, env=STRICT) as server:
        client.ask(server.url, cached, 4)
        assert client.ask(server.url, wide, 64, timeout=60.0).prompt_tokens == 762
        assert client.ask(server.url, cached, 4, timeout=60.0).completion_tokens > 0


@pytest.mark.parametrize("fidelity", ["compressed", "exact"])
def test_small_pool_under_compression_completes_all(prompts: list[list[int]], fidelity: str) -> None:
    replies, log = _run(prompts, POOL, "--schedule-conservativeness", "0.1", prefix_fidelity=fidelity)
    assert all(x.completion_tokens > 0 for x in replies)
    assert "due to OOM" not in log
