"""Tensor parallelism on a real server: stock's tokens, equal decisions under pressure, nothing lost on any rank.

On a CPU, SGLang wants the cores of each rank named; its ranks then sum over gloo. With SGLANG_DIFFKV_CHECK_INTEGRITY,
ranks also compare after every step all that they decide on, and a difference ends the server.
"""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sglang_diffkv.testing import client, tasks
from sglang_diffkv.testing.client import Record
from sglang_diffkv.testing.paths import NANO
from sglang_diffkv.testing.server import Server, stock_backend
from tests.identity import check_tokens
from tests.prometheus_text import samples

pytestmark = pytest.mark.server

LOSSLESS = {"tiers": ["BF16"]}
ROOM = ("--max-total-tokens", "40000")
"""Not a whole GPU."""


def serve(ranks: int, config: dict[str, Any] | None, *args: str) -> Server:
    """A server that checks itself after every step; stock SGLang without a configuration."""
    backend = stock_backend() if config is None else "diffkv"
    env = {
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * ranks),
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
        "SGLANG_DIFFKV_CHECK_INTEGRITY": "1",
    }
    return Server(NANO, backend, ["--tp-size", str(ranks), *args], diffkv_config=config, env=env, timeout=600)


def _ids(items: list[tasks.Item]) -> list[list[int]]:
    return [tasks.chat_ids(tasks.load_tokenizer(NANO), item.prompt) for item in items]


def _stats(server: Server) -> dict[str, Any]:
    stats = server.stats()
    assert stats is not None
    return stats


def test_two_ranks_give_the_tokens_of_stock_s_two() -> None:
    """Not of one rank: the sums of two are rounded otherwise, and on some CPUs stock's own two leave its one."""
    items = tasks.select(tasks.load("dev"), levels=["easy", "medium"], n=20, seed=3)
    prompts = _ids([*items, *[x for x in tasks.load("dev") if x.task == "fewshot_shared"][:4]])

    def ask(server: Server, concurrency: int) -> list[Record]:
        return client.run(server.url, prompts, 48, concurrency=concurrency, top_logprobs=2)

    with serve(2, None, *ROOM) as server:
        stock = ask(server, 1)
    with serve(2, LOSSLESS, *ROOM) as server:
        check_tokens([x.output_ids for x in ask(server, 1)], stock, "two ranks, one request at a time")
        again = ask(server, 16)
        check_tokens([x.output_ids for x in again], stock, "two ranks, batch of 16, over prefix hits")
        assert all(x.cached_tokens == len(ids) - 1 for ids, x in zip(prompts, again, strict=True))
        stats = _stats(server)
        assert (stats["ranks"], stats["kv_heads"]) == (2, 1)
        server.flush_cache()
        assert _stats(server)["pages_used"] == 0


def _load(server: Server, count: int, new_tokens: int) -> list[Record]:
    """Questions with long replies that come one after the other, in pairs that share all but their last tokens."""
    ids = _ids([x for x in tasks.load("dev") if x.task == "recur" and x.level == "hard"][: count // 2])
    prompts = [x for prompt in ids for x in (prompt, prompt[:-8] + prompt[-4:])]

    def ask(index: int) -> Record:
        time.sleep(0.2 * index)
        return client.ask(server.url, prompts[index], new_tokens)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(ask, range(count)))


@pytest.mark.parametrize(
    ("ranks", "fidelity", "options"),
    [
        (2, "compressed", ["--enable-metrics"]),
        (2, "exact", []),
        (2, "compressed", ["--disable-overlap-schedule"]),
        (4, "exact", []),
    ],
)
def test_ranks_decide_alike_in_a_small_pool(ranks: int, fidelity: str, options: list[str]) -> None:
    """With 4 ranks two have the same KV head, and each judges it by query heads of its own."""
    args = ["--max-total-tokens", "800", "--schedule-conservativeness", "0.1", *options]
    config = {"prefix_fidelity": fidelity, "policy": {"name": "diffkv", "window": 64}}
    with serve(ranks, config, *args) as server:
        assert all(x.completion_tokens > 0 for x in _load(server, 10 if ranks == 2 else 6, 320))
        assert _stats(server)["finished"]["low"] > 0
        if "--enable-metrics" in options:  # the first rank reads them, by itself
            (labels, tokens), *others = samples(server.get("/metrics").text)["diffkv_tokens"]
            assert labels["tp_rank"] == "0" and tokens > 0 and not others
        server.flush_cache()
        stats = _stats(server)
        assert (stats["ranks"], stats["pages_used"], stats["segments"]) == (ranks, 0, 0)
        log = server.log_text()
    retracted = [re.findall(rf"TP{rank}\] KV cache pool is full. (Retract requests.*)", log) for rank in range(ranks)]
    assert retracted[0] and all(x == retracted[0] for x in retracted), "ranks retracted differently, or none did"


def test_each_rank_takes_the_factors_of_its_heads() -> None:
    """The first head keeps all tokens high, the second none outside the window; figures are those of rank 0."""
    policy = {"name": "diffkv", "window": 32, "head_scale": [[1e-6, 1e6]] * 6}
    prompts = _ids([x for x in tasks.load("calib") if x.task == "recur"][:2])
    with serve(2, {"policy": policy}, *ROOM) as server:
        client.run(server.url, prompts, 48, concurrency=1)
        found = _stats(server)["finished"]
    assert found["high"] > 0 and found["low"] == 0
    with serve(1, {"policy": policy}, *ROOM) as server:
        client.run(server.url, prompts, 48, concurrency=1)
        assert _stats(server)["finished"]["low"] > 0
