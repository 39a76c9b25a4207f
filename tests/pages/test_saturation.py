"""Running requests at saturation against stock SGLang in the same bytes, and that no load ever empties the ring."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from sglang_diffkv.config import load_config
from sglang_diffkv.layout.page_format import PageFormat, Tier
from sglang_diffkv.plan import MemoryPlan
from tests.pages.saturation import Scheduler, Seen
from tests.pages.saturation_pools import DiffKVServer, Request, StockPool

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
    [
        (0.06, 260, 1024, 1024),
        pytest.param(0.34, 260, 1024, 1024, marks=pytest.mark.full),  # quick: this share with other lengths
        (0.34, 340, 256, 512),
        (0.34, 36, 16384, 1024),
    ],
)
def test_running_requests_are_what_the_bytes_allow(
    capacity: int, high: float, requests: int, prompt: int, reply: int
) -> None:
    stock, found = saturate(capacity, heads(high), requests, prompt, reply)
    allowed = 1 / float(np.mean(found.ratio))
    assert len(found.running) > 200, "the load saturates the pool"
    assert found.mean / stock.mean >= 0.9 * allowed


def test_long_prompts_are_admitted_for_what_they_need() -> None:
    """The same load with and without compaction between chunks; five fit with nothing compressed, hardly."""
    mean, capacity = [], 156800
    for compacts in (False, True):
        server = DiffKVServer(FMT, capacity, heads(0.06), rows=30, longest=40600, compacts_chunks=compacts)
        seen = Scheduler(server, [Request(40000, 512) for _ in range(16)], 30).run()
        assert (seen.compacted > 0) == compacts
        mean.append(seen.mean)
    assert mean[1] > 1.15 * mean[0]


def drain(server: DiffKVServer, requests: list[Request], chunk: int, on_step: Callable[[int], None]) -> Seen:
    """Run all requests to their end, and find the pool as it was."""
    seen = Scheduler(server, requests, 60, chunk=chunk, on_step=on_step).run()
    server.manager.counts.settle()
    assert all(req.made >= req.reply for req in requests)
    assert server.manager.counts.free_bound() == server.manager.geometry.num_pages
    assert not server.ledger.promised and not server.ledger.chunks
    return seen


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 6))])
def test_the_ring_is_never_empty(seed: int) -> None:
    """``CountingOps`` fails as soon as a page is taken that is not there. Requests of all lengths, of which each
    compresses as it likes, in a pool for a few of them."""
    drawn = random.Random(seed)
    server = DiffKVServer(FMT, 3000, heads(drawn.random(), 0.4), rows=60, longest=2900)
    requests = [Request(drawn.choice((10, 100, 700, 1400)), drawn.choice((1, 5, 60, 300, 1200))) for _ in range(30)]

    def other_attention(step: int) -> None:
        if step % 40 == 0:
            server.ops.high[:] = drawn.random()

    drain(server, requests, drawn.choice((128, 512, 4096)), other_attention)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 4))])
def test_prompts_that_do_not_compress_as_expected_wait(seed: int) -> None:
    """Long prompts are admitted because others compressed well, and nothing goes down before they are through."""
    drawn = random.Random(seed)
    server = DiffKVServer(FMT, 6000, heads(0.05), rows=60, longest=3200)
    requests = [Request(drawn.choice((300, 1500, 2200)), drawn.choice((40, 200, 400))) for _ in range(60)]
    server.manager.prompts.end_chunk = lambda *rows: None
    seen = drain(server, requests, 256, lambda step: None)
    assert seen.compacted > 3 and seen.held > 0, (seen.compacted, seen.held)


@pytest.mark.parametrize("pressure_window", [64, None])
def test_of_replies_that_are_reserved_whole_as_many_run_as_pressure_makes_room_for(
    capacity: int, pressure_window: int | None
) -> None:
    """128 requests hold a little more at their ends than there is, unless they are compressed once more then."""
    prompt = reply = 1024
    high = np.full(SHAPE, 0.02)
    server = DiffKVServer(
        FMT, capacity, high, rows=400, longest=prompt + reply + 64, window=256, share_min_tokens=None,
        pressure_window=pressure_window,
    )  # fmt: skip
    seen = Scheduler(server, [Request(prompt, reply) for _ in range(128)], 400, certain=True).run()
    assert not seen.retracted
    if pressure_window is None:
        assert seen.steps >= 2 * reply - 2 and not seen.relieved, "some run behind all others"
    else:
        assert seen.steps <= 1.02 * reply and seen.relieved


def test_few_requests_are_compressed_before_nothing_is_left_to_borrow() -> None:
    """The pages of so few that a step takes are fewer than those that a compression borrows."""
    server = DiffKVServer(
        FMT, 8000, np.full(SHAPE, 0.05), rows=20, longest=1600, window=512, share_min_tokens=None, pressure_window=64
    )
    seen = Scheduler(server, [Request(1000, 500) for _ in range(16)], 20, chunk=512, certain=True).run()
    assert seen.relieved and not seen.retracted
