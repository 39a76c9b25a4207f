"""SGLang's own ways to steer the prefix cache, on real servers: eviction policies, namespaces, sessions."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_diffkv.evaluate.server import Server
from tests.servers.shared import STRICT

pytestmark = pytest.mark.server

POOL = 2000
POLICIES = {
    "lfu": ("compressed", ["--radix-eviction-policy", "lfu"]),
    "priority": ("exact", ["--radix-eviction-policy", "priority", "--enable-priority-scheduling"]),
}


@pytest.fixture(scope="module", params=[pytest.param(x, marks=pytest.mark.full) for x in POLICIES])
def policy(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def server(policy: str, server_of: Callable[..., Server]) -> tuple[str, Server]:
    fidelity, args = POLICIES[policy]
    config = {"prefix_fidelity": fidelity}
    return policy, server_of("diffkv", ["--max-total-tokens", str(POOL), *args], config=config, env=STRICT)


def _prompt(seed: int, length: int = 200) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(300, 8000) for _ in range(length)]


def _ask(server: Server, ids: list[int], **more: Any) -> dict[str, Any]:
    parameters = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    return server.generate({"input_ids": ids, "sampling_params": parameters, **more})


def _cached(reply: dict[str, Any]) -> int:
    return int(reply["meta_info"]["cached_tokens"])


def test_the_policy_decides_what_is_evicted(server: tuple[str, Server]) -> None:
    """A prompt that is asked often, or with priority, outlives twenty newer ones; one like them does not."""
    policy, running = server
    running.flush_cache()
    dear, plain = _prompt(0), _prompt(1)
    level: dict[str, Any] = {"priority": 5} if policy == "priority" else {}
    for _ in range(1 if level else 3):
        _ask(running, dear, **level)
    _ask(running, plain)
    for seed in range(2, 22):
        _ask(running, _prompt(seed))
    assert _cached(_ask(running, dear, **level)) == 199
    assert _cached(_ask(running, plain)) < 199


def test_namespaces_share_nothing(server: tuple[str, Server]) -> None:
    """``extra_key`` (of an adapter, for example) and ``cache_salt`` part equal prompts; the replies stay equal."""
    _, running = server
    running.flush_cache()
    ids = _prompt(50)
    seen = []
    fields = {x.name for x in dataclasses.fields(GenerateReqInput)}
    for name in sorted(fields & {"extra_key", "cache_salt"}):  # SGLang 0.5.17 takes a salt by its other interfaces only
        for value in ("a", "b"):
            first, second = (_ask(running, ids, **{name: value}) for _ in range(2))
            assert (_cached(first), _cached(second)) == (0, 199)
            seen.append(first["output_ids"])
    assert _cached(_ask(running, ids)) == 0
    assert all(x == seen[0] for x in seen)


def test_sessions_continue_branch_and_end(server: tuple[str, Server]) -> None:
    _, running = server
    running.flush_cache()
    name = running.post("/open_session", {"capacity_of_str_len": 10000}).json()
    first = _ask(running, _prompt(60), session_params={"id": name})
    again = _ask(running, _prompt(61, 30), session_params={"id": name, "rid": first["meta_info"]["id"]})
    assert again["meta_info"]["prompt_tokens"] == 238
    assert _cached(again) >= 200, "the session's first turn was not found"
    branch = {"id": name, "rid": first["meta_info"]["id"], "offset": 150}
    other = _ask(running, _prompt(62, 30), session_params=branch)
    assert other["meta_info"]["prompt_tokens"] == 180
    assert _cached(other) == 150
    root = {"id": name, "rid": first["meta_info"]["id"], "replace": True}
    replaced = _ask(running, _prompt(63, 150), session_params=root)
    assert replaced["meta_info"]["prompt_tokens"] == 358
    assert _cached(replaced) >= 200, "what the turn before the replaced ones left was not found"
    assert running.post("/close_session", {"session_id": name}).ok
    response = running.post("/generate", {"input_ids": [5], "session_params": {"id": name}})
    assert "does not exist" in response.text
    streaming = running.post("/open_session", {"capacity_of_str_len": 1000, "streaming": True})
    assert not streaming.ok, "streaming sessions were refused at start"
