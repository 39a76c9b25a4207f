"""How much of the time running requests are compressed (``zipage``), from a trace of what ran on the GPU.

A compression is known by its own kernels. It lasts from the first to the last of them, what runs in between on that
stream and pauses included, until the stream goes on with a pass of the model or does nothing for ``PAUSE``. A prompt's
own compression at its end counts as well. What runs on another stream meanwhile is told apart.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from benchmarks.serving.client import BenchmarkError

OWN = re.compile(
    r"(sums|scores|gather|smooth|last_alike|charge|top|digit|choose|equal|tie|above"  # scores
    r"|put|spare|compact|return|transfer_pages|count|take|copy)_kernel"  # moves
)
"""Of the kernels that score and move, those that no decode step launches."""
PASS = re.compile(r"gemm|nvjet|cutlass|cublas|attn|split_kernel|append_kernel|norm|act_and_mul", re.IGNORECASE)
"""Of every pass of a model."""
PAUSE = 1000.0
"""Microseconds in which a stream that compresses launches its next kernel."""

Span = tuple[float, float]


@dataclass(frozen=True)
class CompressionTime:
    """Of the time from the first to the last kernel.

    Attributes:
        times: how often it was compressed; several requests one after the other count as once.
        mean_ms: of one time. share: of all time. beside: of all time, while another stream was at work too.
    """

    times: int
    mean_ms: float
    share: float
    beside: float


def compression_time(trace: dict[str, Any]) -> CompressionTime:
    """Of a trace of SGLang's profiler. Raises BenchmarkError for one without kernels."""
    streams: dict[Any, list[tuple[str, float, float]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            start = float(event["ts"])
            streams[event.get("tid")].append((event["name"], start, start + float(event["dur"])))
    if not streams:
        raise BenchmarkError("the profile holds no kernel")
    for kernels in streams.values():
        kernels.sort(key=itemgetter(1))
    spans = {stream: list(_spans(kernels)) for stream, kernels in streams.items()}
    every = [span for found in spans.values() for span in found]
    begin = min(kernels[0][1] for kernels in streams.values())
    total = max(end for kernels in streams.values() for _, _, end in kernels) - begin
    beside = sum(
        _common(found, [(start, end) for other in streams if other != stream for _, start, end in streams[other]])
        for stream, found in spans.items()
    )
    lasted = sum(end - start for start, end in every)
    return CompressionTime(len(every), 1e-3 * lasted / max(len(every), 1), lasted / total, beside / total)


def _spans(kernels: Iterable[tuple[str, float, float]]) -> Iterator[Span]:
    """When one stream compresses."""
    span: Span | None = None
    busy = 0.0
    for name, start, end in kernels:
        own = OWN.fullmatch(name) is not None
        if span is not None and (start > busy + PAUSE or (not own and PASS.search(name))):
            yield span
            span = None
        if own:
            span = (start, end) if span is None else (span[0], max(span[1], end))
        busy = max(busy, end)
    if span is not None:
        yield span


def _common(some: Sequence[Span], others: Iterable[Span]) -> float:
    """How long the one and any of the other last at once. ``some`` do not overlap."""
    merged: list[Span] = []
    for start, end in sorted(others):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    found, place = 0.0, 0
    for start, end in sorted(some):
        while place < len(merged) and merged[place][1] <= start:
            place += 1
        for number in range(place, len(merged)):
            if merged[number][0] >= end:
                break
            found += min(end, merged[number][1]) - max(start, merged[number][0])
    return found
