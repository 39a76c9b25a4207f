"""SGLang's options that touch the cache or its scheduling, all on one server: adapters, the KV canary, KV events,
thoughts kept out of the cache, priorities, hidden states, pausing. Prefixes are exact: requests change KV slots."""

from __future__ import annotations

import json
import os
import random
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from benchmarks.paths import NANO
from benchmarks.quality.random_adapters import adapter_args, make_adapters
from sglang_diffkv.evaluate.server import Server
from sglang_diffkv.srt.versions.compat import installed
from tests.helpers import until
from tests.servers.events import Events
from tests.servers.shared import STRICT, stats_of

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not installed().canary_on_cpu, reason="SGLang 0.5.17 has no canary for a CPU"),
]

ROOT = Path(__file__).parents[2]
UNPINNED = Path(__file__).parents[1] / "data" / "unpinned"
RUNNING = 6
LONG = 200
"""Tokens of replies that go on while the client does something, however long that takes on a busy machine."""


@pytest.fixture(scope="module", params=["no canary", pytest.param("canary", marks=pytest.mark.full)])
def listened(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Events]]:
    """One server, and one more with the canary, whose kernels are slow when interpreted."""
    folder = tmp_path_factory.mktemp("adapters")
    events = Events()
    args = ["--max-total-tokens", "2000", "--max-running-requests", str(RUNNING), "--chunked-prefill-size", "128"]
    args += ["--disable-cuda-graph"]
    args += ["--kv-events-config", events.option()]
    make_adapters(folder)
    args += [*adapter_args(folder), "--lora-backend", "torch_native"]
    args += ["--strip-thinking-cache", "--reasoning-parser", "qwen3", "--enable-priority-scheduling"]
    args += ["--enable-return-hidden-states", "--enable-custom-logit-processor"]
    env = {**STRICT, "PYTHONPATH": os.pathsep.join([str(UNPINNED), os.environ.get("PYTHONPATH", "")])}
    if request.param == "canary":
        args += ["--kv-canary", "raise", "--kv-canary-sweep-interval", "5"]
        env |= {
            "SGLANG_KV_CANARY_ENABLE_VERIFY_TOKEN_ASSERT": "1",
            "SGLANG_KV_CANARY_STATS_PRINT_EVERY_N_STEPS": "5",
            "TRITON_INTERPRET": "1",
        }
    with Server(NANO, "diffkv", args, diffkv_config={"prefix_fidelity": "exact"}, env=env) as running:
        yield running, events
        assert running.alive(), "the server died during the tests"
        running.flush_cache()
        stats = running.stats()
        assert stats is not None
        assert stats["pages_used"] == 0, "pages are lost after all tests"
    events.socket.close()


@pytest.fixture
def server(listened: tuple[Server, Events]) -> Server:
    listened[0].flush_cache()
    return listened[0]


def _prompt(seed: int, length: int = 200) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(300, 8000) for _ in range(length)]


def _ask(server: Server, ids: list[int], tokens: int = 8, **more: Any) -> dict[str, Any]:
    parameters = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **more.pop("sampling", {})}
    return server.generate({"input_ids": ids, "sampling_params": parameters, **more})


def _cached(reply: dict[str, Any]) -> int:
    return int(reply["meta_info"]["cached_tokens"])


def test_adapters_share_no_prefix(server: Server) -> None:
    """Equal prompts under two adapters and none have a cache each, and replies of their own."""
    ids = _prompt(0)
    names = (None, "a", "b")
    first = {name: _ask(server, ids, lora_path=name) for name in names}
    again = [{name: _ask(server, ids, lora_path=name) for name in names} for _ in range(2)]
    assert [_cached(x) for x in first.values()] == [0, 0, 0]
    assert [_cached(x) for replies in again for x in replies.values()] == [199] * 6
    second, third = ([x["output_ids"] for x in replies.values()] for replies in again)
    assert second == third
    assert len({tuple(x) for x in second}) == 3, "the adapters change nothing"


def test_events_tell_what_the_prefix_cache_holds(server: Server, listened: tuple[Server, Events]) -> None:
    """A listener finds for each prompt as many tokens as the server does, after splits, cuts and evictions."""
    events, before = listened[1], listened[1].removed
    draw = random.Random(2)
    asked = [_prompt(100 + i % 6, 300)[: draw.randrange(60, 300)] + _prompt(200 + i, 60) for i in range(30)]
    for ids in asked:
        _ask(server, ids, 1)
    events.read()
    assert events.removed > before, "nothing was evicted"
    for ids in asked[-6:]:
        expected = events.cached(ids)
        assert _cached(_ask(server, ids, 1)) == expected
        events.read()
    assert any(events.cached(ids) > 100 for ids in asked)


