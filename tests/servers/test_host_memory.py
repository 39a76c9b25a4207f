"""Options of SGLang's hierarchical cache: how much host memory they ask for, and what is refused with them."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.paths import NANO
from sglang_diffkv.config import load_config
from sglang_diffkv.errors import UnsupportedError
from sglang_diffkv.plan import MemoryPlan
from sglang_diffkv.srt.startup import host_memory, host_options
from sglang_diffkv.srt.versions import compat

GIB = host_memory.GIB


def asked(**changes: Any) -> SimpleNamespace:
    """Arguments that ask for the host tier."""
    fields: dict[str, Any] = {
        "enable_hierarchical_cache": True,
        "hicache_ratio": None,
        "hicache_size": 0,
        "hicache_write_policy": "write_through",
        "hicache_host_memory_fraction": None,
        "speculative_algorithm": None,
        "disable_radix_cache": False,
        "kv_canary": "none",
        "tp_size": 1,
        "dp_size": 1,
    }
    return SimpleNamespace(**{**fields, **changes})


def planned(**changes: Any) -> Any:
    return host_memory.host_tier(SimpleNamespace(server_args=asked(**changes), mambaish_config=None))


@pytest.fixture(autouse=True)
def ten_gib_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "free_host_memory", lambda: 10 * GIB)


@pytest.mark.parametrize(
    ("changes", "bytes_"),
    [
        ({}, 2 * GIB),
        ({"hicache_ratio": 0.5}, GIB // 2),
        ({"hicache_ratio": 20.0}, 8 * GIB),
        ({"hicache_ratio": 20.0, "hicache_host_memory_fraction": 0.5}, 5 * GIB),
        ({"hicache_ratio": 20.0, "dp_size": 2}, 4 * GIB),
        ({"hicache_ratio": 20.0, "tp_size": 2}, 4 * GIB),
        ({"hicache_ratio": 20.0, "tp_size": 4, "nnodes": 2}, 4 * GIB),
        ({"hicache_size": 3, "hicache_ratio": 20.0}, 3 * 10**9),
    ],
)
def test_how_much_is_asked_for(changes: dict[str, Any], bytes_: int) -> None:
    """Beside a pool of one GiB, where ten are free. A ratio takes no more than a part of them."""
    tier = planned(**changes)
    assert tier.bytes_for(GIB) == pytest.approx(bytes_, abs=2)
    less = changes.get("hicache_ratio") == 20.0 and "hicache_size" not in changes
    assert ("as far as that is free" in tier.describe(GIB)) == less


def test_nothing_is_planned_unless_asked() -> None:
    assert planned(enable_hierarchical_cache=False) is None
    assert host_memory.problems(asked(enable_hierarchical_cache=False, tp_size=2), load_config("{}")) == []


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_size_that_is_not_free_is_refused(replicas: int) -> None:
    planned(hicache_size=10 // replicas, dp_size=replicas)
    with pytest.raises(UnsupportedError, match=r"--hicache-size asks for 10.2 GiB .* ask for less"):
        planned(hicache_size=11, dp_size=replicas)


def test_what_states_take_is_refused_where_it_has_no_copies() -> None:
    """In host memory of what lies beside them, and in a store of them at all."""
    found = SimpleNamespace(server_args=asked(), mambaish_config=SimpleNamespace(short_conv_layer_ids=[1]))
    with pytest.raises(UnsupportedError, match=r"n-grams beside its states, .* drop --enable-hierarchical-cache"):
        host_memory.host_tier(found)
    found.mambaish_config.short_conv_layer_ids = []
    assert host_memory.host_tier(found) is not None
    found.server_args.speculative_algorithm = "NEXTN"
    with pytest.raises(UnsupportedError, match=r"with states beside a draft model: .* NGRAM"):
        host_memory.host_tier(found)
    found.server_args.speculative_algorithm = "NGRAM"
    assert host_memory.host_tier(found) is not None
    found.server_args.hicache_storage_backend = "file"
    with pytest.raises(UnsupportedError, match=r"for a model with states, .* drop --hicache-storage-backend"):
        host_memory.host_tier(found)


@pytest.mark.parametrize("size", [0, 3])
def test_host_memory_is_shared_by_pages_and_states_as_the_device_s_is(size: int) -> None:
    config = load_config('{"tiers": ["K8V8"]}')
    tier = planned(hicache_size=size)
    plan = MemoryPlan(config, config.page_format(64, 64, 1000), 2, 2, 4, gpu=False, host_room=tier, slot_bytes=3 << 20)
    geometry, slots = plan.geometry(100_000, 10, 1000), 12
    pool, page = geometry.num_pages * plan.fmt.page_bytes, plan.fmt.page_bytes
    pages, states = plan.host_pages(geometry, slots), plan.host_slots(geometry, slots)
    whole = tier.bytes_for(pool + slots * plan.slot_bytes)
    assert whole - page - plan.slot_bytes < pages * page + states * plan.slot_bytes <= whole
    assert abs(states / slots - pages / geometry.num_pages) < 0.1
    assert plan.host_slots(geometry, 0) == 0 and plan.host_pages(geometry) * page <= tier.bytes_for(pool)


def test_host_memory_of_retracted_requests_is_shared_as_the_device_s_is() -> None:
    """``host_gib`` is for pages and states together."""
    config = load_config('{"tiers": ["K8V8"], "host_gib": 0.5}')
    fmt = config.page_format(64, 64, 1000)
    plan = MemoryPlan(config, fmt, 2, 2, 4, gpu=False, keeps_retracted=True, slot_bytes=3 << 20)
    geometry, slots, page = plan.geometry(100_000, 10, 1000), 4, fmt.page_bytes
    pages, states = plan.host_pages(geometry, slots), plan.host_slots(geometry, slots)
    whole = 1 << 29
    assert whole - 2 * page - plan.slot_bytes < pages * page + states * plan.slot_bytes <= whole
    assert states > slots and abs(states - slots * pages / geometry.num_pages) < 1.01
    assert replace(plan, keeps_retracted=False).host_slots(geometry, slots) == 0


@pytest.mark.parametrize(
    ("changes", "config", "named"),
    [
        ({"disable_radix_cache": True}, "{}", "--disable-radix-cache"),
        ({"kv_canary": "log"}, "{}", "--kv-canary"),
        ({}, '{"tiers": ["K8V4"], "policy": {"name": "zipage", "max_blocks": 8}}', "pages of their own"),
        ({}, '{"host_gib": 2}', '"host_gib" out'),
        ({"hicache_ratio": 0.0}, "{}", "--hicache-ratio of 0"),
        ({"hicache_ratio": float("nan")}, "{}", "--hicache-ratio that is no finite number"),
        ({"hicache_ratio": float("inf")}, "{}", "--hicache-ratio that is no finite number"),
        ({"hicache_size": -5}, "{}", "--hicache-size below 0"),
        ({"hicache_host_memory_fraction": 1.5}, "{}", "--hicache-host-memory-fraction that is not above 0"),
        ({"hicache_host_memory_fraction": float("nan")}, "{}", "--hicache-host-memory-fraction that is not above 0"),
        ({"SGLANG_RADIX_FORCE_MISS": "1"}, "{}", "SGLANG_RADIX_FORCE_MISS"),
    ],
)
def test_what_does_not_work_with_it_is_named(
    changes: dict[str, Any], config: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = asked(speculative_algorithm="NGRAM", speculative_num_draft_tokens=4, tp_size=2)
    assert host_memory.problems(served, load_config('{"host_gib": 0}')) == []
    for name in [name for name in changes if name.isupper()]:
        monkeypatch.setenv(name, changes.pop(name))
    (found,) = host_memory.problems(asked(**changes), load_config(config))
    assert named in found and ("drop" in found or "leave" in found or "unset" in found or "give" in found)


def test_what_was_asked_for_is_known_in_the_processes_of_a_server() -> None:
    """SGLang's own hierarchical cache is off there."""
    from sglang.srt.server_args import ServerArgs

    plain = {"model_path": str(NANO), "device": "cpu", "attention_backend": "torch_native"}
    for wanted in (None, "file", "mooncake"):
        args = ServerArgs(**plain, enable_hierarchical_cache=bool(wanted), hicache_storage_backend=wanted)
        if hasattr(args, "resolve_once"):
            args.resolve_once()
        host_options.decline_hierarchical_cache(args)
        args = pickle.loads(pickle.dumps(args))
        assert host_options.asks_for_host_tier(args) == bool(wanted)
        assert not compat.resolved(args).enable_hierarchical_cache
        assert compat.resolved(args).hicache_storage_backend is None
        host_options.decline_hierarchical_cache(args)
        assert host_options.asks_for_host_tier(args) == bool(wanted)
        assert host_options.store_asked_for(args) == wanted


def test_states_and_draft_models_are_refused_on_a_gpu_where_they_did_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory.disk_store, "check_model", lambda *_: None)

    def drafts(device: str) -> list[str]:
        args = asked(device=device, speculative_algorithm="EAGLE")
        return [x for x in host_memory.problems(args, load_config()) if "with a draft model" in x]

    for device, refused in (("cuda", True), ("cpu", False)):
        found = drafts(device)
        assert bool(found) == refused and all("SGLANG_DIFFKV_UNTRIED" in text for text in found)
        configurator = SimpleNamespace(server_args=asked(device=device), mambaish_config=SimpleNamespace())
        with pytest.raises(UnsupportedError, match="with states") if refused else nullcontext():
            host_memory.host_tier(configurator)
    monkeypatch.setenv("SGLANG_DIFFKV_UNTRIED", "1")
    assert not drafts("cuda")
