"""Small segments of a path become one segment: they waste less memory, and a row has room for them.

Each segment ends in part-filled pages and takes table entries of its own. Short turns of a chat would fill the pool
with nearly empty pages. Hundreds of turns, or branches that each read a little of a long segment, would take more
entries than a row has. So the tokens of such segments are copied as they are to dense pages, and the nodes name those
from then on. Rows that read the old pages keep them.

- ``tidy`` saves pages. It looks at the path of each request that has ended, and joins segments that nobody reads. An
  end of such a segment that the path leaves out is evicted first if it is shorter than a page.
- ``join`` saves table entries. It looks at a path that a request is about to read.

A request's newest tokens are in the high tier when it ends. If its conversation goes on, they lie behind the window one
day, but no request owns them. So the policy may have a rule for earlier turns (``Policy.of_turns``): copies of them are
compressed by it. They *settle*, once, each turn by itself. ``tidy`` does that, and ``settle`` when a prompt has come.
What is not counted yet waits for the next of these, as what has just come back from host memory.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from sglang_diffkv.layout.geometry import Path, Segment, path_end
from sglang_diffkv.mem_pool.segments import MOST_READS
from sglang_diffkv.mem_pool.table_space import Entries, blocks_of
from sglang_diffkv.srt.tree.parts import MOST_PARTS, PathRule
from sglang_diffkv.srt.tree.prefix_cache import DiffKVPrefixCache
from sglang_diffkv.srt.tree.private_space import is_private

SEGMENT_ROWS = 2
"""Rows that joining takes before it returns others: one for the copy, one for the rest of a segment that is cut."""

DENSE_TOKENS = 512
"""A part of at least this many tokens at an end of a path stays as it is, if it takes few more entries than it must."""


WASTE = 1.25
"""Neighbouring segments are joined where they hold more than this many times the pages that their tokens need. So the
pages that a path wastes are bounded, and so is the work: each joining copies at most four times the pages that it
returns."""

LEAST_WASTE, ROOMY_WASTE = 1, 4
"""And where they hold more than so many pages of each layer and head too much: of short turns not every one is copied
at once. The second number is for a pool with room, where pages are worth less than the time of a copy. Once that has
none any more, the paths of ``MOST_SPARED`` requests that ended last are looked at again, a few before each step."""

MOST_SPARED = 1024

ROOM = 1 / 4
"""A pool has room if this part of its pages is free, and of all else that small segments take: rows and table blocks.
"""

PATHS_A_STEP, SHARE_A_STEP = 2, 8
"""So many paths are looked at before a step is scheduled, or one in so many of those that wait. Where many requests end
at once, the next ones do not wait for all of them, and where many end all the time, few paths wait."""

MOST_POSTPONED = 64
"""While a request waits to begin, and the pool has room, no path is looked at, unless as many have come together. Steps
of running requests leave the host time for them; a pass over new prompts waits for the host."""

KEPT_ENDS = 2
"""Segments at the end of a path that stay as they are where layers slide: sliding layers hold the end of each segment,
and a match can end there. These are the newest prompt and its reply. The first segment stays too, with which other
prompts may begin, and so does every place where another path branches off."""


class PathJoiner(PathRule):
    """Joins parts of paths of a prefix cache."""

    def __init__(self, tree: DiffKVPrefixCache):
        self.tree, self.manager = tree, tree.manager
        self.joined = self.settled = 0
        """Paths joined, and earlier turns compressed, so far."""
        self._in_vain: set[Segment] = set()
        """Segments that a prompt could have settled, and that were found to return too little. They are looked at again
        when a request ends."""
        self.ended: list[Any] = []
        """Nodes where requests ended whose paths were not looked at since."""
        self._queued = False
        """Whether a request waits to begin."""
        self._least_waste = LEAST_WASTE
        self._spared: dict[Any, None] = {}
        """Nodes where requests ended whose paths were looked at while the pool had room, the last ones last."""

    # Events

    def queue_seen(self, waiting: Iterable[Any]) -> None:
        self._queued = any(True for _ in waiting)

    def scheduling_begins(self) -> None:
        """Join what requests that have ended left in small segments."""
        if not self._queued or len(self.ended) >= MOST_POSTPONED or not self._is_roomy():
            self.tidy(max(PATHS_A_STEP, len(self.ended) // SHARE_A_STEP))

    def published(self, req: Any, row: int, leaf: Any, length: int, *, ended: bool) -> None:
        """``tidy`` looks at the path of a request that has ended."""
        if ended:
            self.look_at(leaf)

    def row_released(self) -> None:
        """The replies that joined from the row move to dense pages, where there is room for them."""
        segments = self.manager.segments
        for segment in segments.take_fragmented():
            if self.tree.make_pages(segments.packed_pages(segment)) and segment in segments.cached:
                self.tree.uncount(segment)
                if not segments.pack(segment):
                    self.manager.counts.count_later(segment)

    def left(self, req: Any, row: int) -> None:
        """``tidy`` looks at its path."""
        self.look_at(req.last_node)

    def reset(self) -> None:
        self.ended.clear()
        self._spared.clear()
        self._in_vain.clear()

    # Joining

    def look_at(self, node: Any) -> None:
        """A request has ended, whose path in the tree goes to ``node``: ``tidy`` looks at it."""
        if getattr(node, "segment", None) is not None:
            self.ended.append(node)

    def tidy(self, most: int | None = None) -> None:
        """Join small segments in the paths of requests that have ended, of ``most`` of them. Called between steps.

        While requests run, a path is looked at when its pages are counted, so nothing waits for that. Making room waits
        where a long leaf is cut for it.
        """
        counts = self.manager.counts
        if not self.ended and (not self._spared or self._is_roomy()):
            return
        if counts.upcoming is not None or (not self.manager.rows and counts.overtakes):
            return
        if not self.manager.rows:
            counts.settle()
        elif self.manager.ranks.alone:
            counts.refresh()
        roomy = self._is_roomy()
        self._least_waste = ROOMY_WASTE if roomy else LEAST_WASTE
        nodes = [*dict.fromkeys(self.ended)]
        nodes, self.ended = nodes[:most], nodes[most or len(nodes) :]
        if not roomy:
            nodes += self._again()
        for node in nodes:
            if node.segment is None:
                continue
            if not self._tidy(node):
                self.ended.append(node)
            elif roomy:
                self._spare(node)

    def _again(self) -> list[Any]:
        """Some of the paths that were spared, as far as they were not evicted. Those that ended last come first, since
        they are evicted last."""
        found: dict[Any, None] = {}
        while self._spared and len(found) < PATHS_A_STEP:
            node = self._spared.popitem()[0]
            while node is not self.tree.root_node and node.segment is None:
                node = node.parent
            if node is not self.tree.root_node and not node.children:  # else a longer path is looked at
                found[node] = None
        return [*found]

    def _spare(self, node: Any) -> None:
        """A path was looked at that may waste more pages than it could where the pool has no room. It stands for the
        shorter ones that it goes on from."""
        if node.children:
            return
        for before in self.tree.nodes(node):
            self._spared.pop(before, None)
        self._spared[node] = None
        if len(self._spared) > MOST_SPARED:
            del self._spared[next(iter(self._spared))]

    def settle(self, node: Any, length: int) -> None:
        """A prompt of ``length`` tokens has come, whose path in the tree ends at ``node``. The turns of it that are
        behind its window are compressed, where nobody reads them and there is room."""
        segments = self.manager.segments
        if segments.turns is not None and node is not self.tree.root_node:
            path = self.tree.path(node)[-MOST_PARTS:]
            if settling := self._settling(path, node, length) - self._in_vain:
                counted = {x for x in settling if x.row not in self.manager.counts.uncounted}
                self._tidy(node, length)
                self._in_vain = (self._in_vain | counted) & segments.cached

    def _settling(self, path: Path, node: Any, length: int) -> set[Segment]:
        """Segments of a ``path`` to ``node`` that settle now: ``length`` tokens of the conversation are known. Requests
        that chose a tier or a window keep what they chose."""
        segments, window = self.manager.segments, self.manager.policy.window
        if segments.turns is None or self.tree.exact.keeps_prompts or is_private(node):
            return set()
        page = self.manager.fmt.high.tokens  # an end that the path leaves out is evicted if it is shorter: ``_stub``
        behind = [x for x, _, hi in path if x.hi - hi < page and hi + window <= length]
        return {segment for segment in behind if not self.tree.locked_nodes[segment] and segments.settles(segment)}

    def _tidy(self, node: Any, length: int = 0) -> bool:
        """Join what wastes pages in the path to ``node``, and compress earlier turns in it; False if some of it is not
        counted yet. ``length``: tokens of a prompt that begins with the path."""
        path, slides = self.tree.path(node)[-MOST_PARTS:], any(self.manager.geometry.attention_spans)
        settling = self._settling(path, node, max(length, path_end(path)))
        if slides:
            path = [part for part in path[:-KEPT_ENDS] if part[1]]
        if not length and any(segment.row in self.manager.counts.uncounted for segment, _, _ in path):
            return False
        nodes = self.tree.nodes(node)
        forks = self._forks(nodes) if slides else set()
        stubs = {segment: self._stub(nodes, segment, hi) for segment, _, hi in path if hi < segment.hi}
        parts: Path = []
        found: list[Path] = []
        for part in [*path, None]:
            counted = part is not None and part[0].row not in self.manager.counts.uncounted
            joins = counted and part is not None and self._unread(*part, stubs.get(part[0]))
            if joins and part is not None:
                parts.append(part)
            if not joins or (part is not None and part[2] in forks):
                found.extend(self._wasteful(parts, settling))
                parts = []
        given_up = [stub for run in found for segment, _, _ in run if (stub := stubs.get(segment))]
        for stub in given_up:
            self.tree.evict_nodes(stub, wait=False)
        if given_up:
            return False
        for run in found:
            if self._make_room_to_tidy(run, node, settling):
                self._join(run, nodes, settling & {segment for segment, _, _ in run})
        return True

    def _forks(self, nodes: list[Any]) -> set[int]:
        """Positions where other paths branch off from that of ``nodes``."""
        at, forks = 0, set()
        for node in nodes:
            at += len(node.key)
            if len(node.children) > 1:
                forks.add(at)
        return forks

    def _unread(self, segment: Segment, lo: int, hi: int, stub: list[Any] | None) -> bool:
        """Whether nobody reads the segment, all of which is in the path but for a stub. Its pages return once it is
        joined."""
        whole = (lo, hi) == (segment.lo, segment.hi) or stub is not None
        return whole and not self.tree.locked_nodes[segment]

    def _stub(self, nodes: list[Any], segment: Segment, hi: int) -> list[Any] | None:
        """The nodes of what a segment holds behind position ``hi``, where the path of ``nodes`` leaves it, from the
        last one on: of a reply, for example, that the next prompt does not repeat. None if it is worth a page of its
        own, or if anything depends on it."""
        if segment.hi - hi >= self.manager.fmt.high.tokens:
            return None
        at = 0
        for node in nodes:
            at += len(node.key)
            if at == hi:
                break
        stub: list[Any] = []
        while at < segment.hi:
            below = [child for child in node.children.values() if child.segment is segment]
            if not below or (stub and len(node.children) > 1):
                return None
            node = below[0]
            if node.lock_ref > 0 or node in self.tree.states.of_nodes:
                return None
            stub.append(node)
            at += len(node.key)
        return None if node.children else stub[::-1]

    def _wasteful(self, parts: Path, settling: Collection[Segment]) -> Iterator[Path]:
        """The longest runs of ``parts`` that hold too many pages for their tokens, as they are once they have settled:
        of two and more, or of one that settles."""
        if not parts:
            return
        counts = np.array([(x in settling, x.pages, *self._held(x, settling)) for x, _, _ in parts])
        upto = np.concatenate([np.zeros_like(counts[:1]), counts]).cumsum(0).tolist()
        first = 0
        while first < len(parts):
            least = 1 if parts[first][0] in settling else 2
            for end in range(len(parts), first + least - 1, -1):
                settle, pages, *held = (after - before for after, before in zip(upto[end], upto[first], strict=True))
                if self._gain(pages, held, settles=settle > 0) > 0:
                    yield parts[first:end]
                    first = end - 1
                    break
            first += 1

    def _held(self, segment: Segment, settling: Collection[Segment]) -> Sequence[int]:
        """Tokens of each tier that a counted segment holds, or is expected to hold once it has settled."""
        return self.manager.segments.settled_tokens(segment) if segment in settling else segment.held

    def _gain(self, pages: int, held: Sequence[int], *, settles: bool) -> float:
        """Pages that joining is expected to return, of segments with so many pages and tokens of each tier; 0 if they
        waste few. ``settles``: some of them are compressed, which is worth its copy sooner."""
        needed = self.manager.segments.needed_pages(held)
        wasted = pages - needed
        least = max((WASTE - 1) * needed, 0 if settles else self._least_waste * self.manager.geometry.heads)
        return wasted if wasted > least else 0.0

    def _make_room_to_tidy(self, parts: Path, node: Any, settling: Collection[Segment]) -> bool:
        """Whether there is room for the copy. For that no more pages are evicted than joining returns, and nothing for
        rows and table blocks while requests run."""
        segments, ledger = self.manager.segments, self.tree.ledger
        pages = segments.dense_pages(parts, [segment for segment, _, _ in parts if segment in settling])
        held = [sum(of_tier) for of_tier in zip(*(self._held(x, settling) for x, _, _ in parts), strict=True)]
        settles = any(segment in settling for segment, _, _ in parts)
        gain = self._gain(sum(segment.pages for segment, _, _ in parts), held, settles=settles)
        if not self._known_free(pages) and pages > ledger.uncommitted_pages() + gain:
            return False
        if self.manager.rows and not self._has_rows(parts):
            return False
        return self._make_room(parts, node, pages)

    def join(self, node: Any, *, evict: bool) -> bool:
        """Join the parts of the path to ``node`` that take more entries than their tokens need. False, changing
        nothing in the path, if there are no pages, rows or table blocks for the copy.

        Args:
            evict: whether what nobody reads may be evicted to make room.
        """
        parts = self._loose(self.tree.path(node))
        if len(parts) < 2 or not (evict or self._has_room(parts)):
            return False
        room = self._make_room(parts, node, self._needs(parts)[0])
        if room:
            self._join(parts, self.tree.nodes(node))
        return room

    def _loose(self, path: Path) -> Path:
        """The path without long dense parts at either end."""
        first, end = 0, len(path)
        while first < end and self._dense(*path[first]):
            first += 1
        while first < end and self._dense(*path[end - 1]):
            end -= 1
        return path[first:end]

    def _dense(self, segment: Segment, lo: int, hi: int) -> bool:
        if hi - lo < DENSE_TOKENS:
            return False
        return (
            sum(self.manager.space.part_entries(segment, lo, hi)) <= sum(self.manager.space.dense_entries(hi - lo)) + 2
        )

    def _needs(self, parts: Path) -> tuple[int, int]:
        """Pages and table blocks, at most, that joining takes before it returns others: those of the copy, and those
        of the rest of a segment that is cut."""
        tokens = parts[-1][2] - parts[0][1]
        rest = max((self.manager.space.bound(segment.row) for segment, _, _ in parts), key=sum)
        blocks = blocks_of(self.manager.space.dense_entries(tokens)) + blocks_of(rest)
        return self.manager.geometry.most_pages(tokens), blocks

    def _has_room(self, parts: Path) -> bool:
        return self._has_rows(parts) and self.tree.ledger.uncommitted_pages() >= self._needs(parts)[0]

    def _has_rows(self, parts: Path) -> bool:
        """Whether segment rows and table blocks are left."""
        blocks = self._needs(parts)[1]
        return self.manager.segments.rows_free >= SEGMENT_ROWS and not self.tree.ledger.table_starved(blocks)

    def _make_room(self, parts: Path, node: Any, pages: int) -> bool:
        """Whether there is room for a copy of so many ``pages``, once what nobody reads is evicted as far as need be.
        The path to ``node`` stays."""
        tree, blocks = self.tree, self._needs(parts)[1]
        tree.inc_lock_ref(node)
        pages_free = self._known_free(pages)
        room = tree.make_segment_rows(SEGMENT_ROWS) and (pages_free or tree.make_pages(pages))
        room = room and tree.make_table_blocks(blocks)
        tree.dec_lock_ref(node)
        return room

    def _is_roomy(self) -> bool:
        """Whether the pool has room, as far as the host knows."""
        geometry, segments, space = self.manager.geometry, self.manager.segments, self.manager.space
        if segments.rows_free < ROOM * geometry.num_segments:
            return False
        if self.tree.ledger.table_starved(math.ceil(ROOM * space.num_blocks)):
            return False
        return self._known_free(math.ceil(ROOM * geometry.num_pages))

    def _known_free(self, pages: int) -> bool:
        """Whether the host knows of so many free pages without asking the device."""
        with self.manager.counts.as_known():
            return pages <= self.tree.ledger.uncommitted_pages()

    def _join(self, parts: Path, nodes: list[Any], settling: Collection[Segment] = ()) -> None:
        tree, manager = self.tree, self.manager
        lo, hi = parts[0][1], parts[-1][2]
        if any(segment.row in manager.counts.uncounted for segment, _, _ in parts):
            manager.counts.settle()
        for segment, _, _ in parts:
            tree.uncount(segment)
        read = {segment for segment, _, _ in parts if tree.locked_nodes[segment]}
        reads = self._reads(parts, settling)
        joined = manager.segments.join(parts, settling)
        joined.reads.update(reads)
        tree.add_segment(joined)
        at, renamed = 0, []
        for node in nodes:
            if lo <= at < hi:
                renamed.append(node)
                tree.rename(node, joined)
            at += len(node.key)
        for segment, _, end in parts:
            if segment.nodes == 0:
                tree.forget_segment(segment)
                manager.segments.release(segment, exclusive=segment not in read)
            else:
                manager.segments.cut_front(segment, end)
        self.joined += 1
        self.settled += len(settling)
        if settling:
            for source in self.tree.sources:
                source.settled(renamed[-1])
        if any(manager.geometry.attention_spans):
            tree.told.ends_changed(renamed[0])

    def _reads(self, parts: Path, settling: Collection[Segment]) -> dict[tuple[int, int], Entries]:
        """Entries of the joined segment's starts. Parts are copied in order, so a start is dense: who branches off
        early does not pay for what is behind it, nor more than for the parts as they were, unless they settle."""
        space, reads, lo = self.manager.space, {}, parts[0][1]
        so_far = space.dense_entries(0)
        for segment, start, end in parts[:MOST_READS]:
            more = space.dense_entries(end - start) if segment in settling else space.part_entries(segment, start, end)
            so_far = tuple(n + m for n, m in zip(so_far, more, strict=True))
            reads[lo, end] = tuple(map(min, so_far, space.dense_entries(end - lo)))
        return reads
