"""A real server is watched: ``/metrics``, ``/server_info`` and the page of ``inspect`` say the same, to who has its
key."""

from __future__ import annotations

import inspect
import json
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from sglang.srt.observability import metrics_collector

from benchmarks.paths import NANO
from sglang_diffkv.evaluate import cli as evaluate
from sglang_diffkv.evaluate.server import Server
from sglang_diffkv.inspect import cli
from sglang_diffkv.mem_pool.ledger import spare_pages
from sglang_diffkv.srt.hooks.metrics import FAMILIES
from sglang_diffkv.srt.tree.shape import tenant_of
from tests.helpers import until
from tests.servers.prometheus_text import Sample, by_label, samples
from tests.servers.shared import stats_of
from tests.servers.tls_proxy import tls_proxy
from tests.tools.certificates import make_certificate
from tests.tools.evaluation import REFERENCE
from tests.tools.test_observability import metric_names
from tests.tools.test_page import check_page

pytestmark = pytest.mark.server

POOL, REQUESTS = 1100, 5
KEY, ADMIN = "s3cret-of-users", "s3cret-of-admins"
TENANTS = ("tenant-1", "<b>tenant & sons</b>")
HEADS = 12
"""6 layers of 2 heads."""


@dataclass
class Watched:
    """A server after its load: the pages by owner meanwhile, and what it says when it is idle."""

    server: Server
    while_loaded: list[dict[str, float]]
    running: list[dict[str, Any]]
    found: dict[str, list[Sample]]
    stats: dict[str, Any]
    info: dict[str, Any]

    def number(self, name: str) -> float:
        ((_, value),) = self.found[name]
        return value


def _ask(server: Server, seed: int) -> None:
    """A prompt that shares 100 tokens with the others of its tenant, and a long reply."""
    ids = [*range(400, 500), *([300 + seed] * 200)]
    parameters = {"temperature": 0, "max_new_tokens": 150, "ignore_eos": True}
    server.generate({"input_ids": ids, "sampling_params": parameters, "extra_key": TENANTS[seed % 2]})


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    args = ["--max-total-tokens", str(POOL), "--enable-metrics", "--schedule-conservativeness", "0.1"]
    args += ["--api-key", KEY, "--admin-api-key", ADMIN]
    config = {"policy": {"name": "diffkv", "window": 32}}
    with Server(NANO, "diffkv", args, diffkv_config=config) as server:
        with ThreadPoolExecutor(REQUESTS) as threads:
            asked = [threads.submit(_ask, server, seed) for seed in range(REQUESTS)]
            owners, running = [], []
            while not all(x.done() for x in asked):
                owners.append(by_label(samples(_metrics(server))["diffkv_pages"], "owner"))
                running.append(server.stats() or {})
                time.sleep(0.1)
            for x in asked:
                x.result()
        until(lambda: _all_told(server))
        found, info = samples(_metrics(server)), server.server_info()
        stats = info["internal_states"][0]["diffkv"]
        yield Watched(server, owners, running, found, stats, info)
        assert server.log_text().count("Traceback") == 0


def _all_told(server: Server) -> bool:
    """Whether metrics are those of the idle server. SGLang brings them up to date once it is."""
    found = samples(_metrics(server))
    ((_, running),), ((_, finished),) = found["sglang:num_running_reqs"], found["diffkv_finished_requests_total"]
    return not running and finished == stats_of(server)["finished"]["requests"]


def _metrics(server: Server) -> str:
    """As Prometheus asks, which has no key."""
    return requests.get(f"{server.url}/metrics", headers={"Accept": "text/plain;version=0.0.4"}, timeout=60).text


def test_metrics_of_a_server(watched: Watched) -> None:
    found, stats = watched.found, watched.stats
    assert {family.name for family in FAMILIES} <= {*found}
    labels, ratio = found["diffkv_ratio"][0]
    assert {**found["sglang:token_usage"][0][0]} == labels, "the labels are SGLang's"
    assert 0.2 < ratio < 0.7
    owners = watched.while_loaded
    assert any(x["private"] > 0 for x in owners) and all(sum(x.values()) == stats["pages"] for x in owners)
    share = by_label(found["diffkv_share"], "tier")
    assert sum(share.values()) == pytest.approx(1) and share["low"] > 0.1
    assert watched.number("diffkv_finished_requests_total") == REQUESTS + 1, "one warms up"
    finished = by_label(found["diffkv_finished_tokens_total"], "tier")
    assert sum(finished.values()) == pytest.approx(stats["finished"]["tokens"])
    assert by_label(found["diffkv_prompts_total"], "outcome")["compressed"] >= REQUESTS
    admissions = by_label(found["diffkv_admissions_total"], "kind")
    assert admissions["waited"] > 0, "five requests of 450 tokens fit into the pool at once"
    evictable = (stats["owners"]["cached"] - spare_pages(2) * HEADS) * stats["configuration"]["values"]["page_tokens"]
    assert watched.number("sglang:kv_evictable_tokens") == pytest.approx(evictable / HEADS, abs=1), (
        "pages, as tokens at the high tier"
    )
    ((evicted, tokens),) = found["sglang:evicted_tokens_total"]
    assert evicted["cache_type"] == "DiffKVPrefixCache" and tokens > 0


