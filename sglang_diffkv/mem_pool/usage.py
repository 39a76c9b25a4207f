"""What a user sees of the memory: measured bytes of allocated pages against bf16 bytes of the same tokens."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

import torch

from sglang_diffkv.kernels.count_owners.reference import OWNERS
from sglang_diffkv.layout.geometry import Geometry
from sglang_diffkv.layout.page_format import PageFormat
from sglang_diffkv.layout.transfer import to_host
from sglang_diffkv.mem_pool.page_manager import PageManager

COUNT_AT = 1024
"""Ended requests that are counted together at the latest."""

READ_AT = 512
"""Running requests that are counted in a launch."""

REFRESH_SECONDS = 0.5
"""``latest`` measures anew after this time at the earliest."""

RUNNING_SHOWN = 64
"""Running requests that are reported one by one: those with most tokens."""

LONG_REQUEST = 1000
"""Tokens from which a finished request also counts in the totals of long requests."""


@dataclass
class Usage:
    """Totals over rows. ``tokens`` counts sequence tokens; the rest counts (token, layer, KV head) triples.

    Attributes:
        high: in the first tier. low: in all lower tiers. by_tier: in each; empty where nothing was counted.
        pruned: dropped by the policy. out_of_window: dropped by layers with a sliding window, whatever the policy.
        page_bytes: bytes of the pages held. token_bytes: bytes of the slots in use, without empty slots.
        bf16_bytes: what a two-byte cache takes for the same tokens.
        ratio_sum: sum over requests of each one's own token_bytes / bf16_bytes (short requests count as much as
            long ones in its mean).
    """

    requests: int = 0
    tokens: int = 0
    page_bytes: int = 0
    token_bytes: int = 0
    bf16_bytes: int = 0
    high: int = 0
    low: int = 0
    pruned: int = 0
    out_of_window: int = 0
    ratio_sum: float = 0.0
    by_tier: tuple[int, ...] = ()

    def add(self, other: Usage) -> None:
        held = tuple(map(sum, zip_longest(self.by_tier, other.by_tier, fillvalue=0)))
        for name, value in vars(other).items():
            setattr(self, name, held if name == "by_tier" else getattr(self, name) + value)

    @property
    def whole(self) -> int:
        """What all layers and heads would hold with nothing dropped."""
        return self.high + self.low + self.pruned + self.out_of_window

    def summary(self) -> dict[str, float]:
        """Ratios and shares, 0 where nothing is held."""
        whole = self.whole
        return {
            "ratio_pages": self.page_bytes / self.bf16_bytes if self.bf16_bytes else 0.0,
            "ratio_tokens": self.token_bytes / self.bf16_bytes if self.bf16_bytes else 0.0,
            "share_high": self.high / whole if whole else 0.0,
            "share_low": self.low / whole if whole else 0.0,
            "share_pruned": self.pruned / whole if whole else 0.0,
            "share_out_of_window": self.out_of_window / whole if whole else 0.0,
        }


@dataclass(frozen=True)
class Reading:
    """What was held at one moment.

    Attributes:
        by_head: tokens of each tier and pages of each (layer, head), [L][H][T + 1].
        owners: pages of each of ``OWNERS``. free_pages: pages in the ring, by its own counters.
    """

    live: Usage
    by_head: list[list[list[int]]]
    owners: dict[str, int]
    free_pages: int

    def share_by_tier(self, fmt: PageFormat) -> dict[str, float]:
        """Share of the held tokens by the tier's name."""
        whole = self.live.whole
        held = [sum(head[i] for layer in self.by_head for head in layer) for i in range(len(fmt.tiers))]
        return {tier.name: count / whole if whole else 0.0 for tier, count in zip(fmt.tiers, held, strict=True)}


@dataclass(frozen=True)
class _Coming:
    """A reading on its way to the host."""

    values: torch.Tensor  # int64 on the host: by_head, owners, the ring's counters, counts of ended requests
    event: Any  # after which ``values`` stand there, None if they do already
    tokens: int
    requests: int
    ended: list[int]  # lengths of the requests that ended since the reading before

    def arrived(self) -> bool:
        return self.event is None or self.event.query()


