"""With one bf16 tier and no pruning a server gives the tokens of stock SGLang; not selected, it changes nothing."""

from __future__ import annotations

import pytest

from sglang_diffkv.testing import client, tasks
from sglang_diffkv.testing.paths import NANO
from sglang_diffkv.testing.server import Server, stock_backend

pytestmark = pytest.mark.server

LOSSLESS = {"tiers": ["BF16"]}
NEW_TOKENS = 48
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_DIFFKV_CHECK_INTEGRITY": "1"}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    items = tasks.select(tasks.load("dev"), levels=["easy", "medium"], n=20, seed=3)
    items += [x for x in tasks.load("dev") if x.task == "fewshot_shared"][:4]
    return [tasks.chat_ids(tasks.load_tokenizer(NANO), x.prompt) for x in items]


@pytest.fixture(scope="module")
def stock(prompts: list[list[int]]) -> list[list[int]]:
    with Server(NANO, stock_backend(), env={"SGLANG_PLUGINS": "none"}) as server:
        return _tokens(server, prompts, 8)


def _tokens(server: Server, prompts: list[list[int]], concurrency: int) -> list[list[int]]:
    return [r.output_ids for r in client.run(server.url, prompts, NEW_TOKENS, concurrency=concurrency)]


def test_installed_but_not_selected_changes_nothing(prompts: list[list[int]], stock: list[list[int]]) -> None:
    with Server(NANO, stock_backend()) as server:
        assert _tokens(server, prompts, 8) == stock
        assert server.stats() is None
        assert "DiffKV plan" not in server.log_text()


def test_lossless_tier_gives_stock_tokens(prompts: list[list[int]], stock: list[list[int]]) -> None:
    with Server(NANO, "diffkv", diffkv_config=LOSSLESS, env=STRICT) as server:
        assert _tokens(server, prompts, 16) == stock, "batch of 16"
        again = client.run(server.url, prompts, NEW_TOKENS, concurrency=1)
        assert [r.output_ids for r in again] == stock, "one at a time, over prefix hits"
        for ids, record in zip(prompts, again, strict=True):
            assert record.cached_tokens == len(ids) - 1, "a repeated prompt is cached up to its last token"


def test_lossless_tier_with_chunked_prefill(prompts: list[list[int]]) -> None:
    """One request at a time: stock SGLang's own tokens depend on how a chunked batch is composed."""
    chunked = ["--chunked-prefill-size", "64"]
    with Server(NANO, stock_backend(), chunked, env={"SGLANG_PLUGINS": "none"}) as server:
        expected = _tokens(server, prompts[-8:], 1)
    with Server(NANO, "diffkv", chunked, diffkv_config=LOSSLESS, env=STRICT) as server:
        assert _tokens(server, prompts[-8:], 1) == expected
