"""Models with states beside keys and values: the layers that attend have pages, the others' states are SGLang's.

Lossless they give the tokens of stock SGLang, in batches, over chunks and in a pool far too small; with DiffKV's tiers
they hold less, and nothing is lost: pages, or state slots, of which there is one for each request that may run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_diffkv.evaluate import client
from sglang_diffkv.evaluate.client import Record
from sglang_diffkv.evaluate.server import Server, stock_backend
from sglang_diffkv.key_means import write_key_means
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
from tests.servers.identity import check_tokens, first_difference
from tests.servers.shared import SharedServer, check_idle, stats_of, tokens

pytestmark = pytest.mark.server

NEW_TOKENS = 24
SLOTS = 4
"""Requests that may run, and state slots."""
ARGS = ("--disable-radix-cache", "--max-mamba-cache-size", str(SLOTS), "--max-total-tokens", "6000")
CHUNKED = (*ARGS, "--chunked-prefill-size", "64")
SHARED = ("--max-mamba-cache-size", str(3 * SLOTS), "--max-total-tokens", "6000", "--chunked-prefill-size", "64")
"""With a prefix cache."""
PROMPTS = [tokens(length, seed) for seed, length in enumerate((30, 70, 150, 300))]
PAGED = 2
"""Layers of the models here that attend; two others have states."""


@pytest.fixture(scope="module")
def hybrid_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Hybrid]:
    kinds = {**KINDS, "foreseeing": foreseeing}
    return cache(lambda kind: kinds[kind](tmp_path_factory.mktemp(kind)))


def _ask(server: Server, concurrency: int = 1, prompts: Sequence[list[int]] = PROMPTS) -> list[Record]:
    return client.run(server.url, prompts, NEW_TOKENS, concurrency=concurrency, top_logprobs=2)


def _ask_stock(hybrid: Hybrid, shared_server: SharedServer) -> list[Record]:
    args = (*ARGS, *hybrid.args)
    return _ask(shared_server.get(stock_backend(), args, model=hybrid.model, env=hybrid.stock_env))


@pytest.mark.parametrize(
    "drafts", [(), *(pytest.param(x, marks=drafts_run) for x in (NGRAMS, OWN_DRAFTS))], ids=["", "n-grams", "own"]
)
def test_lossless_gives_the_tokens_of_transformers(
    drafts: tuple[str, ...], hybrid_of: Callable[[str], Hybrid], shared_server: SharedServer,
    server_of: Callable[..., Server],
) -> None:  # fmt: skip
    """Over chunks and in a batch, with all that SGLang and the placeholder's kernels do to states. Behind a chain of
    drafts they are those of the last that was accepted: most chains are rejected, some are right. With drafts of the
    model's own there is a prefix cache too, and prompts go on from the states of others. On some processors SGLang
    rounds otherwise than transformers, so that another expert is chosen: there a token is what stock says."""
    from transformers import AutoModelForCausalLM

    own = drafts == OWN_DRAFTS
    hybrid, args = (hybrid_of("foreseeing"), SHARED) if own else (hybrid_of("qwen3_next"), CHUNKED)
    server = hybrid.serve(server_of, (*args, *drafts), {"tiers": ["BF16"], "share_min_tokens": 8})
    asked = PROMPTS[:3]
    found = client.run(server.url, asked, 10, concurrency=3, top_logprobs=2)
    if drafts:  # of what was said before
        asked = [*asked, *(x + y.output_ids[:2] for x, y in zip(asked, found))]
        found += client.run(server.url, asked[3:], 8, top_logprobs=2)
        assert accepted(server) > 1, "some drafts are right"
    if own:
        ends = [(len(x), len(x) // 64 * 64) for x in PROMPTS]  # of prompts, and of their chunks: by who came first
        behind = [x.cached_tokens for x in found]
        assert not any(behind[:3]) and behind[5] and all(x in of for x, of in zip(behind[3:], ends, strict=False))
    network = AutoModelForCausalLM.from_pretrained(hybrid.model, dtype=torch.bfloat16).eval()
    count, unlikely = 0, []
    for prompt, record in zip(asked, found, strict=True):
        with torch.no_grad():
            logits = network(torch.tensor([prompt + record.output_ids])).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(record.output_ids)[:, None])[:, 0]
        left = (logits.max(1).values - chosen > 0.25).nonzero()[:, 0].tolist()
        unlikely += [prompt + record.output_ids[: at + 1] for at in left]
        count += len(record.output_ids)
    assert count == (54 if drafts else 30)
    assert f"{PAGED} of 4 layers have keys and values" in server.log_text()
    if unlikely:
        said = [x + y.output_ids for x, y in zip(PROMPTS, _ask_stock(hybrid, shared_server), strict=True)]
        assert all(any(x == whole[: len(x)] for whole in said) for x in unlikely), (
            "tokens that are not the likeliest, within rounding, after the same tokens"
        )


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_lossless_gives_stock_tokens(
    kind: str, hybrid_of: Callable[[str], Hybrid], shared_server: SharedServer, server_of: Callable[..., Server]
) -> None:
    hybrid = hybrid_of(kind)
    stock = _ask_stock(hybrid, shared_server)
    assert len({tuple(x.output_ids) for x in stock}) == len(stock), "the model says the same whatever it is asked"
    for args in (ARGS, CHUNKED):
        server = hybrid.serve(server_of, args, {"tiers": ["BF16"]})
        for concurrency in (1, 4):
            found = [x.output_ids for x in _ask(server, concurrency)]
            check_tokens(found, stock, f"{kind}, {concurrency} at a time", equal=0.5)
        check_idle(server)


@pytest.mark.full
def test_two_ranks_give_the_tokens_of_stock_s_two(
    hybrid_of: Callable[[str], Hybrid], shared_server: SharedServer, server_of: Callable[..., Server]
) -> None:
    """Each has a KV head, and half of the states."""
    hybrid = hybrid_of("qwen3_5")
    hybrid = replace(hybrid, args=("--tp-size", "2"), env={**hybrid.env, "SGLANG_CPU_OMP_THREADS_BIND": "0|0"})
    stock = _ask_stock(hybrid, shared_server)
    server = hybrid.serve(server_of, CHUNKED, {"tiers": ["BF16"]})
    for concurrency in (1, 4):
        check_tokens([x.output_ids for x in _ask(server, concurrency)], stock, f"{concurrency} at a time", equal=0.5)


@pytest.mark.full
def test_rotated_and_less_key_means_replies_stay(
    hybrid_of: Callable[[str], Hybrid], tmp_path: Path, shared_server: SharedServer, server_of: Callable[..., Server]
) -> None:
    """Heads of 256, of which positions rotate a quarter, behind a gate. With 8 bits a reply stays for a while, less key
    means that have nothing to do with the keys too, where a layer that saw something else would change them all."""
    hybrid, means = hybrid_of("qwen3_5"), tmp_path / "means.safetensors"
    write_key_means(means, torch.randn(PAGED, 2, 256, generator=torch.Generator().manual_seed(3)), {})
    stock = _ask_stock(hybrid, shared_server)
    for config in (
        {"tiers": ["K8V8"], "rotate": "both"},
        {"tiers": ["K8V8"], "rotate": "keys", "key_means": str(means)},
    ):
        server = hybrid.serve(server_of, CHUNKED, config)
        for concurrency in (1, 4):
            equal = [_shared(x.output_ids, y.output_ids) for x, y in zip(_ask(server, concurrency), stock)]
            assert sum(equal) > 0.25 * NEW_TOKENS * len(stock), f"{config}: {equal} tokens of {NEW_TOKENS} stay"
        check_idle(server)


def _shared(a: list[int], b: list[int]) -> int:
    """Tokens with which both begin."""
    at = first_difference(a, b)
    return len(a) if at is None else at


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_tiers_serve_and_hold_less(
    kind: str, hybrid_of: Callable[[str], Hybrid], server_of: Callable[..., Server]
) -> None:
    config = {"policy": {"name": "diffkv", "window": 16}}
    server = hybrid_of(kind).serve(server_of, CHUNKED, config)
    for concurrency in (1, 4):
        assert all(len(x.output_ids) == NEW_TOKENS for x in _ask(server, concurrency))
    stats = stats_of(server)
    assert len(stats["by_head"]["high"]) == PAGED
    assert stats["finished"]["low"] > 0 and stats["finished"]["token_bytes"] < 0.6 * stats["finished"]["bf16_bytes"]


TIGHT = (*ARGS[:3], "--chunked-prefill-size", "64", "--schedule-conservativeness", "0.1", "--max-total-tokens", "500")
MANY = [tokens(40 + 10 * i, 100 + i) for i in range(8)]
REPLIES = [160] * 8
"""Short prompts, all of which are let in, and replies for which there is no room together."""


@pytest.mark.full
@pytest.mark.parametrize("config", [{"tiers": ["BF16"]}, {"policy": {"name": "diffkv", "window": 256}}], ids=str)
def test_a_full_pool_retracts_and_loses_no_state(
    config: dict[str, Any],
    hybrid_of: Callable[[str], Hybrid],
    shared_server: SharedServer,
    server_of: Callable[..., Server],
) -> None:
    """With one slot for each request that may run, one that is lost ends the scheduler at the next full batch."""
    hybrid, stock = hybrid_of("qwen3_5"), []
    if lossless := "tiers" in config:
        args = (*ARGS, *hybrid.args)
        stock = load(shared_server.get(stock_backend(), args, model=hybrid.model, env=hybrid.stock_env), MANY, REPLIES)
    server = hybrid.serve(server_of, TIGHT, config)
    found = load(server, MANY, REPLIES)
    assert "Retract requests" in server.log_text(), "the load did not exercise retraction"
    if lossless:
        check_tokens([x.output_ids for x in found], stock, "retracted", equal=0.5)
    assert [x.completion_tokens for x in found] == REPLIES
    abort_some(server, [MANY[i] for i in range(2 * SLOTS)])  # more than there are state slots
    assert [x.completion_tokens for x in load(server, MANY, REPLIES)] == REPLIES
    check_idle(server)
