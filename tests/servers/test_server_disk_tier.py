"""Prefixes on a disk outlive a server: the next one answers from them, with the same tokens."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from benchmarks.paths import NANO
from sglang_diffkv.evaluate import client
from sglang_diffkv.evaluate.server import Server
from sglang_diffkv.mem_pool import segment_object
from sglang_diffkv.srt.hooks.metrics import FAMILIES
from tests.servers.identity import check_tokens
from tests.servers.prometheus_text import by_label, samples
from tests.servers.shared import START_TIMEOUT, STRICT, stats_of, tokens
from tests.servers.test_server_host_tier import LOSSLESS, NEW_TOKENS, ask, crowd_out, tier
from tests.servers.test_server_metrics import store_reported

pytestmark = pytest.mark.server

PROMPTS = [tokens(150, seed) for seed in range(200, 206)]
EXTRA = {"prefetch_threshold": 32, "max_size": "100M"}


CLASS = {
    "backend_name": "sglang-file",
    "module_path": "sglang.srt.mem_cache.hicache_storage",
    "class_name": "HiCacheFile",
    "prefetch_threshold": 32,
}
"""A backend of SGLang's as one that a user names."""


def start(
    folder: Path,
    store: str = "file",
    extra: dict[str, Any] = EXTRA,
    policy: str = "wait_complete",
    more: Sequence[str] = (),
) -> Server:
    """A server over the folder."""
    chosen = ("--hicache-storage-backend", store, "--hicache-storage-prefetch-policy", policy)
    extra_config = ("--hicache-storage-backend-extra-config", json.dumps(extra))
    args = tier("write_through", *chosen, "--enable-metrics", *extra_config, *more)
    env = {**STRICT, "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder)}
    server = Server(NANO, "diffkv", args, diffkv_config=LOSSLESS, env=env, timeout=START_TIMEOUT)
    server.start()
    return server


def report(server: Server) -> dict[str, Any]:
    return stats_of(server)["stored_prefixes"]


def written(server: Server, least: int) -> None:
    """Wait until nothing is left to be written."""
    end = time.monotonic() + 30
    while report(server)["waiting"] or report(server)["written"] < least:
        assert time.monotonic() < end, report(server)
        ask(server, tokens(3, 1), 1)  # a scheduler that does nothing looks at nothing


def check_metrics(server: Server) -> None:
    """Raise AssertionError unless ``/metrics`` says of the store what ``/server_info`` says."""
    end = time.monotonic() + 60
    while True:
        ask(server, tokens(3, 1), 1)  # SGLang brings its metrics up to date with a prompt
        known = {name: x for name, x in store_reported(report(server)).items() if name != "diffkv_store_queue"}
        text = requests.get(f"{server.url}/metrics", headers={"Accept": "text/plain;version=0.0.4"}, timeout=60).text
        found = samples(text)
        labels = {family.name: family.label for family in FAMILIES}
        said = {name: by_label(found[name], label) if (label := labels[name]) else found[name][0][1] for name in known}
        if said == known:
            return
        assert time.monotonic() < end, (said, known)
        time.sleep(0.2)


@pytest.fixture
def stopped() -> Iterator[list[Server]]:
    """Servers that end with the test."""
    servers: list[Server] = []
    yield servers
    for server in servers:
        server.stop(grace=1.0)


def test_a_restarted_server_answers_from_disk(tmp_path: Path, stopped: list[Server]) -> None:
    """Its replies are those that were computed without a cache, which are stock's (``test_server_host_tier.py``)."""
    first = start(tmp_path)
    stopped.append(first)
    computed = client.run(first.url, PROMPTS, NEW_TOKENS, top_logprobs=2)
    crowd_out(first)
    written(first, len(PROMPTS))
    assert first.flush_cache() is None and report(first)["written"] >= len(PROMPTS)
    again, where = ask(first, PROMPTS[0])
    check_tokens([again], computed[:1], "after a flush")
    assert where["storage"] >= 140 and report(first)["hits"] == 1, "a flush empties the disk"
    first.stop(grace=1.0)

    heads = {path: segment_object.decode(path.read_bytes())[0] for path in tmp_path.rglob("*.segment")}
    (damaged,) = (path for path, head in heads.items() if head.tokens[:20].tolist() == PROMPTS[1][:20])
    damaged.write_bytes(damaged.read_bytes()[:-40])
    second = start(tmp_path)
    stopped.append(second)
    found = [ask(second, prompt) for prompt in PROMPTS]
    check_tokens([reply for reply, _ in found], computed, "after a restart")
    assert [where.get("storage", 0) >= 140 for _, where in found] == [True, False, True, True, True, True]
    assert report(second)["hits"] == 5 and report(second)["refused_size"] == 1 and report(second)["errors"] == 0
    check_metrics(second)

    asked = {"model_path": str(NANO), "flush_cache": True}
    assert requests.post(f"{second.url}/update_weights_from_disk", json=asked, timeout=120).json()["success"]
    assert not ask(second, PROMPTS[2])[1], "what other weights computed came back"
    assert second.alive()


def test_servers_find_each_other_s_prefixes_in_a_store(tmp_path: Path, stopped: list[Server]) -> None:
    """In a backend of SGLang's, which knows keys and values alone."""
    with ThreadPoolExecutor() as pool:
        stopped.extend(pool.map(lambda _: start(tmp_path, "dynamic", CLASS), range(2)))
    first, second = stopped
    computed = client.run(first.url, PROMPTS[:3], NEW_TOKENS, top_logprobs=2)
    crowd_out(first)
    written(first, 3)
    found = [ask(second, prompt) for prompt in PROMPTS[:3]]
    check_tokens([reply for reply, _ in found], computed, "from another server")
    assert all(where["storage"] >= 140 for _, where in found), found
    (other,) = client.run(second.url, PROMPTS[3:4], NEW_TOKENS, top_logprobs=2)
    crowd_out(second)
    written(second, 1)
    back, where = ask(first, PROMPTS[3])
    check_tokens([back], [other], "and back")
    assert where["storage"] >= 140 and report(first)["errors"] == report(second)["errors"] == 0
    check_metrics(second)


def test_a_store_stays(tmp_path: Path, stopped: list[Server]) -> None:
    """Who detaches it, or attaches another, is told so; and it does stay."""
    server = start(tmp_path, more=["--admin-api-key", "s3cret"])
    stopped.append(server)
    url, headers = f"{server.url}/hicache/storage-backend", {"Authorization": "Bearer s3cret"}
    ask(server, PROMPTS[0])
    for answer in (
        requests.delete(url, headers=headers, timeout=60),
        requests.put(url, headers=headers, json={"hicache_storage_backend": "file"}, timeout=60),
    ):
        assert answer.status_code == 400 and "named when the server starts, and stays" in answer.text
        assert "not enabled" not in answer.text
    written(server, 1)
    assert server.flush_cache() is None
    assert ask(server, PROMPTS[0])[1]["storage"] >= 140
