"""A forward pass on the host's side: planned when SGLang prepares its batch, launched when its kernels are.

The order shows in the type: only a launched pass can end prompts, and the counts take a planned one for something that
the device has not seen yet.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PlannedStep:
    """The rows of the pass that runs next.

    Attributes:
        number: passes planned before it, and it. new_tokens, start: of each of ``rows``.
        pages: that its prompts take at most.
        prompts: of each of ``rows``, where its prompt ends; empty for a decode step.
        decoding: how many of ``rows``, the last ones, are past their prompts and get one token in a pass over those of
            others (mixed chunks); 0 in all other passes. ``prompts`` does not have them.
        ending: rows whose prompt ends with it. compacting: rows that are compacted behind it, though more of their
            prompt comes.
    """

    number: int
    rows: list[int]
    new_tokens: list[int]
    start: list[int]
    pages: int
    prompts: list[int] = field(default_factory=list)
    ending: Collection[int] = ()
    compacting: Collection[int] = ()
    decoding: int = 0

    def launched(self) -> LaunchedStep:
        """The same pass, with its kernels launched next on the stream of the forward passes."""
        return LaunchedStep(**vars(self))


@dataclass(frozen=True)
class LaunchedStep(PlannedStep):
    """A planned pass whose kernels follow all that are launched so far."""
