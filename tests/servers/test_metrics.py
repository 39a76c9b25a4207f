"""The plugin's metrics: what they say, what reading them leaves alone, and the dashboard that shows them."""

from __future__ import annotations

import functools
import inspect
import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from sglang.srt.observability import metrics_collector

from sglang_diffkv.mem_pool import usage
from sglang_diffkv.mem_pool.usage import UsageMeter
from sglang_diffkv.srt.hooks import metrics
from tests.servers.prometheus_text import Sample, by_label, samples
from tests.tree.tree_world import World

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana" / "diffkv.json"


class Collector:
    """What SGLang's collector gives, with a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.labels = {"model_name": "nano", "engine_type": "unified", "tp_rank": 0}
        self._gauge_cls = functools.partial(Gauge, registry=self.registry)
        self._counter_cls = functools.partial(Counter, registry=self.registry)

    def read(self) -> dict[str, list[Sample]]:
        return samples(generate_latest(self.registry).decode())


def served(world: World) -> Any:
    """A world's allocator with a meter, as in a server."""
    world.allocator._kvcache = SimpleNamespace(usage=UsageMeter(world.manager), kv_slots_changed=lambda old, new: None)
    return world.allocator


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "REFRESH_SECONDS", 0.0)


@pytest.mark.parametrize("exact", [True, False])
def test_every_family_says_what_is_held(exact: bool) -> None:
    world, collector = World(2000, exact=exact), Collector()
    allocator = served(world)
    prefix = world.tokens(100)
    world.leave(world.prompt([*prefix, 1]))
    running = world.prompt([*prefix[:70], *world.tokens(60)])
    metrics.update(collector, allocator)
    found, report = collector.read(), allocator.get_kvcache().usage.report()
    for family in metrics.FAMILIES:
        assert found[family.name], family.name
        assert all({*collector.labels} <= {*labels} for labels, _ in found[family.name])
    (labels, ratio), *_ = found["diffkv_ratio"]
    assert ratio == pytest.approx(report["ratio_pages"]) and ratio > 0
    assert labels == {"model_name": "nano", "engine_type": "unified", "tp_rank": "0"}
    assert by_label(found["diffkv_pages"], "owner") == report["owners"]
    assert report["owners"]["cached"] > 0 and report["owners"]["shared"] + report["owners"]["private"] > 0
    share = by_label(found["diffkv_share"], "tier")
    assert share == {tier: report[f"share_{tier}"] for tier in ("high", "low", "pruned")} and share["low"] > 0
    assert found["diffkv_tokens"][0][1] == report["tokens"]
    outcomes = by_label(found["diffkv_prompts_total"], "outcome")
    assert outcomes == {name.replace(" ", "_"): n for name, n in metrics.prompt_outcomes(allocator.requests).items()}
    assert sum(outcomes.values()) == 2 and ("no_room" in outcomes) == exact
    world.leave(running)


def test_counters_grow_by_what_is_new() -> None:
    world, collector = World(2000, exact=False), Collector()
    allocator = served(world)
    meter, ended = allocator.get_kvcache().usage, 0
    for count in (60, 40, 90):
        req = world.prompt(world.tokens(count))
        metrics.update(collector, allocator)
        meter.finish(req.kv.req_pool_idx)
        world.leave(req)
        ended += count
        metrics.update(collector, allocator)
    found = collector.read()
    assert found["diffkv_finished_requests_total"][0][1] == 3
    tiers = by_label(found["diffkv_finished_tokens_total"], "tier")
    assert tiers == {"high": 3 * 8, "low": ended - 3 * 8, "pruned": 0}
    assert by_label(found["diffkv_prompts_total"], "outcome") == {"compressed": 3, "as_computed": 0}


def test_reading_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may happen on one of several ranks alone: no exchange, no new estimate, nothing taken over from the device."""
    world, collector = World(2000, exact=False), Collector()
    allocator = served(world)
    req = world.prompt(world.tokens(600 % 250))
    ledger, counts = allocator.ledger, world.manager.counts

    def never(*_: Any) -> None:
        raise AssertionError("a metric was read by something that ranks have to do together")

    for name in ("meet", "refresh", "settle", "take_snapshot"):
        monkeypatch.setattr(counts, name, never)
    monkeypatch.setattr(ledger, "growth_estimate", never)
    metrics.update(collector, allocator)
    assert collector.read()["diffkv_growth_price"][0][1] == ledger.last_estimate
    monkeypatch.undo()
    world.leave(req)


def test_an_error_ends_the_metrics_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    world, collector = World(2000, exact=False), Collector()
    allocator = served(world)
    metrics.update(collector, allocator)
    allocator._kvcache = None
    with caplog.at_level(logging.ERROR):
        metrics.update(collector, allocator)
        metrics.update(collector, allocator)
    assert [record.message for record in caplog.records] == ["DiffKV: metrics of the plugin are not exported any more"]


def test_one_reading_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world, collector = World(2000, exact=False), Collector()
    allocator = served(world)
    world.prompt(world.tokens(50))
    metrics.update(collector, allocator)
    told: list[Any] = []
    monkeypatch.setattr(metrics.Metrics, "update", lambda self, values: told.append(values))
    monkeypatch.setattr(usage, "REFRESH_SECONDS", 1000.0)
    metrics.update(collector, allocator)
    assert not told
    monkeypatch.setattr(usage, "REFRESH_SECONDS", 0.0)
    metrics.update(collector, allocator)
    assert len(told) == 1


def queried(dashboard: dict[str, Any]) -> set[str]:
    """Names of the metrics in a dashboard's queries."""
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    expressions += [x["definition"] for x in dashboard["templating"]["list"] if x["type"] == "query"]
    return {name for text in expressions for name in re.findall(r"\b(?:sglang:|diffkv_)\w+", text)}


def test_the_dashboard_queries_what_is_exported() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    ours = {family.name for family in metrics.FAMILIES}
    names = queried(dashboard)
    sglang = set(re.findall(r'name="(sglang:\w+)"', inspect.getsource(metrics_collector)))
    for name in names - ours:
        assert name in sglang or re.sub("_(bucket|sum|count)$", "", name) in sglang, f"nobody exports {name}"
    assert ours <= names, f"not shown: {ours - names}"
    assert any(name.startswith("sglang:") for name in names)


def test_the_dashboard_s_panels_do_not_overlap() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    taken: set[tuple[int, int]] = set()
    labels = {family.label for family in metrics.FAMILIES} | {"tp_rank"}
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
        for target in panel.get("targets", []):
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels
    numbers = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(numbers)) == len(numbers)
