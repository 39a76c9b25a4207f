"""What requests with budgets hold together: against a simulation of each step, and as admission in a pool."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.serving.budget_model import Load, run
from sglang_diffkv.mem_pool.counts import LOOKAHEAD
from sglang_diffkv.mem_pool.joint_growth import DELAY, Outlook, Saw, peak_growth

STEPS = 700


def pages_of(tokens: int, start: int, free: int, page: int) -> int:
    return start + max(-(-(tokens - free) // page), 0)


def alone(saw: Saw, request: Outlook) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """The most pages that a request may hold in each step, token by token, and what compressions take for the moment:
    they and its end may come up to ``DELAY`` steps late."""
    compressed = request.expected >= request.due
    held, late, copied = np.zeros(STEPS, dtype=int), np.zeros(STEPS, dtype=int), []
    start, free, tokens, due, copy = request.pages, request.free, 0, request.due, request.copy
    for step in range(min(request.left + 1, STEPS)):
        tokens += bool(step) and (compressed or step <= request.expected)
        held[step] = pages_of(tokens, start, free, saw.page)
        if compressed and tokens == due and step < request.left:
            for more in range(1, min(DELAY, STEPS - 1 - step) + 1):
                grown = min(more, request.left - step)
                late[step + more] = max(late[step + more], pages_of(tokens + grown, start, free, saw.page))
            copied.append((step, copy))
            start, free, tokens, due, copy = request.kept, saw.free, 0, saw.period, saw.copy
    held[request.left + 1 : request.left + DELAY + 1] = held[request.left]
    held = np.maximum(held, late)
    held[0] = request.prompt
    return held, copied


def together(saw: Saw, requests: list[Outlook]) -> int:
    total, copies = -sum(x.prompt for x in requests) + np.zeros(STEPS, dtype=int), np.zeros(STEPS, dtype=int)
    for request in requests:
        held, copied = alone(saw, request)
        total += held
        for step, copy in copied:
            about = copies[max(step - saw.queries - LOOKAHEAD, 0) : step + DELAY + 1]
            about[:] = np.maximum(about, copy)
    return max(int((total + copies).max()), 0)


def drawn(draw: random.Random) -> tuple[Saw, list[Outlook]]:
    page, period, keep = draw.choice([4, 7, 8]), draw.choice([16, 24, 32]), draw.choice([32, 40, 64])
    copy = draw.choice([0, 0, draw.randrange(10)])
    saw = Saw(period, -keep % page, page, copy, slots=1000, queries=draw.choice([2, 4, 8]))
    requests = []
    for _ in range(draw.randrange(1, 9)):
        held, left = draw.randrange(1, keep + period + 3), draw.randrange(300)
        pages, free = -(-held // page), draw.choice([-held % page, 0])
        prompt = pages + draw.choice([0, 0, 0, 9])
        expected = draw.choice([left, draw.randrange(left + 1)])
        due, kept = max(keep + period - held, 0), -(-keep // page) + draw.randrange(3)
        requests.append(Outlook(prompt, pages, free, kept, due, left, expected, copy or draw.choice([0, 5])))
    return saw, requests


def test_the_peak_is_that_of_a_simulation_of_each_step():
    """Never below, and hardly ever above: by a request that ends just when it would have been compressed."""
    draw, above = random.Random(3), []
    for _ in range(600):
        saw, requests = drawn(draw)
        found, expected = peak_growth(saw, requests), together(saw, requests)
        assert found >= expected, (saw, requests)
        above.append(found - expected)
    assert max(above) <= 9 and sum(x > 0 for x in above) < 12


def missing_steps(saw: Saw, request: Outlook, end: int) -> np.ndarray:
    """Pages in each step of a request that misses ``saw.missed`` steps behind each compression, as one does that is
    judged beside them; it gives its pages back, and those of its end, ``end`` steps late."""
    held, step = np.zeros(STEPS, dtype=int), 0
    start, free, tokens, due, left = request.pages, request.free, 0, request.due, request.left
    while step < STEPS:
        held[step] = pages_of(tokens, start, free, saw.page)
        if tokens == due and left > 0 and request.expected >= request.due:
            for more in range(1, saw.missed + end + 1):
                if step + more < STEPS:
                    grown = min(max(more - saw.missed, 0), left)
                    held[step + more] = pages_of(tokens + grown, start, free, saw.page)
            grown = min(end, left)
            step, left = step + saw.missed + end, left - grown
            start, free, tokens, due = request.kept, saw.free, grown, saw.period
            if left > 0:
                step, tokens, left = step + 1, tokens + 1, left - 1
                continue
        if left == 0:
            held[step : step + end + 1] = held[min(step, STEPS - 1)]
            break
        step, tokens, left = step + 1, tokens + 1, left - 1
    held[0] = request.prompt
    return held


def test_steps_that_requests_miss_for_their_compressions_are_allowed_for():
    """Each misses some for every compression, so one that is compressed often falls behind one that is not."""
    draw, short = random.Random(5), 0
    for _ in range(400):
        saw, requests = drawn(draw)
        requests = [x._replace(expected=x.left, copy=0) for x in requests]
        saw = replace(saw, copy=0, missed=1)
        held = sum(missing_steps(saw, x, draw.randrange(DELAY + 1)) for x in requests)
        most = int(held.max()) - sum(x.prompt for x in requests)
        assert peak_growth(saw, requests) >= most, (saw, requests)
        short += peak_growth(replace(saw, missed=0), requests) < most
    assert short, "or what is missed makes no difference"


SAW = Saw(period=256, free=0, page=32, copy=0, slots=100, queries=16)


def outlook(due: int, left: int = 8192, expected: int | None = None, copy: int = 0) -> Outlook:
    held = 2048 - due
    return Outlook(held // 32, held // 32, 0, 56, due, left, left if expected is None else expected, copy)


def test_requests_at_different_times_take_less_than_their_limits():
    apart = [outlook(32 * i) for i in range(8)]
    assert peak_growth(SAW, apart) <= 8, "as one is compressed the others grow; each takes a page more if it is late"
    in_step = [outlook(224)] * 8
    assert peak_growth(SAW, in_step) == 8 * (7 + 1)
    assert peak_growth(SAW, [outlook(224, expected=100)] * 8) == 8 * 4, "they are expected to end before"
    assert peak_growth(SAW, [outlook(224, left=64)] * 8) == 8 * 2
    assert peak_growth(SAW, []) == 0


def test_a_request_that_ends_makes_room_for_others_to_grow():
    young = outlook(1536)
    assert peak_growth(SAW, [young]) == 48 + 1
    assert peak_growth(SAW, [young, outlook(0, left=256)]) < 48 - 64 + 64, "the other ends long before the limit"


def test_copies_and_a_want_of_query_slots_count():
    assert peak_growth(SAW, [outlook(224, copy=57)]) == 7 + 1 + 57
    every = Saw(256, 0, 32, 50, slots=100, queries=16)
    assert peak_growth(every, [outlook(224)] * 2) == 2 * (7 + 1) + 50, "one at a time"
    few = Saw(256, 0, 32, 0, slots=2, queries=16)
    assert peak_growth(few, [outlook(224)] * 8) > peak_growth(SAW, [outlook(224)] * 8), "six of eight wait for a slot"


@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_more_run_in_the_same_pool_and_never_more_than_fit(spread: float) -> None:
    load = Load(6000, 48, 1000, 192, 224, page=8, slots=30, queries=4, spread=spread)
    together = run(load, 6000)
    assert together.fullest <= load.capacity / load.page * 1.01
    one_by_one = load.capacity // load.limit
    settled = together.running[1500:]
    assert sum(settled) / len(settled) > one_by_one * 1.05, "not more than if each had its limit to itself"
