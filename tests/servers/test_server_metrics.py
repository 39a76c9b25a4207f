"""``--enable-metrics`` on a real server: the plugin's families stand beside SGLang's."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.paths import NANO
from sglang_diffkv.evaluate.server import Server
from sglang_diffkv.mem_pool.ledger import spare_pages
from sglang_diffkv.srt.hooks.metrics import FAMILIES
from tests.servers.prometheus_text import by_label, samples

pytestmark = pytest.mark.server

POOL, REQUESTS = 1100, 5


def _ask(server: Server, seed: int) -> None:
    """A prompt that shares 100 tokens with the others, and a long reply."""
    ids = [*range(400, 500), *([300 + seed] * 200)]
    parameters = {"temperature": 0, "max_new_tokens": 150, "ignore_eos": True}
    server.generate({"input_ids": ids, "sampling_params": parameters})


def test_metrics_of_a_server() -> None:
    args = ["--max-total-tokens", str(POOL), "--enable-metrics", "--schedule-conservativeness", "0.1"]
    config = {"policy": {"name": "diffkv", "window": 32}}
    with Server(NANO, "diffkv", args, diffkv_config=config) as server:
        with ThreadPoolExecutor(REQUESTS) as threads:
            asked = [threads.submit(_ask, server, seed) for seed in range(REQUESTS)]
            owners = []
            while not all(x.done() for x in asked):
                owners.append(by_label(samples(server.get("/metrics").text)["diffkv_pages"], "owner"))
                time.sleep(0.5)
            for x in asked:
                x.result()
        time.sleep(1.0)  # idle, SGLang brings its metrics up to date once
        found, stats = samples(server.get("/metrics").text), server.stats()
        assert stats is not None
        assert server.log_text().count("Traceback") == 0
    assert {family.name for family in FAMILIES} <= {*found}
    labels, ratio = found["diffkv_ratio"][0]
    assert {**found["sglang:token_usage"][0][0]} == labels, "the labels are SGLang's"
    assert ratio == pytest.approx(stats["ratio_pages"]) and 0.2 < ratio < 0.7
    assert found["diffkv_ratio_tokens"][0][1] == pytest.approx(stats["ratio_tokens"])
    assert by_label(found["diffkv_pages"], "owner") == stats["owners"]
    assert any(x["private"] > 0 for x in owners) and all(sum(x.values()) == stats["pages"] for x in owners)
    share = by_label(found["diffkv_share"], "tier")
    assert sum(share.values()) == pytest.approx(1) and share["low"] > 0.1
    assert found["diffkv_tokens"][0][1] == stats["tokens"]
    assert found["diffkv_segments"][0][1] == stats["segments"]
    finished = by_label(found["diffkv_finished_tokens_total"], "tier")
    assert found["diffkv_finished_requests_total"][0][1] == stats["finished"]["requests"] == REQUESTS + 1, (
        "one warms up"
    )
    assert sum(finished.values()) == pytest.approx(stats["finished"]["tokens"])
    assert finished["low"] * 12 == pytest.approx(stats["finished"]["low"]), "6 layers of 2 heads"
    assert by_label(found["diffkv_prompts_total"], "outcome")["compressed"] >= REQUESTS
    admissions = by_label(found["diffkv_admissions_total"], "kind")
    assert admissions["waited"] > 0, "five requests of 450 tokens fit into the pool at once"
    assert admissions["waited"] == stats["admission"]["waited"]
    assert found["diffkv_faults_total"][0][1] == found["diffkv_refused_requests_total"][0][1] == 0
    assert by_label(found["diffkv_running_requests"], "fidelity") == stats["fidelity"]["running"]
    assert found["sglang:max_total_num_tokens"][0][1] == POOL
    evictable = (stats["owners"]["cached"] - spare_pages(2) * 12) * stats["configuration"]["values"]["page_tokens"] / 12
    assert found["sglang:kv_evictable_tokens"][0][1] == pytest.approx(evictable, abs=1), (
        "pages, as tokens at the high tier"
    )
