"""Readings of what is held: equal to measuring every row, at a cost that segments do not raise, without waiting."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_diffkv.kernels.append.reference import append
from sglang_diffkv.layout.geometry import Geometry, Segment
from sglang_diffkv.layout.spans import retained_tokens
from sglang_diffkv.mem_pool import segment_counts, usage
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.mem_pool.usage import UsageMeter
from tests.helpers import begin_step, make_format, make_manager
from tests.pages.usage_oracle import check_reading
from tests.policies import diffkv_policy
from tests.tree.tree_world import World

TIERS = diffkv_policy(1.0, 0.0, window=8)
"""All but the newest tokens go down a tier, since no test here gives them scores."""


class Work(TorchDispatchMode):
    """Counts the operations inside, and the elements of what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations[str(func)] += 1
        for x in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(x, torch.Tensor):
                self.elements += x.numel()
        return result


def prompt(manager: PageManager, row: int, count: int) -> None:
    """A row of ``count`` tokens."""
    start = manager.rows.length(row)
    begin_step(manager, [row], [count], [start])
    at = torch.arange(start, start + count)
    geometry = manager.geometry
    key = torch.ones(count, geometry.num_heads, geometry.fmt.head_dim)
    for layer in range(geometry.num_layers):
        append(manager.state, layer, key, key, torch.full((count,), row), at - start, at)
    manager.prompts.end(row)


def cached(segments: int) -> PageManager:
    """A prefix cache of so many prompts, and two running requests."""
    manager = make_manager(policy=TIERS, pages=6000, segments=600, rows=4)
    for _ in range(segments):
        prompt(manager, 3, 20)
        assert manager.segments.share(3, 0, 20) is not None
        manager.release(3)
    for row in (1, 2):
        prompt(manager, row, 30)
    return manager


def test_the_cost_of_a_report_does_not_grow_with_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor that of the decode log line. Both prefix caches have more segments than are measured together."""
    first, again, lines = [], [], []
    for segments in (40, 500):
        manager = cached(segments)
        meter = UsageMeter(manager)
        with Work() as work:
            meter.report()
        first.append(sum(work.operations.values()))
        with Work() as work:
            meter.report()
        again.append((work.operations, work.elements))
        with Work() as work:
            meter.latest()
        assert not work.operations, "measured again within a moment"
        with monkeypatch.context() as patch, Work() as work:
            patch.setattr(usage, "REFRESH_SECONDS", 0.0)
            meter.latest()
        lines.append((work.operations, work.elements))
        check_reading(manager, meter.read())
        assert len(manager.segments.cached) == segments
    assert again[0] == again[1] and lines[0] == lines[1]
    assert first[0] == first[1]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("together", [1, 3, 32])
def test_totals_follow_the_tree(exact: bool, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that share prefixes, replies that are packed, evictions that cut leaves, with readings now and then."""
    monkeypatch.setattr(segment_counts, "MEASURE_AT", together)
    world = World(1500, exact=exact)
    meter, seen = UsageMeter(world.manager), 0
    shared = world.tokens(90)
    running: list[Any] = []
    for i in range(60):
        kind = world.random.randrange(5)
        if kind < 2 and len(running) < 5:
            prefix = shared[: world.random.choice((0, 40, 90))]
            running.append(world.prompt(prefix + world.tokens(world.random.randrange(30, 90))))
        elif kind == 2 and running:
            for _ in range(10):
                world.decode(running[0])
        elif kind == 3 and running:
            world.leave(running.pop(world.random.randrange(len(running))), insert=world.random.random() < 0.8)
        else:
            world.tree.evict(EvictParams(num_tokens=world.random.randrange(1, 60)))
        world.manager.counts.settle()
        if i % 4 == 0:
            check_reading(world.manager, meter.read())
            seen += 1
    assert seen and len(world.manager.segments.cached) > 1
    for req in running:
        world.leave(req)
    world.tree.reset()
    world.allocator.clear()
    reading = meter.read()
    check_reading(world.manager, reading)
    nothing = usage.Usage(by_tier=(0,) * len(world.manager.fmt.tiers))
    assert reading.live == nothing and reading.owners["free"] == world.manager.geometry.num_pages


def test_a_prompt_on_its_way_to_the_tree_and_a_packed_reply() -> None:
    """With exact prefixes a prompt's pages wait for the tree, and a reply moves to pages of its own."""
    world = World(1500, exact=True)
    manager, meter = world.manager, UsageMeter(world.manager)
    req = world.start(world.tokens(100))
    world.plan(req)
    world.launch(req)
    assert manager.prompts.pending
    pending = meter.read()
    check_reading(manager, pending)
    assert pending.live.tokens == 200, "as computed for the tree, and the request's copy"
    world.tree.cache_unfinished_req(req)
    for _ in range(30):
        world.decode(req)
    spread: list[int] = []
    pack = manager.segments.pack

    def packed(segment: Segment) -> bool:
        check_reading(manager, meter.read())
        spread.append(segment.row)
        return pack(segment)

    manager.segments.pack = packed  # type: ignore[method-assign]
    world.leave(req)
    reply = world.segments()[1]
    assert spread and spread != [reply.row], "no reply was packed"
    check_reading(manager, meter.read())


