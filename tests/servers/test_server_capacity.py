"""A plan of ``python -m sglang_diffkv.capacity`` beside a server: tokens that fit, bytes that requests hold, requests
that run at once."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from statistics import mean

import pytest

from benchmarks.paths import NANO
from sglang_diffkv.capacity.held import Holding, running
from sglang_diffkv.capacity.memory import Budget, capacity_of, plan_of
from sglang_diffkv.capacity.model import read_model
from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.evaluate.server import Server
from tests.servers.shared import STRICT, stats_of

pytestmark = pytest.mark.server

CONFIG = {"tiers": ["K8V4", "K4V2"], "policy": {"name": "diffkv", "alpha_high": 1e9, "window": 64}}
TOKENS, REQUESTS, PROMPT, REPLY = 5000, 18, 600, 50


def test_tokens_and_requests_are_those_of_a_server(server_of: Callable[..., Server]) -> None:
    """Twice as many requests as run at once, all at the same time: within 10%."""
    args = ["--max-total-tokens", str(TOKENS), "--max-running-requests", "64", "--decode-log-interval", "1"]
    server = server_of("diffkv", args, config=CONFIG, env=STRICT)
    model = read_model(str(NANO))
    plan = plan_of(model, DiffKVConfig.model_validate(CONFIG), 1)
    total = stats_of(server)["memory"]["total"]
    fitting = capacity_of(plan, model, Budget(total, total, None, ()), 64)
    served = server.server_info()["max_total_num_tokens"]
    assert abs(fitting - served) <= plan.fmt.high.tokens and abs(served - TOKENS) <= plan.fmt.high.tokens

    before, seen = stats_of(server)["finished"], len(server.log_text())
    draw = random.Random(1)
    prompts = [[draw.randrange(100, 1900) for _ in range(PROMPT)] for _ in range(REQUESTS)]
    sampling = {"max_new_tokens": REPLY, "temperature": 0, "ignore_eos": True}
    server.generate({"input_ids": prompts, "sampling_params": sampling})
    holding = Holding(plan, served)
    after = stats_of(server)["finished"]
    held, length = (after[x] - before[x] for x in ("page_bytes", "tokens"))
    assert holding.bytes_of(PROMPT, REPLY) / (PROMPT + REPLY) == pytest.approx(held / length, rel=0.1)

    steps = re.findall(r"Decode batch.*?#running-req: (\d+).*?#queue-req: (\d+)", server.log_text()[seen:])
    waiting = [int(x) for x, others in steps if int(others)]
    planned = running(holding, PROMPT, REPLY, 64)
    assert 6 < planned.together < REQUESTS / 1.5
    assert 0.9 * planned.together <= mean(waiting) <= 1.1 * planned.mean
    assert max(waiting) == pytest.approx(planned.mean, abs=1)
