"""SGLang's radix tree over page segments: nodes list KV slots, segments hold pages.

With ``compressed`` fidelity a prompt is compacted before it joins the tree; with ``exact`` it joins as it was computed,
and its request runs on a compressed copy (``Prompts``). A node refers to the segment that stores its tokens. A request
that matches a path takes references to the pages of the path's segments, limited to the matched positions. So a node
splits without moving a byte, and what a path takes of a row does not depend on it. A path of many small segments is
joined to one (``PathJoiner``). Of a model with states a match ends where one is kept (``KeptStates``). Sizes are pages,
in SGLang's unit (see ``PageLedger``).

With ``--page-size`` N all nodes begin and end at multiples of N tokens. Nothing else knows of N: KV slots are single.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

from sglang_diffkv.config import CHECK_ENV
from sglang_diffkv.layout.geometry import Path, Segment
from sglang_diffkv.layout.spans import served_end
from sglang_diffkv.mem_pool.ledger import PageLedger
from sglang_diffkv.srt.models.hybrids import has_states
from sglang_diffkv.srt.tree.events import RequestListener, let_go
from sglang_diffkv.srt.tree.eviction import WORTH_WAITING, EvictingTree
from sglang_diffkv.srt.tree.parts import MOST_PARTS, NodeListener, Parts
from sglang_diffkv.srt.tree.shape import shape
from sglang_diffkv.srt.versions import compat


class DiffKVPrefixCache(EvictingTree):
    """The parts that do not depend on the SGLang version; ``sglang_methods.py`` adds the rest. It is a ``PrefixTree``.

    Args:
        params: SGLang's parameters of a prefix cache.
        ledger: of the pages that the tree holds.
        share_min_tokens: a leaf is cut only if so many of its tokens stay.

    Attributes:
        inserted: length of the longest key that the running insertion has put in, and the node where it ends.
        publishing: the request whose tokens join the tree now.
    """

    inserting_row: int | None
    publishing: Any
    _restored: Segment | None
    inserted: tuple[int, Any]

    def __init__(self, params: Any, ledger: PageLedger, share_min_tokens: int):
        self.ledger, self.manager = ledger, ledger.manager
        self.inserting_row = self._restored = self.publishing = None
        self._later: list[Callable[[], None]] | None = None
        self.connect(Parts())
        self.told = NodeListener()
        self.locked_nodes: dict[Segment, int] = {}
        self.least_kept = self.least_kept_waiting = share_min_tokens
        self.least_cut = 0
        if self.manager.state.pages.is_cuda:
            self.least_cut, self.least_kept_waiting = WORTH_WAITING, max(share_min_tokens, WORTH_WAITING)
        self.enable_session_radix_cache = bool(getattr(params, "enable_session_radix_cache", False))
        super().__init__(params)
        self.is_eagle = False  # a node's tokens are those that its segment holds, and no pairs of them

    def connect(self, parts: Parts) -> None:
        """The optional parts around the tree."""
        self.states, self.exact, self.joiner, self.retracted = parts.states, parts.exact, parts.joiner, parts.retracted
        self.sessions, self.kept, self.sources = parts.sessions, parts.kept, parts.sources
        self.listeners: Sequence[RequestListener] = parts.listeners

    def tell_of_nodes(self, told: NodeListener) -> None:
        """``told`` hears of nodes that come and go from now on."""
        self.told = told

    def reset(self) -> None:
        for part in self.listeners:
            part.reset()
        super().reset()
        self.inserted = (0, self.root_node)
        self.manager.segments.release_all()
        self.locked_nodes.clear()
        self.ledger.release_all()

    # Insertion

    @contextmanager
    def inserting_later(self) -> Iterator[None]:
        """So results that go out inside do not wait for it."""
        later: list[Callable[[], None]] = []
        self._later = later
        try:
            yield
        finally:
            self._later = None
        for insertion in later:
            insertion()

    def inserts_later(self, insertion: Callable[[], None]) -> bool:
        """Whether the ``insertion`` of a running request waits, to be carried out later."""
        if self._later is None:
            return False
        self._later.append(insertion)
        return True

    def publishable_to(self, req: Any) -> int:
        """Position up to which a running request's prompt may join the tree now; 0 if it may not."""
        row = compat.row_of(req)
        end = None if row is None else self.manager.prompts.publishable_to(row)
        return 0 if end is None or end > compat.extend_end(req) or end % self.page_size else end

    def publish(self, req: Any, insertion: Callable[[], None], *, running: bool) -> bool:
        """Run SGLang's ``insertion`` of a request's tokens, with pages of its row: of a running one those up to
        ``publishable_to``. False, running nothing, where they do not join now: a prompt too short to be shared alone,
        no room, a row with a fault or without its tokens."""
        row = compat.row_of(req)
        if row is None or (running and not self.publishable_to(req)):
            return False
        if not running:
            let_go(self.listeners, self.manager, req, row)
        if row in self.manager.counts.faulted or self.manager.rows.hollow(row) or not self._joins(row, running):
            return False
        if not self.make_room_to_share(row) or not self._joins(row, running):  # room may be made by evicting the prompt
            return False
        self.publishing = req
        try:
            self._publish(req, row, insertion, running=running)
        finally:
            self.publishing = None
        return True

    def _publish(self, req: Any, row: int, insertion: Callable[[], None], *, running: bool) -> None:
        self.inserting_row, self.inserted = row, (0, self.root_node)
        try:
            insertion()
        finally:
            self.inserting_row = None
        length, leaf = self.inserted
        for part in self.listeners:
            part.published(req, row, leaf, length, ended=not running)

    def _joins(self, row: int, running: bool) -> bool:
        return running or self.exact.joins(row)

    def prompt_published(self, req: Any) -> None:
        """SGLang has had its chance to insert the prompt."""
        for part in self.listeners:
            part.prompt_published(req)

    def detach(self, req: Any, start: int) -> None:
        count = compat.protected_len(req) - start
        if count <= 0 or self.ledger.uncommitted_kv_slots() < count:
            return
        kv_slots = self.token_to_kv_pool_allocator.alloc(count)
        assert kv_slots is not None
        at, node = 0, self.root_node
        for x in self.nodes(req.last_node):
            if at == start:
                break
            at, node = at + len(x.key), x
        compat.own_from(self, req, node, start, kv_slots)

    def _insert_helper(self, node: Any, key: Any, value: Any, *args: Any) -> Any:
        pending = None if self.inserting_row is None else self.manager.prompts.pending.get(self.inserting_row)
        if pending is None or len(key) <= pending.hi:
            return self._insert(node, key, value, *args)
        # The request ended while its prompt waited: the prompt joins as it is, what was generated behind it.
        matched, _ = self._insert(node, key[: pending.hi], value[: pending.hi], *args)
        everything, leaf = self._insert(node, key, value, *args)
        return (everything if matched == pending.hi else matched), leaf

    def _insert(self, node: Any, key: Any, value: Any, *args: Any) -> Any:
        length = len(key)
        matched, leaf = super()._insert_helper(node, key, value, *args)
        self.inserted = max(self.inserted, (length, leaf), key=lambda found: found[0])
        if matched < length:
            segment = self._segment(matched, length)
            leaf.segment, leaf.left_by_readers = segment, []
            self.add_segment(segment)
            if self.keeps_history:
                self.raise_history(leaf)
            self.told.end_came(leaf)
            for part in self.sources:
                part.came(leaf)
        return matched, leaf

    def _segment(self, lo: int, hi: int) -> Segment:
        """The pages of a node that is being inserted, for positions [lo, hi)."""
        segment: Segment | None
        if self._restored is not None:
            segment = self._restored
        elif self.inserting_row is not None:
            segment = self.manager.prompts.publish(self.inserting_row, lo, hi)
        else:
            raise RuntimeError("diffkv: a prefix was inserted outside a request; there are no pages to keep")
        if segment is None:
            raise RuntimeError("diffkv: no room for a segment, which its inserter has made sure of")
        return segment

    @contextmanager
    def restoring(self, segment: Segment) -> Iterator[None]:
        """Inside, the node that is inserted has the pages of ``segment``, which no node names yet. What the tree lacks
        of the inserted key must be the segment's positions."""
        self._restored = segment
        try:
            yield
        finally:
            self._restored = None

    def _split_node(self, key: Any, child: Any, split_len: int) -> Any:
        parent = super()._split_node(key, child, split_len)
        parent.last_access_time, parent.creation_time = child.last_access_time, child.creation_time
        if self.keeps_history:
            parent._tlru_history_len = child._tlru_history_len
        segment = parent.segment = child.segment
        segment.nodes += 1
        parent.left_by_readers = list(child.left_by_readers)
        self.sessions.split(parent, child)
        self.told.split(parent, child)
        if child.lock_ref > 0:
            for read in self._read_through(child):
                self.locked_nodes[read] += 1
        return parent

    def add_segment(self, segment: Segment) -> None:
        """Nodes are about to name the segment."""
        self.locked_nodes[segment] = 0

    def forget_segment(self, segment: Segment) -> None:
        """No node names the segment any more."""
        del self.locked_nodes[segment]

    def rename(self, node: Any, segment: Segment) -> None:
        """The node's tokens are those of another ``segment`` from now on. Rows that have locked it keep the old pages,
        so these stay locked with it."""
        old = node.segment
        old.nodes -= 1
        segment.nodes += 1
        node.segment = segment
        if node.lock_ref > 0:
            node.left_by_readers.append(old)
            self.locked_nodes[segment] += 1

    # Matching

    def match_prefix(self, params: Any) -> Any:
        for part in self.sources:
            if (found := part.match(params)) is not None:
                return found
        return self.match(params)

    def touch_prefix(self, key: Any) -> None:
        """Somebody waits for what the tree has of ``key``: it counts as used, with its state, and elsewhere too.
        SGLang 0.5.22 and later call it for the head of the queue."""
        if self.disable or not len(key):
            return
        self.states.used(self.find(MatchPrefixParams(key=key)).last_device_node)
        for part in self.sources:
            part.used(key)

    def resolve_node_handle(self, node: Any) -> Any:
        """The last node above ``node``, or itself, that the tree still has. SGLang asks where the prefixes of requests
        are that it has just matched, and leaves out of its queue whose node it does not find. The match of a later
        request may have evicted that."""
        while node.parent is not None and node.segment is None:
            node = node.parent
        return self.root_node if node.parent is None else node

    def find(self, params: Any) -> Any:
        """What the tree has of a key, whether or not a row may read it."""
        return super().match_prefix(params)

    def match(self, params: Any) -> Any:
        """What a row may read of a key that the tree has."""
        if (end := getattr(params.req, "diffkv_match_to", None)) is not None:
            params = dataclasses.replace(params, key=params.key[:end])
        result = super().match_prefix(params)
        if self.inserting_row is not None:
            return result  # SGLang looks for what it has just inserted, and attaches nothing
        if params.req is not None:
            self.joiner.settle(result.last_device_node, len(params.key))
        node, found = result.last_device_node, self.depth(result.last_device_node)
        end = self.states.match_end(params.req, node, len(params.key), self._served)
        if end == found:
            return result
        return super().match_prefix(dataclasses.replace(params, key=params.key[:end]))

    def may_end_match(self, node: Any) -> bool:
        """Whether what a request matches may end with the node: sliding layers hold all that they see, and the state
        is kept."""
        if not self.states.may_end(node):
            return False
        attention_spans = self.manager.geometry.attention_spans
        return not any(attention_spans) or served_end(self.path(node), attention_spans) == self.depth(node)

    def event_recorder(self) -> tuple[Callable[..., None], Callable[..., None]] | None:
        """How SGLang records that a node has come, and that one has gone, if its KV events are on: functions of the
        node and, unless it is the GPU, the medium. The tree itself says which nodes come from now on."""
        raise NotImplementedError

    def _served(self, node: Any) -> int:
        """Position up to which a row may read the path to ``node``: it has room for that, and sliding layers find all
        that they see."""
        return served_end(self._made_to_fit(node), self.manager.geometry.attention_spans)

    def _made_to_fit(self, node: Any) -> Path:
        """The path to ``node`` if a row has room for it, at the latest when its pages are counted, or small parts of it
        are joined; else as much of it as fits."""
        path = self.path(node)
        if len(path) > MOST_PARTS and self.joiner.join(node, evict=False):
            path = self.path(node)
        if self._fits(path):
            return path
        self.manager.segments.count_reads(path)
        if not self._fits(path) and self.joiner.join(node, evict=True):
            path = self.path(node)
        while path and not self._fits(path):
            path = path[:-1]
        return path

    def _fits(self, path: Path) -> bool:
        """Whether a row has room for a path, and another server for the row, if it goes there."""
        manager, transfer = self.manager, self.manager.transfer
        if not manager.space.fits(path, manager.geometry.max_tokens):
            return False
        return transfer is None or not path or transfer.sends(path)

    def nodes(self, node: Any) -> list[Any]:
        """The nodes of a path from below the root to ``node``."""
        nodes = []
        while node is not None and node is not self.root_node:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def depth(self, node: Any) -> int:
        """Position where a node ends."""
        return sum(len(x.key) for x in self.nodes(node))

    def node_within(self, node: Any, end: int) -> Any:
        """The last node of the path to ``node`` that ends at ``end`` or before."""
        while self.depth(node) > end:
            node = node.parent
        return node

    def node_ending(self, leaf: Any, position: int) -> Any:
        """The node of the path to ``leaf`` that ends at ``position``, which is above 0 and within the path: one that
        goes further is split."""
        at = 0
        for node in self.nodes(leaf):
            start, at = at, at + len(node.key)
            if at >= position:
                return node if at == position else self._split_node(node.key, node, position - start)
        raise ValueError(f"a path of {at} tokens does not reach position {position}")

    def path(self, node: Any) -> Path:
        """Segments from the root to ``node``; however often a segment's nodes were split, it is one part."""
        parts: Path = []
        at = 0
        for x in self.nodes(node):
            end = at + len(x.key)
            if parts and parts[-1][0] is x.segment:
                parts[-1] = (x.segment, parts[-1][1], end)
            else:
                parts.append((x.segment, at, end))
            at = end
        return parts

    def pages_read_alone(self, node: Any) -> int:
        """Pages of the path to ``node`` that can be evicted when the request that has locked it lets go: those that no
        other holds."""
        nodes: dict[Segment, int] = {}
        for x in self.nodes(node):
            if x.lock_ref <= 1:
                nodes[x.segment] = nodes.get(x.segment, 0) + 1
        return sum(segment.pages for segment, count in nodes.items() if self.locked_nodes[segment] <= count)

    # Locks

    def inc_lock_ref(self, node: Any, *args: Any, **kwargs: Any) -> Any:
        self._relock(node, 0, 1)
        return super().inc_lock_ref(node, *args, **kwargs)

    def dec_lock_ref(self, node: Any, *args: Any, **kwargs: Any) -> Any:
        self._relock(node, 1, -1)
        return super().dec_lock_ref(node, *args, **kwargs)

    def _relock(self, node: Any, changing_at: int, delta: int) -> None:
        """Count the nodes of the path whose lock is about to be taken or given up."""
        while not self.disable and node is not self.root_node:
            if node.lock_ref == changing_at:
                for segment in self._read_through(node):
                    before = self.locked_nodes[segment]
                    self.locked_nodes[segment] = before + delta
                    if before == 0:
                        self.ledger.lock(segment.pages)
                    elif before + delta == 0:
                        self.ledger.unlock(segment.pages)
                if delta < 0:
                    node.left_by_readers = []
            node = node.parent

    def _read_through(self, node: Any) -> list[Segment]:
        """Segments whose pages rows may hold that have locked the node: its own, and those it named before they were
        joined to another."""
        return [node.segment, *(segment for segment in node.left_by_readers if segment in self.locked_nodes)]

    # Eviction, see ``EvictingTree``

    def _delete_leaf(self, node: Any) -> None:
        self.states.drop(node)
        self.sessions.gone(node)
        super()._delete_leaf(node)

    def give_up_end(self, segment: Segment, nodes: int, tokens: int, *, wait: bool) -> None:
        if segment.row in self.manager.counts.uncounted:
            self.manager.counts.settle()
        self.uncount(segment)
        segment.nodes -= nodes
        if segment.nodes == 0:
            self.manager.segments.release(segment, exclusive=self.locked_nodes.pop(segment) == 0)
        else:
            self.manager.segments.trim(segment, segment.hi - tokens, wait=wait)

    def uncount(self, segment: Segment) -> None:
        """The pages of a segment are about to change."""
        self.ledger.release(segment.pages, locked=bool(self.locked_nodes[segment]))

    def count(self, segment: Segment) -> None:
        """The pages of a segment became known."""
        self.ledger.hold(segment.pages, locked=bool(self.locked_nodes[segment]))

    # States, see ``NodeStates``; the methods are those by which SGLang asks a prefix cache

    def supports_mamba(self) -> bool:
        return has_states(self.req_to_token_pool)

    def mamba_evictable_size(self) -> int:
        return len(self.states.of_nodes)

    def mamba_protected_size(self) -> int:
        return 0

    def all_values_flatten(self) -> torch.Tensor:
        """KV slots of all nodes, also where there are none: SGLang asks for its report of a leak."""
        nodes = self.root_node.children
        return super().all_values_flatten() if nodes else torch.empty(0, dtype=torch.int64)

    def all_mamba_values_flatten(self) -> torch.Tensor:
        kept = list(self.states.of_nodes.values())
        return torch.cat(kept) if kept else torch.empty(0, dtype=torch.int64)

    # Sessions, see ``SessionRule``; the methods are those that SGLang calls with ``--enable-session-radix-cache``

    def open_radix_session(self, session_id: str) -> int:
        return self.sessions.open(session_id)

    def ensure_session_generation(self, session_id: str) -> int:
        return self.sessions.generation(session_id)

    def release_radix_session(self, session_id: str) -> None:
        self.sessions.close(session_id)

    # Reports

    def report(self) -> dict[str, object]:
        """Pages of the prefix cache, and those that its tokens need where each chain without a branch has dense pages
        of its own; and its ``shape``."""
        if self.disable:
            return {}
        held, needed = self.manager.segments.counts_of.pages(self._chains())
        return {
            "pages": held,
            "pages_needed": needed,
            "pages_over_needed": held / needed if needed else 1.0,
            "joined": self.joiner.joined,
            "settled": self.joiner.settled,
            **self.kept.report(),
            **shape(self.root_node, self.manager.segments.counts_of.pages_each),
        }

    def _chains(self) -> list[list[Segment]]:
        """The segments between one branch of the tree and the next. A segment that branches belongs to the chain in
        which it begins."""
        chains: list[list[Segment]] = []
        seen: set[Segment] = set()
        heads = list(self.root_node.children.values())
        while heads:
            node, chain = heads.pop(), []
            while True:
                if node.segment not in seen:
                    seen.add(node.segment)
                    chain.append(node.segment)
                if len(node.children) != 1:
                    break
                node = next(iter(node.children.values()))
            heads.extend(node.children.values())
            if chain:
                chains.append(chain)
        return chains

    # Checks

    def sanity_check(self) -> None:
        """SGLang asks at idle, on 0.5.17 again and again for models with states."""
        if os.environ.get(CHECK_ENV):
            self.check_integrity()

    def check_integrity(self) -> None:
        """Raise AssertionError unless nodes, segments, states and page totals agree."""
        every: set[Any] = set()
        nodes: dict[Segment, list[Any]] = {}
        left: list[Segment] = []  # once for each locked node that names it
        stack = list(self.root_node.children.values())
        while stack:
            node = stack.pop()
            every.add(node)
            nodes.setdefault(node.segment, []).append(node)
            assert node.lock_ref > 0 or not node.left_by_readers, "a node without readers names what they left"
            left.extend(self._read_through(node)[1:])
            stack.extend(node.children.values())
        assert set(nodes) == self.manager.segments.cached, "tree and page manager hold different segments"
        evictable = 0
        for segment, held in nodes.items():
            assert segment.nodes == len(held), "a segment miscounts its nodes"
            locked = sum(node.lock_ref > 0 for node in held) + left.count(segment)
            assert self.locked_nodes[segment] == locked, "a segment miscounts its locked nodes"
            assert sum(len(node.key) for node in held) == segment.hi - segment.lo, "a segment covers other tokens"
            evictable += 0 if locked else segment.pages
            if segment.as_computed and segment.pages:
                ordered = self.manager.segments.computed_pages(segment)
                assert segment.pages == ordered, "a segment as computed has pages that are not in order"
        assert self.ledger.tree_pages == sum(s.pages for s in nodes), "tree pages miscounted"
        assert self.ledger.evictable_pages == evictable, "evictable pages miscounted"
        self.states.check_nodes(every)
        self.sessions.check_nodes(every)
