"""Prometheus families of evicted prefixes: in host memory, and in a store behind it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from sglang_diffkv.mem_pool.segment_object import REASONS
from sglang_diffkv.mem_pool.stored_segments import DAMAGED
from sglang_diffkv.srt.startup.server_part import Family, Value

FAMILIES = (
    Family(
        "diffkv_host_prefixes_total",
        "Evicted prefixes in host memory: requests for which some came back, those for which there was no room, and "
        "segments for which there was no host memory.",
        "kind",
        total=True,
    ),
    Family(
        "diffkv_host_moved_tokens_total",
        "Tokens of evicted prefixes that came back from host memory, or went from it for want of room.",
        "kind",
        total=True,
    ),
    Family("diffkv_host_copied_bytes_total", "Bytes of prefixes, to host memory and back.", "direction", total=True),
    Family("diffkv_host_prefix_tokens", "Tokens of prefixes in host memory."),
    Family("diffkv_host_prefix_bytes", "Bytes of host memory that prefixes hold."),
    Family(
        "diffkv_store_requests_total",
        "Requests for which something came from the store, and those that waited for it as long as they may.",
        "kind",
        total=True,
    ),
    Family(
        "diffkv_store_objects_total",
        "Objects of the store: written, there already, given up before they were written, read, damaged, of another "
        "server, without host memory to be read to.",
        "kind",
        total=True,
    ),
    Family("diffkv_store_tokens_total", "Tokens of prefixes, to the store and back.", "direction", total=True),
    Family("diffkv_store_bytes_total", "Bytes of objects, to the store and back.", "direction", total=True),
    Family("diffkv_store_seconds_total", "Seconds that threads wrote to the store, and read.", "direction", total=True),
    Family("diffkv_store_wait_seconds_total", "Seconds that requests waited for the store.", total=True),
    Family("diffkv_store_errors_total", "Failures of reading from the store and writing to it.", total=True),
    Family("diffkv_store_queue", "Objects to be written; requests for which the store is asked.", "direction"),
    Family("diffkv_store_held_bytes", "Bytes that the store has, of all who share it."),
)


def values_of(reports: Mapping[str, Mapping[str, float]]) -> dict[str, Value]:
    """The value of each family, or its values by label; 0 where ``reports``, of ``/server_info``, lack them."""
    host: Mapping[str, float] = defaultdict(int, reports.get("host_prefixes", {}))
    store: Mapping[str, float] = defaultdict(int, reports.get("stored_prefixes", {}))
    return {
        "diffkv_host_prefixes_total": {kind: host[kind] for kind in ("hits", "no_room", "no_host_memory")},
        "diffkv_host_moved_tokens_total": {kind: host[f"tokens_{kind}"] for kind in ("restored", "evicted")},
        "diffkv_host_copied_bytes_total": {way: host[f"bytes_{way}"] for way in ("out", "in")},
        "diffkv_host_prefix_tokens": host["tokens"],
        "diffkv_host_prefix_bytes": host["host_bytes"],
        "diffkv_store_requests_total": {kind: store[kind] for kind in ("hits", "late")},
        "diffkv_store_objects_total": {
            **{kind: store[kind] for kind in ("written", "there_already", "dropped", "read", "no_host_memory")},
            "damaged": sum(store[f"refused_{reason}"] for reason in DAMAGED),
            "foreign": sum(store[f"refused_{reason}"] for reason in REASONS if reason not in DAMAGED),
        },
        "diffkv_store_tokens_total": _both_ways(store, "tokens"),
        "diffkv_store_bytes_total": _both_ways(store, "bytes"),
        "diffkv_store_seconds_total": _both_ways(store, "seconds"),
        "diffkv_store_wait_seconds_total": store["seconds_waited"],
        "diffkv_store_errors_total": store["errors"],
        "diffkv_store_queue": {"out": store["waiting"], "in": store["fetching"]},
        "diffkv_store_held_bytes": store["folder_bytes"],
    }


def _both_ways(store: Mapping[str, float], what: str) -> dict[str, float]:
    """What went to the store, and what came from there."""
    return {"out": store[f"{what}_written"], "in": store[f"{what}_read"]}
