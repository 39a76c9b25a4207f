"""Running requests at saturation against stock SGLang in the same bytes, and that no load ever empties the ring."""

from __future__ import annotations

import random

import numpy as np
import pytest

from sglang_diffkv.config import load_config
from sglang_diffkv.mem_pool.page_format import PageFormat, Tier
from sglang_diffkv.plan import MemoryPlan
from tests.saturation import DiffKVServer, Request, Scheduler, Seen, StockPool

FMT = PageFormat(128, 128, (Tier(8, 4), Tier(4, 2)), 32)
STOCK_TOKENS = 65_536
"""8 GiB of Llama-3-8B."""
SHAPE = (2, 4)


def heads(high: float, spread: float = 0.1) -> np.ndarray:
    """Shares of tokens that stay high, by head."""
    return np.random.default_rng(0).normal(high, spread, SHAPE).clip(0.02, 1.0)


@pytest.fixture(scope="module")
def capacity() -> int:
    """High-tier tokens in 8 GiB with all that lies beside the pages."""
    plan = MemoryPlan(load_config("{}"), FMT, 32, 8, 32, gpu=True)
    return plan.capacity_in(8 << 30, lambda tokens: 129, 8196)


def saturate(capacity: int, high: np.ndarray, requests: int, prompt: int, reply: int) -> tuple[Seen, Seen]:
    """Stock and DiffKV under more requests than fit."""
    load = [[Request(prompt, reply) for _ in range(requests)] for _ in range(2)]
    stock = Scheduler(StockPool(STOCK_TOKENS), load[0], 400).run()
    server = DiffKVServer(FMT, capacity, high, rows=400, longest=prompt + reply + 64)
    return stock, Scheduler(server, load[1], 400).run()


@pytest.mark.parametrize(
    ("high", "requests", "prompt", "reply"),
    [(0.06, 260, 1024, 1024), (0.34, 260, 1024, 1024), (0.34, 340, 256, 512), (0.34, 36, 16384, 1024)],
)
def test_running_requests_are_what_the_bytes_allow(
    capacity: int, high: float, requests: int, prompt: int, reply: int
) -> None:
    stock, found = saturate(capacity, heads(high), requests, prompt, reply)
    allowed = 1 / float(np.mean(found.ratio))
    assert len(found.running) > 200, "the load saturates the pool"
    assert found.mean / stock.mean >= 0.9 * allowed


@pytest.mark.parametrize("seed", range(6))
def test_the_ring_is_never_empty(seed: int) -> None:
    """``CountingOps`` fails as soon as a page is taken that is not there. Requests of all lengths, of which each
    compresses as it likes, in a pool for a few of them."""
    drawn = random.Random(seed)
    server = DiffKVServer(FMT, 3000, heads(drawn.random(), 0.4), rows=60, longest=2900)
    requests = [Request(drawn.choice((10, 100, 700, 1400)), drawn.choice((1, 5, 60, 300, 1200))) for _ in range(60)]

    def other_attention(step: int) -> None:
        if step % 40 == 0:
            server.manager.ops.high[:] = drawn.random()

    scheduler = Scheduler(server, requests, 60, chunk=drawn.choice((128, 512, 4096)), on_step=other_attention)
    scheduler.run()
    server.manager.tracker.settle()
    assert all(req.made >= req.reply for req in requests)
    assert server.manager.free_bound() == server.manager.geometry.num_pages
    assert not server.ledger.promised
