"""Eviction by pages: whole leaves of SGLang's radix tree, and of the last one only as much as is missing.

A leaf's tokens are the end of its segment, so a long leaf is cut: SGLang's own split makes its end a leaf, which is
evicted like any other, and the segment is trimmed to the rest.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache

from sglang_diffkv.mem_pool.geometry import Path
from sglang_diffkv.mem_pool.ledger import PageLedger
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.mem_pool.reach import whole_tokens
from sglang_diffkv.srt.kept_states import KeptStates
from sglang_diffkv.srt.kv_events import ToldNodes

WORTH_WAITING = 1024
"""Tokens of a compressed leaf that are worth a wait for the GPU's running step: their prefill takes longer, and so much
room lasts a full pool for many steps."""


class EvictingTree(RadixCache):
    """The part of ``DiffKVPrefixCache`` that gives pages back."""

    ledger: PageLedger
    manager: PageManager
    states: KeptStates | None
    told: ToldNodes | None
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

    def evict(self, params: EvictParams) -> EvictResult:
        """Evict leaves until ``params.num_tokens`` more high-tier tokens fit than now.

        Should that not be enough, the host waits for the device's counts, which may know of more room than its bounds:
        SGLang would retract a request next.
        """
        if self.disable:
            return EvictResult()
        start, before = time.perf_counter(), self.ledger.available()
        goal = before + params.num_tokens
        self._evict_while(lambda: self.ledger.pages_of_tokens(goal - self.ledger.available()))
        if self.ledger.available() < goal:
            self.manager.counts.settle()
        gained = self.ledger.available() - before
        self.update_eviction_metrics(gained, start)
        return EvictResult(num_tokens_evicted=gained)

    def evict_uncovered(self) -> None:
        """Evict until free pages cover all promises and the next step."""
        self.evict_pages(0)

    def evict_pages(self, pages: int) -> None:
        """Evict until ``pages`` are free that nobody is going to take."""
        self._evict_while(lambda: pages - self.ledger.uncommitted_pages())

    def make_room(self, pages: int) -> bool:
        """Evict until ``pages`` are free that nobody is going to take; False if that is not possible."""
        if self.ledger.uncommitted_pages() + self.ledger.evictable_pages < pages:
            return False
        self.evict_pages(pages)
        return self.ledger.uncommitted_pages() >= pages

    def evict_table_blocks(self, path: Path, new_tokens: int) -> None:
        """Evict until the page table has room for a prompt after a matched path, which must be locked."""
        self.make_table_blocks(self.ledger.blocks_for(path, new_tokens))

    def make_table_blocks(self, blocks: int) -> bool:
        """Evict until the page table has so many free blocks that nobody is going to take; False if that is not
        possible."""
        self._evict_while(lambda: math.inf if self.ledger.table_starved(blocks) else 0)
        return not self.ledger.table_starved(blocks)

    def evictable_tokens(self) -> int:
        """KV slots that the tree could give back."""
        return super().evictable_size()

    def evict_kv_slots(self, count: int) -> None:
        """Evict until ``count`` KV slots are free that nobody is going to take, if so many can be."""
        if self.ledger.uncommitted_kv_slots() + self.evictable_tokens() < count:
            return
        self._evict_while(lambda: math.inf if self.ledger.uncommitted_kv_slots() < count else 0)

    def _evict_while(self, missing: Callable[[], float]) -> None:
        """Evict while ``missing()`` pages is above 0; infinity evicts whole leaves."""
        heap: list[tuple[Any, Any]] | None = None
        while (pages := missing()) > 0:
            if heap is None:
                heap = [(self._priority(n), n) for n in self.evictable_leaves]
                heapq.heapify(heap)
            if not heap:
                return
            _, leaf = heapq.heappop(heap)
            self._evict_node(self._cut(leaf, pages))
            parent = leaf.parent
            if not parent.children and parent.lock_ref == 0:
                heapq.heappush(heap, (self._priority(parent), parent))

    def _cut(self, leaf: Any, pages: float) -> Any:
        """Split a leaf so that its end returns at least ``pages``; the end, or all of it if too little would stay."""
        if self.states is not None and leaf in self.states.of_nodes:
            return leaf  # no match would end in what stays
        tokens, least_kept = self.manager.segments.tokens_for(leaf.segment, pages), self.least_kept
        if not leaf.segment.as_computed:
            reaches = self.manager.geometry.reaches
            if any(reaches) and leaf.segment.end > whole_tokens(reaches):
                return leaf  # no match may end in what would stay: sliding layers hold its end only
            least_kept = self.least_kept_waiting
            tokens = max(tokens, min(self.least_cut, len(leaf.key) - least_kept))
        kept = len(leaf.key) - tokens
        if kept < max(least_kept, 1):
            return leaf
        self._split_node(leaf.key, leaf, kept)
        return leaf

    def _evict_leaf(self) -> bool:
        if not self.evictable_leaves:
            return False
        self._evict_node(min(self.evictable_leaves, key=self._priority))
        return True

    def _priority(self, leaf: Any) -> Any:
        """What SGLang's eviction policy says; where states are kept, leaves without one, of which no request can go on,
        come first."""
        priority = self.eviction_strategy.get_priority(leaf)
        return priority if self.states is None else (leaf in self.states.of_nodes, priority)

    def evict_path(self, key: Any, start: int = 0) -> None:
        """Evict what the tree has of SGLang's RadixKey ``key`` from position ``start`` on, as far as nothing branches
        off and nobody reads it."""
        node, path = RadixCache.match_prefix(self, MatchPrefixParams(key=key)).last_device_node, []
        while node is not self.root_node:
            path.append(node)
            node = node.parent
        end = sum(len(node.key) for node in path)
        for node in path:
            if end <= start or node.children or node.lock_ref:
                return
            end -= len(node.key)
            self._evict_node(node)

    def _evict_node(self, leaf: Any) -> None:
        self.token_to_kv_pool_allocator.free(leaf.value)
        self._delete_leaf(leaf)
        if self.told is not None:
            self.told.gone(leaf)
            self.told.end_went(leaf.parent)
