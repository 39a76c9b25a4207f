"""A plain model of the page manager: for each row and segment, the tier of every token of every head."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sglang_diffkv.mem_pool.page_manager import Segment
from sglang_diffkv.policies.diffkv import DiffKVPolicy
from tests.helpers import Visible
from tests.paper import Caches, algorithm_1, classify_prompt

Parts = list[tuple[Segment, int, int]]


@dataclass
class RowModel:
    """A request. ``tier[layer, head, position]`` is the number of tiers for a token that is gone."""

    tier: np.ndarray
    own_from: int = 0
    chunks: list[int] = field(default_factory=list)
    path: Parts | None = field(default_factory=list)
    """Parts that hold [0, own_from), None if some of it is in no segment."""

    @property
    def length(self) -> int:
        return self.tier.shape[2]

    def grow(self, count: int) -> None:
        """New tokens, all in the high tier."""
        self.tier = np.concatenate([self.tier, np.zeros((*self.tier.shape[:2], count), np.int64)], 2)

    def end_prompt(self, seen: Visible, policy: DiffKVPolicy, tiers: int) -> None:
        """Classify the own tokens by the scores that the pages hold."""
        if self.length <= policy.window:
            return
        mine = seen.pick(seen.own & (seen.tier == 0))
        for layer, head, position, score in zip(mine.layer, mine.head, mine.position, mine.score):
            self.tier[layer, head, position] = classify_prompt(
                score, position, self.length, tiers, policy.alpha_high, policy.alpha_low, policy.window
            )

    def end_decode(self, seen: Visible, policy: DiffKVPolicy, tiers: int) -> None:
        """Algorithm 1 for each head, by the scores that the pages hold."""
        leaving = self.length - 1 - policy.window
        for layer, head in np.ndindex(self.tier.shape[:2]):
            here = seen.at(layer, head)
            here = here.pick(here.own & (here.position <= leaving))
            sides = [
                {int(p): float(s) for p, s in zip(here.position[at], here.score[at])}
                for at in (here.tier == 0, here.tier == 1)
            ]
            candidate = leaving if leaving in sides[0] else None
            after = algorithm_1(
                Caches(*sides, candidate), self.length, policy.alpha_high, policy.alpha_low, tiers
            )
            for position in sides[0].keys() | sides[1].keys():
                kept = 0 if position in after.high else 1 if position in after.low else tiers
                self.tier[layer, head, position] = kept


@dataclass
class SegmentModel:
    """A segment's tokens [lo, hi), and the parts that hold what comes before them."""

    tier: np.ndarray
    path: Parts | None

    def is_reachable(self, live: set[Segment]) -> bool:
        """Whether a row can attach everything before this segment."""
        return self.path is not None and all(s in live and hi <= s.hi for s, _, hi in self.path)
