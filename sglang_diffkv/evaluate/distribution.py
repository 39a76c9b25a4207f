"""Next-token distributions as far as a server tells them, its likeliest tokens, and how far two of them are apart.

The Kullback-Leibler divergence of a configuration to the first one, the sum of ``p log(p / q)`` over all tokens, needs
all of both distributions; a server tells the ``k`` likeliest tokens of each. So it is taken between coarser ones: each
token among the ``k`` of both stands for itself, and one bucket has the rest of the probability. Merging tokens never
raises a divergence, so this is a **lower bound** of the whole one, never below 0 (but for rounding) and 0 for equal
distributions. What it cannot see are changes inside the bucket, whose probability says how much that may be.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

REST = 1e-7
"""Least probability of the bucket: the rounding of sums of float32 probabilities."""
TIE = 1e-4
"""Log-probabilities that differ by less are equal. Those of logits in bfloat16 are often exactly equal, and then their
order means nothing."""


def pack(positions: Sequence[Sequence[tuple[float, int]]]) -> str:
    """Likeliest tokens as ``(logprob, token id)``, best first, equally many at each position, as text for a record."""
    values = np.array([[entry[0] for entry in position] for position in positions], "<f4")
    ids = np.array([[entry[1] for entry in position] for position in positions], "<i4")
    head = np.array(values.shape, "<i4")
    return base64.b64encode(zlib.compress(head.tobytes() + ids.tobytes() + values.tobytes())).decode()


def unpack(text: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Token ids and log-probabilities, both [positions, k], of what ``pack`` made."""
    data = zlib.decompress(base64.b64decode(text))
    n, k = np.frombuffer(data, "<i4", 2)
    ids = np.frombuffer(data, "<i4", n * k, 8).reshape(n, k)
    return ids, np.frombuffer(data, "<f4", n * k, 8 + 4 * n * k).reshape(n, k).astype(np.float64)


@dataclass(frozen=True)
class Comparison:
    """Position by position: the divergence in nats, whether the likeliest token is the same (one of them, where several
    tie), and the first distribution's probability outside of the bucket."""

    divergence: np.ndarray[Any, Any]
    agreeing: np.ndarray[Any, Any]
    covered: np.ndarray[Any, Any]


def compare(first: str, other: str) -> Comparison:
    """A configuration's packed distributions against the first one's at the same positions."""
    (ids, p), (other_ids, q) = unpack(first), unpack(other)
    if len(ids) != len(other_ids):
        raise ValueError(f"{len(ids)} and {len(other_ids)} positions are not pairs")
    same = ids[:, :, None] == other_ids[:, None, :]
    shared = same.any(2)
    q_there = np.take_along_axis(q, same.argmax(2), axis=1)
    one = np.where(shared, np.exp(p), 0.0)
    two = np.where(shared, np.exp(q_there), 0.0)
    rest, other_rest = (np.maximum(1.0 - x.sum(1), REST) for x in (one, two))
    inside = (one * np.where(shared, p - q_there, 0.0)).sum(1)
    divergence = inside + rest * np.log(rest / other_rest)
    best = p >= p[:, :1] - TIE
    best_there = q >= q[:, :1] - TIE
    agreeing = (same & best[:, :, None] & best_there[:, None, :]).any((1, 2))
    return Comparison(divergence, agreeing, one.sum(1))
