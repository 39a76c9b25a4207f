"""Speculative decoding with chains of n-grams under DiffKV's tiers: replies, pressure, aborts and shared prefixes."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from benchmarks import splits
from benchmarks.paths import NANO
from sglang_diffkv.evaluate import client
from sglang_diffkv.evaluate.prompts import chat_ids, load_tokenizer
from sglang_diffkv.evaluate.server import Server
from sglang_diffkv.evaluate.tasks import reference
from sglang_diffkv.srt.speculation import CHAIN
from tests.servers.shared import STRICT

pytestmark = [pytest.mark.server, pytest.mark.full]

DRAFTS = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "6", *CHAIN.split())
TIERS = {"page_tokens": 8, "policy": {"name": "diffkv", "alpha_high": 1.0, "alpha_low": 0.02, "window": 16}}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    items = reference.select(splits.load("dev"), levels=["easy", "medium"], n=30, seed=5)
    items += [x for x in splits.load("dev") if x.task == "fewshot_shared"][:8]
    found = [chat_ids(load_tokenizer(NANO), x.prompt) for x in items]
    return [x for x in found if len(x) < 700]


def _post(server: Server, path: str, body: dict[str, Any]) -> requests.Response:
    return requests.post(f"{server.url}/{path}", json=body, timeout=300)


def test_a_small_pool_under_drafts_loses_nothing(prompts: list[list[int]], server_of: Callable[..., Server]) -> None:
    tight = ("--max-total-tokens", "1600", "--chunked-prefill-size", "128")
    server = server_of("diffkv", (*DRAFTS, *tight), config=TIERS, env=STRICT)
    draw = random.Random(1)

    def ask(number: int) -> str:
        prompt, tokens = draw.choice(prompts), draw.choice([1, 2, 5, 40, 90, 200, 400])
        parameters = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": number % 3 == 0}
        body = {"rid": f"{number:02}", "input_ids": prompt, "sampling_params": parameters}
        answer = _post(server, "generate", body)
        assert answer.status_code == 200, answer.text
        meta = answer.json()["meta_info"]
        reason = meta["finish_reason"]["type"]
        assert reason != "length" or meta["completion_tokens"] == tokens
        return str(reason)

    with ThreadPoolExecutor(40) as pool:
        asked = [pool.submit(ask, number) for number in range(60)]
        for number in range(1, 60, 6):
            _post(server, "abort_request", {"rid": f"{number:02}"})
        reasons = [x.result() for x in asked]
    assert set(reasons) <= {"length", "stop", "abort"} and reasons.count("abort") <= 10
    stats = server.stats()
    assert stats is not None and stats["faults"] == 0 and stats["finished"]["low"] > 0


def test_drafts_change_no_reply(prompts: list[list[int]], server_of: Callable[..., Server]) -> None:
    """What is compressed and what is dropped is decided token by token, as without drafts."""
    plain, drafted = (
        client.run(server_of("diffkv", args, config=TIERS, env=STRICT).url, prompts[:16], 96, concurrency=1)
        for args in ((), DRAFTS)
    )
    equal = sum(x.output_ids == y.output_ids for x, y in zip(plain, drafted, strict=True))
    assert equal >= 12
