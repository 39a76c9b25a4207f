"""Prefixes that a small pool evicts come back from host memory: replies are those of a server that never lost them,
and nothing that old weights computed comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import requests

from benchmarks import splits
from benchmarks.paths import NANO
from sglang_diffkv.evaluate import client
from sglang_diffkv.evaluate.prompts import chat_ids, load_tokenizer
from sglang_diffkv.evaluate.server import Server, stock_backend
from sglang_diffkv.srt.models.speculation import CHAIN
from sglang_diffkv.srt.tree.host_tier import SELECTIVE, WRITE_BACK, WRITE_THROUGH
from tests.servers.hybrid_models import KINDS, drafts_run, foreseeing
from tests.servers.identity import check_tokens
from tests.servers.shared import STRICT, check_idle, stats_of, tokens

pytestmark = pytest.mark.server

NEW_TOKENS, CAPACITY = 10, 700
LOSSLESS = {"tiers": ["BF16"], "share_min_tokens": 32}
COMPRESSED = {"policy": {"name": "diffkv", "window": 16}, "share_min_tokens": 32}
NGRAMS = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "5", *CHAIN.split())
EXACT = {**COMPRESSED, "prefix_fidelity": "exact"}


def tier(policy: str, *more: str) -> tuple[str, ...]:
    """Arguments of a server whose pool has room for a few prompts, and the host for all."""
    size = ("--max-total-tokens", str(CAPACITY), "--hicache-ratio", "20")
    return (*size, "--enable-hierarchical-cache", "--hicache-write-policy", policy, *more)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Prompts of which some share a prefix, and turns that go on where others ended."""
    items = [x for x in splits.load("dev") if x.task == "fewshot_shared"][:3]
    ids = [chat_ids(load_tokenizer(NANO), x.prompt) for x in items]
    chats = [tokens(120, seed) for seed in range(5)]
    return [*ids, *chats, *([*chat, *tokens(30, 10 + at)] for at, chat in enumerate(chats))]


def ask(server: Server, prompt: list[int], new_tokens: int = NEW_TOKENS) -> tuple[list[int], dict[str, int]]:
    """A reply, and its prompt's cached tokens by where they were."""
    found = server.generate(
        {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}}
    )
    return found["output_ids"], found["meta_info"].get("cached_tokens_details") or {}


def counts(server: Server) -> dict[str, int]:
    return stats_of(server)["host_prefixes"]


def crowd_out(server: Server) -> None:
    """Other prompts fill the pool until nothing else is left in it."""
    for seed in range(6):
        ask(server, tokens(240, 100 + seed), 2)


@pytest.mark.parametrize("more", [(), pytest.param(NGRAMS, marks=pytest.mark.full)], ids=["", "n-grams"])
def test_lossless_gives_stock_tokens(
    more: tuple[str, ...], prompts: list[list[int]], server_of: Callable[..., Server]
) -> None:
    stock = client.run(server_of(stock_backend()).url, prompts, NEW_TOKENS, top_logprobs=2)
    server = server_of("diffkv", tier(WRITE_THROUGH, *more), config=LOSSLESS, env=STRICT)
    for round_ in range(2):
        before = counts(server)["tokens_restored"]
        found = client.run(server.url, prompts, NEW_TOKENS, concurrency=3 if round_ else 1)
        check_tokens([x.output_ids for x in found], stock, f"round {round_}")
    report = counts(server)
    assert report["hits"] >= 5 and report["tokens_restored"] - before > 300 and report["bytes_in"] > 0
    assert 0 < report["host_bytes"] <= report["host_bytes_most"] and report["bytes_out"] > 0
    check_idle(server)


def test_replies_say_what_came_from_the_host(server_of: Callable[..., Server]) -> None:
    server, prompt = server_of("diffkv", tier(WRITE_THROUGH), config=LOSSLESS, env=STRICT), tokens(150, 50)
    ask(server, prompt)
    assert ask(server, prompt)[1] == {"device": 149, "host": 0}
    crowd_out(server)
    first, where = ask(server, prompt)
    assert where["host"] > 100 and where["host"] + where["device"] == 149
    assert ask(server, prompt) == (first, {"device": 149, "host": 0}), "it came back for one request alone"


