"""Which low tier each layer of a model takes, so that the loss stays within a limit in the fewest bytes.

Layers differ by two orders of magnitude in what they lose at equal bits, and losses of layers add up. A bit less makes
the square of an error four times as large. So what a layer loses in any tier follows from two measurements: of few bits
for keys alone, and of few bits for values alone.

Others give layers bits of their own by other rules: Tao et al., "AsymKV: Enabling 1-Bit Quantization of KV Cache with
Layer-Wise Asymmetric Quantization Configurations", 2024. Li et al., "KVTuner: Sensitivity-Aware Layer-Wise
Mixed-Precision KV Cache Quantization", ICML 2025.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from sglang_diffkv.ladder import ALPHA_HIGH, pair
from sglang_diffkv.layout.page_format import MOST_TIERS, SHORT_POSITION_BYTES, Tier

KEYS, VALUES = Tier(3, 8), Tier(8, 2)
"""Tiers that tell what a layer loses by its keys, and by its values: 8 bits lose next to nothing beside them."""
Parts = tuple[float, float]
"""Nats a token: of a new prompt behind a cached one, and of a reply."""


@dataclass(frozen=True)
class LayerLoss:
    """What a layer loses while all others are as computed: with its low tier in ``KEYS``, and in ``VALUES``."""

    keys: Parts
    values: Parts

    def at(self, tier: Tier) -> Parts:
        """In another low tier."""
        by_keys, by_values = 4.0 ** (KEYS.k_bits - tier.k_bits), 4.0 ** (VALUES.v_bits - tier.v_bits)
        prompt, reply = (max(k, 0.0) * by_keys + max(v, 0.0) * by_values for k, v in zip(self.keys, self.values))
        return prompt, reply


@dataclass(frozen=True)
class Given:
    """What layers are given.

    Attributes:
        tiers: low ones, the most bytes first. of: each layer's, its place among them.
        loss: that follows from what layers lose alone. size: bytes of a token's low tier, mean over layers.
    """

    tiers: tuple[Tier, ...]
    of: tuple[int, ...]
    loss: Parts
    size: float

    def fields(self, high: Tier) -> dict[str, Any]:
        """Of a configuration: as of ``pair``, with the tiers that are used, and thresholds by layer that say which."""
        used = sorted(set(self.of))
        between = []
        for place in used[:-1]:  # at or below this place of theirs, tokens get no further
            between.append([0.0 if tier <= place else ALPHA_HIGH for tier in self.of])
        names = [self.tiers[place].name for place in used]
        found = pair(names[-1], high.name)
        if between:
            found["policy"]["alpha_between"] = between
        return {**found, "tiers": [high.name, *names]}


def low_bytes(tier: Tier, head_dim: int) -> int:
    """Bytes of a token of one KV head in a low tier, which has no scores."""
    return tier.token_bytes(head_dim, head_dim, 0, SHORT_POSITION_BYTES)


def fewest_bytes(
    layers: Sequence[LayerLoss], shares: Sequence[float], candidates: Sequence[Tier], head_dim: int, limit: Parts
) -> Given | None:
    """The fewest bytes that hold a limit, of all sets of candidates that a server can have beside its high tier. None
    if none holds it.

    Args:
        shares: of a long sequence's tokens that each layer holds: less than 1 for a sliding window.
    """
    found = (_upgraded(layers, shares, tiers, head_dim, limit) for tiers in _sets(candidates, head_dim))
    return min((x for x in found if x is not None), key=lambda x: x.size, default=None)


def _sets(candidates: Sequence[Tier], head_dim: int) -> Iterator[tuple[Tier, ...]]:
    """Of up to ``MOST_TIERS - 1``, the most bytes first; none has two of one size."""
    ordered = sorted(candidates, key=lambda tier: low_bytes(tier, head_dim), reverse=True)
    for count in range(1, MOST_TIERS):
        for tiers in combinations(ordered, count):
            if len({low_bytes(x, head_dim) for x in tiers}) == count:
                yield tiers


def _upgraded(
    layers: Sequence[LayerLoss], shares: Sequence[float], tiers: tuple[Tier, ...], head_dim: int, limit: Parts
) -> Given | None:
    """From the fewest bytes upward, each time by what takes most of the excess for a byte; then back where more was
    taken than needed."""
    losses = [[layer.at(tier) for tier in tiers] for layer in layers]
    sizes = [low_bytes(tier, head_dim) for tier in tiers]
    of = [len(tiers) - 1] * len(layers)

    def total() -> Parts:
        prompt, reply = (sum(losses[x][at][part] for x, at in enumerate(of)) for part in range(2))
        return prompt, reply

    def held() -> bool:
        return all(lost <= most for lost, most in zip(total(), limit))

    while not held():
        over = [part for part, (lost, most) in enumerate(zip(total(), limit)) if lost > most]
        steps = [(layer, to) for layer, at in enumerate(of) for to in range(at)]

        def gain(step: tuple[int, int], over: list[int] = over) -> float:
            layer, to = step
            less = sum((losses[layer][of[layer]][x] - losses[layer][to][x]) / max(limit[x], 1e-30) for x in over)
            return less / (shares[layer] * (sizes[to] - sizes[of[layer]]))

        if not steps:
            return None
        layer, to = max(steps, key=gain)
        of[layer] = to
    for layer in sorted(range(len(of)), key=lambda x: sum(losses[x][of[x]])):
        while of[layer] < len(tiers) - 1:
            of[layer] += 1
            if not held():
                of[layer] -= 1
                break
    size = sum(share * sizes[at] for share, at in zip(shares, of)) / sum(shares)
    return Given(tiers, tuple(of), total(), size)