def test_thoughts_do_not_join_the_prefix_cache(server: Server) -> None:
    found = []
    for thinks in (False, True):
        ids = _prompt(300 + thinks)
        reply = _ask(server, ids, 32, require_reasoning=thinks)
        found.append(_cached(_ask(server, ids + reply["output_ids"] + [5], 1)))
    assert found[0] >= 231 and found[1] == 200


def test_a_request_of_higher_priority_takes_the_room(server: Server) -> None:
    """Once others fill the batch it takes one's place: it ends before any of them, and each of them in full."""
    ended: list[int] = []

    def plain(number: int) -> None:
        payload = {"max_new_tokens": LONG, "temperature": 0, "ignore_eos": True}
        request = {"input_ids": _prompt(400 + number, 60), "sampling_params": payload, "stream": True}
        lines = requests.post(f"{server.url}/generate", json=request, stream=True, timeout=600).iter_lines()
        last = next(lines)
        full.wait()
        for line in lines:
            last = line if line.startswith(b"data: {") else last
        assert json.loads(last.removeprefix(b"data: "))["meta_info"]["completion_tokens"] == LONG
        ended.append(number)

    full = threading.Barrier(RUNNING + 1)
    with ThreadPoolExecutor(RUNNING) as pool:
        replies = [pool.submit(plain, i) for i in range(RUNNING)]
        full.wait(120)
        urgent = _ask(server, _prompt(410, 100), 2, priority=50)
        assert not ended, "it waited for one to end"
        assert len(urgent["output_ids"]) == 2
        for reply in replies:
            reply.result()


def test_hidden_states_and_logit_processors(server: Server) -> None:
    from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

    ids = _prompt(500, 100)
    reply = _ask(server, ids, 3, return_hidden_states=True)
    states = reply["meta_info"]["hidden_states"]
    assert len(states[0]) == 100 and len(states[0][0]) == 256
    banned = reply["output_ids"][0]
    processor = DisallowedTokensLogitsProcessor.to_str()
    wanted = {"custom_params": {"token_ids": [banned]}}
    other = _ask(server, ids, 3, custom_logit_processor=processor, sampling=wanted)
    assert banned not in other["output_ids"]


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
def test_a_pause_in_generation(server: Server, mode: str) -> None:
    ids = _prompt(600)
    alone = _ask(server, ids, LONG) if mode == "in_place" else {}
    server.flush_cache()
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(_ask, server, ids, LONG)
        until(lambda: bool(stats_of(server)["running"]))
        assert server.post("/pause_generation", {"mode": mode}).ok
        if mode == "abort":
            reply.result()
        time.sleep(0.5)
        assert reply.done() == (mode == "abort")
        assert server.post("/continue_generation", {}).ok
        ended = reply.result()
    if mode == "in_place":
        assert ended["output_ids"] == alone["output_ids"]
    assert ended["meta_info"]["finish_reason"]["type"] == ("abort" if mode == "abort" else "length")


@pytest.mark.full
@pytest.mark.parametrize("listened", ["canary"], indirect=True)
def test_the_canary_stays_silent(server: Server) -> None:
    """Names are those of the tokens that every request reads and the prefix cache holds, while both change."""

    def ask(seed: int) -> int:
        draw = random.Random(seed)
        ids = _prompt(800 + seed % 5, 300)[: draw.randrange(50, 300)] + _prompt(900 + seed, 30)
        return len(_ask(server, ids, 40, lora_path=draw.choice([None, "a"]))["output_ids"])

    with ThreadPoolExecutor(RUNNING) as pool:
        assert set(pool.map(ask, range(24))) == {40}
    told = re.findall(r"protected_tokens=(\d+) sweep_passes=(\d+) violations=(\d+)", server.log_text())
    tokens, sweeps, violations = map(int, told[-1])
    assert violations == 0 and tokens > 100_000 and sweeps > 10
    stats = server.stats()
    assert stats is not None
    assert stats["prompts"]["copied"] > 10, "no request ran on a copy, which has KV slots of its own"
