"""Budgets on a real server: replies far longer than the pool at their full length would hold, over shared prefixes."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from sglang_diffkv.evaluate.server import Server
from tests.servers.shared import SHALLOW, STRICT, check_idle, stats_of, tokens

pytestmark = pytest.mark.server

POOL, KEEP, LIMIT, REPLY, REQUESTS, MANY = 1200, 96, 128, 260, 10, 14
POLICY = {"name": "zipage", "max_blocks": LIMIT // 32, "block": 32}
CONFIG: dict[str, Any] = {"tiers": ["BF16"], "policy": POLICY, "page_tokens": 16}


@pytest.mark.parametrize(
    ("ranks", "asynchronous", "flags"),
    [
        pytest.param(1, False, [], marks=pytest.mark.full),
        (1, True, ["--disable-overlap-schedule"]),
        pytest.param(2, False, [], marks=pytest.mark.full),
        pytest.param(2, True, [], marks=pytest.mark.full),
    ],
)
def test_requests_hold_their_budget(
    ranks: int, asynchronous: bool, flags: list[str], server_of: Callable[..., Server]
) -> None:
    """Ten requests of 360 tokens run together where 1,200 fit: the server's own checks see that none holds more than
    its budget for long (``RunningCompression.check_integrity``)."""
    args = ["--max-total-tokens", str(POOL), "--decode-log-interval", "1", "--tp-size", str(ranks), *SHALLOW, *flags]
    env = {**STRICT, "SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * ranks)} if ranks > 1 else STRICT
    config = {**CONFIG, "policy": {**POLICY, "asynchronous": asynchronous}}
    server = server_of("diffkv", args, config=config, env=env)

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
    assert (stats["admission"].get("budget_judged_beside", 0) > least // 2) == asynchronous
    check_idle(server)


def running_in(log: str) -> list[int]:
    """Requests that ran, step by step."""
    return [int(line.split("#running-req: ")[1].split(",")[0]) for line in log.splitlines() if "Decode batch" in line]


def reply(server: Server, number: int, length: int) -> list[int]:
    """To a prompt that nobody shares, of a length of its own."""
    parameters = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
    payload = {"input_ids": tokens(30 + 5 * number, 2 + number), "sampling_params": parameters}
    return server.generate(payload)["output_ids"]


def crowded(server_of: Callable[..., Server], asynchronous: bool, **options: Any) -> Server:
    """A server on which most prompts join the prefix cache, so their first compression parts with it."""
    policy = {**POLICY, "query_slots": 1, "asynchronous": asynchronous, **options}
    config = {**CONFIG, "policy": policy, "share_min_tokens": 48}
    args = ["--max-total-tokens", str(POOL), "--decode-log-interval", "1"]
    return server_of("diffkv", args, config=config, env=STRICT)


@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=pytest.mark.full), True])
def test_more_run_than_fit_with_their_limits(asynchronous: bool, server_of: Callable[..., Server]) -> None:
    """Requests that are not at their limits at the same time: more run than limits fit, none is retracted, and each
    gets the tokens that it gets alone, where nobody is parked. Most prompts join the prefix cache, so their first
    compression parts with it."""
    server = crowded(server_of, asynchronous)
    for _ in range(5):  # until so many have met
        with ThreadPoolExecutor(MANY) as threads:
            found = list(threads.map(lambda number: reply(server, number, 110 + 5 * number), range(MANY)))
        log, stats = server.log_text(), stats_of(server)
        if met := max(running_in(log)) > (POOL - KEEP) // LIMIT:
            break
        server.flush_cache()
    assert met
    assert "Retract requests" not in log and stats["admission"]["budget_waited_steps"] == stats["faults"] == 0
    assert stats["admission"]["budget_late_tokens"] == 0, "prompts that run meanwhile delay no compression"
    judged = stats["admission"].get("budget_judged_beside", 0)
    assert (judged > stats["admission"]["budget_compressions"] // 2) == asynchronous
    server.flush_cache()  # which has what the requests kept
    for number in range(0, MANY, 7):
        assert reply(server, number, 110 + 5 * number) == found[number]
    check_idle(server)


def test_a_layer_stride_changes_no_token(server_of: Callable[..., Server]) -> None:
    """Four of the six layers at a time: prompts that join the prefix cache, one that is compressed at its end, and
    several compressions each."""
    found = []
    for options in ({}, {"layer_stride": 4}):
        server = crowded(server_of, False, **options)
        found.append([reply(server, number, 110) for number in (8, 20)])
        assert stats_of(server)["faults"] == 0
        check_idle(server)
    assert found[0] == found[1]


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "forced": {"sampling_params": {"logit_bias": {"300": 200.0}}},
    "scored": {"return_logprob": True, "top_logprobs_num": 3},
    "forced otherwise": {"sampling_params": {"logit_bias": {"301": 200.0}}},
    "letters": {"sampling_params": {"regex": "[a-z ]*"}},
    "scored alone": {"return_logprob": True},
    "drawn": {"sampling_params": {"temperature": 1.5, "top_k": 20, "top_p": 0.9}},
}
PENALISED: dict[str, Any] = {"sampling_params": {"frequency_penalty": 2.0}}


@pytest.mark.parametrize("penalties", [False, pytest.param(True, marks=pytest.mark.full)])
def test_parked_requests_keep_what_they_asked_for(penalties: bool, server_of: Callable[..., Server]) -> None:
    """Requests with parameters of every kind leave their batch and come back, each with its own. Beside penalties,
    which SGLang accumulates by batch, nobody is parked. Some are aborted meanwhile."""
    server = crowded(server_of, True)
    kinds = {**KINDS, **({"penalised": PENALISED} if penalties else {})}

    def ask(number: int, kind: dict[str, Any]) -> dict[str, Any]:
        parameters = {"temperature": 0, "max_new_tokens": 150 + 3 * number, "ignore_eos": True}
        payload = {"input_ids": tokens(30 + 5 * number, 2 + number), **kind}
        return server.generate({**payload, "sampling_params": {**parameters, **kind.get("sampling_params", {})}})

    def break_off(number: int) -> None:
        parameters = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
        payload = {"input_ids": tokens(90, 50 + number), "stream": True, "sampling_params": parameters}
        with requests.post(f"{server.url}/generate", json=payload, stream=True, timeout=120) as reply:
            lines = reply.iter_lines()
            for _ in range(2 * (40 + 32 * (number % 3)) + number):
                next(lines)

    before = stats_of(server)["admission"]["budget_judged_beside"]
    with ThreadPoolExecutor(2 * MANY) as threads:
        gone = [threads.submit(break_off, number) for number in range(6)]
        found = dict(zip(kinds, threads.map(ask, range(len(kinds)), kinds.values()), strict=True))
        for future in gone:
            future.result()
    stats = stats_of(server)
    assert stats["faults"] == 0 and stats["admission"]["budget_judged_beside"] >= before + len(kinds)
    made = {kind: reply["output_ids"] for kind, reply in found.items()}
    assert all(len(ids) == 150 + 3 * number for number, ids in enumerate(made.values()))
    assert {*made["forced"]} == {300} and {*made["forced otherwise"]} == {301}
    assert re.fullmatch("[a-z ]*", found["letters"]["text"])
    for kind in ("scored", "scored alone"):
        scores = found[kind]["meta_info"]["output_token_logprobs"]
        assert [token for _, token, *_ in scores] == made[kind] and all(score <= 0 for score, *_ in scores)
    assert all(len(x) == 3 for x in found["scored"]["meta_info"]["output_top_logprobs"])
    assert not penalties or len({*made["penalised"]}) > 2 * len({*made["plain"]})
    check_idle(server)


def test_no_more_run_than_have_query_slots(server_of: Callable[..., Server]) -> None:
    config = {**CONFIG, "policy": {**POLICY, "query_slots": 0.25, "scheduling": "constrained"}}
    args = ["--max-total-tokens", str(POOL), "--decode-log-interval", "1", *SHALLOW]
    server = server_of("diffkv", args, config=config, env=STRICT)
    with ThreadPoolExecutor(MANY) as threads:
        found = list(threads.map(lambda number: reply(server, number, 150), range(6)))
    assert [len(x) for x in found] == [150] * 6
    assert max(running_in(server.log_text())) == round(0.25 * (POOL // LIMIT))
    check_idle(server)


@pytest.mark.parametrize(
    ("tiers", "asynchronous"),
    [
        pytest.param(["BF16"], False, marks=pytest.mark.full),
        (["BF16"], True),
        pytest.param(["K8V4", "K4V2"], False, marks=pytest.mark.full),
        pytest.param(["K8V4", "K4V2"], True, marks=pytest.mark.full),
    ],
)
def test_requests_that_were_expected_to_end_are_retracted_and_answered(
    tiers: list[str], asynchronous: bool, server_of: Callable[..., Server]
) -> None:
    """Admission by lengths that are far too short: the pool fills up, compressions wait for pages, requests are
    retracted, and all get what they asked for."""
    policy = {**POLICY, "asynchronous": asynchronous}
    config = {**CONFIG, "tiers": tiers, "policy": policy, "share_min_tokens": 16}
    args = ["--max-total-tokens", str(POOL), "--decode-log-interval", "1", *SHALLOW]
    server = server_of("diffkv", args, config=config, env={**STRICT, "SGLANG_INIT_NEW_TOKEN_RATIO": "0.02"})

    def ask(number: int) -> int:
        parameters = {"temperature": 0, "max_new_tokens": 150, "min_new_tokens": 150}
        return len(server.generate({"input_ids": tokens(24, 2 + number), "sampling_params": parameters})["output_ids"])

    with ThreadPoolExecutor(24) as threads:
        assert list(threads.map(ask, range(24))) == [150] * 24
    assert "Retract requests" in server.log_text(), "the load did not exercise retraction"
    assert stats_of(server)["faults"] == 0
    check_idle(server)
