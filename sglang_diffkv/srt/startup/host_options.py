"""SGLang's options of its hierarchical cache: those that are refused, those that work, and what the user asked for."""

from __future__ import annotations

from typing import Any

from sglang_diffkv.srt.startup.option_kinds import Predicate, Refused, unlike
from sglang_diffkv.srt.versions import compat


def _of_host_tier(usual: Any) -> Predicate:
    """Other values than the usual one, where evicted prefixes go to host memory."""
    return lambda value, args: getattr(args, "enable_hierarchical_cache", False) and value not in (None, usual)


_HOST_TIER_RUN = "tests/servers/test_server_host_tier.py::test_lossless_gives_stock_tokens"

REFUSED: dict[str, Refused] = {
    "hicache_storage_backend": Refused(
        "--hicache-storage-backend {value}: use file, mooncake, or dynamic with the class of your store, or drop it",
        unlike(None, "file", "dynamic", "mooncake"),
        "tests/servers/test_server_disk_tier.py::test_a_restarted_server_answers_from_disk",
    ),
    "hicache_storage_prefetch_retry_poll_interval": Refused(
        "--hicache-storage-prefetch-retry-poll-interval {value}: drop it, a store is asked once", unlike(None, 8)
    ),
    "hicache_storage_prefetch_retry_max_attempts": Refused(
        "--hicache-storage-prefetch-retry-max-attempts {value}: drop it, a store is asked once", unlike(None, 8)
    ),
    "hicache_host_memory_mode": Refused(
        "--hicache-host-memory-mode {value}: drop it, host memory holds prefixes", _of_host_tier("cache")
    ),
    "hicache_io_backend": Refused(
        "--hicache-io-backend {value}: drop it, pages are copied whole, in one way",
        _of_host_tier("kernel"),
        _HOST_TIER_RUN,
    ),
    "hicache_mem_layout": Refused(
        "--hicache-mem-layout {value}: drop it, the host has pages as the device has them",
        lambda value, args: _of_host_tier(compat.default_of("hicache_mem_layout"))(value, args),
        _HOST_TIER_RUN,
    ),
}

WORKS: dict[str, str] = {
    "tests/servers/test_server_disk_tier.py::test_a_restarted_server_answers_from_disk": (
        "hicache_storage_prefetch_policy hicache_storage_backend_extra_config"
    ),
    "tests/servers/test_server_host_tier.py::test_lossless_gives_stock_tokens": (
        "enable_hierarchical_cache hicache_ratio hicache_size hicache_write_policy hicache_host_memory_fraction"
    ),
}
"""Test -> fields that it sets."""


def asks_for_host_tier(server_args: Any) -> bool:
    """Whether the user asked for SGLang's hierarchical cache, whose place the plugin's host tier takes."""
    if getattr(server_args, "enable_hierarchical_cache", False):
        return True
    if compat.installed().declared_arguments:  # they are as the user gave them
        return False
    return compat.has_declined(server_args, enable_hierarchical_cache=False)


def store_asked_for(server_args: Any) -> str | None:
    """The store that the user asked for behind the hierarchical cache; None for none."""
    return getattr(server_args, "hicache_storage_backend", None) or getattr(server_args, "_diffkv_store", None)


def decline_hierarchical_cache(server_args: Any) -> None:
    """Keep SGLang's own hierarchical cache off, with all that its scheduler does for it and for a store behind it:
    ``asks_for_host_tier`` and ``store_asked_for`` still tell what the user asked for."""
    if getattr(compat.resolved(server_args), "enable_hierarchical_cache", False):
        compat.decide(server_args, enable_hierarchical_cache=False)
    store = getattr(compat.resolved(server_args), "hicache_storage_backend", None)
    if store is not None:
        if not compat.installed().declared_arguments:  # those keep what the user asked for
            server_args._diffkv_store = store
        compat.decide(server_args, hicache_storage_backend=None)
