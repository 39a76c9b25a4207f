"""Sizes of a page manager, and the segments that the prefix cache keeps in it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sglang_diffkv.layout.page_format import PageFormat

TABLE_BLOCK = 8
"""Columns of a page-table block."""


LEAST_KV_SLOTS = 4
"""KV slots for each token of nominal capacity, at least."""

PRUNING_KV_SLOTS = 16
"""The same where tokens are pruned: those keep their KV slots while their request runs or the prefix cache has them."""

MOST_KV_SLOTS = 256
"""The same at most: each takes 8 bytes, and one whose token was pruned nothing else."""


def kv_slots_for(
    capacity: int,
    fmt: PageFormat,
    *,
    prunes: bool,
    kept_share: float | None = None,
    in_layers: float = 1.0,
    owning: bool = False,
) -> int:
    """KV slots of a pool of ``capacity`` high-tier tokens: twice what fits if all are in the lowest tier. Where tokens
    are pruned, it is what fits of sequences of which ``kept_share`` stays, if that is known. Where running requests
    hold a budget that is their share of the longest sequence. ``in_layers``: share of the longest sequence that layers
    hold on average, where some have a sliding window. ``owning``: each KV slot has a place in a draft model's cache
    too, so there are no more than fit if all are in the lowest tier.

    A KV slot is SGLang's index of a token. It names the token and owns no memory here, where bytes are pages. KV slots
    may run out before pages do all the same, where most tokens are pruned: then the prefix cache gives some back, and
    SGLang retracts requests, as it does for want of pages.
    """
    shrink = -(-fmt.low.tokens // fmt.high.tokens)
    if owning:
        return capacity * shrink
    if in_layers < 1:
        shrink = min(math.ceil(shrink / in_layers), MOST_KV_SLOTS // 2)
    most = LEAST_KV_SLOTS
    if prunes:
        fitting = math.ceil(min(shrink / kept_share, MOST_KV_SLOTS)) if kept_share else 0
        most = max(PRUNING_KV_SLOTS, min(fitting, MOST_KV_SLOTS))
    return capacity * max(most, 2 * shrink)


@dataclass(eq=False)
class Segment:
    """Pages that the prefix cache holds for positions [lo, hi) of some sequence.

    ``pages`` is 0 and ``held`` empty until the manager knows them. ``held``: tokens of each tier, over all
    (layer, head) pairs. ``nodes`` counts the tree nodes that refer to the segment
    (splitting a node adds one and moves no byte). ``as_computed``: every token is there, in the high tier and in
    order, and the first page of each head begins with position ``first``.
    """

    row: int
    lo: int
    hi: int
    pages: int = 0
    nodes: int = field(default=1)
    as_computed: bool = False
    first: int = 0
    held: tuple[int, ...] = ()
    end: int = 0
    """Tokens of the sequence when the segment was made of it: so much is known to have left sliding layers' windows."""
    unsettled: tuple[tuple[int, int], ...] | None = None
    """Positions [lo, hi) of turns that are compressed once they are earlier ones (``Policy.of_turns``); None: all of it
    is one, if the policy has such a rule."""
    reads: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    """Entries of each tier, at most, that a row takes to read a range [lo, hi), where the device has counted them."""

    @property
    def settled(self) -> bool:
        """Whether its turns have been compressed, or there was nothing to compress in them."""
        return self.unsettled == ()


Path = list[tuple[Segment, int, int]]
"""Consecutive parts of a sequence from position 0: (segment, first position, position after the last). Neighbours are
of different segments: what a path takes depends on the pages that it reads, not on how often the tree was split."""


def path_end(path: Path) -> int:
    """Position after a path's last token."""
    return path[-1][2] if path else 0


def rows_of(path: Path) -> list[tuple[int, int, int]]:
    """A path's parts by the rows of their segments."""
    return [(segment.row, lo, hi) for segment, lo, hi in path]


def split_path(path: Path, at: int) -> tuple[Path, Path]:
    """The parts of a path before position ``at``, and those from there on."""
    before = [(segment, lo, min(hi, at)) for segment, lo, hi in path if lo < at]
    return before, [(segment, max(lo, at), hi) for segment, lo, hi in path if hi > at]


@dataclass(frozen=True)
class Geometry:
    """Sizes of a page manager.

    Attributes:
        max_tokens: longest sequence of a request; the page format holds positions of one so long.
        attention_spans: of each layer, how many tokens a query may see, itself included, 0 for all; empty if all see
            all.
        num_rows: rows of requests, row 0 (padding) included.
        num_segments: rows of tree segments.
        num_pages: pages in the ring.
    """

    fmt: PageFormat
    num_layers: int
    num_heads: int
    num_pages: int
    num_rows: int
    num_segments: int
    max_tokens: int
    attention_spans: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.max_tokens <= self.fmt.max_tokens, (
            f"positions of {self.fmt.position_bytes} bytes are too short for sequences of {self.max_tokens} tokens"
        )

    @property
    def heads(self) -> int:
        """(layer, head) pairs: each has pages of its own."""
        return self.num_layers * self.num_heads

    def most_pages(self, tokens: int) -> int:
        """Upper bound of the pages of ``tokens`` in pages of their own: the ends of all tiers may be part-filled."""
        return self.heads * (-(-tokens // self.fmt.high.tokens) + max(len(self.fmt.tiers) - 1, 1))

    @property
    def max_blocks(self) -> int:
        """Table blocks of a row: twice what its longest sequence needs, for the part-filled pages of segments.

        With more than two tiers, of two tables of one size: that of tiers 0 and 2 needs more than that of 1 and 3."""
        layouts = self.fmt.layouts
        tables = 1 if len(layouts) <= 2 else 2
        first = layouts[0], layouts[-1 if tables == 1 else 2]
        return tables * 2 * sum(-(-self.max_tokens // (x.tokens * TABLE_BLOCK)) + 1 for x in first)

    @property
    def num_blocks(self) -> int:
        """Table blocks: the entries of all pages twice over, and an end of each tier, two at least, for rows that
        are in use together, which the pages they share take as well. Where they run out, prefixes are evicted, then
        requests retracted."""
        entries = -(-self.num_pages // self.heads)
        rows = min(self.num_rows, 512) + min(self.num_segments, 512)
        return 1 + 2 * -(-entries // TABLE_BLOCK) + max(len(self.fmt.tiers), 2) * min(rows, 2 * entries)

    @property
    def scored_tokens(self) -> int:
        """Shared tokens whose scores running prompts may keep at once, for exact prefixes."""
        return self.num_pages // self.heads * self.fmt.high.tokens // 8
