"""Models of random weights with sliding-window layers.

Of one all layers but one slide (Gemma 3's): lossless it gives the tokens of stock SGLang, whole, in chunks, in batches,
from the prefix cache and in a pool far too small; with DiffKV's tiers it holds less, and with rotation and without key
means replies stay. Of the other every other layer slides, and logits are capped (Gemma 2's).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.quality.random_windows import WINDOW, make_gemma2, make_gemma3
from sglang_diffkv.evaluate import client
from sglang_diffkv.evaluate.client import Record
from sglang_diffkv.evaluate.server import Server, stock_backend
from sglang_diffkv.key_means import write_key_means
from sglang_diffkv.layout.spans import SLACK, retained_tokens
from tests.servers.identity import check_tokens
from tests.servers.shared import STRICT, SharedServer, check_idle, stats_of, tokens

pytestmark = pytest.mark.server

NEW_TOKENS = 20
ARGS = ("--max-total-tokens", "6000", "--chunked-prefill-size", "128")
LONG, BRANCH = 300, 200
PROMPTS = [tokens(length, seed) for seed, length in enumerate((30, 70, 150, LONG, 390))]
PROMPTS.append(PROMPTS[3][:BRANCH] + tokens(80, 9))
"""Up to six windows long; the last branches off the fourth, by more than a window."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma3")
    make_gemma3(folder)
    return folder


