"""What it would mean for a server to read prompts as XKV's mini-prefill does, computed from shapes alone.

Each request holds the share ``KEEP`` of its prompt once that is read; replies, windows and pages' free slots are left
out. A server with chunked prefill reads one prompt at a time where there is room for no more. Beside n - 1 requests it
holds, until the prompt has been scored, all of that prompt's keys and values, or with mini-prefill those of one layer
and the share of the others. What a pass holds beside these comes from the same GPU: a prompt in one piece has its
activations at once, and one whose chunks all go through a layer before the next layer has its hidden states, where
chunks that go through all layers one after the other leave nothing behind but the cache. ``mini_prefill.py`` measures
what a single prompt takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.serving.geometries import PRESETS, Preset
from sglang_diffkv.evaluate.report import markdown

ELEMENT = 2
"""Bytes of a bf16 number."""
GIB = 1 << 30
POOL = 8 * GIB
KEEP = 0.38
CHUNK = 8192
PROMPTS = (4096, 32768)
PROMPT_SHARE = 0.5
"""Of the time that a server spends on prompts, about what it was in the load ``mixed``."""
SAID = (
    f"Computed, not measured: Llama-3-8B's shape in bf16, {POOL / GIB:.0f} GiB, {KEEP:.0%} kept, replies left out, "
    f"passes of {CHUNK:,} tokens. Beside them: what a pass holds more than one of that size, taken off the "
    f"{POOL / GIB:.0f} GiB. Throughput: to the first line's, at best, if prompts take {PROMPT_SHARE:.0%} of the time "
    "there, twice as long with two passes, and the rest shrinks as more requests run."
)


def token_bytes(shape: Preset) -> int:
    """Keys and values of a token in all layers."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * ELEMENT


@dataclass(frozen=True)
class Way:
    """How a prompt is read.

    Attributes:
        passes: over the prompt. reading: share of a prompt's keys and values that is held while it is read. beside:
            bytes that a pass holds for a token beyond the first ``CHUNK``.
    """

    name: str
    passes: int
    reading: float
    beside: int


def ways(shape: Preset, keep: float) -> tuple[Way, ...]:
    """All that are compared. In a layer's MLP a token has residual and hidden state, gate, up and their product;
    between layers residual and hidden state."""
    reading = keep + (1 - keep) / shape.layers
    hidden, mlp = 2 * shape.hidden * ELEMENT, 3 * shape.intermediate * ELEMENT
    return (
        Way("scored at the end", 1, 1.0, 0),
        Way("mini-prefill, keys and values alone", 2, reading, 0),
        Way("mini-prefill in one piece", 2, reading, hidden + mlp),
        Way("mini-prefill, all chunks through a layer at a time", 2, reading, hidden),
    )


@dataclass(frozen=True)
class Served:
    """One way to read prompts of one length.

    Attributes:
        reading_bytes: keys and values of a prompt while it is read, at most. beside_bytes: what a pass holds more than
            one of ``CHUNK`` tokens. requests: that run at most, the one that is read included. longest: tokens of a
            prompt that can be read alone. throughput: to that of the first way, at best; 0 where nothing can run.
    """

    way: str
    prompt: int
    reading_bytes: float
    beside_bytes: int
    requests: int
    longest: int
    throughput: float


def served(prompt: int, shape: Preset, pool: int, keep: float, share: float = PROMPT_SHARE) -> list[Served]:
    """All ways in a pool of so many bytes; ``share`` of the first one's time are prompts."""
    whole, found = prompt * token_bytes(shape), list[Served]()
    for way in ways(shape, keep):
        reading, beside = way.reading * whole, max(prompt - CHUNK, 0) * way.beside
        room = pool - reading - beside
        requests = int(room / (keep * whole)) + 1 if room >= 0 else 0
        longest = int(pool / (way.reading * token_bytes(shape)))
        if longest > CHUNK:
            longest = int((pool + CHUNK * way.beside) / (way.reading * token_bytes(shape) + way.beside))
        first = found[0].requests if found else requests
        speed = 1 / (way.passes * share + (1 - share) * first / requests) if requests else 0.0
        found.append(Served(way.name, prompt, reading, beside, requests, longest, speed))
    return found


def rows() -> list[Served]:
    """Of Llama-3-8B's shape."""
    return [x for prompt in PROMPTS for x in served(prompt, PRESETS["llama3-8b"], POOL, KEEP)]


def table(found: Sequence[Served]) -> str:
    """As Markdown."""
    header = ["prompt tokens", "way", "keys and values while one is read, GiB", "beside them, GiB", "requests at most"]
    header += ["longest prompt alone", "throughput"]
    lines = []
    for x in found:
        line = [f"{x.prompt:,}", x.way, f"{x.reading_bytes / GIB:.2f}", f"{x.beside_bytes / GIB:.2f}"]
        lines.append([*line, str(x.requests), f"{x.longest:,}", f"{x.throughput:.2f}"])
    return markdown(header, lines)
