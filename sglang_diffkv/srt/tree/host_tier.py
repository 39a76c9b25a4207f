"""Prefixes that the GPU's tree evicts live on in host memory, as they are, and come back for a request that matches.

The host has whole segments (``SavedSegments``), in an index of its own (``HostIndex``). Before a request is admitted
the match goes on there from where the tree ends. What it finds becomes segments of the tree again, if there is room. So
it is like what was never evicted: in the positions where a match may end, in who shares it, in what evicts it.

When a segment is copied is SGLang's ``--hicache-write-policy``:

- ``write_through``: some passes after nobody reads it, beside others; at its eviction if that comes first;
- ``write_through_selective``: the same, once a second request has matched it; never if none has;
- ``write_back``: at its eviction.

A copy at eviction waits for nothing either: the pages return to the ring behind it. What the host has already is not
copied again. Where the host's memory is full, leaves of the index go, by SGLang's eviction policy. Retracted requests
come first: prefixes make room for them.

A request of a model with states goes on from a prefix only where a state stands (``KeptStates``). So states go to the
host too, when their prefix does or the tree gives one up, and what comes back ends where the host has one. The tree may
still have the pages: then the state comes back alone.

A draft model has keys and values of its own, by KV slot: they go and come with the segments of the same tokens.

Behind host memory there may be a disk (``disk_tier.py``).

Several ranks do all of this alike, each for the pages of its heads. They count what takes most on any rank, and bring
back what all of them have by then.

What other weights computed is never brought back: a change of weights, and a pause that retracts all requests, drop
everything. If some of it is left on the GPU, nothing more is copied until the cache is flushed. An adapter (LoRA) that
is loaded again has another id, and so a namespace of its own.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams

from sglang_diffkv.layout.geometry import Path, Segment
from sglang_diffkv.layout.spans import served_end
from sglang_diffkv.mem_pool.growth import Expected
from sglang_diffkv.mem_pool.saved_rows import Needed
from sglang_diffkv.mem_pool.saved_segments import SavedSegment, SavedSegments
from sglang_diffkv.mem_pool.saved_slots import SavedSlots, SlotStore
from sglang_diffkv.mem_pool.stored_segments import StoredSegments
from sglang_diffkv.srt.tree.disk_tier import DiskTier, NoDisk, Prefetch
from sglang_diffkv.srt.tree.host_events import ToldHost
from sglang_diffkv.srt.tree.host_index import HostIndex, HostNode, Part
from sglang_diffkv.srt.tree.old_weights import OldWeights
from sglang_diffkv.srt.tree.parts import PrefixSource
from sglang_diffkv.srt.tree.prefix_cache import DiffKVPrefixCache
from sglang_diffkv.srt.tree.private_space import is_of_one
from sglang_diffkv.srt.versions import compat

WRITE_BACK, WRITE_THROUGH, SELECTIVE = "write_back", "write_through", "write_through_selective"

WRITTEN_AT_ONCE = 8
"""Segments that are copied between two passes, at most: they take a share of the bus."""

GATHERED_FOR = 8
"""While requests run, what is to be copied waits for others for so many passes. The host launches as much for one copy
as for ``WRITTEN_AT_ONCE`` together. Of short turns some end in each pass, and are joined meanwhile."""

LISTED_AT_ONCE = 1 << 17
"""Of these the device lists so many pages at most: a few MiB."""

TOGETHER = 2
"""Of host memory that prefixes may have, this part at most is filled together."""

FREED_AT_ONCE = 128
"""Of a full host memory this part at least is freed together."""

COUNTS = ("hits", "no_room", "no_host_memory", "tokens_restored", "tokens_evicted")
"""Of ``/server_info`` and the metrics, since the start. Requests for which something came back from the host, and those
for which there was no room for what it had. Segments for which it had no memory. Tokens that came back, and those that
it forgot for want of memory."""


@dataclass(frozen=True)
class Behind:
    """What host memory has behind what the tree finds of a prompt.

    Attributes:
        parts: that follow the tree's tokens; none where it has all up to ``end``. start: position where a match ends
            without them. end: and with them. state: that stands there, of a model with states.
    """

    parts: list[Part]
    start: int
    end: int
    state: SavedSlots | None = None

    @property
    def tokens(self) -> int:
        """That a request finds more."""
        return self.end - self.start


class HostTier(PrefixSource):
    """Evicted prefixes in host memory, over a prefix cache.

    Args:
        saved: where they are. policy: when they are copied. least: fewer tokens than this are not brought back.
        states: where states are, of a model that has some.

    Attributes:
        counts: by ``COUNTS``.
    """

    def __init__(
        self,
        tree: DiffKVPrefixCache,
        saved: SavedSegments,
        *,
        policy: str,
        least: int,
        states: SlotStore | None = None,
    ):
        self.tree, self.saved, self.policy, self.least, self.states = tree, saved, policy, least, states
        self.manager, self.ledger, self.host = tree.manager, tree.ledger, saved.host
        self.ranks = self.manager.ranks
        self.index = HostIndex(saved.drop, tree.page_size, self._drop_state)
        self.expected: Callable[[], Iterable[Expected]] = lambda: ()
        self.old_weights = OldWeights(self.manager, "evicted prefixes do not go to host memory")
        self.counts = dict.fromkeys(COUNTS, 0)
        self._unwritten: dict[Any, None] = {}  # nodes whose segments are to be copied, in order
        self._gathered = 0
        """Passes scheduled since what was to be copied was looked at; ``GATHERED_FOR`` where some was left for the next
        time."""
        self._replacing: dict[SavedSegment, tuple[Segment, Hashable, np.ndarray]] = {}
        """Copies of segments that have settled, with their prefixes. They take the places of larger ones once they have
        arrived."""
        self._admitting: Any = None
        self._restoring: set[SavedSegment | SavedSlots] = set()
        self.disk = NoDisk()
        saved.rows.share_memory(self._make_room, saved.runs)
        if states is not None:
            states.share_memory(self._make_state_room)
        elif saved.drafts is not None:
            saved.drafts.share_memory(lambda tokens: self._make_room(0, tokens))

    def store_in(self, stored: StoredSegments, prefetch: Prefetch) -> None:
        """What the host has is written to a store from now on, and found there."""
        self.disk = DiskTier(
            stored,
            self.index,
            prefetch,
            self._make_room,
            lambda: self.ledger.idle and self.manager.counts.upcoming is None,
        )

    def queue_seen(self, waiting: Iterable[Any]) -> None:
        """Requests that wait no longer need nothing from the disk. Host memory is pinned while none waits or runs."""
        self.disk.queue_seen(waiting)
        idle = self.ledger.idle and not any(True for _ in waiting)
        slots = self.states or self.saved.drafts
        for host in (self.host, *([] if slots is None else [slots.host])):
            host.idle(idle)

    def prefill_begins(self, reqs: Sequence[Any]) -> None:
        """They were admitted."""
        self.disk.prefill_begins(reqs)

    def expect(self, tokens: Callable[[], Iterable[Expected]]) -> None:
        self.expected = tokens

    def tell_events(self, store: Callable[..., None], remove: Callable[..., None]) -> None:
        self.index.told = ToldHost(self.tree, store, remove)

    # To the host

    def came(self, node: Any) -> None:
        """Its segment is copied soon, where the policy says so."""
        if self.policy == WRITE_THROUGH:
            self._unwritten[node] = None

    def settled(self, node: Any) -> None:
        """What the host has of its segment is written anew, as small as it is now."""
        if self.policy == WRITE_THROUGH:
            self._unwritten[node] = None

    def state_came(self, node: Any) -> None:
        """The same of its state."""
        if self.policy == WRITE_THROUGH or (self.policy == SELECTIVE and getattr(node, "read_again", False)):
            self._unwritten[node] = None

    def prompt_begun(self, req: Any, row: int, *, alone: bool) -> None:
        """A second request has matched a prefix."""
        if self.policy == SELECTIVE and not alone:
            for node in self.tree.nodes(req.last_node):
                if not getattr(node, "read_again", False):
                    node.read_again = True
                    self._unwritten[node] = None

    def scheduling_begins(self) -> None:
        """Copy some of what is to be copied, beside the passes. What is not counted yet waits, and what is read: short
        turns are joined before, once nobody reads them (``PathJoiner``)."""
        self._arrived()
        if self.manager.counts.upcoming is not None or not self._is_time_to_write():
            return
        chosen: dict[Segment, Any] = {}
        stated: list[Any] = []
        for node in list(self._unwritten):
            segment = node.segment
            if segment is not None and (node.lock_ref > 0 or segment.row in self.manager.counts.uncounted):
                continue
            if chosen and segment is not None and not self._copied_together([*chosen, segment]):
                self._gathered = GATHERED_FOR
                continue
            del self._unwritten[node]
            stated.append(node)
            if segment not in chosen and self._is_to_be_written(node):
                chosen[segment] = node
            if max(len(chosen), len(stated) if self.states else 0) == WRITTEN_AT_ONCE:
                self._gathered = GATHERED_FOR
                break
        self._write(list(chosen.values()))
        self._write_states(stated)

    def _is_time_to_write(self) -> bool:
        """Whether what is to be copied has waited for others, or nothing runs that would wait for the copy."""
        self._gathered += 1
        due = self._gathered >= GATHERED_FOR or not self.manager.rows
        if due:
            self._gathered = 0
        return due

    def _copied_together(self, segments: list[Segment]) -> bool:
        """Whether the device may list them together, and they leave room on the host: of more than it holds together
        the newest would be lost."""
        pages, drafts = [segment.pages for segment in segments], self.saved.drafts
        room = self.host.count - self.saved.rows.pages_held
        if drafts is not None and _tokens_of(segments) > drafts.host.count // TOGETHER:
            return False
        return sum(pages) <= min(LISTED_AT_ONCE, room // TOGETHER)

    def _arrived(self) -> None:
        """Take over what is on the host by now, on all ranks."""
        self.disk.finished(self.saved.finish())
        for saved, (_, space, tokens) in list(self._replacing.items()):
            if self.saved.ready(saved):
                del self._replacing[saved]
                self.index.replace(space, tokens, saved)
            elif saved.lost:
                del self._replacing[saved]
                if not saved.nodes:
                    self.saved.drop(saved)
        if self.states is not None:
            self.states.finish()
        self.disk.poll()

    def leaving(self, nodes: list[Any]) -> None:
        """Nodes of one segment are about to be evicted, the first of them a leaf: the last moment to copy it."""
        wanted = self._is_wanted(nodes)
        for node in nodes:
            self._unwritten.pop(node, None)
        if wanted and nodes[0].segment.row in self.manager.counts.uncounted:
            self.manager.counts.settle()
        if wanted and self._is_to_be_written(nodes[0]):
            self._write(nodes[:1])
        if wanted:
            self._write_states(nodes)

    def state_leaving(self, node: Any) -> None:
        """A node is about to lose its state, for want of slots: the last moment to copy it."""
        if self._is_wanted([node]):
            self._write_states([node])

    def state_changing(self, slot: torch.Tensor) -> None:
        """Its slot is about to be given back: not before it is copied."""
        if self.states is not None:
            self.states.changing(slot)

    def _is_wanted(self, nodes: list[Any]) -> bool:
        """Whether nodes that leave the tree go to the host, by the policy."""
        return self.policy != SELECTIVE or any(getattr(node, "read_again", False) for node in nodes)

    def _is_to_be_written(self, node: Any) -> bool:
        """Whether the host lacks some of the segment of a node, as far as the tree still has it, and may have it."""
        if self.old_weights.left or node.segment is None or is_of_one(node):
            return False
        end = self._last_of(node)
        space, tokens = space_of(end.key), self._tokens(end)
        on_its_way = any(node.segment is segment for segment, _, _ in self._replacing.values())
        larger = not on_its_way and self.index.has_larger(space, tokens, node.segment)
        if larger or self.index.lacks(space, tokens, node.segment.lo):
            return True
        self.index.touch(space, tokens, end.last_access_time)
        return False

    def _write(self, nodes: list[Any]) -> None:
        """Copy the segments of nodes, each of another one, together."""
        if not nodes:
            return
        segments = [node.segment for node in nodes]
        pages, count = sum(segment.pages for segment in segments), _tokens_of(segments)
        if self._lacks_room(pages, count):
            self._make_room(max(pages, self.host.count // FREED_AT_ONCE), count)
        kv_slots = None if self.saved.drafts is None else [self._kv_slots(node) for node in nodes]
        for node, saved in zip(nodes, self.saved.save_all(segments, kv_slots), strict=True):
            if saved is None:
                self.counts["no_host_memory"] += 1
                continue
            end = self._last_of(node)
            space, tokens = space_of(end.key), self._tokens(end)
            replaces = self.index.has_larger(space, tokens, node.segment)
            if replaces:
                self._replacing[saved] = node.segment, space, tokens
            used, priority = end.last_access_time, end.priority
            self.index.insert(space, tokens, saved, used=used, priority=priority, late=replaces)
            if saved.nodes:
                self.disk.copied(saved, space, tokens)

    def _write_states(self, nodes: list[Any]) -> None:
        """Copy the states of nodes that have one which the host lacks, and may have."""
        if self.states is None or self.old_weights.left:
            return
        for node in nodes:
            slot = self.tree.states.of_nodes.get(node)
            if slot is None or is_of_one(node):
                continue
            space, tokens = space_of(node.key), self._tokens(node)
            if not self.index.lacks_state(space, tokens):
                continue
            saved = self.states.save(slot) if self._state_room() else None
            if saved is None:
                self.counts["no_host_memory"] += 1
                continue
            self.index.keep_state(space, tokens, saved, used=node.last_access_time, priority=node.priority)

    def _state_room(self) -> bool:
        """Have host memory for one more state, at the cost of another one. False if that is not possible."""
        assert self.states is not None
        return self.states.host.free > 0 or self._forget_state()

    def _forget_state(self) -> bool:
        """Give back the host memory of one state. False if there is none that may go."""
        stated = [x for x in self.index.nodes() if x.state is not None and x.state not in self._restoring]
        if stated:
            self.index.drop_state(min(stated, key=lambda x: (self._priority(x), x.number)))
        return bool(stated)

    def _make_state_room(self, count: int) -> None:
        """Forget states until there is host memory for so many, as far as possible."""
        assert self.states is not None
        while self.states.host.free < count and self._forget_state():
            pass

    def _drop_state(self, state: SavedSlots) -> None:
        assert self.states is not None
        self.states.drop(state)

    def _last_of(self, node: Any) -> Any:
        """The node where the segment of ``node`` ends."""
        while below := [child for child in node.children.values() if child.segment is node.segment]:
            node = below[0]
        return node

    def _kv_slots(self, node: Any) -> torch.Tensor:
        """[n] int64: of the tokens of a node's segment."""
        path = self.tree.nodes(self._last_of(node))
        return torch.cat([x.value for x in path if x.segment is node.segment]).long()

    def _tokens(self, node: Any) -> np.ndarray:
        """The tokens of the path to ``node``."""
        return np.concatenate([tokens_of(x.key) for x in self.tree.nodes(node)])

    def _lacks_room(self, pages: int, tokens: int) -> bool:
        """Whether too few host pages are free, or with a draft model places for so many tokens."""
        drafts = self.saved.drafts
        return pages > self.host.free or (drafts is not None and tokens > drafts.host.free)

    def _make_room(self, pages: int, tokens: int = 0) -> None:
        """Forget prefixes until so many host pages are free, and with a draft model places for so many tokens, as far
        as possible."""
        drafts = self.saved.drafts
        forgotten = pages <= self.host.count and (drafts is None or tokens <= drafts.host.count)
        while self._lacks_room(pages, tokens) and forgotten:
            heap = [(self._priority(node), node.number, node) for node in self.index.nodes() if not node.children]
            heapq.heapify(heap)
            forgotten = False
            while heap and self._lacks_room(pages, tokens):
                _, _, leaf = heapq.heappop(heap)
                nodes = self.index.end_of(leaf)
                if not nodes or not self._restoring.isdisjoint(x for node in nodes for x in (node.saved, node.state)):
                    continue
                forgotten = True
                self.counts["tokens_evicted"] += sum(len(node.tokens) for node in nodes if node.saved is not None)
                above = self.index.remove(nodes)
                if above is not None:
                    heapq.heappush(heap, (self._priority(above), above.number, above))

    def _priority(self, node: HostNode) -> Any:
        """By SGLang's eviction policy; where there are states, leaves without one come first, as in the tree."""
        history = self.tree.keeps_history  # of a branch, which is the tree's
        policy = node.last_access_time if history else self.tree.eviction_strategy.get_priority(node)
        return node.state is not None, policy

    # Back to the tree

    @contextmanager
    def admitting(self, req: Any) -> Iterator[None]:
        """Inside, SGLang matches the request that it admits next."""
        self._admitting = req
        try:
            yield
        finally:
            self._admitting = None

    def match(self, params: Any) -> Any:
        """The match with what came back from the host; None if nothing did. Of a request that waits, the match with how
        much would come back."""
        req, self._admitting = self._admitting, None
        if req is None:
            return self._seen_waiting(params)
        req.diffkv_waits_for_store = False
        if self.old_weights.left or _without_host(req) or not (self._holds_any or self.stores):
            return None
        if self.ranks.alone:  # several exchange what has arrived before they schedule
            self._arrived()
        space, tokens = space_of(params.key), tokens_of(params.key)
        node = self.tree.find(params).last_device_node
        at = self.tree.depth(node)
        parts = self._parts(space, tokens, at)
        if self.stores and self._held_up(req, space, tokens, node, parts):
            return None
        behind = self._behind(space, tokens, node, at, parts)
        if behind.tokens < self.least:
            return None
        restored, of_store = self._restore(req, params.key, node, behind)
        if not restored:
            self.counts["no_room"] += not getattr(req, "diffkv_no_room", False)
            req.diffkv_no_room = True  # it may ask again and again
            return None
        self.index.touch(space, tokens[: behind.start + restored], time.monotonic(), hit=True)
        self.counts["hits"] += 1
        self.counts["tokens_restored"] += restored
        req.diffkv_from_host, req.diffkv_from_store = restored, of_store
        return self.tree.match(params)

    def _seen_waiting(self, params: Any) -> Any:
        """SGLang puts its queue in order, by what requests would find: on the host too, as its hierarchical cache
        counts. Nothing comes back for that. None if the host has nothing for the request."""
        req = params.req
        if req is None or self.old_weights.left or _without_host(req) or not self._holds_any:
            return None
        found = self.tree.match(params)
        node, space, tokens = found.last_device_node, space_of(params.key), tokens_of(params.key)
        if self.states is not None:  # the match ends where a state is, and what the tree has may go on
            node = self.tree.find(params).last_device_node
        at = self.tree.depth(node)
        behind = self._behind(space, tokens, node, at, self._parts(space, tokens, at)).tokens
        return found._replace(host_hit_length=behind) if behind >= self.least else found

    def used(self, key: Any) -> None:
        self.index.touch(space_of(key), tokens_of(key), time.monotonic())

    def _held_up(self, req: Any, space: Hashable, tokens: np.ndarray, node: Any, parts: list[Part]) -> bool:
        """Whether a request waits for what the disk has behind ``parts``."""
        starts = [*(segment.lo for segment, _, _ in self.tree.path(node)), *(saved.start for saved, _, _ in parts)]
        at = parts[-1][2] if parts else self.tree.depth(node)
        req.diffkv_waits_for_store = self.disk.holds_up(req, space, tokens, at, starts)
        return bool(req.diffkv_waits_for_store)

    def waits_for(self, req: Any) -> bool:
        return bool(getattr(req, "diffkv_waits_for_store", False))

    @property
    def _holds_any(self) -> bool:
        return bool(self.saved.held or (self.states is not None and self.states.held))

    @property
    def stores(self) -> bool:
        """Whether there is a disk."""
        return isinstance(self.disk, DiskTier)

    def _parts(self, space: Hashable, tokens: np.ndarray, at: int) -> list[Part]:
        """What the host has of a prefix from ``at`` on, and can bring back now."""
        parts = self.index.parts(space, tokens, at)
        ready = [self.saved.ready(saved) for saved, _, _ in parts]
        parts = parts[: ready.index(False)] if False in ready else parts
        return parts if parts and parts[0][1] == at else []

    def _behind(self, space: Hashable, tokens: np.ndarray, node: Any, at: int, parts: list[Part]) -> Behind:
        """What may come back of ``parts``, which follow the tree's ``node``, where ``at`` tokens end. Of a model with
        states that is all up to the last position behind which the host has one."""
        if self.states is None:
            parts = self._served(node, parts)
            return Behind(parts, at, parts[-1][2] if parts else at)
        start, most = self.tree.depth(self.tree.states.last(node)), parts[-1][2] if parts else at
        for end, stated in reversed(self.index.states(space, tokens)):
            state = stated.state
            if state is None or not start < end <= most or not self.states.ready(state):
                continue
            wanted = [(saved, lo, min(hi, end)) for saved, lo, hi in parts if lo < end]
            if self._served(node, wanted) == wanted:
                return Behind(wanted, start, end, state)
        return Behind([], start, start)

    def _served(self, node: Any, parts: list[Part]) -> list[Part]:
        """As many of the parts behind the path to ``node`` as a row may read."""
        path: Path = [*self.tree.path(node), *((saved.segment(lo, hi), lo, hi) for saved, lo, hi in parts)]
        end = served_end(path, self.manager.geometry.attention_spans)
        return [part for part in parts if part[2] <= end]

    def _restore(self, req: Any, key: Any, node: Any, behind: Behind) -> tuple[int, int]:
        """Bring back parts that follow the path to ``node``, as many as there is room for; of a model with states all
        of them, and the state. Tokens that a request finds more, and how many of these have just come from a store."""
        parts = behind.parts
        needed = self.saved.needed(parts) if parts else []
        self._restoring = {saved for saved, _, _ in parts}
        self.tree.inc_lock_ref(node)
        came: list[Part] = []
        try:
            fits = not parts or self._expected_to_fit(req, parts[-1][2], sum(x.pages for x in needed))
            if behind.state is not None:
                return (behind.tokens if fits and self._restore_state(req, key, node, behind, needed) else 0), 0
            if fits:
                whole = self._restore_parts(req, key, node, parts, needed) is not None
                came = parts if whole else self._restore_first(req, key, node, parts, needed)
        finally:
            self.tree.dec_lock_ref(node)
            self._restoring = set()
        of_store = sum((hi - lo) * saved.from_store for saved, lo, hi in came)
        for saved, _, _ in came:
            saved.from_store = False
        return sum(hi - lo for _, lo, hi in came), of_store

    def _restore_state(self, req: Any, key: Any, node: Any, behind: Behind, needed: list[Needed]) -> bool:
        """Bring back a state, and before it the parts behind ``node``, which is locked. False, changing nothing but by
        eviction, if there is no room."""
        tree, state = self.tree, behind.state
        assert self.states is not None and state is not None
        self._restoring.add(state)
        slot = tree.states.take_slot()
        if slot is None:
            return False
        if behind.parts:
            end = self._restore_parts(req, key, node, behind.parts, needed)
        else:
            end = tree.node_ending(node, behind.end)
        if end is None:
            tree.states.give_slot(slot)
            return False
        self.states.restore(state, slot)
        tree.states.came_back(end, slot)
        return True

    def _restore_first(self, req: Any, key: Any, node: Any, parts: list[Part], needed: list[Needed]) -> list[Part]:
        """Bring back as many of the parts behind ``node``, which is locked, as there is room for; these. There is none
        for all of them."""
        locked: list[Any] = []
        for part, takes in zip(parts[:-1], needed[:-1], strict=True):
            below = self._restore_parts(req, key, node, [part], [takes])
            if below is None:
                break
            self.tree.inc_lock_ref(below)
            locked.append(below)
            node = below
        for node in locked:
            self.tree.dec_lock_ref(node)
        return parts[: len(locked)]

    def _expected_to_fit(self, req: Any, end: int, pages: int) -> bool:
        """Whether the request would be admitted once its prefix up to ``end`` is restored, in so many pages."""
        if self.ledger.idle:
            return True
        geometry = self.manager.geometry
        wanted = pages * geometry.fmt.high.tokens / geometry.heads + compat.prompt_len(req) - end + 1
        wanted += compat.tokens_to_grow(req, compat.growth_of(req, self.ledger, end))
        growth = self.ledger.growth_of_all(self.expected())
        return self.ledger.available() + self.ledger.evictable() - growth >= wanted

    def _restore_parts(self, req: Any, key: Any, node: Any, parts: list[Part], needed: list[Needed]) -> Any:
        """The last node of restored parts behind ``node``, which is locked; None, changing nothing but by eviction, if
        there is no room for all of them. Each is a segment of its own, which can go by itself."""
        tree, start, end = self.tree, parts[0][1], parts[-1][2]
        room = tree.make_room_to_restore(
            end - start, sum(x.pages for x in needed), sum(x.blocks for x in needed), segments=len(parts)
        )
        found = MatchPrefixParams(key=key[:end])
        if not room or tree.depth(tree.find(found).last_device_node) != start:
            return None
        kv_slots = tree.token_to_kv_pool_allocator.alloc(end - start)
        if kv_slots is None:
            return None
        segments = self.saved.restore(parts, needed, kv_slots.long())
        if segments is None:
            tree.token_to_kv_pool_allocator.free(kv_slots)
            return None
        value = torch.cat([torch.zeros(start, dtype=torch.int64, device=kv_slots.device), kv_slots.long()])
        for segment in segments:
            with tree.restoring(segment):
                upto = key[: segment.hi], value[: segment.hi]
                tree.insert(InsertParams(*upto, priority=getattr(req, "priority", None) or 0))
        self.saved.count(parts, needed, segments)
        return tree.find(found).last_device_node

    def does_not_fit_alone(self, req: Any) -> None:
        """What came back may take more than its tokens computed again. With nothing running it would be brought back
        and refused for ever."""
        req.diffkv_without_host = True

    # Other weights

    @contextmanager
    def retracting_all(self) -> Iterator[None]:
        """Inside, SGLang retracts all requests for a pause, with the promise that they are computed again when it ends,
        by other weights perhaps. Nothing outlives it on the host."""
        try:
            yield
        finally:
            self._forget_all()

    def weights_change(self) -> None:
        """Drop everything. Unless nothing is left that these weights computed, nothing is copied from now on until the
        tree is reset: requests that go on, and prefixes that stay in the tree, are of both."""
        self._forget_all()
        self.disk.weights_change()
        self.old_weights.change()

    def reset(self) -> None:
        """Weights may have changed, and nothing computed so far counts."""
        self._forget_all()
        self.old_weights.reset()

    def _forget_all(self) -> None:
        self._unwritten.clear()
        self._replacing.clear()
        self.index.clear()
        self.disk.forget_all()
        self.saved.drop_all()
        if self.states is not None:
            self.states.drop_all()

    # Reports and checks

    def report(self) -> dict[str, int]:
        """For ``/server_info``."""
        size, slots = self.manager.fmt.page_bytes, self.states or self.saved.drafts
        return {
            **self.counts,
            "tokens": self.index.tokens,
            "host_bytes": sum(x.host_pages for x in self.saved.held) * size + (slots.bytes_held if slots else 0),
            "host_bytes_most": self.host.count * size + (slots.bytes_most if slots else 0),
            "bytes_out": self.saved.bytes_out + (slots.bytes_out if slots else 0),
            "bytes_in": self.saved.bytes_in + (slots.bytes_in if slots else 0),
            **({"states": len(self.states.held)} if self.states else {}),
        }

    def report_of_store(self) -> dict[str, float]:
        """The same of a store behind host memory."""
        return self.disk.report()

    def reports(self) -> dict[str, Mapping[str, float]]:
        return {"host_prefixes": self.report(), "stored_prefixes": self.report_of_store()}

    def digest(self) -> Any:
        slots = self.states or self.saved.drafts
        held = self.index.tokens, self.host.free, slots and slots.host.free, len(self._unwritten), len(self._replacing)
        return *held, *self.counts.values(), self.disk.digest()

    def check_integrity(self) -> None:
        """Raise AssertionError unless index and host memory agree."""
        assert not self._restoring and self._admitting is None, "a request is admitted for ever"
        self.saved.check_integrity()
        self.disk.check_integrity()
        late = {saved for saved in self._replacing if not saved.nodes}
        self.index.check_integrity(self.saved.held - late, self.states.held if self.states is not None else ())


def _without_host(req: Any) -> bool:
    """Whether a request is to be computed, whatever the host has."""
    return getattr(req, "diffkv_without_host", False) or getattr(req, "diffkv_started_over", False)


def _tokens_of(segments: Iterable[Segment]) -> int:
    return sum(segment.hi - segment.lo for segment in segments)


def space_of(key: Any) -> Hashable:
    """The namespace of SGLang's RadixKey: what it keeps prompts of equal tokens apart by."""
    return key.extra_key, getattr(key, "cache_salt", None)


def tokens_of(key: Any) -> np.ndarray:
    """[n] int64: the tokens of SGLang's RadixKey."""
    return np.array(key.raw_token_ids(), dtype=np.int64)
