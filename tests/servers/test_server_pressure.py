"""A pool far too small for the load: every request completes, with the tokens of a roomy pool, and nothing leaks."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from benchmarks import splits
from benchmarks.paths import NANO
from sglang_diffkv.evaluate import client
from sglang_diffkv.evaluate.client import Record
from sglang_diffkv.evaluate.prompts import chat_ids, load_tokenizer
from sglang_diffkv.evaluate.server import Server
from tests.servers.identity import check_tokens
from tests.servers.shared import SHALLOW, STRICT, check_idle, stats_of

pytestmark = pytest.mark.server

REQUESTS, NEW_TOKENS, POOL = 10, 320, 800
"""Two or three requests fill the pool."""
LOSSLESS = {"tiers": ["BF16"]}
COMPRESSED = {"prefix_fidelity": "compressed"}
EXACT = {"prefix_fidelity": "exact"}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Questions with long replies, in pairs that share all but their last tokens."""
    items = [x for x in splits.load("dev") if x.task == "recur" and x.level == "hard"][: REQUESTS // 2]
    ids = [chat_ids(load_tokenizer(NANO), x.prompt) for x in items]
    return [x for prompt in ids for x in (prompt, prompt[:-8] + prompt[-4:])]


def _load(server: Server, prompts: list[list[int]]) -> list[Record]:
    def ask(index: int) -> Record:
        time.sleep(0.2 * index)
        return client.ask(server.url, prompts[index], NEW_TOKENS, top_logprobs=2)

    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(ask, range(len(prompts))))


WHOLE = ("--max-total-tokens", str(POOL), "--schedule-conservativeness", "0.1")
TIGHT = (*WHOLE, *SHALLOW)


@pytest.mark.full  # of lossless tiers, test_server_interleavings.py compares more
def test_small_pool_completes_all_with_the_same_tokens(
    prompts: list[list[int]], server_of: Callable[..., Server]
) -> None:
    room = ["--max-total-tokens", "16384", "--disable-radix-cache"]
    server = server_of("diffkv", room, config=LOSSLESS, env=STRICT)
    roomy = _load(server, prompts)
    check_idle(server)
    server = server_of("diffkv", WHOLE, config=LOSSLESS, env=STRICT)
    tight = _load(server, prompts)
    check_tokens([x.output_ids for x in tight], roomy, "shared, evicted and retracted")
    assert "Retract requests" in server.log_text(), "the load did not exercise retraction"
    assert sum(x.completion_tokens for x in roomy) > 4 * POOL // 2


@pytest.fixture
def server(server_of: Callable[..., Server]) -> Server:
    """At the high tier two requests of 900 tokens fill this pool; nearly all of their tokens go down."""
    config = {"policy": {"name": "diffkv", "alpha_high": 50.0}}
    args = ["--max-total-tokens", "2000", "--chunked-prefill-size", "128", "--decode-log-interval", "2", *SHALLOW]
    return server_of("diffkv", args, config=config, env=STRICT)


def _ask_all(server: Server, lengths: list[int], new_tokens: int) -> None:
    """Random prompts of these lengths, all at once; nobody ends early."""
    parameters = {"temperature": 0, "max_new_tokens": new_tokens, "min_new_tokens": new_tokens}

    def ask(index: int) -> int:
        ids = [random.Random(index).randrange(300, 8000) for _ in range(lengths[index])]
        return len(server.generate({"input_ids": ids, "sampling_params": parameters})["output_ids"])

    with ThreadPoolExecutor(len(lengths)) as threads:
        assert list(threads.map(ask, range(len(lengths)))) == [new_tokens] * len(lengths)


@pytest.mark.parametrize("requests", [4, pytest.param(6, marks=pytest.mark.full)])
def test_room_that_compression_frees_is_admitted_again(requests: int, server: Server) -> None:
    """Nobody ends early, so only a look at the waiting requests while others run can admit a third. Then all are
    aborted, and nothing is left."""
    before = len(server.log_text())
    parameters = {"temperature": 0, "max_new_tokens": 780, "min_new_tokens": 780}

    def ask(index: int) -> None:
        ids = [random.Random(index).randrange(300, 8000) for _ in range(120)]
        server.post("/generate", {"input_ids": ids, "sampling_params": parameters})

    with ThreadPoolExecutor(requests) as threads:
        asked = [threads.submit(ask, index) for index in range(requests)]
        running = [0]
        while max(running) < 3 and not all(x.done() for x in asked):
            time.sleep(0.2)
            running += map(int, re.findall(r"Decode batch, #running-req: (\d+)", server.log_text()[before:]))
        server.post("/abort_request", {"abort_all": True})
    assert max(running) >= 3
    check_idle(server)


def test_long_prompts_are_compacted_between_chunks(server: Server) -> None:
    """Each of these prompts takes half of the pool at the high tier, and much less once its chunks are compacted."""
    before = stats_of(server)["admission"]["compacted_between_chunks"]
    _ask_all(server, [700 + 40 * (i % 3) for i in range(8)], 60)
    stats = stats_of(server)
    assert stats["admission"]["compacted_between_chunks"] > before
    assert stats["faults"] == 0
    check_idle(server)
    assert stats_of(server)["admission"]["promised_pages"] == 0


def test_running_requests_give_up_bytes_before_one_is_retracted(server_of: Callable[..., Server]) -> None:
    """Replies that outgrow the pool by what their windows hold: with a smaller window all of them fit."""
    args = ("--max-total-tokens", "800", *TIGHT[2:])
    kept = {}
    for smaller in (16, 240):
        policy = {"name": "diffkv", "alpha_high": 50.0, "window": 240, "pressure_window": smaller}
        server = server_of("diffkv", args, config={"policy": policy}, env=STRICT)
        _ask_all(server, [40] * 3, 340)
        stats = stats_of(server)
        assert stats["faults"] == 0
        assert (stats["admission"].get("compressed_under_pressure", 0) > 0) == (smaller < 240)
        assert ("running requests are compressed once more" in server.log_text()) == (smaller < 240)
        kept[smaller] = stats["retracted"]["kept"]
        check_idle(server)
    assert kept[240] > kept[16], kept


@pytest.mark.parametrize("config", [pytest.param(LOSSLESS, marks=pytest.mark.full), COMPRESSED], ids=str)
def test_a_prompt_that_needs_the_pool_gets_it_from_its_own_prefix(
    config: dict[str, Any], server_of: Callable[..., Server]
) -> None:
    """It shares two tokens with a long cached prompt, whose segment it locks as a whole; nothing runs that could make
    room."""
    draw = random.Random(0)
    cached, wide = ([7, 8, *(draw.randrange(300, 8000) for _ in range(n))] for n in (500, 660))
    server = server_of("diffkv", TIGHT, config=config, env=STRICT)
    client.ask(server.url, cached, 4)
    assert client.ask(server.url, wide, 64, timeout=120.0).prompt_tokens == 662
    assert client.ask(server.url, cached, 4, timeout=120.0).completion_tokens > 0


@pytest.mark.parametrize(
    ("config", "requests"),
    [(COMPRESSED, 4), *(pytest.param(x, REQUESTS, marks=pytest.mark.full) for x in (COMPRESSED, EXACT))],
    ids=str,
)
def test_small_pool_under_compression_completes_all(
    prompts: list[list[int]], config: dict[str, Any], requests: int, server_of: Callable[..., Server]
) -> None:
    server = server_of("diffkv", TIGHT, config=config, env=STRICT)
    assert all(x.completion_tokens > 0 for x in _load(server, prompts[:requests]))
    assert "due to OOM" not in server.log_text()
