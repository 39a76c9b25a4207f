"""Prometheus families of the plugin beside SGLang's own, for servers with ``--enable-metrics``.

SGLang's collector calls ``log_stats`` with every prefill batch it logs, every ``--decode-log-interval`` decode steps
and, idle, every 30 s. The families are brought up to date then, from a reading that nobody waits for, with its labels.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from sglang_diffkv.mem_pool.usage import Reading, Usage
from sglang_diffkv.srt.scheduling.allocator import DiffKVAllocator
from sglang_diffkv.srt.scheduling.lifecycle import RequestLifecycle
from sglang_diffkv.srt.startup.optional_parts import PARTS
from sglang_diffkv.srt.startup.server_part import Family, Value
from sglang_diffkv.srt.tree.retracted import COUNTS

logger = logging.getLogger(__name__)

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
    Family("diffkv_growth_price", "What a token behind the window is expected to take, in tokens at the high tier."),
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
    *(family for part in PARTS for family in part.families),
)


def prompt_outcomes(requests: RequestLifecycle) -> Mapping[str, int]:
    """Prompts so far, by what was done with them when their last chunk had run."""
    return requests.exact.outcomes or requests.manager.prompts.outcomes


def retracted_counts(reports: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Retracted requests so far, by what became of them, and the bytes that the host has of them."""
    return {**dict.fromkeys((*COUNTS, "host_bytes"), 0), **reports.get("retracted", {})}


def values_of(requests: RequestLifecycle, reading: Reading, finished: Usage) -> dict[str, Value]:
    """The value of each family, or its values by label. Starts no exchange with other ranks and changes nothing that a
    scheduler decides on."""
    ledger, manager, reports = requests.ledger, requests.manager, requests.reports()
    live, heads = reading.live.summary(), manager.geometry.heads
    windows = ("out_of_window",) if any(manager.geometry.attention_spans) else ()
    tiers, retracted = ("high", "low", "pruned", *windows), retracted_counts(reports)
    found: dict[str, Value] = {
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
    }
    for part in PARTS:
        found.update(part.values_of(reports))
    return found


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
