"""Evicted prefixes in host memory, and in a store behind it, as a server takes them: all that they declare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.findings import Findings
from sglang_diffkv.mem_pool.segment_object import Origin
from sglang_diffkv.mem_pool.stored_segments import StoredSegments
from sglang_diffkv.plan import HostRoom
from sglang_diffkv.srt.startup import disk_store, host_families, host_memory, host_options
from sglang_diffkv.srt.startup.server_part import ServerPart, Value
from sglang_diffkv.srt.tree.host_tier import HostTier
from sglang_diffkv.srt.tree.prefix_cache import DiffKVPrefixCache


class HostPart(ServerPart):
    """See ``ServerPart``."""

    refused, works, families = host_options.REFUSED, host_options.WORKS, host_families.FAMILIES

    def values_of(self, reports: Mapping[str, Mapping[str, float]]) -> Mapping[str, Value]:
        return host_families.values_of(reports)

    def problems(self, args: Any, config: DiffKVConfig) -> list[str]:
        return host_memory.problems(args, config)

    def decline(self, args: Any) -> None:
        host_options.decline_hierarchical_cache(args)

    def host_room(self, configurator: Any) -> HostRoom | None:
        return host_memory.host_tier(configurator)

    def opened(self, args: Any, model: Any, config: DiffKVConfig) -> disk_store.Store | None:
        return disk_store.opened(args, model, config)

    def source(self, tree: DiffKVPrefixCache, share_min_tokens: int, opened: Any) -> HostTier | None:
        manager, store = tree.manager, opened
        if manager.saved_segments is None:
            return None
        states = manager.saved_slots if tree.supports_mamba() else None
        policy, least = manager.write_policy, share_min_tokens
        host = HostTier(tree, manager.saved_segments, policy=policy, least=least, states=states)
        if store is not None:
            described = (manager.state.dtype, store.model, store.configuration, manager.ranks)
            origin = Origin.of(manager.geometry, *described)
            host.store_in(StoredSegments(manager.saved_segments, store.objects, origin), store.prefetch)
        return host

    def add_findings(self, findings: Findings, args: Any, room: HostRoom | None, pool: int, host: int) -> None:
        if room is not None:
            findings.add(room.guests, room.describe(pool), host, key="memory.evicted_host_bytes")
        if store := disk_store.describe(args):
            findings.add("prefixes on disk", store)
