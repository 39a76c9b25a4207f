"""Tensor parallelism on a real server: stock's tokens, equal decisions under pressure, nothing lost on any rank.

On a CPU, SGLang wants the cores of each rank named; its ranks then sum over gloo. With SGLANG_DIFFKV_CHECK_INTEGRITY,
ranks also compare after every step all that they decide on, and a difference ends the server.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import splits
from benchmarks.paths import NANO
from benchmarks.quality.random_drafts import model_drafts
from benchmarks.quality.random_windows import make_gemma3
from sglang_diffkv.evaluate import client
from sglang_diffkv.evaluate.client import Record
from sglang_diffkv.evaluate.ports import Port
from sglang_diffkv.evaluate.prompts import chat_ids, load_tokenizer
from sglang_diffkv.evaluate.server import Server, ServerError, stock_backend
from sglang_diffkv.evaluate.tasks import reference
from sglang_diffkv.evaluate.tasks.generation import Example
from sglang_diffkv.mem_pool import segment_object
from sglang_diffkv.srt.models.speculation import CHAIN
from sglang_diffkv.srt.tree.host_tier import WRITE_THROUGH
from tests.servers.identity import check_tokens
from tests.servers.prometheus_text import samples
from tests.servers.shared import SHALLOW, START_TIMEOUT, STRICT, check_idle, stats_of, tokens
from tests.servers.test_server_disk_tier import written
from tests.servers.test_server_host_tier import ask, crowd_out, tier

pytestmark = [pytest.mark.server, pytest.mark.timeout(1800)]

LOSSLESS = {"tiers": ["BF16"]}
ROOM = ("--max-total-tokens", "40000")
"""Not a whole GPU."""
NGRAM_TREES = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8")
NGRAMS = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "5", *CHAIN.split())
SMALL = ("--max-total-tokens", "800", "--schedule-conservativeness", "0.1")


@pytest.fixture
def serve(server_of: Callable[..., Server]) -> Callable[..., Server]:
    """``serve(ranks, config, *args, model=...)``: a server of so many ranks that checks itself; stock SGLang without a
    configuration."""

    def start(ranks: int, config: dict[str, Any] | None, *args: str, model: Path = NANO) -> Server:
        backend = stock_backend() if config is None else "diffkv"
        env = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * ranks), **STRICT}
        return server_of(backend, ["--tp-size", str(ranks), *args], model=model, config=config, env=env)

    return start


def _ids(items: list[Example]) -> list[list[int]]:
    return [chat_ids(load_tokenizer(NANO), item.prompt) for item in items]


@pytest.mark.parametrize(
    ("questions", "shared", "new_tokens"), [(2, 1, 16), pytest.param(20, 4, 48, marks=pytest.mark.full)]
)
def test_two_ranks_give_the_tokens_of_stock_s_two(
    questions: int, shared: int, new_tokens: int, serve: Callable[..., Server]
) -> None:
    """Not of one rank: the sums of two are rounded otherwise, and on some CPUs stock's own two leave its one."""
    items = reference.select(splits.load("dev"), levels=["easy", "medium"], n=questions, seed=3)
    prompts = _ids([*items, *[x for x in splits.load("dev") if x.task == "fewshot_shared"][:shared]])

    def ask(server: Server, concurrency: int) -> list[Record]:
        return client.run(server.url, prompts, new_tokens, concurrency=concurrency, top_logprobs=2)

    stock = ask(serve(2, None, *ROOM), 1)
    server = serve(2, LOSSLESS, *ROOM)
    check_tokens([x.output_ids for x in ask(server, 1)], stock, "two ranks, one request at a time")
    again = ask(server, 16)
    check_tokens([x.output_ids for x in again], stock, "two ranks, batch of 16, over prefix hits")
    assert all(x.cached_tokens == len(ids) - 1 for ids, x in zip(prompts, again, strict=True))
    stats = stats_of(server)
    assert (stats["ranks"], stats["kv_heads"]) == (2, 1)


def test_two_ranks_go_on_with_what_they_retract(serve: Callable[..., Server]) -> None:
    """From host memory, with the replies of a roomy pool."""
    roomy = _load(serve(2, LOSSLESS, *ROOM), 4, 160)
    server = serve(2, LOSSLESS, "--max-total-tokens", "620", *SMALL[2:])
    for _ in range(5):  # until as many have met as the pool has no room for
        check_tokens([x.output_ids for x in _load(server, 4, 160)], roomy, "retracted")
        if (found := stats_of(server)["retracted"])["restored"]:
            break
    assert found["kept"] == found["restored"] + found["recomputed"] + found["dropped"] and not found["no_host_memory"]
    assert found["restored"] and found["tokens_restored"] >= 60 * found["restored"]
    assert (found["waiting"], found["host_bytes"]) == (0, 0)