class UsageMeter:
    """Measures a manager's pages, in stream order with the forward passes.

    A reading takes launches for every ``READ_AT`` requests and some that grow with nothing, and one transfer; on the
    device its time goes by the tokens of running requests and the pages of the pool.
    """

    def __init__(self, manager: PageManager):
        self.manager = manager
        shape, device = self.ended_shape(manager.geometry), manager.state.device
        self.sliding = [
            layer for layer, attention_span in enumerate(manager.geometry.attention_spans) if attention_span
        ]
        """Layers with a sliding window. They drop what has left it and nothing else."""
        self._sliding = {x: torch.tensor(self.sliding, device=x) for x in ("cpu", torch.device(device).type)}
        self.ended_counts = torch.zeros(shape, dtype=torch.int64, device=device)
        self._finished = Usage()
        self._finished_1k = Usage()
        self._ended: list[int] = []  # lengths of the requests whose counts are the first of ``ended_counts``
        self._latest = Reading(Usage(), [], dict.fromkeys(OWNERS, 0), manager.geometry.num_pages)
        self._coming: list[_Coming] = []
        self._started = -math.inf

    @staticmethod
    def ended_shape(geometry: Geometry) -> tuple[int, int]:
        """Of the counts of ended requests, int64: as ``_summed``."""
        return COUNT_AT, len(geometry.fmt.tiers) + 2

    def _summed(self, by_head: torch.Tensor) -> torch.Tensor:
        """From [..., L, H, T + 1], tokens of each tier and pages: their sums, and the tokens that sliding layers hold,
        [..., T + 2]."""
        sums = by_head.sum((-3, -2))
        if not self.sliding:
            return torch.cat([sums, sums.new_zeros(*sums.shape[:-1], 1)], -1)
        sliding = by_head.index_select(-3, self._sliding[by_head.device.type])[..., :-1].sum((-3, -2, -1))
        return torch.cat([sums, sliding.unsqueeze(-1)], -1)

    def _usage(self, counts: list[int], tokens: int) -> Usage:
        """``counts``: as ``_summed``."""
        fmt, geometry = self.manager.fmt, self.manager.geometry
        *held, pages, in_sliding = counts
        total = tokens * geometry.heads
        out_of_window = tokens * len(self.sliding) * geometry.num_heads - in_sliding
        sizes = [x.token_bytes for x in fmt.layouts]
        return Usage(
            tokens=tokens,
            page_bytes=pages * fmt.page_bytes,
            token_bytes=sum(c * s for c, s in zip(held, sizes, strict=True)),
            bf16_bytes=total * fmt.bf16_token_bytes,
            high=held[0],
            low=sum(held[1:]),
            pruned=total - sum(held) - out_of_window,
            out_of_window=out_of_window,
            by_tier=tuple(held),
        )

    def finish(self, row: int) -> None:
        """Count a request that ends now, with the shared pages it refers to."""
        length = self.manager.rows.length(row)
        self.manager.device.tally(row, length, self.ended_counts, len(self._ended))
        self._ended.append(length)
        if len(self._ended) == COUNT_AT:
            self._take_arrived()
            self._start()

    def _start(self) -> None:
        """Launch a reading of what is held now and of the requests that ended."""
        manager, state = self.manager, self.manager.state
        rows = [(row, manager.rows.shared(row), manager.rows.length(row)) for row in manager.rows]
        segments = manager.segments.counts_of
        with manager.launching():
            by_head = segments.totals()
            for first in range(0, len(rows), READ_AT):
                by_head = by_head + self.manager.device.measure(rows[first : first + READ_AT]).sum(0)
            ended = self.ended_counts[: len(self._ended)].flatten()
            owners = manager.ops.count_owners(manager.to_device(list(manager.rows)))
            parts = [by_head.flatten(), owners, state.counters, ended]
            values, event = to_host(torch.cat(parts))
            self.ended_counts.zero_()
        tokens = segments.tokens + sum(end - start for _, start, end in rows)
        self._coming.append(_Coming(values, event, tokens, len(rows), self._ended))
        self._ended = []
        self._started = time.monotonic()

    def _take_arrived(self) -> None:
        while self._coming and self._coming[0].arrived():
            self._take()

    def _take(self) -> None:
        """Take over the oldest reading on its way; waits for it."""
        coming, geometry = self._coming.pop(0), self.manager.geometry
        if coming.event is not None:
            coming.event.synchronize()
        columns = len(geometry.fmt.tiers) + 1
        sizes = (geometry.heads * columns, len(OWNERS) - 1, 2, len(coming.ended) * (columns + 1))
        by_head, owners, counters, ended = coming.values.split(sizes)
        held = owners.tolist()
        by_head = by_head.view(geometry.num_layers, geometry.num_heads, columns)
        live = self._usage(self._summed(by_head).tolist(), coming.tokens)
        live.requests = coming.requests
        taken, put = counters.tolist()
        self._latest = Reading(
            live,
            by_head.tolist(),
            dict(zip(OWNERS, (*held, geometry.num_pages - sum(held)), strict=True)),
            put - taken,
        )
        self._count_ended(ended.view(-1, columns + 1).tolist(), coming.ended)

    def _count_ended(self, counts: list[list[int]], lengths: list[int]) -> None:
        for row, length in zip(counts, lengths, strict=True):
            usage = self._usage(row, length)
            usage.requests = 1
            usage.ratio_sum = usage.token_bytes / usage.bf16_bytes if usage.bf16_bytes else 0.0
            self._finished.add(usage)
            if length >= LONG_REQUEST:
                self._finished_1k.add(usage)

    def read(self) -> Reading:
        """What is held now. Waits for the device."""
        self._start()
        while self._coming:
            self._take()
        return self._latest

    def latest(self) -> Reading:
        """What was held at an earlier call, without waiting for the device; starts to measure what is held now if that
        is ``REFRESH_SECONDS`` ago. With nothing running, what is held now."""
        if not self.manager.rows:
            return self.read()
        self._take_arrived()
        if not self._coming and time.monotonic() - self._started >= REFRESH_SECONDS:
            self._start()
            self._take_arrived()
        return self._latest

    @property
    def finished(self) -> Usage:
        """Totals of requests that ended, as far as the readings so far tell."""
        return self._finished

    @property
    def finished_1k(self) -> Usage:
        """The same for requests of ``LONG_REQUEST`` tokens and more."""
        return self._finished_1k

    def running(self) -> list[dict[str, float]]:
        """The running requests with most tokens, ``RUNNING_SHOWN`` at most: their tokens, those of a shared prefix, and
        the pages that they refer to, with the ratios of ``Usage.summary``. Waits for the device."""
        manager = self.manager
        rows = sorted(manager.rows, key=lambda row: -manager.rows.length(row))[:RUNNING_SHOWN]
        rows = [row for row in rows if manager.rows.length(row)]
        if not rows:
            return []
        lengths = [manager.rows.length(row) for row in rows]
        with manager.launching():
            parts = [(row, 0, length) for row, length in zip(rows, lengths)]
            counts = self._summed(manager.device.measure(parts)).tolist()
        found = []
        for row, length, held in zip(rows, lengths, counts, strict=True):
            usage = self._usage(held, length)
            ratios = {name: value for name, value in usage.summary().items() if name.startswith("ratio_")}
            tokens = {"tokens": length, "prefix_tokens": manager.rows.shared(row)}
            found.append({**tokens, "pages": usage.page_bytes // manager.fmt.page_bytes, **ratios})
        return found

    def _totals(self, usage: Usage) -> dict[str, object]:
        names = [tier.name for tier in self.manager.fmt.tiers]
        held = dict(zip_longest(names, usage.by_tier, fillvalue=0))
        return {**asdict(usage), "by_tier": held}

    def report(self) -> dict[str, object]:
        """The ``diffkv`` entry of ``/server_info``. Waits for the device.

        Of several ``ranks`` this is the first one's: its ``kv_heads`` of each layer, their pages and their tokens.
        """
        manager, reading = self.manager, self.read()
        live, heads = reading.live, reading.by_head
        by_head = {"high": [[head[0] for head in layer] for layer in heads]}
        if len(manager.fmt.tiers) > 1:
            by_head["low"] = [[sum(head[1:-1]) for head in layer] for layer in heads]
        return {
            **live.summary(),
            "share_by_tier": reading.share_by_tier(manager.fmt),
            "tokens": live.tokens,
            "requests": live.requests,
            "running": self.running(),
            "ranks": manager.ranks.size,
            "kv_heads": manager.geometry.num_heads,
            "pages": manager.geometry.num_pages,
            "pages_used": manager.geometry.num_pages - reading.free_pages,
            "owners": reading.owners,
            "page_bytes": manager.fmt.page_bytes,
            "segments": len(manager.segments.cached),
            "faults": manager.counts.faults,
            "finished": self._totals(self.finished),
            "finished_1k": self._totals(self.finished_1k),
            "by_head": {
                "tokens": live.tokens,
                **by_head,
                "pages": [[head[-1] for head in layer] for layer in heads],
                "sliding_layers": self.sliding,
            },
        }
