"""Prometheus families of the plugin beside SGLang's own, for servers with ``--enable-metrics``.

SGLang's collector calls ``log_stats`` with every prefill batch it logs, every ``--decode-log-interval`` decode steps
and, idle, every 30 s. The families are brought up to date then, from a reading that nobody waits for, with its labels.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from sglang_diffkv.mem_pool.segment_object import REASONS
from sglang_diffkv.mem_pool.stored_segments import DAMAGED
from sglang_diffkv.mem_pool.usage import Reading, Usage
from sglang_diffkv.srt.scheduling.allocator import DiffKVAllocator
from sglang_diffkv.srt.scheduling.lifecycle import RequestLifecycle
from sglang_diffkv.srt.tree.retracted import COUNTS

logger = logging.getLogger(__name__)


Value: TypeAlias = "float | Mapping[str, float]"


@dataclass(frozen=True)
class Family:
    """A metric's name, text and own label; ``total``: a counter."""

    name: str
    text: str
    label: str | None = None
    total: bool = False


FAMILIES = (
    Family("diffkv_ratio", "Bytes of the KV pages in use over the bf16 bytes of the tokens that they hold."),
    Family("diffkv_ratio_tokens", "The same without the empty slots of part-filled pages."),
    Family(
        "diffkv_share", "Share of the held tokens by tier, over layers and KV heads; low: in all lower tiers.", "tier"
    ),
    Family("diffkv_share_by_tier", "The same by the names of the tiers.", "tier"),
    Family("diffkv_tokens", "Sequence tokens that running requests and the prefix cache hold, a shared one once."),
    Family("diffkv_pages", "KV pages by who refers to them.", "owner"),
    Family("diffkv_page_bytes", "Bytes of a page."),
    Family("diffkv_segments", "Parts of sequences that the prefix cache holds pages for."),
    Family("diffkv_headroom_pages", "Free pages set aside for the next decode steps of running requests."),
    Family("diffkv_promised_pages", "Free pages set aside for admitted prompts that are still being computed."),
    Family("diffkv_growth_price", "What a generated token is expected to take, in tokens at the high tier."),
    Family("diffkv_faults_total", "Requests that found no free page and ended with an error.", total=True),
    Family("diffkv_finished_requests_total", "Requests that finished.", total=True),
    Family(
        "diffkv_finished_tokens_total",
        "Tokens of finished requests by the tier in which they ended, mean over layers and KV heads; a shared prefix "
        "counts for each of its requests.",
        "tier",
        total=True,
    ),
    Family("diffkv_prompts_total", "Prompts by what was done with them when they had been computed.", "outcome", True),
    Family(
        "diffkv_admissions_total",
        "Requests that had to wait for pages, and prompts admitted that fit only compacted between chunks.",
        "kind",
        total=True,
    ),
    Family(
        "diffkv_retracted_total",
        "Retracted requests by what became of them: kept in host memory, restored from there, computed again.",
        "kind",
        total=True,
    ),
    Family("diffkv_restored_tokens_total", "Tokens of retracted requests that were not computed again.", total=True),
    Family(
        "diffkv_running_requests",
        "Requests that hold pages, by what they asked for: all their tokens in the high tier, or an own window.",
        "fidelity",
    ),
    Family(
        "diffkv_refused_requests_total", "Requests that asked for what this server does not have, refused.", total=True
    ),
    Family("diffkv_host_bytes", "Bytes of host memory that retracted requests hold."),
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


def prompt_outcomes(requests: RequestLifecycle) -> Mapping[str, int]:
    """Prompts so far, by what was done with them when their last chunk had run."""
    return requests.exact.outcomes or requests.manager.prompts.outcomes


def retracted_counts(requests: RequestLifecycle) -> dict[str, int]:
    """Retracted requests so far, by what became of them, and the bytes that the host has of them."""
    return {**dict.fromkeys((*COUNTS, "host_bytes"), 0), **requests.retracted.report()}


def values_of(requests: RequestLifecycle, reading: Reading, finished: Usage) -> dict[str, Value]:
    """The value of each family, or its values by label. Starts no exchange with other ranks and changes nothing that a
    scheduler decides on."""
    ledger, manager = requests.ledger, requests.manager
    live, heads = reading.live.summary(), manager.geometry.heads
    windows = ("out_of_window",) if any(manager.geometry.attention_spans) else ()
    tiers, retracted = ("high", "low", "pruned", *windows), retracted_counts(requests)
    host = defaultdict(int, requests.host.report())
    store: defaultdict[str, float] = defaultdict(int, requests.host.report_of_store())
    return {
        "diffkv_ratio": live["ratio_pages"],
        "diffkv_ratio_tokens": live["ratio_tokens"],
        "diffkv_share": {tier: live[f"share_{tier}"] for tier in tiers},
        "diffkv_share_by_tier": reading.share_by_tier(manager.fmt),
        "diffkv_tokens": reading.live.tokens,
        "diffkv_pages": reading.owners,
        "diffkv_page_bytes": manager.fmt.page_bytes,
        "diffkv_segments": len(manager.segments.cached),
        "diffkv_headroom_pages": manager.counts.headroom(),
        "diffkv_promised_pages": ledger.promised_pages(),
        "diffkv_growth_price": ledger.last_estimate,
        "diffkv_faults_total": manager.counts.faults,
        "diffkv_finished_requests_total": finished.requests,
        "diffkv_finished_tokens_total": {tier: getattr(finished, tier) / heads for tier in tiers},
        "diffkv_prompts_total": {name.replace(" ", "_"): n for name, n in prompt_outcomes(requests).items()},
        "diffkv_admissions_total": {"waited": ledger.waited, "compacted_between_chunks": ledger.compacted},
        "diffkv_retracted_total": {kind: retracted[kind] for kind in COUNTS if kind != "tokens_restored"},
        "diffkv_restored_tokens_total": retracted["tokens_restored"],
        "diffkv_running_requests": requests.fidelity.counts(),
        "diffkv_refused_requests_total": requests.fidelity.refused,
        "diffkv_host_bytes": retracted["host_bytes"],
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


class Metrics:
    """The families of one scheduler.

    Args:
        collector: SGLang's, whose labels and kinds of metric are taken over.
    """

    def __init__(self, collector: Any):
        # As in SGLang: the client library must not be imported before PROMETHEUS_MULTIPROC_DIR is set.
        from prometheus_client import Counter, Gauge

        self.labels = dict(collector.labels)
        self.seen: Reading | None = None
        self._told: dict[tuple[str, str | None], float] = {}  # of counters
        self._families: dict[str, Any] = {}
        for family in FAMILIES:
            names = [*self.labels, *([family.label] if family.label else [])]
            if family.total:
                kind = collector._counter_cls or Counter
                self._families[family.name] = kind(name=family.name, documentation=family.text, labelnames=names)
            else:
                kind = collector._gauge_cls or Gauge
                self._families[family.name] = kind(
                    name=family.name, documentation=family.text, labelnames=names, multiprocess_mode="mostrecent"
                )

    def update(self, values: Mapping[str, Value]) -> None:
        """Bring all families up to date. Counters are given as totals so far."""
        for family in FAMILIES:
            value = values[family.name]
            for label, number in value.items() if isinstance(value, Mapping) else [(None, value)]:
                labels = self.labels if family.label is None else {**self.labels, family.label: label}
                child = self._families[family.name].labels(**labels)
                if family.total:
                    told = self._told.get((family.name, label), 0)
                    child.inc(max(number - told, 0))
                    self._told[family.name, label] = number
                else:
                    child.set(number)


def update(collector: Any, allocator: DiffKVAllocator) -> None:
    """Bring the families of SGLang's ``collector`` up to date if there is a new reading. Waits for no running pass. An
    error is logged once, and ends them."""
    if not hasattr(collector, "diffkv"):
        collector.diffkv = None
        try:
            collector.diffkv = Metrics(collector)
        except Exception:
            logger.exception("DiffKV: no metrics of the plugin will be exported")
    if collector.diffkv is None:
        return
    try:
        meter = allocator.get_kvcache().usage
        reading = meter.latest()
        if reading is not collector.diffkv.seen:
            collector.diffkv.update(values_of(allocator.requests, reading, meter.finished))
            collector.diffkv.seen = reading
    except Exception:
        logger.exception("DiffKV: metrics of the plugin are not exported any more")
        collector.diffkv = None
