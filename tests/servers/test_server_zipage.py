"""Budgets on a real server: replies far longer than the pool at their full length would hold, over shared prefixes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sglang_diffkv.evaluate.server import Server
from tests.servers.shared import STRICT, check_idle, stats_of, tokens

pytestmark = pytest.mark.server

POOL, KEEP, LIMIT, REPLY, REQUESTS, MANY = 1200, 96, 128, 260, 10, 14
POLICY = {"name": "zipage", "max_blocks": LIMIT // 32, "block": 32}
CONFIG: dict[str, Any] = {"tiers": ["BF16"], "policy": POLICY, "page_tokens": 16}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_requests_hold_their_budget(ranks: int, server_of: Callable[..., Server]) -> None:
    """Ten requests of 360 tokens run together where 1,200 fit: the server's own checks see that none holds more than
    its budget for long (``RunningBudgets.check_integrity``)."""
    args = ["--max-total-tokens", str(POOL), "--decode-log-interval", "1", "--tp-size", str(ranks)]
    env = {**STRICT, "SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * ranks)} if ranks > 1 else STRICT
    server = server_of("diffkv", args, config=CONFIG, env=env)

    def ask(number: int) -> int:
        parameters = {"temperature": 0, "max_new_tokens": REPLY, "min_new_tokens": REPLY}
        payload = {"input_ids": tokens(80, 1) + tokens(20, 2 + number), "sampling_params": parameters}
        return len(server.generate(payload)["output_ids"])

    with ThreadPoolExecutor(REQUESTS) as threads:
        assert list(threads.map(ask, range(REQUESTS))) == [REPLY] * REQUESTS
    stats, log = stats_of(server), server.log_text()
    assert stats["faults"] == 0
    least = REQUESTS * (100 + REPLY - LIMIT) // (LIMIT - KEEP)
    assert stats["admission"]["budget_compressions"] >= least - 2 * REQUESTS
    assert max(running_in(log)) > POOL // 360 + 2, "concurrency follows from lengths"
    check_idle(server)


def running_in(log: str) -> list[int]:
    """Requests that ran, step by step."""
    return [int(line.split("#running-req: ")[1].split(",")[0]) for line in log.splitlines() if "Decode batch" in line]


def reply(server: Server, number: int, length: int) -> list[int]:
    """To a prompt that nobody shares, of a length of its own."""
    parameters = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
    payload = {"input_ids": tokens(30 + 5 * number, 2 + number), "sampling_params": parameters}
    return server.generate(payload)["output_ids"]


def test_more_run_than_fit_with_their_limits(server_of: Callable[..., Server]) -> None:
    """Requests that are not at their limits at the same time: more run than limits fit, none is retracted, and each
    gets the tokens that it gets alone. Most prompts join the prefix cache, so their first compression parts with it."""
    config = {**CONFIG, "policy": {**POLICY, "query_slots": 1}, "share_min_tokens": 48}
    args = ["--max-total-tokens", str(POOL), "--decode-log-interval", "1"]
    server = server_of("diffkv", args, config=config, env=STRICT)
    with ThreadPoolExecutor(MANY) as threads:
        found = list(threads.map(lambda number: reply(server, number, 130 + 7 * number), range(MANY)))
    log, stats = server.log_text(), stats_of(server)
    assert max(running_in(log)) > (POOL - KEEP) // LIMIT
    assert "Retract requests" not in log and stats["admission"]["budget_waited_steps"] == stats["faults"] == 0
    server.flush_cache()  # which has what the requests kept
    for number in range(0, MANY, 5):
        assert reply(server, number, 130 + 7 * number) == found[number]
    check_idle(server)


def test_no_more_run_than_have_query_slots(server_of: Callable[..., Server]) -> None:
    config = {**CONFIG, "policy": {**POLICY, "query_slots": 0.25, "scheduling": "constrained"}}
    args = ["--max-total-tokens", str(POOL), "--decode-log-interval", "1"]
    server = server_of("diffkv", args, config=config, env=STRICT)
    with ThreadPoolExecutor(MANY) as threads:
        found = list(threads.map(lambda number: reply(server, number, 50), range(6)))
    assert [len(x) for x in found] == [50] * 6
    assert max(running_in(server.log_text())) == round(0.25 * (POOL // LIMIT))
    check_idle(server)


@pytest.mark.parametrize("tiers", [["BF16"], pytest.param(["K8V4", "K4V2"], marks=pytest.mark.full)])
def test_requests_that_were_expected_to_end_are_retracted_and_answered(
    tiers: list[str], server_of: Callable[..., Server]
) -> None:
    """Admission by lengths that are far too short: the pool fills up, compressions wait for pages, requests are
    retracted, and all get what they asked for."""
    config = {**CONFIG, "tiers": tiers, "share_min_tokens": 16}
    args = ["--max-total-tokens", str(POOL), "--decode-log-interval", "1"]
    server = server_of("diffkv", args, config=config, env={**STRICT, "SGLANG_INIT_NEW_TOKEN_RATIO": "0.02"})

    def ask(number: int) -> int:
        parameters = {"temperature": 0, "max_new_tokens": 150, "min_new_tokens": 150}
        return len(server.generate({"input_ids": tokens(24, 2 + number), "sampling_params": parameters})["output_ids"])

    with ThreadPoolExecutor(24) as threads:
        assert list(threads.map(ask, range(24))) == [150] * 24
    assert "Retract requests" in server.log_text(), "the load did not exercise retraction"
    assert stats_of(server)["faults"] == 0
    check_idle(server)
