"""The two ways to read a prompt whose layers share a size: scored at the end, and by a mini-prefill.

What they are and what is counted: ``mini_prefill.py``.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from sglang_diffkv.attention.whole import Sight, causal
from sglang_diffkv.calibrate.layers.measure import Rule, score_layers, window_scores
from sglang_diffkv.calibrate.reading import load
from sglang_diffkv.evaluate.endpoint import EvaluationError
from sglang_diffkv.kernels.gather_scores.reference import smooth
from sglang_diffkv.kernels.select.reference import is_above, select_count

QUERIES = 256
"""Of a later chunk that attend at once, which bounds their mask."""

Step = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""Attention of a layer: its number, query, key and value [1, heads, M, D], scaling; gives [1, M, heads, D]."""


@dataclass
class Cache:
    """Keys and values of one prompt by layer, [H, n, D] each, and the bytes of those held, now and at most."""

    tokens: int
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    written: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    held: int = 0
    peak: int = 0

    def _add(self, size: int) -> None:
        self.held += size
        self.peak = max(self.peak, self.held)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [H, M, D] of each; gives all that the layer has so far."""
        if layer not in self.layers:
            heads, _, dim = key.shape
            self.layers[layer] = (key.new_empty(heads, self.tokens, dim), key.new_empty(heads, self.tokens, dim))
        start = self.written[layer]
        end = self.written[layer] = start + key.shape[1]
        for room, new in zip(self.layers[layer], (key, value), strict=True):
            room[:, start:end] = new
            self._add(new.nbytes)
        keys, values = self.layers[layer]
        return keys[:, :end], values[:, :end]

    def cut(self, layer: int, kept: torch.Tensor) -> None:
        """Keep the tokens [H, n] alone."""
        whole = self.layers.pop(layer)
        at = kept.unsqueeze(2).expand(-1, -1, whole[0].shape[2])
        keys, values = (x.gather(1, at) for x in whole)
        self.layers[layer] = (keys, values)
        self._add(keys.nbytes + values.nbytes - sum(x.nbytes for x in whole))

    def check_integrity(self) -> None:
        """What is counted is what there is, once layers are whole or cut."""
        assert self.held == sum(x.nbytes for pair in self.layers.values() for x in pair) <= self.peak


@dataclass(frozen=True)
class Outcome:
    """What is left of a prompt.

    Attributes:
        kept: by layer, [H, n] positions, in order. seconds: of each pass over the prompt, with what follows it.
    """

    kept: list[torch.Tensor]
    cache: Cache
    seconds: tuple[float, ...]


class _Seen(Exception):
    """The last layer has been looked at."""


class Reader:
    """A model whose attention is the step of the pass that runs. Raises EvaluationError if it cannot be loaded."""

    def __init__(self, path: str, dtype: torch.dtype):
        self.step: Step | None = None
        self.model = load(path, self._attend).to(dtype)
        self.layers: int = self.model.config.num_hidden_layers
        self.end = 0

    def _attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """As transformers calls it. Raises EvaluationError for layers that ``xkv`` is refused for."""
        if not Sight.of(kwargs).plain(self.end):
            raise EvaluationError("layers with a sliding window, a cap on logits or attention sinks are not measured")
        assert self.step is not None
        return self.step(module.layer_idx, query, key, value, scaling), None

    def read(self, ids: torch.Tensor, start: int, step: Step) -> None:
        """One pass over ids [M] that begin at position ``start``."""
        self.step, self.end = step, start + len(ids)
        at = torch.arange(start, self.end, device=ids.device)
        try:
            self.model.model(ids.unsqueeze(0), position_ids=at.unsqueeze(0), use_cache=False)
        finally:
            self.step = None  # it holds its pass's cache

    def now(self) -> float:
        """Seconds: of this process's time on a CPU, which others that share it do not stretch, or of the clock, once a
        GPU's work is done."""
        if self.model.device.type == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
    """Causal, in transformers' shapes, of the newest queries [1, Hq, M, D] over keys [1, H, N, D]."""
    count, tokens = query.shape[2], key.shape[2]
    if count == tokens:
        return causal(query, key, value, scaling)
    column, found = torch.arange(tokens, device=key.device), []
    for first in range(0, count, QUERIES):
        part = query[:, :, first : first + QUERIES]
        row = tokens - count + first + torch.arange(part.shape[2], device=key.device)
        seen = column <= row.unsqueeze(1)
        found.append(F.scaled_dot_product_attention(part, key, value, seen, scale=scaling, enable_gqa=True))
    return torch.cat(found, 2).transpose(1, 2).contiguous()


