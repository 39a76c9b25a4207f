"""Every method on a real server, at both fidelities: shared prefixes, chunked prompts, samples, aborts of requests that
run, wait or are between two chunks, retraction.

Replies are not compared, since methods lose differently; what is kept of the tokens is. SGLang's own test mode retracts
a request every so many passes, since methods whose requests do not grow never fill a pool that they were admitted to.
All of it is in ``make
test-all``; in ``make test`` the ops that a CPU server runs on are driven without one (``tests/pages``, ``tests/tree``).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from sglang_diffkv.evaluate.server import Server
from tests.policies import documented_methods
from tests.servers.shared import STRICT, check_idle, stats_of, tokens

pytestmark = pytest.mark.server

POOL, PREFIX, TAIL, REPLY, REQUESTS = 1000, 240, 60, 160, 8
ONE, TWO, THREE = ["K8V4"], ["K8V4", "K4V2"], ["BF16", "K8V4", "K4V2"]
RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "37"}

FOR_THE_LOAD: dict[str, tuple[list[str], dict[str, Any]]] = {
    "diffkv": (TWO, {"alpha_high": 2.0, "alpha_low": 0.1, "window": 32}),
    "leankv": (TWO, {"mass_high": 0.1, "mass_low": 0.002, "window": 32}),
    "snapkv": (ONE, {"window": 16}),
    "knorm": (ONE, {"window": 16}),
    "random": (ONE, {"window": 16}),
    "h2o": (ONE, {"window": 32}),
    "xkv": (ONE, {"keep": 0.4}),
    "zipage": (ONE, {"max_blocks": 4, "block": 32}),
    "streaming": (ONE, {"window": 128}),
    "duo": (ONE, {"window": 64, "sinks": 16}),
}
"""What methods take beside their examples in the documentation, so that this load makes them compress."""
METHODS: dict[str, tuple[list[str], dict[str, Any]]] = {
    name: (FOR_THE_LOAD.get(name, (ONE, {}))[0], {**example, **FOR_THE_LOAD.get(name, (ONE, {}))[1]})
    for name, example in documented_methods(6, 2).items()
}
METHODS["diffkv, three tiers"] = (THREE, {**METHODS["diffkv"][1], "alpha_high": 3.0, "alpha_between": [1.0]})
"""Name -> tiers and policy."""


def _parameters(new_tokens: int = REPLY, **more: Any) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": new_tokens, "min_new_tokens": new_tokens, **more}


def _prompt(family: int, number: int) -> list[int]:
    return tokens(PREFIX, family) + tokens(TAIL, 100 + number)


def _load(server: Server) -> list[int]:
    """Two families of prompts, one after the other, with long replies; beside them streams that are broken off, and
    requests that are aborted by name soon after they came. Returns the lengths of the replies."""

    def ask(number: int) -> int:
        time.sleep(0.1 * number)
        payload = {"input_ids": _prompt(number % 2, number), "sampling_params": _parameters()}
        return len(server.generate(payload)["output_ids"])

    def abort(number: int) -> None:
        time.sleep(0.2 * number)
        payload = {"input_ids": _prompt(number % 2, 50 + number), "stream": True, "sampling_params": _parameters()}
        with requests.post(f"{server.url}/generate", json=payload, stream=True, timeout=120) as reply:
            lines = reply.iter_lines()
            for _ in range(1 + 9 * number):
                next(lines)

    def withdraw(number: int) -> None:
        """In one of its five chunks, or still waiting: SGLang answers with an error or an empty reply."""
        time.sleep(0.3 * number)
        name = f"withdrawn {number}"
        payload = {"rid": name, "input_ids": _prompt(number % 2, 70) + tokens(300, number)}
        asked = threads.submit(server.post, "/generate", {**payload, "sampling_params": _parameters()})
        time.sleep(0.15)
        server.post("/abort_request", {"rid": name})
        reply = asked.result().json()
        assert "error" in reply or reply["meta_info"]["finish_reason"]["type"] == "abort", reply

    with ThreadPoolExecutor(REQUESTS + 9) as threads:
        broken = [threads.submit(act, number) for act in (abort, withdraw) for number in range(3)]
        found = list(threads.map(ask, range(REQUESTS)))
        for x in broken:
            x.result()
    return found


def _retracted(server: Server) -> int:
    return sum(map(int, re.findall(r"#retracted_reqs: (\d+)", server.log_text())))


CASES = [
    (name, fidelity)
    for name in METHODS
    for fidelity in ("compressed", "exact")
    if (name, fidelity) != ("uniform", "exact")  # nothing is compressed, so there is one form of a prompt
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "fidelity"), CASES)
def test_a_method_under_load(name: str, fidelity: str, server_of: Callable[..., Server]) -> None:
    tiers, policy = METHODS[name]
    config = {"tiers": tiers, "policy": policy, "prefix_fidelity": fidelity, "page_tokens": 16}
    args = ["--max-total-tokens", str(POOL), "--chunked-prefill-size", "128", "--schedule-conservativeness", "0.1"]
    server = server_of("diffkv", args, config=config, env={**STRICT, **RETRACTING})
    alone = {"input_ids": _prompt(0, 0), "sampling_params": _parameters(24)}
    first = server.generate(alone)
    again = server.generate(alone)
    assert first["meta_info"]["cached_tokens"] == 0
    assert again["meta_info"]["cached_tokens"] == PREFIX + TAIL - 1, "in three chunks, then found whole"
    other = server.generate({**alone, "input_ids": _prompt(0, 1)})
    assert other["meta_info"]["cached_tokens"] == PREFIX
    choices = server.generate({**alone, "sampling_params": _parameters(24, n=3)})
    assert [len(x["output_ids"]) for x in choices] == [24] * 3
    before, retracted = stats_of(server)["finished"], _retracted(server)
    assert _load(server) == [REPLY] * REQUESTS
    assert _retracted(server) > retracted, "nothing was retracted"
    stats = stats_of(server)
    assert stats["faults"] == 0
    ended = {key: stats["finished"][key] - before[key] for key in ("tokens", "high", "low")}
    cells = ended["tokens"] * 12  # 6 layers of 2 heads
    gone = cells - ended["high"] - ended["low"]
    if name == "uniform":
        assert gone == 0
    else:
        assert gone > 0.02 * cells, "nothing was pruned"
    assert (ended["low"] > 0.1 * cells) == (len(tiers) > 1)
    assert all(stats["finished"]["by_tier"].values()), "a tier was never used"
    check_idle(server)
