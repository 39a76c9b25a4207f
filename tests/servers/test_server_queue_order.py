"""Cache-aware policies on real servers: what host memory has counts, routers are told of it, and nobody is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from sglang.srt.mem_cache import evict_policy

from sglang_diffkv.evaluate.server import Server
from sglang_diffkv.srt.tree.host_tier import WRITE_THROUGH
from tests.helpers import until
from tests.servers.events import Events
from tests.servers.shared import SHALLOW, STRICT, check_idle, stats_of, tokens

pytestmark = pytest.mark.server

CONFIG = {"tiers": ["BF16"], "share_min_tokens": 32}


@pytest.fixture
def events() -> Iterator[Events]:
    listener = Events()
    yield listener
    listener.socket.close()


def ask(server: Server, prompt: list[int], new_tokens: int = 4, **named: str) -> tuple[float, int]:
    """When a reply has come, and how many tokens of its prompt were cached."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    answer = server.generate({"input_ids": prompt, "sampling_params": sampling, **named})
    assert len(answer["output_ids"]) == new_tokens
    return time.monotonic(), answer["meta_info"]["cached_tokens"]


def test_what_host_memory_has_goes_first_and_is_told_of(events: Events, server_of: Callable[..., Server]) -> None:
    args = ("--max-total-tokens", "700", "--hicache-ratio", "20", "--enable-hierarchical-cache", *SHALLOW)
    args += ("--hicache-write-policy", WRITE_THROUGH, "--schedule-policy", "lpm", "--max-running-requests", "1")
    server = server_of("diffkv", (*args, "--kv-events-config", events.option()), config=CONFIG, env=STRICT)
    kept, new = tokens(150, 1), tokens(150, 2)
    ask(server, kept)
    for seed in range(6):
        ask(server, tokens(240, 100 + seed), 2)
    events.read()
    assert events.cached([*kept, 1]) < 10 and events.cached([*kept, 1], on_host=True) >= 150
    with ThreadPoolExecutor(3) as pool:
        running = pool.submit(ask, server, tokens(40, 3), 600)  # the others have come before it ends
        until(lambda: bool(stats_of(server)["running"]))
        second = pool.submit(ask, server, [*new, 1], 60)  # so long that a client's delays cannot change their order
        time.sleep(0.2)
        first = pool.submit(ask, server, [*kept, 1], 60)
        assert running.result()[0] < first.result()[0] < second.result()[0], "what would come back did not go first"
    assert first.result()[1] >= 140 and second.result()[1] == 0
    assert stats_of(server)["host_prefixes"]["hits"] == 1
    events.read()
    assert events.cached([*new, 1]) >= 150
    check_idle(server)
    server.flush_cache()
    events.read()
    assert not events.blocks and not events.on_host


BY_WEIGHT = ["--max-total-tokens", "900", "--schedule-policy", "dfs-weight", "--max-running-requests", "3", *SHALLOW]
BY_WEIGHT += ["--enable-session-radix-cache"]
if hasattr(evict_policy, "TLRUStrategy"):
    BY_WEIGHT += ["--radix-eviction-policy", "tlru", "--radix-eviction-policy-config", '{"threshold": 150}']


def test_by_weight_all_are_answered(server_of: Callable[..., Server]) -> None:
    """More requests than fit at once, in a pool that evicts while they wait; by T-LRU, where SGLang has it."""
    server = server_of("diffkv", BY_WEIGHT, config=CONFIG, env=STRICT)
    shared = [tokens(120, 10 + at) for at in range(3)]
    prompts = [[*shared[at % 3], *tokens(60, 20 + at)] for at in range(15)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        cached = [found for _, found in pool.map(lambda prompt: ask(server, prompt, 12), prompts)]
    assert sum(found >= 120 for found in cached) >= 9, "prefixes were not shared"
    check_idle(server)


def test_what_a_session_left_stays_until_it_is_closed(server_of: Callable[..., Server]) -> None:
    server, chat = server_of("diffkv", BY_WEIGHT, config=CONFIG, env=STRICT), tokens(200, 40)
    server.flush_cache()

    def crowd() -> None:
        for seed in range(5):
            ask(server, tokens(240, 200 + seed), 2)

    ask(server, chat, session_id="chat")
    crowd()
    assert ask(server, [*chat, 1], session_id="chat")[1] >= 199, "others took the place of what a session refers to"
    answer = server.post("/close_session", {"session_id": "chat"})
    assert answer.status_code == 200, answer.text
    crowd()
    assert ask(server, [*chat, 2])[1] < 100, "a closed session keeps its place"
    check_idle(server)