def sizes(scores: dict[int, torch.Tensor], rule: Rule) -> list[int]:
    """By layer, tokens outside the window that each head keeps (Algorithm 1)."""
    return score_layers(torch.stack([scores[layer] for layer in sorted(scores)]), rule).kept.tolist()


def chosen(scores: torch.Tensor, count: int, rule: Rule) -> torch.Tensor:
    """[H, count + window], the positions that heads keep of scores [H, m]: their own ``count`` best, as a server finds
    them (Algorithm 2), and the window."""
    values = smooth(scores.unsqueeze(0), rule.pool, average=True) if rule.pool > 1 else scores.unsqueeze(0)
    heads, tokens = scores.shape
    best = is_above(values, *select_count(values, torch.full((1, heads), count)))[0]
    window = torch.arange(tokens, tokens + rule.window).expand(heads, -1)
    return torch.cat([best.nonzero()[:, 1].view(heads, count), window], 1)


@torch.inference_mode()
def scored_at_end(reader: Reader, ids: torch.Tensor, rule: Rule, chunk: int) -> Outcome:
    """One pass in chunks, with a whole cache that is cut at the end."""
    tokens, began = len(ids), reader.now()
    cache, scores = Cache(tokens), {}
    newest: defaultdict[int, list[torch.Tensor]] = defaultdict(list)

    def step(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
        keys, values = cache.write(layer, key[0], value[0])
        before = max(tokens - rule.window - (keys.shape[1] - query.shape[2]), 0)
        newest[layer].append(query[0, :, before:].clone())
        if keys.shape[1] == tokens:
            scores[layer] = window_scores(torch.cat(newest.pop(layer), 1), keys, scaling, rule.window).cpu()
        return attention(query, keys.unsqueeze(0), values.unsqueeze(0), scaling)

    for start in range(0, tokens, chunk):
        reader.read(ids[start : start + chunk], start, step)
    kept = [chosen(scores[layer], size, rule) for layer, size in enumerate(sizes(scores, rule))]
    for layer, positions in enumerate(kept):
        cache.cut(layer, positions.to(ids.device))
    return Outcome(kept, cache, (reader.now() - began,))


@torch.inference_mode()
def mini_prefill(reader: Reader, ids: torch.Tensor, rule: Rule) -> Outcome:
    """Two passes in one piece: without a cache, and with one that is cut layer by layer."""
    times, scores = [reader.now()], {}

    def look(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
        scores[layer] = window_scores(query[0], key[0], scaling, rule.window).cpu()
        if layer == reader.layers - 1:
            raise _Seen
        return causal(query, key, value, scaling)

    with contextlib.suppress(_Seen):
        reader.read(ids, 0, look)
    given, cache, kept = sizes(scores, rule), Cache(len(ids)), []
    scores.clear()
    times.append(reader.now())

    def keep(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
        keys, values = cache.write(layer, key[0], value[0])
        found = window_scores(query[0], keys, scaling, rule.window).cpu()
        attended = causal(query, keys.unsqueeze(0), values.unsqueeze(0), scaling)
        kept.append(chosen(found, given[layer], rule))
        cache.cut(layer, kept[layer].to(ids.device))
        return attended

    reader.read(ids, 0, keep)
    times.append(reader.now())
    return Outcome(kept, cache, (times[1] - times[0], times[2] - times[1]))
