"""With one bf16 tier and no pruning a server gives the tokens of stock SGLang; not selected, it changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import requests

from benchmarks import splits
from benchmarks.paths import NANO
from benchmarks.quality.random_drafts import model_drafts
from sglang_diffkv.evaluate import client
from sglang_diffkv.evaluate.client import Record
from sglang_diffkv.evaluate.prompts import chat_ids, load_tokenizer
from sglang_diffkv.evaluate.server import Server, stock_backend
from sglang_diffkv.evaluate.tasks import reference
from sglang_diffkv.srt.models.speculation import CHAIN
from tests.servers.identity import check_tokens
from tests.servers.shared import STRICT, SharedServer

pytestmark = pytest.mark.server

LOSSLESS = {"tiers": ["BF16"]}
NEW_TOKENS = 36
STOCK = {"SGLANG_PLUGINS": "none"}
CHUNKS = {"chunks of 128": ("--chunked-prefill-size", "128"), "whole": ()}
"""Some of the prompts are longer than 128 tokens, so the first runs them in both ways."""
NGRAMS = (*["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "5"], *CHAIN.split())
CONTEXT = 1024
TREES = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8", "--context-length", str(CONTEXT))
"""SGLang's default: up to 10 proposals behind a token."""
SHARED = 4
"""Prompts over one prefix."""


@pytest.fixture(scope="module", params=[10, pytest.param(24, marks=pytest.mark.full)])
def prompts(request: pytest.FixtureRequest) -> list[list[int]]:
    items = reference.select(splits.load("dev"), levels=["easy", "medium"], n=request.param - SHARED, seed=3)
    items += [x for x in splits.load("dev") if x.task == "fewshot_shared"][:SHARED]
    prompts = [chat_ids(load_tokenizer(NANO), x.prompt) for x in items]
    assert min(map(len, prompts)) < 128 < max(map(len, prompts))
    return prompts


