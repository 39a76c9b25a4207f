"""Eviction by pages: whole leaves of SGLang's radix tree, and of the last one only as much as is missing.

A leaf's tokens are the end of its segment, so a long leaf is cut. SGLang's own split makes its end a leaf, which is
evicted like any other, and the segment is trimmed to the rest. Short turns of a chat have a node each and share a
segment once they are joined (``PathJoiner``). Such nodes go together, as far as they are next in order.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache

from sglang_diffkv.layout.geometry import TABLE_BLOCK
from sglang_diffkv.layout.spans import whole_tokens
from sglang_diffkv.mem_pool.ledger import PageLedger
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.srt.tree.parts import NodeListener, NodeStates, PrefixSource, SessionRule

WORTH_WAITING = 1024
"""Tokens of a compressed leaf that are worth a wait for the GPU's running step: their prefill takes longer, and so much
room lasts a full pool for many steps."""


class EvictingTree(RadixCache):
    """The part of ``DiffKVPrefixCache`` that gives pages back."""

    ledger: PageLedger
    manager: PageManager
    states: NodeStates
    """States that nodes keep, of a model that has some."""
    sessions: SessionRule
    """Which nodes sessions refer to."""
    sources: Sequence[PrefixSource]
    """What becomes of evicted prefixes."""
    told: NodeListener
    """Who follows SGLang's KV events."""
    least_kept: int
    """A leaf is cut only if this many of its tokens stay."""
    least_kept_waiting: int
    """The same for a compressed leaf, of which the device has to tell what its end returned."""
    least_cut: int
    """From such a leaf so many tokens are cut at least, as far as enough stay: a full pool would wait at every step for
    the few it needs."""

    def evictable_size(self) -> int:
        return self.ledger.evictable()

    def protected_size(self) -> int:
        return self.ledger.protected()

    def full_evictable_size(self) -> int:
        return self.ledger.evictable()

    def full_protected_size(self) -> int:
        return self.ledger.protected()

    tokens_evicted = 0
    """Tokens that were evicted so far."""

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """SGLang's metrics count the tokens that are evicted inside, and the time."""
        start, before = time.perf_counter(), self.tokens_evicted
        yield
        self.update_eviction_metrics(self.tokens_evicted - before, start)

    def evict(self, params: EvictParams) -> EvictResult:
        """Evict leaves until ``params.num_tokens`` more high-tier tokens fit than now.

        Should that not be enough, the host waits for the device's counts, which may know of more room than its bounds:
        SGLang would retract a request next.
        """
        if self.disable:
            return EvictResult()
        before = self.ledger.available()
        goal = before + params.num_tokens
        self._evict_while(lambda: self.ledger.pages_of_tokens(goal - self.ledger.available()))
        if self.ledger.available() < goal:
            self.manager.counts.settle()
        return EvictResult(num_tokens_evicted=self.ledger.available() - before)

    def make_tokens(self, tokens: int) -> bool:
        return self.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted >= tokens

    def make_pages(self, pages: int, *, partly: bool = False) -> bool:
        if not partly and self.ledger.uncommitted_pages() + self.ledger.evictable_pages < pages:
            return False
        self._evict_while(lambda: pages - self.ledger.uncommitted_pages())
        return self.ledger.uncommitted_pages() >= pages

    def make_table_blocks(self, blocks: int) -> bool:
        self._evict_while(lambda: math.inf if self.ledger.table_starved(blocks) else 0)
        return not self.ledger.table_starved(blocks)

    def evictable_tokens(self) -> int:
        """KV slots that the tree could give back."""
        return super().evictable_size()

    def make_kv_slots(self, count: int) -> bool:
        if self.ledger.uncommitted_kv_slots() + self.evictable_tokens() < count:
            return False
        self._evict_while(
            lambda: math.inf if self.ledger.uncommitted_kv_slots() < count else 0,
            lambda: count - self.ledger.uncommitted_kv_slots(),
        )
        return self.ledger.uncommitted_kv_slots() >= count

    def make_segment_rows(self, count: int) -> bool:
        return self._evict_leaves_until(lambda: self.manager.segments.rows_free >= count)

    def make_room_to_restore(self, tokens: int, pages: int, blocks: int, *, segments: int = 1) -> bool:
        """Evict until so many tokens, of so many pages and table blocks, can be ``segments`` that a request reads, and
        the request computes one more; False if that is not possible."""
        ledger = self.ledger
        self.make_kv_slots(tokens + 1)
        if ledger.uncommitted_kv_slots() < tokens + 1:
            return False  # what follows frees some, and takes none
        return (
            self.make_segment_rows(segments)
            and self.make_pages(pages + ledger.prompt_pages(1))
            and self.make_table_blocks(blocks * 2 + ledger.next_blocks)  # of the segment, and of the row
        )

    def make_room_to_share(self, row: int) -> bool:
        """Evict until a segment can be made of the row's pages; False if that is not possible."""
        return self._evict_leaves_until(lambda: self.manager.prompts.can_publish(row))

    def _evict_leaves_until(self, enough: Callable[[], bool]) -> bool:
        with self._counted():
            while not enough():
                if not self._evict_leaf():
                    return False
        return True

    def _evict_while(self, missing: Callable[[], float], tokens: Callable[[], int] | None = None) -> None:
        """Evict while ``missing()`` pages is above 0; infinity evicts whole leaves, of those that share a segment as
        many as have ``tokens()``, or a table block's worth."""
        block = TABLE_BLOCK * self.manager.fmt.high.tokens
        heap: list[tuple[Any, Any]] | None = None
        with self._counted():
            while (pages := missing()) > 0:
                heap = self._order() if heap is None else heap
                if not heap:
                    return
                _, leaf = heapq.heappop(heap)
                nodes = self._together(leaf, heap)
                whole = math.isinf(pages)
                parent = self.evict_nodes(
                    self._end(nodes, tokens() if tokens else block) if whole else self._cut(nodes, pages)
                )
                if not parent.children and parent.lock_ref == 0:
                    heapq.heappush(heap, (self._priority(parent), parent))

    def _order(self) -> list[tuple[Any, Any]]:
        """A heap of the leaves that may go, by priority."""
        heap = [(self._priority(leaf), leaf) for leaf in self.evictable_leaves]
        heapq.heapify(heap)
        return heap

    def _together(self, leaf: Any, others: list[tuple[Any, Any]]) -> list[Any]:
        """A leaf and the nodes above it that go with it: of its segment, and next in order before the ``others`` (a
        heap)."""
        nodes = [leaf]
        while self._is_end(parent := nodes[-1].parent, leaf.segment):
            if others and self._priority(parent) > others[0][0]:
                break
            nodes.append(parent)
        return nodes

    def _is_end(self, node: Any, segment: Any) -> bool:
        """Whether a node of the segment becomes a leaf once the one below it is gone, with nothing in it that is worth
        more: no reader, and no state."""
        if node is self.root_node or node.segment is not segment or node.lock_ref > 0 or len(node.children) > 1:
            return False
        return node not in self.states.of_nodes

    def _end(self, nodes: list[Any], tokens: int) -> list[Any]:
        """Of a leaf and nodes above it, so many that they have ``tokens``."""
        count = 0
        for node in nodes:
            if tokens <= 0:
                break
            tokens, count = tokens - len(node.key), count + 1
        return nodes[: max(count, 1)]

    def _cut(self, nodes: list[Any], pages: float) -> list[Any]:
        """Of a leaf and nodes above it, all of one segment, the end that returns at least ``pages``; all of them if too
        little would stay. A node that is longer is split."""
        segment = nodes[0].segment
        if nodes[0] in self.states.of_nodes:
            return nodes  # no match would end in what stays
        if segment.row in self.manager.counts.uncounted:
            self.manager.counts.settle()
        length = sum(len(node.key) for node in nodes)
        tokens, least_kept = self.manager.segments.tokens_for(segment, pages), self.least_kept
        if not segment.as_computed:
            attention_spans = self.manager.geometry.attention_spans
            if any(attention_spans) and segment.end > whole_tokens(attention_spans):
                return nodes  # no match may end in what would stay: sliding layers hold its end only
            least_kept = self.least_kept_waiting
            tokens = max(tokens, min(self.least_cut, length - least_kept))
        if length - tokens < max(least_kept, 1):
            return nodes
        end: list[Any] = []
        for node in nodes:
            kept = len(node.key) - int(tokens)
            kept -= kept % self.page_size
            if kept >= len(node.key):
                break
            if kept > 0:
                self._split_node(node.key, node, kept)
            tokens -= len(node.key)
            end.append(node)
        return end

    def _evict_leaf(self) -> bool:
        if not self.evictable_leaves:
            return False
        heap = self._order()
        _, leaf = heapq.heappop(heap)
        self.evict_nodes(self._together(leaf, heap))
        return True

    @property
    def keeps_history(self) -> bool:
        """Whether SGLang's eviction policy asks how long a branch was (``tlru``)."""
        return hasattr(self.eviction_strategy, "next_prompt_estimate")

    def raise_history(self, leaf: Any) -> None:
        """A leaf was inserted: its branch, and those above, were as long at least."""
        nodes, length = [leaf], len(leaf.key)
        while nodes[-1].parent is not self.root_node:
            nodes.append(nodes[-1].parent)
            length += len(nodes[-1].key)
        for node in nodes:
            node._tlru_history_len = max(getattr(node, "_tlru_history_len", 0), length)

    def _priority(self, leaf: Any) -> Any:
        """What SGLang's eviction policy says. Before that, leaves to which no session refers come first; where states
        are kept, of these the leaves without one, of which no request can go on."""
        if self.keeps_history:
            leaf._tlru_cached_prefix_len, above = 0, leaf
            while above is not self.root_node:
                leaf._tlru_cached_prefix_len, above = leaf._tlru_cached_prefix_len + len(above.key), above.parent
        referenced, stated = self.sessions.referenced(leaf), leaf in self.states.of_nodes
        return referenced, stated, self.eviction_strategy.get_priority(leaf)

    def evict_path(self, key: Any, start: int = 0) -> None:
        """Evict what the tree has of SGLang's RadixKey ``key`` from position ``start`` on, as far as nothing branches
        off and nobody reads it."""
        self._evict_back(RadixCache.match_prefix(self, MatchPrefixParams(key=key)).last_device_node, start)

    def evict_branch(self, node: Any) -> bool:
        if node in (None, self.root_node):
            return False
        if node.segment is not None:
            self._evict_back(node)
        return True

    def _evict_back(self, node: Any, start: int = 0) -> None:
        """Evict the path to ``node`` from its end to position ``start``, as far as nothing branches off and nobody
        reads it."""
        end, above = 0, node
        while above is not self.root_node:
            end, above = end + len(above.key), above.parent
        while end > start and not node.children and node.lock_ref == 0:
            nodes = [node]
            end -= len(node.key)
            while end > start and self._is_end(nodes[-1].parent, node.segment):
                nodes.append(nodes[-1].parent)
                end -= len(nodes[-1].key)
            node = self.evict_nodes(nodes)

    def evict_nodes(self, nodes: list[Any], *, wait: bool = True) -> Any:
        """Evict a leaf and nodes above it, all of one segment; the node above them. ``wait``: for the device to count
        the pages that are left of the segment. Without it nobody copies them: they are not worth a page."""
        if wait:
            for part in self.sources:
                part.leaving(nodes)
        above, segment, tokens = nodes[-1].parent, nodes[0].segment, sum(len(node.key) for node in nodes)
        self.tokens_evicted += tokens
        for node in nodes:
            self.token_to_kv_pool_allocator.free(node.value)
            self._delete_leaf(node)
            node.segment = None
        self.give_up_end(segment, len(nodes), tokens, wait=wait)
        for node in nodes:
            self.told.gone(node)
        self.told.end_went(above)
        return above

    def give_up_end(self, segment: Any, nodes: int, tokens: int, *, wait: bool) -> None:
        """So many nodes at the end of a segment, with so many tokens, are gone."""
        raise NotImplementedError
