"""A server whose clients branch off one long prompt at many places, at once: it goes on, and finds what is cached."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from benchmarks.paths import NANO
from sglang_diffkv.evaluate.server import Server
from tests.servers.shared import SHALLOW, tokens

pytestmark = pytest.mark.server

SPLITS = [50, 375, 400, 700, 1024, 1333, 1600, 1999, 2222, 2600, 3000, 3700]


PROMPT = tokens(4000, 0)


@pytest.fixture(scope="module", params=["compressed", pytest.param("exact", marks=pytest.mark.full)])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    config = {"prefix_fidelity": request.param}
    with Server(NANO, "diffkv", ["--max-total-tokens", "80000", *SHALLOW], diffkv_config=config) as running:
        yield running
        assert running.alive(), "the server died during the tests"


def cached(server: Server, ids: list[list[int]]) -> list[int]:
    """One batched request; tokens found in the cache by each of its prompts."""
    sampling = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
    replies = server.generate({"input_ids": ids, "sampling_params": sampling})
    return [reply["meta_info"]["cached_tokens"] for reply in replies]


def test_one_batch_of_branches(server: Server) -> None:
    server.flush_cache()
    cached(server, [PROMPT])
    batch = [PROMPT + tokens(9, 1), *(PROMPT[:at] + tokens(9, at) for at in SPLITS)]
    assert cached(server, batch) == [len(PROMPT), *SPLITS]
    assert cached(server, [PROMPT + tokens(9, 2)]) == [len(PROMPT)]


def test_a_prompt_is_found_after_sixty_branches(server: Server) -> None:
    server.flush_cache()
    cached(server, [PROMPT])
    for first in range(0, 60, 10):
        cached(server, [PROMPT[: 60 * i + 30] + tokens(9, i) for i in range(first, first + 10)])
        assert cached(server, [PROMPT + tokens(9, first)]) == [len(PROMPT)]


def shared(left: list[int], right: list[int]) -> int:
    """Tokens with which both begin."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_random_trees(server: Server) -> None:
    """Some 1,500 requests in batches that branch off one another anywhere: at least what earlier batches brought is
    found, and the server goes on. One is as long as the pool allows a few of."""
    server.flush_cache()
    source = random.Random(7)
    known: list[list[int]] = [tokens(4000, 1)]
    cached(server, known)
    for number in range(250):
        batch = []
        for _ in range(source.choice([1, 2, 6, 15])):
            stem = source.choice(known)
            stem = stem[: source.choice([source.randrange(len(stem) + 1), source.randrange(60), len(stem)])]
            batch.append(stem[:3000] + tokens(source.choice([1, 3, 17, 40]), source.randrange(1 << 30)))
        expected = [min(max(shared(x, y) for y in known), len(x) - 1) for x in batch]
        found = cached(server, batch)
        outcomes = (server.stats() or {}).get("prompts")
        assert all(n >= m for n, m in zip(found, expected, strict=True)), (number, found, expected, outcomes)
        known = [known[0], *known[1:][-30:], *batch]