@pytest.fixture(scope="module", params=["chunks of 128", pytest.param("whole", marks=pytest.mark.full)])
def chunks(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Arguments of stock and of the server beside it."""
    return CHUNKS[request.param]


@pytest.fixture(scope="module")
def stock(prompts: list[list[int]], chunks: tuple[str, ...], shared_server: SharedServer) -> list[Record]:
    return _ask(shared_server.get(stock_backend(), chunks, env=STOCK), prompts)


def _ask(server: Server, prompts: list[list[int]], concurrency: int = 1) -> list[Record]:
    """One request at a time, unless told otherwise: what a batch is composed of decides how stock SGLang rounds."""
    return client.run(server.url, prompts, NEW_TOKENS, concurrency=concurrency, top_logprobs=2)


def _tokens(records: list[Record]) -> list[list[int]]:
    return [record.output_ids for record in records]


def test_lossless_tier_gives_stock_tokens(
    prompts: list[list[int]], chunks: tuple[str, ...], stock: list[Record], server_of: Callable[..., Server]
) -> None:
    server = server_of("diffkv", chunks, config=LOSSLESS, env=STRICT)
    check_tokens(_tokens(_ask(server, prompts, 16)), stock, "batch of 16")
    again = _ask(server, prompts)
    check_tokens(_tokens(again), stock, "one at a time, over prefix hits")
    for ids, record in zip(prompts, again, strict=True):
        assert record.cached_tokens == len(ids) - 1, "a repeated prompt is cached up to its last token"


@pytest.mark.new_process
@pytest.mark.parametrize("count", [3, pytest.param(24, marks=pytest.mark.full)])
def test_installed_but_not_selected_changes_nothing(
    count: int, prompts: list[list[int]], chunks: tuple[str, ...], stock: list[Record], server_of: Callable[..., Server]
) -> None:
    """The real command, behind a test for which stock was asked."""
    server = server_of(stock_backend(), chunks)
    found, same = _ask(server, prompts[:count]), stock[:count]
    assert len(found) == count
    assert _tokens(found) == _tokens(same)
    assert [record.logprobs for record in found] == [record.logprobs for record in same]
    assert server.stats() is None
    assert "DiffKV plan" not in server.log_text()


def test_chains_of_drafts_give_stock_tokens(
    prompts: list[list[int]], chunks: tuple[str, ...], stock: list[Record], server_of: Callable[..., Server]
) -> None:
    server = server_of("diffkv", (*chunks, *NGRAMS), config=LOSSLESS, env=STRICT)
    check_tokens(_tokens(_ask(server, prompts, 16)), stock, "batch of 16")
    check_tokens(_tokens(_ask(server, prompts[:2])), stock[:2], "one at a time, over prefix hits")
    assert server.server_info()["internal_states"][0]["avg_spec_accept_length"] > 1.05, "some drafts are right"


def test_trees_of_drafts_give_stock_tokens(
    prompts: list[list[int]], chunks: tuple[str, ...], stock: list[Record], server_of: Callable[..., Server]
) -> None:
    server = server_of("diffkv", (*chunks, *TREES), config=LOSSLESS, env=STRICT)
    check_tokens(_tokens(_ask(server, prompts, 16)), stock, "batch of 16")
    check_tokens(_tokens(_ask(server, prompts[:2])), stock[:2], "one at a time, over prefix hits")
    assert server.server_info()["internal_states"][0]["avg_spec_accept_length"] > 1.05, "some drafts are right"


def test_drafts_at_the_end_of_the_context_are_their_request_s_alone(
    prompts: list[list[int]], chunks: tuple[str, ...], stock: list[Record], server_of: Callable[..., Server]
) -> None:
    """SGLang sets KV slots aside for the drafts of two passes, and they are past what a request may have."""
    server = server_of("diffkv", (*chunks, *TREES), config=LOSSLESS, env=STRICT)
    ids = [token for prompt in prompts for token in prompt][: CONTEXT - 12]
    parameters = {"max_new_tokens": CONTEXT - len(ids) - 1, "ignore_eos": True, "temperature": 0}
    url, body = f"{server.url}/generate", {"input_ids": ids, "sampling_params": parameters}
    answer = requests.post(url, json=body, timeout=120)
    assert answer.status_code == 200 and answer.json()["meta_info"]["finish_reason"]["type"] == "length", answer.text
    check_tokens(_tokens(_ask(server, prompts[:1])), stock[:1], "behind it")


def test_drafts_of_a_model_give_stock_tokens(
    prompts: list[list[int]], chunks: tuple[str, ...], stock: list[Record], server_of: Callable[..., Server]
) -> None:
    """The draft model is the model itself, so most of its drafts are right."""
    args = (*chunks, *model_drafts("STANDALONE", NANO), "--decode-log-interval", "2")
    server = server_of("diffkv", args, config=LOSSLESS, env=STRICT)
    check_tokens(_tokens(_ask(server, prompts[:6], 6)), stock[:6], "batch of 6")
    check_tokens(_tokens(_ask(server, prompts[:2])), stock[:2], "one at a time, over prefix hits")
    assert server.server_info()["internal_states"][0]["avg_spec_accept_length"] > 2


def test_trees_of_a_model_give_stock_tokens(
    prompts: list[list[int]], chunks: tuple[str, ...], stock: list[Record], server_of: Callable[..., Server]
) -> None:
    """Of many drafts, three behind each, so that the likeliest tokens of the model itself are among them."""
    args = (*chunks, *model_drafts("STANDALONE", NANO, branches=3, drafts=9), "--decode-log-interval", "2")
    server = server_of("diffkv", args, config=LOSSLESS, env=STRICT)
    check_tokens(_tokens(_ask(server, prompts[:6], 6)), stock[:6], "batch of 6")
    assert server.server_info()["internal_states"][0]["avg_spec_accept_length"] > 2