def test_two_ranks_bring_back_what_the_pool_has_lost(tmp_path: Path, serve: Callable[..., Server]) -> None:
    """From host memory, and after a flush from a folder, in which each rank has parts of its own. Replies are those
    computed without a cache."""
    prompts = [tokens(150, seed) for seed in range(300, 303)]
    extra = {"file_storage_path": str(tmp_path), "prefetch_threshold": 32, "max_size": "100M"}
    store = ("--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete")
    args = tier(WRITE_THROUGH, *store, "--hicache-storage-backend-extra-config", json.dumps(extra))
    server = serve(2, {**LOSSLESS, "share_min_tokens": 32}, *args)
    computed = client.run(server.url, prompts, 8, top_logprobs=2)
    crowd_out(server)
    back = client.run(server.url, prompts, 8, concurrency=3)
    check_tokens([x.output_ids for x in back], computed, "from host memory")
    found = stats_of(server)["host_prefixes"]
    assert found["hits"] >= 3 and found["tokens_restored"] >= 3 * 140
    written(server, len(prompts))
    server.flush_cache()
    again = [ask(server, prompt, 8) for prompt in prompts]
    check_tokens([reply for reply, _ in again], computed, "from the folder")
    assert all(where["storage"] >= 140 for _, where in again) and stats_of(server)["stored_prefixes"]["hits"] == 3
    ranks = [segment_object.decode(x.read_bytes())[0].header["rank"] for x in tmp_path.rglob("*.segment")]
    assert ranks.count(0) == ranks.count(1) >= 3


@pytest.mark.full
@pytest.mark.parametrize(
    "drafts",
    [NGRAMS, NGRAM_TREES, model_drafts("STANDALONE", NANO)],
    ids=["n-grams", "trees", "a draft model"],
)
def test_two_ranks_accept_the_same_drafts(drafts: tuple[str, ...], serve: Callable[..., Server]) -> None:
    """Stock's tokens, and in a small pool with two tiers no rank decides otherwise than the other."""
    prompts = _ids(reference.select(splits.load("dev"), levels=["easy", "medium"], n=6, seed=3))
    stock = client.run(serve(2, None, *ROOM).url, prompts, 36, concurrency=1, top_logprobs=2)
    lossless = client.run(serve(2, LOSSLESS, *ROOM, *drafts).url, prompts, 36, concurrency=8)
    check_tokens([x.output_ids for x in lossless], stock, "two ranks with drafts, batch of 8")
    tight = serve(2, {"page_tokens": 8}, "--max-total-tokens", "1600", *drafts)
    assert all(x.output_ids for x in client.run(tight.url, prompts, 96, concurrency=8))
    stats = stats_of(tight)
    assert (stats["ranks"], stats["faults"]) == (2, 0)


