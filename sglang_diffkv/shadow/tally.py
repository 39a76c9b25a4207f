"""What the judged requests add up to."""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from sglang_diffkv.shadow.exchange import REASONS, Reason
from sglang_diffkv.shadow.judge import Judged

FORM = 1
"""Of ``Tally.as_json``; it changes with a name or its meaning."""
PROMPTS = (0, 256, 1024, 4096, 16384, 65536)
"""Tokens at which the groups of prompts begin."""
POSITIONS = (0, 1, 16, 64, 256, 1024)
"""Of a reply, the tokens at which its parts begin."""
PARTED = (0, 1, 3, 7, 15, 31, 63, 127, 255, 511, 1023)
"""Upper bounds of the histogram of first tokens on which servers do not agree."""


@dataclass
class Mean:
    """Of a number that each request has one of: its mean, and the standard error of that."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.squares += value * value

    def as_json(self) -> dict[str, float | None]:
        if not self.count:
            return {"mean": None, "error": None}
        mean = self.total / self.count
        if self.count < 2:
            return {"mean": mean, "error": None}
        spread = max(self.squares / self.count - mean * mean, 0.0)
        return {"mean": mean, "error": math.sqrt(spread / (self.count - 1))}


@dataclass
class Tokens:
    """Of some tokens of replies: how many, those on which both servers agree, and the sum of divergences in nats."""

    count: int = 0
    agreeing: int = 0
    divergence: float = 0.0

    def add(self, judged: Judged, start: int = 0, end: int | None = None) -> None:
        """The tokens [start, end) of a reply."""
        agreeing = judged.comparison.agreeing[start:end]
        self.count += len(agreeing)
        self.agreeing += int(agreeing.sum())
        self.divergence += float(judged.comparison.divergence[start:end].sum())

    def as_json(self) -> dict[str, Any]:
        share = self.agreeing / self.count if self.count else None
        mean = self.divergence / self.count if self.count else None
        return {"tokens": self.count, "agreeing": self.agreeing, "share_agreeing": share, "divergence": mean}


class Tally:
    """Counts since the start. Several threads may add.

    Attributes:
        forwarded: requests that went through the proxy. waiting: samples that wait to be judged.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.forwarded = self.sampled = self.waiting = 0
        self._left_out: dict[Reason, int] = dict.fromkeys(REASONS, 0)
        self._all, self._agreement, self._divergence = Tokens(), Mean(), Mean()
        self._by_prompt = [(Mean(), Tokens()) for _ in PROMPTS]
        self._by_position = [Tokens() for _ in POSITIONS]
        self._parted = [0] * (len(PARTED) + 1)
        self._parted_sum = self._prompt_tokens = self._cached_tokens = 0
        self._covered = 0.0

    def forward(self) -> None:
        with self._lock:
            self.forwarded += 1

    def sample(self) -> None:
        """A request is to be looked at."""
        with self._lock:
            self.sampled += 1

    def wait(self, more: int) -> None:
        """So many samples more wait."""
        with self._lock:
            self.waiting += more

    def leave_out(self, reason: Reason) -> None:
        with self._lock:
            self._left_out[reason] += 1

    def add(self, judged: Judged) -> None:
        """A request is judged."""
        found = judged.comparison
        with self._lock:
            self._all.add(judged)
            self._agreement.add(float(found.agreeing.mean()))
            self._divergence.add(float(found.divergence.mean()))
            self._covered += float(found.covered.sum())
            mean, tokens = self._by_prompt[bisect_right(PROMPTS, judged.prompt_tokens) - 1]
            mean.add(float(found.divergence.mean()))
            tokens.add(judged)
            for part, (start, end) in zip(self._by_position, pairwise((*POSITIONS, None)), strict=True):
                part.add(judged, start or 0, end)
            self._prompt_tokens += judged.prompt_tokens
            self._cached_tokens += judged.cached_tokens
            if (at := judged.parted) is not None:
                self._parted[sum(at > bound for bound in PARTED)] += 1
                self._parted_sum += at

    def as_json(self) -> dict[str, Any]:
        """All of it, by stable names."""
        with self._lock:
            judged, parted = self._agreement.count, sum(self._parted)
            prompts = ((low, *found) for low, found in zip(PROMPTS, self._by_prompt))
            positions = zip(POSITIONS, self._by_position)
            return {
                "form": FORM,
                "requests": {
                    "forwarded": self.forwarded,
                    "sampled": self.sampled,
                    "waiting": self.waiting,
                    "judged": judged,
                    "left_out": {name: count for name, count in self._left_out.items() if count},
                },
                "tokens": self._all.as_json(),
                "agreement": self._agreement.as_json(),
                "divergence": self._divergence.as_json(),
                "covered": self._covered / self._all.count if self._all.count else None,
                "prompt_tokens": self._prompt_tokens,
                "share_cached": self._cached_tokens / self._prompt_tokens if self._prompt_tokens else None,
                "parted": {
                    "requests": parted,
                    "share": parted / judged if judged else None,
                    "mean_token": self._parted_sum / parted if parted else None,
                    "up_to": [*PARTED, None],
                    "counts": list(self._parted),
                },
                "by_prompt": [
                    {"from": low, "requests": mean.count, **tokens.as_json()} for low, mean, tokens in prompts
                ],
                "by_position": [{"from": low, **tokens.as_json()} for low, tokens in positions],
            }