def test_a_cut_segment_counts_what_is_left() -> None:
    manager = make_manager(policy=TIERS)
    prompt(manager, 1, 100)
    segment = manager.segments.share(1, 0, 100)
    assert segment is not None
    manager.release(1)
    meter = UsageMeter(manager)
    before = meter.read()
    manager.segments.trim(segment, 40)
    after = meter.read()
    check_reading(manager, after)
    assert (before.live.tokens, after.live.tokens) == (100, 40)
    assert before.live.page_bytes > after.live.page_bytes > 0
    assert after.owners["cached"] == sum(head[-1] for layer in after.by_head for head in layer)


class Event:
    """Of a transfer that has not arrived until it is told so."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        assert self.done, "waited for the device"


def test_the_log_line_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Event] = []

    def to_host(values: torch.Tensor) -> tuple[torch.Tensor, Event]:
        events.append(Event())
        return values.clone(), events[-1]

    monkeypatch.setattr(usage, "to_host", to_host)
    monkeypatch.setattr(usage, "REFRESH_SECONDS", 0.0)
    manager = make_manager(policy=TIERS)
    meter = UsageMeter(manager)
    prompt(manager, 1, 50)
    assert meter.latest().live.tokens == 0
    prompt(manager, 2, 30)
    assert meter.latest().live.tokens == 0 and len(events) == 1, "one reading on its way at a time"
    events[0].done = True
    assert meter.latest().live.tokens == 50 and len(events) == 2
    events[1].done = True
    assert meter.latest().live.tokens == 80


def test_an_idle_pool_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager(policy=TIERS)
    meter = UsageMeter(manager)
    prompt(manager, 1, 50)
    assert meter.latest().live.tokens == 50
    manager.release(1)
    assert meter.latest().live.tokens == 0


@pytest.mark.parametrize("alpha_low", [0.0, 0.5])
def test_what_windows_let_go_is_told_from_what_is_pruned(alpha_low: float) -> None:
    """Of two layers one sees 10 tokens. Without scores the other drops all but its newest 8 where it prunes."""
    policy = diffkv_policy(1.0, alpha_low, window=8)
    manager = PageManager(Geometry(make_format(), 2, 2, 400, 8, 8, 200, attention_spans=(0, 10)), policy)
    meter, length, kept = UsageMeter(manager), 100, retained_tokens(10)
    prompt(manager, 1, length)
    left, gone = 2 * (length - kept), 2 * (length - 8) if alpha_low else 0
    live = meter.read().live
    assert (live.out_of_window, live.pruned) == (left, gone)
    meter.finish(1)
    manager.release(1)
    report: Any = meter.report()
    finished = report["finished"]
    assert (finished["out_of_window"], finished["pruned"]) == (left, gone)
    assert sum(finished[x] for x in ("high", "low", "pruned", "out_of_window")) == 4 * length
    assert report["by_head"]["sliding_layers"] == [1]


@pytest.mark.parametrize("count", [1, 3, 7])
def test_requests_that_ended_are_counted_once(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "COUNT_AT", 3)
    monkeypatch.setattr(usage, "LONG_REQUEST", 45)
    manager = make_manager(policy=TIERS)
    meter = UsageMeter(manager)
    lengths = [20 + 10 * i for i in range(count)]
    for length in lengths:
        prompt(manager, 1, length)
        meter.finish(1)
        manager.release(1)
    for _ in range(2):
        report: Any = meter.report()
        assert report["finished"]["requests"] == count
        assert report["finished"]["tokens"] == sum(lengths)
        assert report["finished_1k"]["tokens"] == sum(x for x in lengths if x >= 45)
        assert report["finished"]["high"] + report["finished"]["low"] + report["finished"]["pruned"] == 4 * sum(lengths)
        first, *lower = report["finished"]["by_tier"].values()
        assert (first, sum(lower)) == (report["finished"]["high"], report["finished"]["low"])
        assert list(report["finished_1k"]["by_tier"]) == [tier.name for tier in manager.fmt.tiers]


def test_running_requests_are_reported_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2000, exact=False)
    meter = UsageMeter(world.manager)
    assert meter.report()["running"] == [] and meter.report()["requests"] == 0
    prefix = world.tokens(100)
    world.leave(world.prompt([*prefix, 1]))
    running = [world.prompt([*prefix[:70], *world.tokens(60)]), world.prompt(world.tokens(40))]
    found = meter.running()
    assert [(x["tokens"], x["prefix_tokens"] >= 70) for x in found] == [(130, True), (40, False)]
    lone = found[1]
    assert lone["pages"] == world.manager.device.pages_of(running[1].kv.req_pool_idx)
    assert lone["ratio_pages"] == lone["pages"] * world.manager.fmt.page_bytes / (
        40 * world.manager.fmt.bf16_token_bytes
    )
    assert 0 < lone["ratio_tokens"] <= lone["ratio_pages"]
    monkeypatch.setattr(usage, "RUNNING_SHOWN", 1)
    assert [x["tokens"] for x in meter.report()["running"]] == [130] and meter.report()["requests"] == 2  # type: ignore
    for req in running:
        world.leave(req)