def _load(server: Server, count: int, new_tokens: int) -> list[Record]:
    """Questions with long replies that come one after the other, in pairs that share all but their last tokens."""
    ids = _ids([x for x in splits.load("dev") if x.task == "recur" and x.level == "hard"][: -(-count // 2)])
    prompts = [x for prompt in ids for x in (prompt, prompt[:-8] + prompt[-4:])][:count]

    def ask(index: int) -> Record:
        time.sleep(0.2 * index)
        return client.ask(server.url, prompts[index], new_tokens, top_logprobs=2)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(ask, range(count)))


WINDOW, KEPT, GONE = 64, 1e-6, 1e6
"""Of a head with the last factor nothing but the window stays high, of one with the first all."""


@pytest.mark.parametrize(
    ("ranks", "fidelity", "scale", "requests", "options"),
    [
        (2, "exact", [GONE, KEPT], 3, []),
        pytest.param(2, "exact", None, 10, [], marks=pytest.mark.full),
        pytest.param(2, "compressed", None, 10, ["--enable-metrics"], marks=pytest.mark.full),
        pytest.param(2, "compressed", None, 10, ["--disable-overlap-schedule"], marks=pytest.mark.full),
        pytest.param(4, "exact", None, 6, [], marks=pytest.mark.full),
    ],
)
def test_ranks_decide_alike_in_a_small_pool(
    ranks: int,
    fidelity: str,
    scale: list[float] | None,
    requests: int,
    options: list[str],
    serve: Callable[..., Server],
) -> None:
    """With factors by head the pages of two ranks differ as much as they can, and a rank with another's factors shows.
    With 4 ranks two have the same KV head, and each judges it by query heads of its own."""
    pool, new_tokens = (800, 320) if requests > 3 else (640, 240)
    args = ["--max-total-tokens", str(pool), "--schedule-conservativeness", "0.1", *SHALLOW, *options]
    policy = {"name": "diffkv", "window": WINDOW, **({"head_scale": [scale] * 2} if scale else {})}
    server = serve(ranks, {"prefix_fidelity": fidelity, "policy": policy}, *args)
    replies = _load(server, requests, new_tokens)
    assert all(x.completion_tokens > 0 for x in replies)
    stats = stats_of(server)
    assert stats["ranks"] == ranks
    high, low = stats["finished"]["high"], stats["finished"]["low"]
    assert low > (high if scale else 0), "figures are those of rank 0, which has the first head"
    if "--enable-metrics" in options:  # the first rank reads them, by itself
        (labels, tokens), *others = samples(server.get("/metrics").text)["diffkv_tokens"]
        assert labels["tp_rank"] == "0" and tokens > 0 and not others
    check_idle(server)
    _check_retractions([server.log_text()] * ranks)
    retracted = stats["retracted"]
    assert retracted["kept"] == retracted["restored"] + retracted["recomputed"] + retracted["dropped"] > 0


def _check_retractions(logs: list[str]) -> None:
    """Raise AssertionError unless all ranks, whose logs these are, retracted the same requests, and some."""
    told = [
        re.findall(rf"TP{rank}\] KV cache pool is full. (Retract requests.*)", log) for rank, log in enumerate(logs)
    ]
    assert told[0] and all(x == told[0] for x in told), "ranks retracted differently, or none did"


@pytest.fixture(scope="module")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers but one have a sliding window."""
    folder = tmp_path_factory.mktemp("gemma3")
    make_gemma3(folder)
    return folder


@pytest.mark.full
def test_two_ranks_with_sliding_layers_give_the_tokens_of_stock_s_two(
    sliding: Path, serve: Callable[..., Server]
) -> None:
    """Over chunks, then in batches over prefix hits."""
    prompts = [tokens(length, seed) for seed, length in enumerate((30, 150, 300, 390))]
    args = ("--max-total-tokens", "6000", "--chunked-prefill-size", "128")

    def ask(server: Server, concurrency: int) -> list[Record]:
        return client.run(server.url, prompts, 36, concurrency=concurrency, top_logprobs=2)

    stock = ask(serve(2, None, *args[:2], model=sliding), 1)
    server = serve(2, LOSSLESS, *args, model=sliding)
    check_tokens([x.output_ids for x in ask(server, 1)], stock, "two ranks, sliding layers")
    again = ask(server, 4)
    check_tokens([x.output_ids for x in again], stock, "two ranks, sliding layers, in batches, over prefix hits")
    assert all(x.cached_tokens == len(ids) - 1 for ids, x in zip(prompts[1:], again[1:], strict=True))
    stats = stats_of(server)
    assert (stats["ranks"], stats["kv_heads"]) == (2, 1)
    held = stats["by_head"]["high"]
    assert all(layer[0] < held[-1][0] for layer in held[:-1]), "sliding layers hold as much as the other"


@pytest.mark.full
@pytest.mark.parametrize("fidelity", ["compressed", "exact"])
def test_ranks_with_sliding_layers_decide_alike_in_a_small_pool(
    fidelity: str, sliding: Path, serve: Callable[..., Server]
) -> None:
    """Of its full layer one rank's head keeps all tokens high, the other's nothing but the window. Prompts come in
    chunks, some are longer than what the pool has left."""
    scale = [[1.0, 1.0]] * 5 + [[GONE, KEPT]]
    config = {"prefix_fidelity": fidelity, "policy": {"name": "diffkv", "window": WINDOW, "head_scale": scale}}
    args = ["--max-total-tokens", "640", "--chunked-prefill-size", "128", "--schedule-conservativeness", "0.1"]
    server = serve(2, config, *args, model=sliding)
    lengths = (60, 330, 90, 120, 350, 40, 80, 110, 70, 100)
    prompts = [tokens(length, 20 + seed) for seed, length in enumerate(lengths)]

    def ask(index: int) -> Record:
        time.sleep(0.2 * index)
        return client.ask(server.url, prompts[index], 240)

    with ThreadPoolExecutor(len(prompts)) as threads:
        assert all(x.completion_tokens > 0 for x in threads.map(ask, range(len(prompts))))
    stats = stats_of(server)
    assert (stats["ranks"], stats["faults"]) == (2, 0)
    check_idle(server)
    _check_retractions([server.log_text()] * 2)


XKV = {"tiers": ["K8V4"], "policy": {"name": "xkv", "keep": 0.4}}


@pytest.mark.full
def test_ranks_give_layers_the_sizes_that_one_rank_gives_them(serve: Callable[..., Server]) -> None:
    """XKV's sizes by layer follow from all heads' attention, wherever they are. Two ranks round otherwise than one,
    which moves a layer's size by a token or two; each rank by its own head would move it by more."""
    prompt = _ids([x for x in splits.load("dev") if x.group == "medium-1"][:1])[0][:700]

    def sizes(ranks: int) -> list[int]:
        server = serve(ranks, XKV, *SMALL)
        server.flush_cache()
        assert client.ask(server.url, prompt, 2).completion_tokens == 2
        stats = stats_of(server)
        assert stats["ranks"] == ranks
        return [layer[0] for layer in stats["by_head"]["high"]]

    alone, together = sizes(1), sizes(2)
    outside = [x - 8 for x in together]
    assert abs(sum(outside) - 0.4 * 6 * (len(prompt) - 8)) < 20 and max(outside) > 1.2 * min(outside)
    assert max(abs(a - b) for a, b in zip(alone, together, strict=True)) <= 3


@pytest.mark.full
def test_ranks_that_share_sizes_decide_alike_in_a_small_pool(serve: Callable[..., Server]) -> None:
    server = serve(2, {**XKV, "prefix_fidelity": "exact"}, *SMALL)
    assert all(x.completion_tokens > 0 for x in _load(server, 10, 320))
    assert stats_of(server)["faults"] == 0
    check_idle(server)
    _check_retractions([server.log_text()] * 2)


@pytest.mark.full
def test_each_rank_takes_the_factors_of_its_heads(serve: Callable[..., Server]) -> None:
    """Of three layers the first head keeps all tokens high, of three the second. Figures are those of rank 0."""
    prompts = _ids([x for x in splits.load("calib") if x.task == "recur"][:2])
    policy = {"name": "diffkv", "window": 32, "head_scale": [[KEPT, GONE]] * 3 + [[GONE, KEPT]] * 3}
    server = serve(2, {"policy": policy}, *ROOM)
    client.run(server.url, prompts, 48, concurrency=1)
    heads = stats_of(server)["by_head"]
    assert heads["high"][:3] == [[heads["tokens"]]] * 3 and heads["low"][:3] == [[0]] * 3
    assert all(high < heads["tokens"] and low > 0 for [high], [low] in zip(heads["high"][3:], heads["low"][3:]))


@contextmanager
def _two_hosts(*configs: dict[str, Any]) -> Iterator[tuple[Server, Server]]:
    """A server of two ranks, each launched by itself with a configuration of its own, as on two hosts."""
    rendezvous = Port()
    args = ["--tp-size", "2", *SMALL, "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{rendezvous.number}"]
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|0", **STRICT}
    first, second = (
        Server(
            NANO,
            "diffkv",
            [*args, "--node-rank", str(rank)],
            diffkv_config=config,
            env=env,
            timeout=START_TIMEOUT,
            **more,
        )
        for rank, (config, more) in enumerate(zip(configs, ({}, {"ready": ""}), strict=True))
    )
    with second, first:  # the first is ready when both are
        yield first, second


@pytest.mark.full
def test_two_hosts_give_the_tokens_of_one_s_two_ranks_and_decide_alike(serve: Callable[..., Server]) -> None:
    config = {"prefix_fidelity": "exact", "policy": {"name": "diffkv", "window": WINDOW}}
    prompts = _ids([x for x in splits.load("dev") if x.task == "fewshot_shared"][:6])

    def ask(server: Server) -> list[tuple[list[int], int]]:
        return [(x.output_ids, x.cached_tokens) for x in client.run(server.url, prompts, 48, concurrency=1)]

    expected = ask(serve(2, config, *SMALL))
    with _two_hosts(config, config) as (first, second):
        assert ask(first) == expected and any(cached for _, cached in expected)
        assert stats_of(first)["finished"]["low"] > 0
        assert all(x.completion_tokens > 0 for x in _load(first, 10, 320))
        check_idle(first)
        assert second.alive()
        _check_retractions([first.log_text(), second.log_text()])


@pytest.mark.full
def test_hosts_with_different_configurations_end_the_start() -> None:
    policies = [{"policy": {"name": "diffkv", "window": window}} for window in (64, 128)]
    with (
        pytest.raises(ServerError, match="ranks differ in the plugin's version, --diffkv-config"),
        _two_hosts(*policies),
    ):
        pass
