"""Budgets on a real server: replies far longer than the pool at their full length would hold, over shared prefixes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from sglang_diffkv.evaluate.server import Server
from tests.servers.shared import STRICT, check_idle, stats_of, tokens

pytestmark = pytest.mark.server

POOL, KEEP, LIMIT, REPLY, REQUESTS = 1200, 96, 128, 260, 10
CONFIG = {"tiers": ["BF16"], "policy": {"name": "zipage", "max_blocks": LIMIT // 32, "block": 32}, "page_tokens": 16}


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
    running = [
        int(line.split("#running-req: ")[1].split(",")[0]) for line in log.splitlines() if "Decode batch" in line
    ]
    assert max(running) > POOL // 360 + 2, "concurrency follows from lengths"
    check_idle(server)