def reported(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Each family of ``/metrics`` as ``/server_info`` has it: a number, or numbers by label."""
    admission, retracted, finished = stats["admission"], stats["retracted"], stats["finished"]
    tiers = ("high", "low", "pruned")
    return {
        "diffkv_ratio": stats["ratio_pages"],
        "diffkv_ratio_tokens": stats["ratio_tokens"],
        "diffkv_share": {tier: stats[f"share_{tier}"] for tier in tiers},
        "diffkv_share_by_tier": stats["share_by_tier"],
        "diffkv_tokens": stats["tokens"],
        "diffkv_pages": stats["owners"],
        "diffkv_page_bytes": stats["page_bytes"],
        "diffkv_running_requests": stats["fidelity"]["running"],
        "diffkv_refused_requests_total": stats["fidelity"]["refused"],
        "diffkv_segments": stats["segments"],
        "diffkv_headroom_pages": admission["headroom_pages"],
        "diffkv_promised_pages": admission["promised_pages"],
        "diffkv_growth_price": admission["price"],
        "diffkv_faults_total": stats["faults"],
        "diffkv_finished_requests_total": finished["requests"],
        "diffkv_finished_tokens_total": {tier: finished[tier] / HEADS for tier in tiers},
        "diffkv_prompts_total": {name.replace(" ", "_"): count for name, count in stats["prompts"].items()},
        "diffkv_admissions_total": {name: admission[name] for name in ("waited", "compacted_between_chunks")},
        "diffkv_retracted_total": {
            kind: retracted[kind] for kind in ("kept", "no_host_memory", "restored", "recomputed", "dropped")
        },
        "diffkv_restored_tokens_total": retracted["tokens_restored"],
        "diffkv_host_bytes": retracted["host_bytes"],
        "diffkv_host_prefixes_total": dict.fromkeys(("hits", "no_room", "no_host_memory"), 0),
        "diffkv_host_moved_tokens_total": dict.fromkeys(("restored", "evicted"), 0),
        "diffkv_host_copied_bytes_total": dict.fromkeys(("out", "in"), 0),
        "diffkv_host_prefix_tokens": 0,
        "diffkv_host_prefix_bytes": 0,
        **store_reported({}),
    }


def store_reported(stored: Mapping[str, float]) -> dict[str, Any]:
    """Each family of a store as ``/server_info`` has it (``stored_prefixes``); all zeros without one."""
    found: defaultdict[str, float] = defaultdict(int, stored)
    kinds = ("written", "there_already", "dropped", "read", "no_host_memory")
    foreign = ("refused_origin", "refused_version", "refused_tokens")
    damaged = ("refused_format", "refused_size", "refused_checksum", "refused_header", "refused_table")
    ways = {
        what: {"out": found[f"{what}_written"], "in": found[f"{what}_read"]} for what in ("tokens", "bytes", "seconds")
    }
    return {
        "diffkv_store_requests_total": {kind: found[kind] for kind in ("hits", "late")},
        "diffkv_store_objects_total": {
            **{kind: found[kind] for kind in kinds},
            "damaged": sum(found[name] for name in damaged),
            "foreign": sum(found[name] for name in foreign),
        },
        **{f"diffkv_store_{what}_total": both for what, both in ways.items()},
        "diffkv_store_wait_seconds_total": found["seconds_waited"],
        "diffkv_store_errors_total": found["errors"],
        "diffkv_store_queue": {"out": found["waiting"], "in": found["fetching"]},
        "diffkv_store_held_bytes": found["folder_bytes"],
    }


def test_metrics_and_server_info_say_the_same(watched: Watched) -> None:
    """Each number that both have, on the idle server."""
    known = reported(watched.stats)
    assert {*known} == {family.name for family in FAMILIES}, "a family that is not compared"
    for family in FAMILIES:
        value = known[family.name]
        if family.label is None:
            assert watched.number(family.name) == pytest.approx(value), family.name
        else:
            assert by_label(watched.found[family.name], family.label) == pytest.approx(value), family.name
    assert watched.number("sglang:max_total_num_tokens") == watched.info["max_total_num_tokens"] == POOL
    assert watched.number("sglang:page_size") == watched.info["page_size"] == 1
    assert watched.number("sglang:num_running_reqs") == watched.stats["requests"] == len(watched.stats["running"]) == 0


def test_dashboard_and_alerts_name_metrics_that_a_server_exposes(watched: Watched) -> None:
    """As Prometheus gets them. A counter of SGLang's is not there until it counts: its name is in SGLang's source."""
    exposed = {*watched.found}
    source = {*re.findall(r'name="(sglang:\w+_total)"', inspect.getsource(metrics_collector))}
    assert metric_names() - exposed - (source & {"sglang:num_retracted_requests_total"}) == set()
    assert len(metric_names()) > 25
    accepted = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;version=0.0.4;q=0.3"
    text = requests.get(f"{watched.server.url}/metrics", headers={"Accept": accepted}, timeout=60).text
    assert "\nsglang:num_running_reqs{" in text, "what Prometheus 3 asks for keeps the colon"


def test_server_info_tells_what_runs_and_what_the_tree_holds(watched: Watched) -> None:
    seen = [x for stats in watched.running for x in stats["running"]]
    assert seen and all(0 < x["prefix_tokens"] <= x["tokens"] <= 450 or not x["prefix_tokens"] for x in seen)
    assert any(0.2 < x["ratio_tokens"] <= x["ratio_pages"] for x in seen if x["tokens"] > 300)
    assert all(len(x["running"]) == x["requests"] <= REQUESTS for x in watched.running)
    tree = watched.stats["prefix_cache"]
    assert {x["tenant"] for x in tree["by_tenant"]} == {tenant_of((name,)) for name in TENANTS}
    assert sum(x["tokens"] for x in tree["by_depth"]) == sum(x["tokens"] for x in tree["by_tenant"])
    assert sum(x["pages"] for x in tree["by_tenant"]) == tree["pages"] > 0


def test_the_page_of_a_server_that_wants_a_key(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over https, with a certificate that only who is told trusts."""
    page, data, server = tmp_path / "cache.html", tmp_path / "cache.json", watched.server
    certificate = make_certificate(tmp_path)
    with tls_proxy(server.port, certificate) as url:
        wanted = ["--url", url, "--html", str(page), "--json", str(data)]
        assert cli.main(wanted) == 1 and "is not trusted (self-signed certificate)" in capsys.readouterr().err
        wanted += ["--cacert", str(certificate[0])]
        assert cli.main(wanted) == 1 and "wants a key for /server_info (status 401)" in capsys.readouterr().err
        monkeypatch.setenv("SGLANG_API_KEY", ADMIN)
        assert cli.main(wanted) == 1 and "refuses the key for /server_info" in capsys.readouterr().err
        assert not page.exists() and not data.exists()
        monkeypatch.setenv("SGLANG_API_KEY", KEY)
        assert cli.main(wanted) == 0
    assert json.loads(data.read_text())["diffkv"]["prefix_cache"] == watched.stats["prefix_cache"]
    found = check_page(page.read_text(encoding="utf-8"))
    assert str(tenant_of(TENANTS[:1])) in found.text and "tenant-1" not in found.text and "0.5." in found.text
    assert f"{watched.stats['tokens']:,} by running requests and the prefix cache" in found.text
    everything = page.read_text(encoding="utf-8") + data.read_text() + "".join(capsys.readouterr())
    assert "s3cret" not in everything


def test_questions_to_a_server_that_wants_keys(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One to answer, and another to empty its prefix cache."""
    for name in ("SGLANG_API_KEY", "SGLANG_ADMIN_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    ask = ["--url", watched.server.url, "--task", REFERENCE, "--n", "1", "--max-new-tokens", "8"]
    assert evaluate.main([*ask, "--output", str(tmp_path / "a")]) == 1
    assert "wants a key for /v1/models (status 401)" in capsys.readouterr().err
    assert evaluate.main([*ask, "--output", str(tmp_path / "b"), "--api-key", KEY]) == 0
    assert "not emptied (status 401: --admin-api-key may be wanted)" in capsys.readouterr().err
    both = ["--api-key", KEY, "--admin-api-key", ADMIN]
    assert evaluate.main([*ask, "--output", str(tmp_path / "c"), *both]) == 0
    assert "not emptied" not in "".join(capsys.readouterr())
    check_page((tmp_path / "c" / "report.html").read_text(encoding="utf-8"))
    assert not any("s3cret" in x.read_text() for x in tmp_path.glob("*/*"))
    watched.server.flush_cache()
    assert (watched.server.stats() or {})["prefix_cache"]["by_tenant"] == []
