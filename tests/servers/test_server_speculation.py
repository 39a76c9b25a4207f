"""Speculative decoding under DiffKV's tiers, by n-grams and by draft models: replies, pressure, aborts and shared
prefixes."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from benchmarks import splits
from benchmarks.paths import NANO
from benchmarks.quality.random_drafts import make_eagle, model_drafts
from sglang_diffkv.evaluate import client
from sglang_diffkv.evaluate.prompts import chat_ids, load_tokenizer
from sglang_diffkv.evaluate.server import Server
from sglang_diffkv.evaluate.tasks import reference
from sglang_diffkv.srt.models.speculation import CHAIN
from tests.servers.shared import STRICT, tokens

pytestmark = [pytest.mark.server, pytest.mark.full]

NGRAM_TREES = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8")
NGRAMS = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "6", *CHAIN.split())


def tiers(drafts: tuple[str, ...]) -> dict[str, Any]:
    """A configuration; n-grams are tried with pruning too, which is refused with a draft model."""
    low = 0.02 if "NGRAM" in drafts else 0.0
    return {"page_tokens": 8, "policy": {"name": "diffkv", "alpha_high": 1.0, "alpha_low": low, "window": 16}}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    items = reference.select(splits.load("dev"), levels=["easy", "medium"], n=30, seed=5)
    items += [x for x in splits.load("dev") if x.task == "fewshot_shared"][:8]
    found = [chat_ids(load_tokenizer(NANO), x.prompt) for x in items]
    return [x for x in found if len(x) < 700]


@pytest.fixture(scope="module", params=["NGRAM", "STANDALONE", "EAGLE", "NGRAM trees", "EAGLE trees"])
def drafts(request: pytest.FixtureRequest, prompts: list[list[int]], tmp_path_factory: Any) -> tuple[str, ...]:
    """Arguments of a server that drafts so."""
    if request.param.startswith("NGRAM"):
        return NGRAMS if request.param == "NGRAM" else NGRAM_TREES
    if request.param == "STANDALONE":
        return model_drafts("STANDALONE", NANO)
    folder = tmp_path_factory.mktemp("eagle")
    make_eagle(folder, prompts)
    if request.param == "EAGLE":
        return model_drafts("EAGLE", folder)
    return model_drafts("EAGLE", folder, branches=3, drafts=8)


def _post(server: Server, path: str, body: dict[str, Any]) -> requests.Response:
    return requests.post(f"{server.url}/{path}", json=body, timeout=300)


def test_a_small_pool_under_drafts_loses_nothing(
    prompts: list[list[int]], drafts: tuple[str, ...], server_of: Callable[..., Server]
) -> None:
    tight = ("--max-total-tokens", "1600", "--chunked-prefill-size", "128")
    server = server_of("diffkv", (*drafts, *tight), config=tiers(drafts), env=STRICT)
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


def test_drafts_change_no_reply(
    prompts: list[list[int]], drafts: tuple[str, ...], server_of: Callable[..., Server]
) -> None:
    """What is compressed and what is dropped is decided token by token, as without drafts."""
    plain, drafted = (
        client.run(server_of("diffkv", args, config=tiers(drafts), env=STRICT).url, prompts[:16], 96, concurrency=1)
        for args in ((), drafts)
    )
    equal = sum(x.output_ids == y.output_ids for x, y in zip(plain, drafted, strict=True))
    assert equal >= 12


def test_grammars_under_drafts_lose_nothing(drafts: tuple[str, ...], server_of: Callable[..., Server]) -> None:
    """With n-grams on a GPU, where overlap scheduling is on, requests that end leave rows of a pass that is planned and
    not launched."""
    server = server_of("diffkv", (*drafts, "--max-total-tokens", "4000"), config=tiers(drafts), env=STRICT)

    def ask(number: int) -> str:
        parameters = {"temperature": 0, "max_new_tokens": 60, "regex": f"(yes|no)-[0-9]{{{3 + number}}}"}
        body = {"input_ids": tokens(40 + number, number), "sampling_params": parameters}
        return str(_post(server, "generate", body).json()["text"])

    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(ask, range(20)))
    assert all(re.fullmatch(f"(yes|no)-[0-9]{{{3 + number}}}", reply) for number, reply in enumerate(replies))


def _rounds(server: Server, ids: list[int]) -> tuple[int, int, list[int]]:
    """Tokens found in the cache, passes that verified, tokens."""
    parameters = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}
    reply = _post(server, "generate", {"input_ids": ids, "sampling_params": parameters}).json()
    meta = reply["meta_info"]
    return meta["cached_tokens"], meta["spec_verify_ct"], reply["output_ids"]


def test_a_prefix_from_host_memory_has_its_draft_keys(
    prompts: list[list[int]], server_of: Callable[..., Server]
) -> None:
    """They come back with it to other KV slots: the draft model proposes what it would had it computed the prefix."""
    host = ("--enable-hierarchical-cache", "--hicache-ratio", "20", "--max-total-tokens", "900")
    args = (*model_drafts("STANDALONE", NANO), "--chunked-prefill-size", "128", *host)
    server = server_of("diffkv", args, config={"tiers": ["BF16"], "share_min_tokens": 32}, env=STRICT)
    asked = sorted(prompts, key=len)[-3:]
    first, again = ([_rounds(server, ids) for ids in asked] for _ in range(2))
    report = server.server_info()["internal_states"][0]["diffkv"]["host_prefixes"]
    assert report["hits"] >= 2 and report["tokens_restored"] > 300
    assert sum(cached for cached, _, _ in again) > 0.8 * sum(map(len, asked))
    assert [x[2] for x in again] == [x[2] for x in first]
    passes, before = (sum(x[1] for x in found) for found in (again, first))
    assert abs(passes - before) <= 0.1 * before, "drafts are worse behind a prefix that came back"
    assert sum(x[1] for x in first) < 0.6 * 48 * len(first), "most drafts are right"


def test_a_prefix_from_the_cache_has_its_draft_keys(prompts: list[list[int]], server_of: Callable[..., Server]) -> None:
    """The draft model finds what it stored of a shared prefix by the same KV slots: it proposes what it would propose
    had it computed the prefix anew."""
    args = (*model_drafts("STANDALONE", NANO), "--chunked-prefill-size", "128")
    server = server_of("diffkv", args, config={"tiers": ["BF16"]}, env=STRICT)
    first, again = ([_rounds(server, ids) for ids in prompts[:8]] for _ in range(2))
    assert all(cached == len(ids) - 1 for ids, (cached, _, _) in zip(prompts, again, strict=False))
    assert [x[1:] for x in again] == [x[1:] for x in first]
    assert sum(x[1] for x in first) < 0.6 * 48 * len(first), "most drafts are right"
