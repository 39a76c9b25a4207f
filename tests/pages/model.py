"""A plain model of the page manager: for each row and segment, the tier of every token of every head."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from sglang_diffkv.layout.geometry import Segment
from sglang_diffkv.mem_pool.integrity import check_bounds, check_integrity
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.policies.diffkv import DiffKVPolicy
from tests.checks import check_row
from tests.dense import Session
from tests.helpers import Visible, faults, own_pages, tier_map
from tests.pages.paper import Caches, algorithm_1, classify_prompt, step_of_tiers
from tests.policies import between_in

Parts = list[tuple[Segment, int, int]]


def split(parts: Parts, cuts: list[int]) -> Parts:
    """``parts``, each cut in two at a position, as a tree does when its nodes split."""
    halves = [(s, a, b) for (s, lo, hi), cut in zip(parts, cuts) for a, b in ((lo, cut), (cut, hi))]
    return [(segment, lo, hi) for segment, lo, hi in halves if lo < hi]


@dataclass
class RowModel:
    """A request. ``tier[layer, head, position]`` is the number of tiers for a token that is gone."""

    tier: np.ndarray
    kept_from: int = 0  # first token in no segment
    own_from: int = 0  # first token whose page the row may write
    shared: int = 0  # end of the tokens that segments were made of or attached
    chunks: list[int] = field(default_factory=list)
    path: Parts | None = field(default_factory=list)
    """Parts that hold [0, kept_from), None if some of it is in no segment."""

    @property
    def length(self) -> int:
        return self.tier.shape[2]

    def grow(self, count: int) -> None:
        """New tokens, all in the high tier."""
        self.tier = np.concatenate([self.tier, np.zeros((*self.tier.shape[:2], count), np.int64)], 2)

    def end_prompt(self, seen: Visible, policy: DiffKVPolicy, tiers: int) -> None:
        """Classify the own tokens by the scores that the pages hold."""
        mine = seen.pick(seen.own & (seen.tier == 0) & (self.length > policy.window))
        for layer, head, position, score in zip(mine.layer, mine.head, mine.position, mine.score):
            self.tier[layer, head, position] = classify_prompt(
                score, position, self.length, tiers, policy.alpha_high, policy.alpha_low, policy.window, policy.sinks,
                between_in(policy, layer),
            )  # fmt: skip

    def end_decode(self, seen: Visible, policy: DiffKVPolicy, tiers: int) -> None:
        """Algorithm 1 for each head, or its like for more tiers, by the scores that the pages hold."""
        leaving = self.length - 1 - policy.window
        for layer, head in np.ndindex(self.tier.shape[:2]):
            alphas = (policy.alpha_high, *between_in(policy, layer), policy.alpha_low)
            here = seen.at(layer, head)
            here = here.pick(here.own & (here.position <= leaving) & (here.position >= policy.sinks))
            sides = [
                {int(p): float(s) for p, s in zip(here.position[at], here.score[at])}
                for at in (here.tier == number for number in range(max(tiers, 2)))
            ]
            candidate = leaving if leaving in sides[0] else None
            if tiers > 2:
                after = step_of_tiers(sides, candidate, self.length, alphas)
            else:
                caches = algorithm_1(Caches(*sides, candidate), self.length, alphas[0], alphas[-1], tiers)
                after = [caches.high, caches.low]
            for position in set().union(*sides):
                kept = (number for number, side in enumerate(after) if position in side)
                self.tier[layer, head, position] = next(kept, tiers)


@dataclass
class SegmentModel:
    """A segment's tokens [lo, hi), and the parts that hold what comes before them."""

    tier: np.ndarray
    path: Parts | None

    def is_reachable(self, live: set[Segment]) -> bool:
        """Whether a row can attach everything before this segment."""
        return self.path is not None and all(s in live and hi <= s.hi for s, _, hi in self.path)


class Model:
    """Rows and segments of a manager, what can be done with them, and the comparison with the state."""

    def __init__(self, manager: PageManager, policy: DiffKVPolicy, seed: int):
        self.manager, self.state, self.policy = manager, manager.state, policy
        self.tiers = len(manager.fmt.tiers)
        self.session = Session(manager, group=2, spread=3.0, seed=seed)
        self.rows: dict[int, RowModel] = {}
        self.segments: dict[Segment, SegmentModel] = {}
        self.longest = manager.geometry.max_tokens
        self.request_rows = range(1, manager.geometry.num_rows)

    def free_rows(self) -> list[int]:
        return [row for row in self.request_rows if row not in self.rows]

    def reachable(self) -> list[Segment]:
        """Segments that a row can attach."""
        live = set(self.segments)
        return [s for s, m in self.segments.items() if s.hi > s.lo and m.is_reachable(live)]

    def prefilling(self) -> list[int]:
        return [row for row, model in self.rows.items() if model.chunks]

    def decoding(self) -> list[int]:
        return [row for row, m in self.rows.items() if not m.chunks and m.length < self.longest]

    def sharing(self) -> list[int]:
        return [row for row, m in self.rows.items() if m.length > m.kept_from]

    def path_to(self, segment: Segment, end: int) -> Parts:
        """Parts that hold [0, end), the last of them in ``segment``."""
        return [*(self.segments[segment].path or []), (segment, segment.lo, end)]

    def pages_for(self, count: int) -> int:
        """Safe bound of the pages that an extend and the end of a prompt can take."""
        return self.manager.geometry.heads * (-(-count // self.manager.fmt.high.tokens) + max(self.tiers, 2))

    def freeze(self, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages in use, other than those that ``rows`` may write, with their bytes."""
        held = self.state.refcount > 0
        for row in rows:
            held[list(own_pages(self.state, row))] = False
        ids = held.nonzero().squeeze(1)
        return ids, self.state.pages[ids].clone()

    def check(self, frozen: tuple[torch.Tensor, torch.Tensor], touched: list[int]) -> None:
        """All invariants; ``frozen`` pages that are still in use hold the same bytes."""
        check_bounds(self.manager)
        check_integrity(self.manager)
        ids, before = frozen
        still = self.state.refcount[ids] > 0
        assert torch.equal(self.state.pages[ids[still]], before[still]), "a page changed under its readers"
        assert self.manager.rows.lengths() == {row: m.length for row, m in self.rows.items()}
        assert faults(self.manager, [*self.request_rows]) == []
        for row, model in self.rows.items():
            assert np.array_equal(tier_map(self.state, row, model.length), model.tier), f"row {row}"
            if row in touched:
                check_row(self.session, row)
        assert self.manager.segments.cached == set(self.segments)
        for segment, held in self.segments.items():
            found = tier_map(self.state, segment.row, segment.hi)
            assert np.array_equal(found[:, :, segment.lo :], held.tier), segment
            assert (found[:, :, : segment.lo] == self.tiers).all(), segment
