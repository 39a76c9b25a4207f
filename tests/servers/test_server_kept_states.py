"""Prefixes that requests of a model with states share: they go on from a state that the prefix cache kept.

With the lossless tier the tokens are those of the same server without a prefix cache, whatever was found: prompts asked
again, the next turn of a chat, branches, in chunks, in batches, and in pools of states and of pages that are too small.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import requests

from sglang_diffkv.evaluate import client
from sglang_diffkv.evaluate.client import Record
from sglang_diffkv.evaluate.server import Server, stock_backend
from tests.servers.hybrid_models import (
    KINDS,
    NGRAMS,
    OWN_DRAFTS,
    Hybrid,
    abort_some,
    accepted,
    drafts_run,
    foreseeing,
    load,
)
from tests.servers.identity import check_tokens
from tests.servers.shared import SharedServer, check_idle, stats_of, tokens

pytestmark = pytest.mark.server

NEW_TOKENS, CHUNK = 8, 64
RUNNING = 4
"""Requests that may run."""
ARGS = ("--max-total-tokens", "6000", "--chunked-prefill-size", str(CHUNK))
SHARED = (*ARGS, "--max-mamba-cache-size", str(3 * RUNNING))
"""SGLang sets three slots aside for each request where there is a prefix cache."""
ALONE = (*ARGS, "--max-mamba-cache-size", str(RUNNING), "--disable-radix-cache")
LOSSLESS = {"tiers": ["BF16"], "share_min_tokens": 8}
TIERS = {"policy": {"name": "diffkv", "window": 16}, "share_min_tokens": 8}


def _family(seed: int = 3, count: int = 12) -> list[list[int]]:
    """Prompts that begin as others do, up to their end or somewhere before."""
    source, stems, prompts = random.Random(seed), [tokens(150, 1), tokens(90, 2)], []
    for _ in range(count):
        stem = source.choice(stems)
        at = source.choice([len(stem), len(stem), 50, 100, CHUNK])
        prompts.append(stem[:at] + tokens(source.choice([1, 10, 40]), source.choice([5, 6, 7])))
        if source.random() < 0.3:
            stems.append(prompts[-1])
    return prompts


PROMPTS = _family()


@pytest.fixture(scope="module")
def hybrid_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Hybrid]:
    kinds = {**KINDS, "foreseeing": foreseeing}
    return cache(lambda kind: kinds[kind](tmp_path_factory.mktemp(kind)))


@pytest.fixture(scope="module")
def alone(hybrid_of: Callable[[str], Hybrid]) -> Callable[[str, tuple[str, ...]], list[Record]]:
    """Replies to ``PROMPTS`` of a server that computes every prompt whole."""
    found: dict[tuple[str, tuple[str, ...]], list[Record]] = {}

    def ask(kind: str, args: tuple[str, ...], server_of: Callable[..., Server]) -> list[Record]:
        if (kind, args) not in found:
            found[kind, args] = _ask(hybrid_of(kind).serve(server_of, (*ALONE, *args), LOSSLESS))
        return found[kind, args]

    return ask


def _ask(server: Server, concurrency: int = 1, prompts: Sequence[list[int]] = PROMPTS) -> list[Record]:
    return client.run(server.url, prompts, NEW_TOKENS, concurrency=concurrency, top_logprobs=2)


def _args(overlap: bool) -> tuple[str, ...]:
    return () if overlap else ("--disable-overlap-schedule",)


def _check(server: Server, expected: list[Record], what: str) -> None:
    """The tokens of a server without a prefix cache, one at a time and in batches, of which many are found."""
    for concurrency in (1, RUNNING):
        records = _ask(server, concurrency)
        check_tokens([x.output_ids for x in records], expected, f"{what}, {concurrency} at a time", equal=0.5)
        assert sum(x.cached_tokens for x in records) > 0.25 * sum(map(len, PROMPTS)), "hardly a prefix was found"
    states = stats_of(server)["states"]
    assert states["running"] == states["snapshots"] == 0 and states["kept"] > RUNNING


@pytest.mark.parametrize(
    ("kind", "overlap"),
    [
        pytest.param(kind, overlap, marks=() if overlap and kind == "lfm2" else pytest.mark.full)
        for kind in KINDS
        for overlap in (True, False)
    ],
)
def test_lossless_gives_the_tokens_of_a_server_without_a_prefix_cache(
    kind: str, overlap: bool, alone: Any, hybrid_of: Callable[[str], Hybrid], server_of: Callable[..., Server]
) -> None:
    expected = alone(kind, (), server_of)
    server = hybrid_of(kind).serve(server_of, (*SHARED, *_args(overlap)), LOSSLESS)
    _check(server, expected, kind)
    check_idle(server)


@drafts_run
@pytest.mark.full
@pytest.mark.parametrize("drafts", [NGRAMS, OWN_DRAFTS], ids=["n-grams", "own"])
def test_lossless_with_drafts_gives_the_tokens_without(
    drafts: tuple[str, ...], alone: Any, hybrid_of: Callable[[str], Hybrid], server_of: Callable[..., Server]
) -> None:
    """States behind accepted drafts are kept at ends of requests, where no draft was accepted behind the last token
    that its client got."""
    expected = alone("foreseeing", (), server_of)
    server = hybrid_of("foreseeing").serve(server_of, (*SHARED, *drafts), LOSSLESS)
    _check(server, expected, "drafts")
    assert accepted(server) > (1.2 if drafts == OWN_DRAFTS else 1.0)
    found = []
    for length in range(60, 68):
        prompt = tokens(length, 20 + length)
        reply = client.ask(server.url, prompt, length - 50).output_ids
        turn = client.ask(server.url, prompt + reply + tokens(9, 12), NEW_TOKENS)
        found.append(turn.cached_tokens - length)
        assert found[-1] in (CHUNK - length, 0, length - 51, length - 50), "behind a chunk, a prompt or a reply"
    assert sum(x > 0 for x in found) > 2, "most states of replies are lost"
    check_idle(server)


@pytest.mark.full
def test_lossless_gives_stock_tokens(
    hybrid_of: Callable[[str], Hybrid], shared_server: SharedServer, server_of: Callable[..., Server]
) -> None:
    hybrid = hybrid_of("qwen3_next")
    stock = _ask(shared_server.get(stock_backend(), (*ALONE, *hybrid.args), model=hybrid.model, env=hybrid.stock_env))
    _check(hybrid.serve(server_of, SHARED, LOSSLESS), stock, "stock")


@pytest.mark.versions
@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.full)], ids=["overlap", "no overlap"])
def test_what_is_found(overlap: bool, hybrid_of: Callable[[str], Hybrid], server_of: Callable[..., Server]) -> None:
    """At the ends of prompts, requests and chunks, and where a second request parted from a first."""
    server = hybrid_of("qwen3_next").serve(server_of, (*SHARED, *_args(overlap)), LOSSLESS)
    server.flush_cache()
    prompt = tokens(150, 11)

    def found(tail: list[int], of: int = len(prompt)) -> int:
        return client.ask(server.url, prompt[:of] + tail, NEW_TOKENS).cached_tokens

    first = client.ask(server.url, prompt, NEW_TOKENS)
    assert first.cached_tokens == 0
    again = [client.ask(server.url, prompt, NEW_TOKENS) for _ in range(2)]
    assert [x.cached_tokens for x in again] == [2 * CHUNK, len(prompt) - 1], "a prompt asked again"
    assert all(x.output_ids == first.output_ids for x in again)
    turn = len(prompt) + len(first.output_ids)
    assert found(first.output_ids + tokens(20, 12)) in (turn - 1, turn), "the next turn of a chat"
    assert found(tokens(20, 13)) == len(prompt), "a prompt that begins with all of it"
    assert [found(tokens(50, seed), of=100) for seed in (14, 15, 16)] == [CHUNK, 100, 100], "a branch in the middle"
    assert client.ask(server.url, tokens(150, 17), NEW_TOKENS).cached_tokens == 0
    payload = {"input_ids": tokens(150, 18), "sampling_params": {"n": 3, "temperature": 0, "max_new_tokens": 4}}
    samples = requests.post(f"{server.url}/generate", json=payload, timeout=300.0).json()
    assert [x["meta_info"]["cached_tokens"] for x in samples] == [149] * 3, "several replies to one prompt"
    assert re.search(rf"disable_overlap_schedule\W+{not overlap}\b", server.log_text()), (
        "scheduled otherwise than asked"
    )
    check_idle(server)
    assert client.ask(server.url, prompt, NEW_TOKENS).cached_tokens == 0, "flushed"


@pytest.mark.full
def test_a_full_pool_of_states(
    alone: Any, hybrid_of: Callable[[str], Hybrid], server_of: Callable[..., Server]
) -> None:
    """Two requests may run, beside four states: most of what is kept goes before it is used."""
    expected = alone("qwen3_next", (), server_of)
    server = hybrid_of("qwen3_next").serve(server_of, (*ARGS, "--max-mamba-cache-size", "6"), LOSSLESS)
    check_tokens([x.output_ids for x in _ask(server, 6)], expected, "few states", equal=0.5)
    states = stats_of(server)["states"]
    assert states["kept"] >= 4 and states["kept"] + states["free"] == states["slots"] == 6, "idle, most are kept"
    check_idle(server)


MANY = [tokens(40 + 10 * i, 100 + i) for i in range(4)] * 2
REPLIES = [160] * len(MANY)


@pytest.mark.full
@pytest.mark.parametrize(
    ("config", "drafts"),
    [(LOSSLESS, ()), (TIERS, ()), pytest.param(LOSSLESS, OWN_DRAFTS, marks=drafts_run)],
    ids=["lossless", "tiers", "drafts"],
)
def test_a_full_pool_of_pages_retracts_and_loses_no_state(
    config: dict[str, Any], drafts: Sequence[str], hybrid_of: Callable[[str], Hybrid], server_of: Callable[..., Server]
) -> None:
    hybrid, alone = hybrid_of("foreseeing" if drafts else "qwen3_next"), []
    if config is LOSSLESS:
        alone = load(hybrid.serve(server_of, ALONE, LOSSLESS), MANY, REPLIES)
    tight = ("--schedule-conservativeness", "0.1", "--max-total-tokens", "500")
    server = hybrid.serve(server_of, (*SHARED, *tight, *drafts), config)
    found = load(server, MANY, REPLIES)
    if config is LOSSLESS:
        assert "Retract requests" in server.log_text(), "the load did not exercise retraction"
        check_tokens([x.output_ids for x in found], alone, "retracted", equal=0.5)
    abort_some(server, [*MANY, *PROMPTS[:8]])
    assert [x.completion_tokens for x in load(server, MANY, REPLIES)] == [x.completion_tokens for x in found]
    check_idle(server)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_tiers_serve_and_share(kind: str, hybrid_of: Callable[[str], Hybrid], server_of: Callable[..., Server]) -> None:
    server = hybrid_of(kind).serve(server_of, SHARED, TIERS)
    for concurrency in (1, RUNNING):
        records = _ask(server, concurrency)
        assert all(len(x.output_ids) == NEW_TOKENS for x in records)
        assert sum(x.cached_tokens for x in records) > 0.25 * sum(map(len, PROMPTS))
    assert stats_of(server)["finished"]["low"] > 0
    check_idle(server)


@pytest.mark.full
@pytest.mark.parametrize("drafts", [(), pytest.param(OWN_DRAFTS, marks=drafts_run)], ids=["", "drafts"])
def test_two_ranks_keep_the_same_states(
    drafts: tuple[str, ...], hybrid_of: Callable[[str], Hybrid], server_of: Callable[..., Server]
) -> None:
    """Each has half of the states, and they find the same prefixes or part."""
    hybrid = hybrid_of("foreseeing" if drafts else "qwen3_next")
    args = (*SHARED, "--tp-size", "2", *drafts)
    env = {**hybrid.env, "SGLANG_CPU_OMP_THREADS_BIND": "0|0"}
    server = Hybrid(hybrid.model, hybrid.args, env, hybrid.plugin).serve(server_of, args, TIERS)
    for concurrency in (1, RUNNING):
        assert sum(x.cached_tokens for x in _ask(server, concurrency)) > 0.25 * sum(map(len, PROMPTS))
    check_idle(server)