@pytest.fixture(scope="module")
def key_means(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of vectors that have nothing to do with the keys, of the keys' size."""
    path = tmp_path_factory.mktemp("means") / "means.safetensors"
    write_key_means(path, torch.randn(6, 2, 64, generator=torch.Generator().manual_seed(3)), {})
    return str(path)


@pytest.fixture(scope="module")
def stock(model: Path, shared_server: SharedServer) -> list[Record]:
    found = _ask(shared_server.get(stock_backend(), ARGS[:2], model=model))
    assert len({tuple(x.output_ids) for x in found}) == len(found), "the model says the same whatever it is asked"
    return found


def _ask(server: Server, concurrency: int = 1) -> list[Record]:
    return client.run(server.url, PROMPTS, NEW_TOKENS, concurrency=concurrency, top_logprobs=2)


@pytest.mark.parametrize("fidelity", ["compressed", pytest.param("exact", marks=pytest.mark.full)])
def test_lossless_gives_stock_tokens(
    fidelity: str, model: Path, stock: list[Record], server_of: Callable[..., Server]
) -> None:
    server = server_of("diffkv", ARGS, model=model, config={"tiers": ["BF16"], "prefix_fidelity": fidelity}, env=STRICT)
    alone = _ask(server)
    check_tokens([x.output_ids for x in alone], stock, "alone")
    branch = alone[-1].cached_tokens
    assert branch == (BRANCH if fidelity == "exact" else 0), "with compressed fidelity windows are whole at ends only"
    held = stats_of(server)["by_head"]["high"]
    if fidelity == "compressed":
        assert all(max(layer) < min(held[-1]) for layer in held[:-1]), "sliding layers hold as much as the other"
        most = retained_tokens(WINDOW) + 1 + SLACK
        assert all(max(layer) <= 2 * most * len(PROMPTS) for layer in held[:-1]), "sliding layers hold too much"
    again = _ask(server, 3)
    check_tokens([x.output_ids for x in again], stock, "in batches, over prefix hits")
    for prompt, record in zip(PROMPTS, again, strict=True):
        if len(prompt) >= 128 or fidelity == "exact":
            assert record.cached_tokens == len(prompt) - 1, "a repeated prompt is cached up to its last token"
    assert "5 of 6 layers have a sliding window" in server.log_text()


@pytest.mark.full
@pytest.mark.parametrize("fidelity", ["compressed", "exact"])
def test_tiers_serve_and_hold_less(fidelity: str, model: Path, server_of: Callable[..., Server]) -> None:
    policy = {"name": "diffkv", "window": 16}
    server = server_of("diffkv", ARGS, model=model, config={"policy": policy, "prefix_fidelity": fidelity}, env=STRICT)
    for concurrency in (1, 3):
        for record in _ask(server, concurrency):
            assert len(record.output_ids) == NEW_TOKENS
    finished = stats_of(server)["finished"]
    assert finished["low"] > 0 and finished["out_of_window"] > 0 and finished["pruned"] == 0
    assert finished["token_bytes"] < 0.4 * finished["bf16_bytes"]


@pytest.mark.full
def test_duo_is_served(model: Path, stock: list[Record], server_of: Callable[..., Server]) -> None:
    """Of the layer that sees everything one head streams. Where it keeps all of a sequence the tokens are stock's."""
    pattern = [[0.0, 0.0]] * 5 + [[1.0, 0.0]]
    policy = {"name": "duo", "pattern": pattern, "sparsity": 11 / 12, "window": 80, "sinks": 4}
    server = server_of("diffkv", ARGS, model=model, config={"tiers": ["BF16"], "policy": policy}, env=STRICT)
    found = _ask(server)
    assert all(len(x.output_ids) == NEW_TOKENS for x in found)
    check_tokens([found[0].output_ids], stock[:1], "shorter than what heads that stream keep")
    finished = stats_of(server)["finished"]
    assert finished["out_of_window"] > 0 and finished["pruned"] > 0


TIGHT = ("--max-total-tokens", "1400", "--chunked-prefill-size", "128", "--schedule-conservativeness", "0.1")


@pytest.mark.full
@pytest.mark.parametrize("rotate", ["both", "keys"])
def test_rotated_and_less_key_means_replies_stay(
    rotate: str, key_means: str, model: Path, stock: list[Record], server_of: Callable[..., Server]
) -> None:
    """With 8 bits most of them to the last token; a layer that saw something else would change them all. Over chunks,
    then in batches over prefix hits."""
    config = {"tiers": ["K8V8"], "rotate": rotate, "key_means": key_means}
    server = server_of("diffkv", TIGHT, model=model, config=config, env=STRICT)
    for concurrency, cached in ((1, False), (3, True)):
        found = _ask(server, concurrency)
        check_tokens([x.output_ids for x in found], stock, f"rotated, {concurrency} at a time", equal=0.5)
        assert all(x.cached_tokens == len(ids) - 1 for ids, x in zip(PROMPTS, found) if len(ids) >= 128) is cached


MANY = [*(tokens(500 + 30 * i, 100 + i) for i in range(4)), *(tokens(40 + 7 * i, 200 + i) for i in range(8))]
MANY += [MANY[0][:350] + tokens(200, 300), MANY[1] + tokens(60, 301)]
"""Long prompts, of which the pool holds two before they are compacted, and short ones with long replies."""
REPLIES = [80] * 4 + [300] * 8 + [60] * 2


def _load(server: Server, *, at_once: bool) -> list[Record]:
    def ask(index: int) -> Record:
        if at_once:
            time.sleep(0.15 * (index * 5 % len(MANY)))
        return client.ask(server.url, MANY[index], REPLIES[index], top_logprobs=2)

    with ThreadPoolExecutor(len(MANY) if at_once else 1) as threads:
        return list(threads.map(ask, range(len(MANY))))


@pytest.fixture(scope="module")
def stock_of_many(model: Path, shared_server: SharedServer) -> list[Record]:
    args = ("--max-total-tokens", "16000")
    server = shared_server.get(stock_backend(), args, model=model)
    return _load(server, at_once=False)


def _check_pressure(server: Server) -> None:
    """Raise AssertionError unless prompts were compacted between chunks, requests were retracted, and nothing is left
    of them."""
    stats = stats_of(server)
    assert stats["admission"]["compacted_between_chunks"] > 0 and stats["faults"] == 0
    assert "Retract requests" in server.log_text(), "the load did not exercise retraction"
    check_idle(server)
    assert stats_of(server)["admission"]["promised_pages"] == 0


@pytest.mark.full
def test_a_full_pool_compacts_retracts_and_gives_stock_tokens(
    model: Path, stock_of_many: list[Record], server_of: Callable[..., Server]
) -> None:
    server = server_of("diffkv", TIGHT, model=model, config={"tiers": ["BF16"]}, env=STRICT)
    found = _load(server, at_once=True)
    check_tokens([x.output_ids for x in found], stock_of_many, "compacted between chunks and retracted")
    _check_pressure(server)


@pytest.mark.full
@pytest.mark.parametrize(
    "config",
    [
        {"policy": {"name": "diffkv", "alpha_high": 50.0}},
        {"policy": {"name": "diffkv", "alpha_low": 0.0}},
    ],
    ids=str,
)
def test_a_full_pool_compacts_and_retracts(
    config: dict[str, Any], model: Path, server_of: Callable[..., Server]
) -> None:
    server = server_of("diffkv", TIGHT, model=model, config=config, env=STRICT)
    assert [x.completion_tokens for x in _load(server, at_once=True)] == REPLIES
    _check_pressure(server)


@pytest.mark.full
def test_gemma_2_without_a_cap_gives_stock_tokens(
    tmp_path: Path, shared_server: SharedServer, server_of: Callable[..., Server]
) -> None:
    make_gemma2(tmp_path, None)
    stock = _ask(shared_server.get(stock_backend(), ARGS[:2], model=tmp_path))
    server = server_of("diffkv", ARGS, model=tmp_path, config={"tiers": ["BF16"]}, env=STRICT)
    for concurrency in (1, 3):
        check_tokens([x.output_ids for x in _ask(server, concurrency)], stock, f"Gemma 2, {concurrency} at a time")
    assert "2 of 4 layers have a sliding window" in server.log_text()


@pytest.mark.full
def test_gemma_2_caps_attention_as_transformers_does(tmp_path: Path, server_of: Callable[..., Server]) -> None:
    """Stock SGLang leaves this cap out on a CPU (``torch_native``). It is so low that without it half of the tokens
    would be others."""
    make_gemma2(tmp_path, 5.0)
    server = server_of("diffkv", ARGS, model=tmp_path, config={"tiers": ["BF16"]}, env=STRICT)
    alone = _ask(server)
    assert _agreement(tmp_path, alone) > 0.9
    check_tokens([x.output_ids for x in _ask(server, 3)], alone, "Gemma 2, in batches, over prefix hits")
    check_idle(server)
    config = {"policy": {"name": "diffkv", "window": 16}}
    server = server_of("diffkv", ARGS, model=tmp_path, config=config, env=STRICT)
    for concurrency in (1, 3):
        assert all(len(x.output_ids) == NEW_TOKENS for x in _ask(server, concurrency))
    finished = stats_of(server)["finished"]
    assert finished["low"] > 0 and finished["out_of_window"] > 0 and finished["pruned"] == 0


def _agreement(model: Path, replies: list[Record]) -> float:
    """The share of the replies' tokens that are the likeliest in transformers too, after the same tokens."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="eager").eval()
    equal = 0
    for prompt, record in zip(PROMPTS, replies, strict=True):
        with torch.no_grad():
            logits = network(torch.tensor([prompt + record.output_ids])).logits[0, len(prompt) - 1 : -1]
        equal += int((logits.argmax(1) == torch.tensor(record.output_ids)).sum())
    return equal / sum(len(x.output_ids) for x in replies)
