"""A server whose clients branch off one long prompt at many places, at once: it goes on, and finds what is cached."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from sglang_diffkv.testing.paths import NANO
from sglang_diffkv.testing.server import Server

pytestmark = pytest.mark.server

SPLITS = [50, 375, 400, 700, 1024, 1333, 1600, 1999, 2222, 2600, 3000, 3700]


def tokens(count: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(100, 1900) for _ in range(count)]


PROMPT = tokens(4000, 0)


@pytest.fixture(scope="module", params=["compressed", pytest.param("exact", marks=pytest.mark.full)])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    config = {"prefix_fidelity": request.param}
    with Server(NANO, "diffkv", ["--max-total-tokens", "20000"], diffkv_config=config) as running:
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
