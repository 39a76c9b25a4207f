"""DiffKV's compression policy as the paper states it (section 4 and Algorithm 1), one token at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def threshold(alpha: float, count: int) -> np.float32:
    """``alpha / count`` in the precision of the scores."""
    return np.float32(alpha) / np.float32(count)


def classify_prompt(
    score: float, position: int, length: int, num_tiers: int, alpha_high: float, alpha_low: float, window: int,
    sinks: int = 0, between: Sequence[float] = (),
) -> int:  # fmt: skip
    """Tier of the token at 0-based ``position``, the paper's ``position + 1``; ``num_tiers`` prunes it. The first
    ``sinks`` tokens, which the paper does not know, stay; nor does it know more than two tiers, which have thresholds
    ``between``."""
    if position >= length - window or position < sinks:
        return 0
    mean = np.float32(1) / np.float32(position + 1)
    if num_tiers == 1:
        return 0 if score >= np.float32(alpha_low) * mean else 1
    if score >= np.float32(alpha_high) * mean:
        return 0
    for tier, alpha in enumerate((*between, alpha_low), 1):
        if score >= np.float32(alpha) * mean:
            return tier
    return num_tiers


@dataclass
class Caches:
    """KV_h, with the candidate in it, and KV_l of one head: token to score."""

    high: dict[int, float]
    low: dict[int, float]
    candidate: int | None


def algorithm_1(cache: Caches, length: int, alpha_high: float, alpha_low: float, num_tiers: int = 2) -> Caches:
    """The caches after one generation step. With one tier both thresholds are the lower one."""
    high, low = dict(cache.high), dict(cache.low)
    if cache.candidate is None:
        return Caches(high, low, None)
    at_high = threshold(alpha_high if num_tiers > 1 else alpha_low, length)
    at_low = threshold(alpha_low, length)
    score = high.pop(cache.candidate)
    if score >= at_high:
        high[cache.candidate] = score
        victim = min(high, key=high.__getitem__)
        if at_low <= high[victim] < at_high:
            low[_new_key(low, victim)] = high.pop(victim)
        elif high[victim] < at_low:
            del high[victim]
    elif score >= at_low:
        low[_new_key(low, cache.candidate)] = score
        victim = min(low, key=low.__getitem__)
        if low[victim] < at_low:
            del low[victim]
    return Caches(high, low, None)


def step_of_tiers(
    tiers: Sequence[dict[int, float]], candidate: int | None, length: int, alphas: Sequence[float]
) -> list[dict[int, float]]:
    """One generation step with more than two tiers, which is no part of the paper: token to score of each tier."""
    held = [dict(tier) for tier in tiers]
    if candidate is None:
        return held
    limits = [threshold(alpha, length) for alpha in alphas]

    def named(score: float) -> int:
        return next((tier for tier, limit in enumerate(limits) if score >= limit), len(limits))

    stays = named(held[0][candidate]) == 0
    leaving = min(held[0], key=held[0].__getitem__) if stays else candidate
    score = held[0].pop(leaving)
    to = named(score)
    if to < len(limits):
        if not stays and held[to]:
            least = min(held[to], key=held[to].__getitem__)
            if held[to][least] < limits[-1]:
                del held[to][least]
        held[to][leaving] = score
    return held


def _new_key(cache: dict[int, float], wanted: int) -> int:
    """``wanted``, or a key that is free: keys of the two caches need not be from one numbering."""
    return wanted if wanted not in cache else max(cache) + 1
