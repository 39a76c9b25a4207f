"""Exact prefix fidelity on a real server: what is shared, copied and evicted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks import splits
from benchmarks.paths import NANO
from sglang_diffkv.evaluate import client
from sglang_diffkv.evaluate.prompts import chat_ids, load_tokenizer
from sglang_diffkv.evaluate.server import Server
from sglang_diffkv.evaluate.tasks import reference
from sglang_diffkv.evaluate.tasks.generation import Example
from tests.servers.shared import STRICT, stats_of

pytestmark = pytest.mark.server

EXACT = {"prefix_fidelity": "exact"}


@pytest.fixture
def server(server_of: Callable[..., Server]) -> Server:
    return server_of("diffkv", ["--max-total-tokens", "9000"], config=EXACT, env=STRICT)


def _group(name: str, count: int) -> tuple[list[Example], list[list[int]]]:
    items = [x for x in splits.load("dev") if x.group == name][:count]
    return items, [chat_ids(load_tokenizer(NANO), x.prompt) for x in items]


def test_the_tree_keeps_prompts_high_and_requests_run_compressed(server: Server) -> None:
    item = next(x for x in splits.load("dev") if x.task == "mul" and x.level == "medium")
    long = chat_ids(load_tokenizer(NANO), "Remember. " * 150 + item.prompt)
    server.flush_cache()
    before = stats_of(server)["finished"]
    client.ask(server.url, long, 100)
    stats = stats_of(server)
    low = stats["finished"]["low"] - before["low"]
    assert low > 0.2 * len(long) * 12, "the request did not run on a compressed copy"
    assert stats["share_high"] > 0.8, "the tree does not keep the prompt in the high tier"
    again = client.ask(server.url, long, 1)
    assert again.cached_tokens == len(long) - 1


def test_shared_questions_are_right_and_cached(server: Server) -> None:
    items, ids = _group("medium-1", 8)
    shared = next(i for i, tokens in enumerate(zip(*ids, strict=False)) if len(set(tokens)) > 1)
    server.flush_cache()
    first = client.ask(server.url, ids[0], 160)
    others = client.run(server.url, ids[1:], 160, concurrency=4)
    assert first.cached_tokens == 0
    assert all(record.cached_tokens >= shared for record in others)
    right = sum(reference.grade(r.text, x.answers) for r, x in zip([first, *others], items, strict=True))
    assert right >= 6


def test_parallel_samples_of_one_prompt(server: Server) -> None:
    _, ids = _group("medium-0", 1)
    server.flush_cache()
    parameters = {"temperature": 0, "max_new_tokens": 60, "n": 3}
    replies = server.generate({"input_ids": ids[0], "sampling_params": parameters})
    assert len(replies) == 3
    assert all(len(x["output_ids"]) > 0 for x in replies)
    outcomes = stats_of(server)["prompts"]
    assert outcomes["brief"] >= 1, "the prompt was not read once for all samples"
    assert outcomes["shared"] >= 3, "the samples did not share the prompt's pages"


@pytest.mark.full  # test_server_ranks.py has such a pool too
def test_a_small_pool_completes_all(server_of: Callable[..., Server]) -> None:
    """Copies are made only where pages are left; the others are compressed in place or read the tree's pages."""
    _, ids = _group("medium-0", 3)
    more = [chat_ids(load_tokenizer(NANO), x.prompt) for x in splits.load("dev") if x.task == "recur"][:6]
    args = ["--max-total-tokens", "1600", "--schedule-conservativeness", "0.2"]
    server = server_of("diffkv", args, config=EXACT, env=STRICT)
    records = client.run(server.url, [*ids, *more, *ids], 120, concurrency=8)
    assert len(records) == 12
    assert all(record.completion_tokens > 0 for record in records)
    assert sum(record.cached_tokens for record in records) > 0
    outcomes = stats_of(server)["prompts"]
    assert outcomes["copied"] and outcomes["no room"], outcomes