def _flush(server: Server) -> None:
    server.flush_cache()


def _new_weights(server: Server) -> None:
    """The same numbers, as far as anybody knows others; SGLang keeps its prefix cache."""
    asked = {"model_path": str(NANO), "flush_cache": False}
    answer = requests.post(f"{server.url}/update_weights_from_disk", json=asked, timeout=120)
    assert answer.json()["success"], answer.text


@pytest.mark.parametrize("change", [_flush, _new_weights])
def test_what_is_outdated_does_not_come_back(
    change: Callable[[Server], None], server_of: Callable[..., Server]
) -> None:
    server, prompt = server_of("diffkv", tier(WRITE_THROUGH), config=LOSSLESS, env=STRICT), tokens(150, 60)
    ask(server, prompt)
    crowd_out(server)
    assert counts(server)["host_bytes"] > 0
    before = counts(server)["hits"]
    change(server)
    assert counts(server)["host_bytes"] == counts(server)["tokens"] == 0
    crowd_out(server)
    assert not ask(server, prompt)[1] and counts(server)["hits"] == before
    _flush(server)


@pytest.mark.parametrize(
    ("config", "policy"),
    [
        (COMPRESSED, WRITE_BACK),
        pytest.param(COMPRESSED, SELECTIVE, marks=pytest.mark.full),
        pytest.param(EXACT, WRITE_THROUGH, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_reply_is_that_of_a_prefix_that_was_never_lost(
    config: dict[str, Any], policy: str, server_of: Callable[..., Server]
) -> None:
    """Behind as many cached tokens: a prompt's new tokens see each other as they were computed."""
    server, prompt = server_of("diffkv", tier(policy), config=config, env=STRICT), tokens(200, 70)
    ask(server, prompt)
    there, where = ask(server, prompt)
    assert where["device"] >= 150 and where["host"] == 0
    crowd_out(server)
    back, whence = ask(server, prompt)
    assert whence["host"] >= 150 and sum(whence.values()) == sum(where.values())
    assert back == there
    assert counts(server)["no_host_memory"] == 0


@pytest.mark.parametrize(
    ("policy", "drafts"),
    [
        (WRITE_BACK, ()),
        pytest.param(WRITE_THROUGH, (), marks=pytest.mark.full),
        pytest.param(WRITE_BACK, NGRAMS, marks=[drafts_run, pytest.mark.full]),
    ],
    ids=["write back", "write through", "n-grams"],
)
def test_states_come_back_with_their_prefixes(
    policy: str, drafts: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory, server_of: Callable[..., Server]
) -> None:
    """Of a model with states, which has few slots for them: replies are those that were computed whole."""
    hybrid = (foreseeing if drafts else KINDS["lfm2"])(tmp_path_factory.mktemp("hybrid"))
    few = ("--chunked-prefill-size", "128", "--max-mamba-cache-size", "6", "--max-running-requests", "2", *drafts)
    server = hybrid.serve(server_of, (*tier(policy), *few), LOSSLESS)
    chats = [tokens(length, seed) for seed, length in enumerate((160, 100))]
    turns = [[*chat, *tokens(20, 30)] for chat in chats]
    server.flush_cache()
    whole = client.run(server.url, turns, 6, top_logprobs=2)
    assert [x.cached_tokens for x in whole] == [0, 0]
    server.flush_cache()
    for prompt in (*chats, *(tokens(240, 100 + seed) for seed in range(3))):
        ask(server, prompt, 1)
    found = client.run(server.url, turns, 6)
    assert [x.cached_tokens for x in found] == [160, 100]
    check_tokens([x.output_ids for x in found], whole, policy, equal=0.5)
    report, states = counts(server), stats_of(server)["states"]
    assert (report["hits"], report["tokens_restored"]) == (2, 260) and report["bytes_in"] > 0
    assert report["states"] >= 2 and states["running"] == states["snapshots"] == 0
    check_idle(server)
