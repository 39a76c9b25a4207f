"""SGLang's radix tree over page segments: nodes list KV slots, segments hold pages.

With ``compressed`` fidelity a prompt is compacted before it joins the tree; with ``exact`` it joins as it was computed,
and its request runs on a compressed copy (``Prompts``). A node refers to the segment that stores its tokens. A request
that matches a path takes references to the pages of the path's segments, limited to the matched positions. So a node
splits without moving a byte, and what a path takes of a row does not depend on it. A path of many small segments is
joined to one (``PathJoiner``). Of a model with states a match ends where one is kept (``KeptStates``). Sizes are pages,
in SGLang's unit (see ``PageLedger``).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sglang_diffkv.config import CHECK_ENV
from sglang_diffkv.layout.geometry import Path, Segment
from sglang_diffkv.layout.spans import served_end
from sglang_diffkv.ops.decisions import compacts, tail_tokens
from sglang_diffkv.srt.models.hybrids import has_states
from sglang_diffkv.srt.scheduling.lifecycle import RequestLifecycle
from sglang_diffkv.srt.tree.eviction import WORTH_WAITING, EvictingTree
from sglang_diffkv.srt.tree.exact_prompts import ExactPrompts
from sglang_diffkv.srt.tree.kept_states import KeptStates
from sglang_diffkv.srt.tree.kv_events import ToldNodes, is_told
from sglang_diffkv.srt.tree.path_joining import MOST_PARTS, PathJoiner
from sglang_diffkv.srt.tree.retracted import Retracted
from sglang_diffkv.srt.versions import compat


class DiffKVPrefixCache(EvictingTree):
    """The parts that do not depend on the SGLang version; ``compat_tree.prefix_cache_class`` adds the rest."""

    inserting_row: int | None
    _restored: Segment | None
    inserted: tuple[int, Any]
    """Length of the longest key that the running insertion has put in, and the node where it ends."""
    states: KeptStates | None = None
    """Of a model that has states; None of others, and while nothing is kept."""
    told: ToldNodes | None = None
    """Nodes that listeners to SGLang's KV events know of; None without these events."""

    def __init__(self, params: Any, share_min_tokens: int, *, exact: bool = False):
        self.requests: RequestLifecycle = params.token_to_kv_pool_allocator.requests
        self.ledger, self.manager = self.requests.ledger, self.requests.manager
        self.inserting_row = self._restored = None
        self.locked_nodes: dict[Segment, int] = {}
        self.least_kept = self.least_kept_waiting = share_min_tokens
        self.least_cut = 0
        if self.manager.state.pages.is_cuda:
            self.least_cut, self.least_kept_waiting = WORTH_WAITING, max(share_min_tokens, WORTH_WAITING)
        self.requests.tree = self
        self.joiner = PathJoiner(self)
        super().__init__(params)
        self.told = self.told_nodes()
        self.is_eagle = False  # a node's tokens are those that its segment holds, and no pairs of them
        self.manager.counts.on_counted = self._count
        if not self.disable and has_states(self.req_to_token_pool):
            self.states = KeptStates(self, share_min_tokens)
        self.exact: ExactPrompts | None = None
        if self.manager.running is not None and not self.disable:
            self.manager.running.copies, self.manager.running.exact_prefixes = True, exact
        if exact and compacts(self.manager.state, self.manager.policy) and not self.disable:
            self.exact = ExactPrompts(self, min(share_min_tokens, self.manager.fmt.high.tokens))
        elif not self.disable:
            self.manager.prompts.share_min_tokens = share_min_tokens
            if self.states is None:  # a state stands for all of a prompt, so the tree takes that or nothing
                self.manager.prompts.tail = tail_tokens(self.manager.state, self.manager.policy)
        if self.manager.saved is not None and not self.disable:
            self.requests.retracted = Retracted(self, self.manager.saved)

    def reset(self) -> None:
        if self.states is not None:
            self.states.clear()
        if self.requests.retracted is not None:
            self.requests.retracted.clear()
        super().reset()
        self.joiner.ended.clear()
        self.inserted = (0, self.root_node)
        self.manager.segments.release_all()
        self.locked_nodes.clear()
        self.ledger.tree_pages = self.ledger.evictable_pages = 0

    # Insertion

    def make_segment_rows(self, count: int) -> bool:
        """Evict until ``count`` segment rows are free; False if that is not possible."""
        while self.manager.segments.rows_free < count:
            if not self._evict_leaf():
                return False
        return True

    def make_room_to_share(self, row: int) -> bool:
        """Evict until a segment can be made of the row's pages; False if that is not possible."""
        while not self.manager.prompts.can_publish(row):
            if not self._evict_leaf():
                return False
        return True

    def detach(self, req: Any, start: int) -> None:
        """The request has copied its tokens from position ``start`` on: it gets KV slots of its own for them, and locks
        the rest only. Without KV slots it goes on as it is."""
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

    def pack_replies(self) -> None:
        """A row was released: the replies that joined from it move to dense pages, where there is room for them."""
        waiting, self.manager.segments.fragmented = self.manager.segments.fragmented, []
        for segment in waiting:
            needed = self.manager.segments.packed_pages(segment)
            if self.make_room(needed) and segment in self.manager.segments.cached:
                self.uncount(segment)
                if not self.manager.segments.pack(segment):
                    segment.pages = 0
                    self.manager.counts.count_later(segment)

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
            self.locked_nodes[segment] = 0
            if self.told is not None:
                self.told.end_came(leaf)
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
        segment = parent.segment = child.segment
        segment.nodes += 1
        parent.left_by_readers, parent.told = list(child.left_by_readers), is_told(child)
        if child.lock_ref > 0:
            for read in self._read_through(child):
                self.locked_nodes[read] += 1
        return parent

    # Matching

    def match_prefix(self, params: Any) -> Any:
        retracted = self.requests.retracted
        return self.match(params) if retracted is None else retracted.match(params)

    def find(self, params: Any) -> Any:
        """What the tree has of a key, whether or not a row may read it."""
        return super().match_prefix(params)

    def match(self, params: Any) -> Any:
        """What a row may read of a key that the tree has."""
        result = super().match_prefix(params)
        if self.inserting_row is not None:
            return result  # SGLang looks for what it has just inserted, and attaches nothing
        node, found = result.last_device_node, self.depth(result.last_device_node)
        if self.states is None:
            end = self._served(node)
        else:
            node = self.states.last(node)
            while (end := self._served(node)) < self.depth(node):
                node = self.states.last(self._node_within(node, end))
            self.states.matched(params.req, node, end, found, len(params.key))
        if end == found:
            return result
        return super().match_prefix(dataclasses.replace(params, key=params.key[:end]))

    def may_end_match(self, node: Any) -> bool:
        """Whether what a request matches may end with the node: sliding layers hold all that they see, and the state
        is kept."""
        if self.states is not None and node not in self.states.of_nodes:
            return False
        attention_spans = self.manager.geometry.attention_spans
        return not any(attention_spans) or served_end(self.path(node), attention_spans) == self.depth(node)

    def told_nodes(self) -> ToldNodes | None:
        """What follows the KV events of the installed SGLang, if they are on."""
        raise NotImplementedError

    def _served(self, node: Any) -> int:
        """Position up to which a row may read the path to ``node``: it has room for that, and sliding layers find all
        that they see."""
        fitting = self._made_to_fit(node)
        return served_end(self.path(node) if fitting is None else fitting, self.manager.geometry.attention_spans)

    def _made_to_fit(self, node: Any) -> Path | None:
        """None if a row has room for the path to ``node``, at the latest when its pages are counted, or small parts of
        it are joined; else as much of the path as fits."""
        space, longest = self.manager.space, self.manager.geometry.max_tokens
        path = self.path(node)
        if len(path) > MOST_PARTS and self.joiner.join(node, evict=False):
            path = self.path(node)
        if space.fits(path, longest):
            return None
        self.manager.segments.count_reads(path)
        if not space.fits(path, longest) and self.joiner.join(node, evict=True):
            path = self.path(node)
        return None if space.fits(path, longest) else space.fitting(path, longest)

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

    def _node_within(self, node: Any, end: int) -> Any:
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
                        self.ledger.evictable_pages -= segment.pages
                    elif before + delta == 0:
                        self.ledger.evictable_pages += segment.pages
                if delta < 0:
                    node.left_by_readers = []
            node = node.parent

    def _read_through(self, node: Any) -> list[Segment]:
        """Segments whose pages rows may hold that have locked the node: its own, and those it named before they were
        joined to another."""
        return [node.segment, *(segment for segment in node.left_by_readers if segment in self.locked_nodes)]

    # Eviction, see ``EvictingTree``

    def _delete_leaf(self, node: Any) -> None:
        if self.states is not None:
            self.states.drop(node)
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
        self.ledger.tree_pages -= segment.pages
        if not self.locked_nodes[segment]:
            self.ledger.evictable_pages -= segment.pages

    def _count(self, segment: Segment) -> None:
        """The pages of a segment became known."""
        self.ledger.tree_pages += segment.pages
        if not self.locked_nodes[segment]:
            self.ledger.evictable_pages += segment.pages

    # States, see ``KeptStates``; the methods are those by which SGLang asks a prefix cache

    def supports_mamba(self) -> bool:
        return has_states(self.req_to_token_pool)

    def give_up_states(self, req: Any, row: int) -> None:
        """The request leaves its row."""
        if self.states is not None:
            self.states.leave(req, row)
        elif self.supports_mamba():
            compat.free_state(self.req_to_token_pool, req)

    def mamba_evictable_size(self) -> int:
        return 0 if self.states is None else len(self.states.of_nodes)

    def mamba_protected_size(self) -> int:
        return 0

    def all_mamba_values_flatten(self) -> torch.Tensor:
        kept = [] if self.states is None else list(self.states.of_nodes.values())
        return torch.cat(kept) if kept else torch.empty(0, dtype=torch.int64)

    # Reports

    def report(self) -> dict[str, float]:
        """For ``/server_info``: pages of the prefix cache, and those that its tokens need where each chain without a
        branch has dense pages of its own. Waits for the device."""
        held, needed = self.manager.segments.counts_of.pages(self._chains())
        return {
            "pages": held,
            "pages_needed": needed,
            "pages_over_needed": held / needed if needed else 1.0,
            "joined": self.joiner.joined,
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
        if self.states is not None:
            self.states.check_integrity(every)
