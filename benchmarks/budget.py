"""A time limit for a benchmark: what would not fit any more is skipped, and the reason is reported."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Budget:
    """Seconds for a whole run. A step is expected to take as long as the longest one of its kind so far.

    Args:
        seconds: None for no limit.
        guesses: expected seconds of a kind of step of which none was seen yet.
    """

    def __init__(
        self,
        seconds: float | None,
        guesses: dict[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.seconds = seconds
        self._clock = clock
        self._start = clock()
        self._longest: dict[str, float] = {}
        self._guesses = dict(guesses or {})

    def elapsed(self) -> float:
        return self._clock() - self._start

    def remaining(self) -> float:
        """Seconds left, infinity without a limit."""
        return math.inf if self.seconds is None else self.seconds - self.elapsed()

    def expected(self, kind: str) -> float:
        """Seconds that a step of this kind is expected to take."""
        return self._longest.get(kind, self._guesses.get(kind, 0.0))

    def refusal(self, *kinds: str) -> str | None:
        """Why steps of these kinds, one after the other, do not fit; None if they do."""
        needed, left = sum(self.expected(kind) for kind in kinds), self.remaining()
        if left > needed:
            return None
        return f"{max(left, 0):.0f} s of {self.seconds:.0f} s left, about {needed:.0f} s needed"

    @contextmanager
    def step(self, kind: str) -> Iterator[None]:
        """Time a step; one that raises is not remembered."""
        start = self._clock()
        yield
        self._longest[kind] = max(self._longest.get(kind, 0.0), self._clock() - start)
