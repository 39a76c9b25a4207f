"""``--page-size``: prompts are found at multiples of it, and the lossless tier still gives stock's tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks import splits
from benchmarks.paths import NANO
from sglang_diffkv.evaluate import client
from sglang_diffkv.evaluate.prompts import chat_ids, load_tokenizer
from sglang_diffkv.evaluate.server import Server, stock_backend
from sglang_diffkv.srt.models.speculation import CHAIN
from tests.servers.identity import check_tokens
from tests.servers.shared import STRICT, check_idle, stats_of

pytestmark = pytest.mark.server

NEW_TOKENS = 12
LOSSLESS = {"tiers": ["BF16"], "share_min_tokens": 32}
HOST = ("--max-total-tokens", "700", "--hicache-ratio", "20", "--enable-hierarchical-cache")
NGRAMS = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "5", *CHAIN.split())
FORMS = {
    "host memory": (16, (*HOST, "--chunked-prefill-size", "64")),
    "n-grams": (64, NGRAMS),
    "pages of 5": (5, ()),
}
FULL = [pytest.param(name, marks=pytest.mark.full) for name in [*FORMS][1:]]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    items = [x for x in splits.load("dev") if x.task == "fewshot_shared"][:4]
    ids = [chat_ids(load_tokenizer(NANO), x.prompt) for x in items]
    return [*ids, *([*x, *ids[0][:40]] for x in ids)]


@pytest.mark.parametrize("form", ["host memory", *FULL])
def test_lossless_gives_stock_tokens(form: str, prompts: list[list[int]], server_of: Callable[..., Server]) -> None:
    size, args = FORMS[form]
    stock = server_of(stock_backend())
    expected = client.run(stock.url, prompts, NEW_TOKENS, top_logprobs=2)
    server = server_of("diffkv", ("--page-size", str(size), *args), config=LOSSLESS, env=STRICT)
    for concurrency in (4, 1):
        found = client.run(server.url, prompts, NEW_TOKENS, concurrency=concurrency)
        check_tokens([x.output_ids for x in found], expected, f"{concurrency} at a time")
    assert all(x.cached_tokens % size == 0 for x in found) and sum(x.cached_tokens for x in found) > 0
    last = client.run(server.url, prompts[-1:], NEW_TOKENS)[0]
    assert last.cached_tokens == (len(prompts[-1]) - 1) // size * size, "it is found up to its last whole page"
    if "--enable-hierarchical-cache" in args:
        assert stats_of(server)["host_prefixes"]["tokens_restored"] > 0, "nothing came back from host memory"
    check_idle(server)
