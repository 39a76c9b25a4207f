"""Accounting in the unit SGLang schedules with: one token at the high tier, in all layers and heads.

Pages are the truth; tokens are pages times the high-tier tokens of a page, over the (layer, head) pairs.
Everything here is a lower bound of what is free: pages that running requests may take in the next step and
pages promised to admitted prompts count as used.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from sglang_diffkv.layout.geometry import Path
from sglang_diffkv.mem_pool.growth import GROWTH_MARGIN, Expected, ExpectedGrowth
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.policies.base import kv_slots_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


def spare_pages(tiers: int) -> int:
    """Pages of each (layer, head) that a pool has beyond its nominal capacity, so that one request can always reach it.
    These are a part-filled page of each of two tiers or more and the page a step takes before it returns another."""
    return max(tiers, 2) + 1


def pages_for(capacity: int, page_tokens: int, heads: int, tiers: int = 2) -> int:
    """Pages of a pool that holds ``capacity`` tokens at the high tier."""
    return heads * (-(-capacity // page_tokens) + spare_pages(tiers))


PROMPT_MARGIN = 1.05
"""Prompts that are compacted between chunks are expected to take this many times what their tokens take."""


class Promise(NamedTuple):
    """Pages, page-table blocks and KV slots."""

    pages: int
    blocks: int
    kv_slots: int


NOTHING = Promise(0, 0, 0)


class Promises(dict[Hashable, Promise]):
    """What each request is promised, and ``total``, their sum: many are admitted at once, and each of them asks for it
    several times."""

    def __init__(self) -> None:
        super().__init__()
        self.total = NOTHING

    def __setitem__(self, request: Hashable, promise: Promise) -> None:
        self._change(self.get(request, NOTHING), promise)
        super().__setitem__(request, promise)

    def drop(self, request: Hashable) -> None:
        """The request is promised nothing."""
        self._change(self.pop(request, NOTHING), NOTHING)

    def clear(self) -> None:
        super().clear()
        self.total = NOTHING

    def check_integrity(self) -> None:
        """Raise AssertionError unless ``total`` is the sum."""
        assert self.total == Promise(*map(sum, zip(NOTHING, *self.values(), strict=True))), "promises are miscounted"

    def _change(self, before: Promise, after: Promise) -> None:
        self.total = Promise(*(x - y + z for x, y, z in zip(self.total, before, after, strict=True)))


class PageLedger(ExpectedGrowth):
    """Free, promised and shared pages of a manager, in tokens.

    Args:
        owning: whether a draft model has a cache by KV slot. draft_slots: KV slots that SGLang sets aside for the
            drafts of a request in a pass; 0 without speculation.

    Attributes:
        tree_pages: pages that the prefix cache holds. evictable_pages: those of them that no request has locked.
    """

    def __init__(self, manager: PageManager, capacity: int, *, owning: bool = False, draft_slots: int = 0):
        super().__init__(manager)
        self.draft_slots = draft_slots
        self.capacity = capacity
        longest, attention_spans = manager.geometry.max_tokens, manager.geometry.attention_spans
        self.kv_slots = kv_slots_of(manager.policy, capacity, manager.fmt, longest, attention_spans, owning=owning)
        """Tokens that SGLang may hold at once."""
        self.kv_slots_free: Callable[[], int] = lambda: self.kv_slots
        """Of these, those that are free; ``ask_for_kv_slots`` says who knows."""
        self.tree_pages = 0
        self.evictable_pages = 0
        self.promised = Promises()
        """Request -> what its admitted prompt may still take. Requests are keys here, and not their ids: clients choose
        ids, so two requests may have the same."""
        self.chunks: dict[Hashable, int] = {}
        """Request -> tokens of a chunk, where the prompt is compacted between chunks."""
        self.compacted = 0  # prompts admitted so
        self.waited = 0
        """Requests that were refused at least once for want of pages or table blocks."""
        self.started_over = 0
        """Requests that did not fit alone behind their prefix, and were computed as a whole."""
        self._allocating = self._compressing = self._checking = False
        self._credit = self._charged = 0
        self.refused: float | None = None
        """Tokens that the last refused request needed, while it waits for them."""

    def reset(self) -> None:
        """Nothing is held, and nothing is promised."""
        self.release_all()
        self.promised.clear()
        self.chunks.clear()

    def ask_for_kv_slots(self, free: Callable[[], int]) -> None:
        """Ask ``free`` from now on how many KV slots are free."""
        self.kv_slots_free = free

    # Pages of the prefix cache

    def hold(self, pages: int, *, locked: bool) -> None:
        """The prefix cache holds so many more pages. ``locked``: a request reads them, so they cannot be evicted."""
        self.tree_pages += pages
        if not locked:
            self.evictable_pages += pages

    def release(self, pages: int, *, locked: bool) -> None:
        """It holds so many fewer. ``locked``: a request still reads them."""
        self.tree_pages -= pages
        if not locked:
            self.evictable_pages -= pages

    def lock(self, pages: int) -> None:
        """A request reads pages that nobody read before."""
        self.evictable_pages -= pages

    def unlock(self, pages: int) -> None:
        """The last request that read so many pages has let go of them."""
        self.evictable_pages += pages

    def release_all(self) -> None:
        """The prefix cache holds nothing."""
        self.tree_pages = self.evictable_pages = 0

    # Requests that wait

    def refuse(self, tokens: float, *, first: bool) -> None:
        """A request waits until so many tokens are free. ``first``: it did not wait before."""
        self.refused = tokens
        self.waited += first

    def forget_refused(self) -> None:
        """The last refused request waits no longer, or is looked at again."""
        self.refused = None

    def start_over(self) -> None:
        """A request that did not fit alone behind its prefix is computed as a whole."""
        self.started_over += 1

    # Estimates

    def prompt_pages(self, tokens: int) -> int:
        """Most pages that a prompt of ``tokens`` new tokens holds at any moment: one more in each head than its tokens
        in a row if its tail is no whole number of pages."""
        if tokens <= 0:
            return 0
        geometry, prompts = self.manager.geometry, self.manager.prompts
        ragged = prompts.tail % geometry.fmt.high.tokens > 0 or (prompts.tail > 0 and self.manager.windows.ragged)
        ragged |= prompts.page_size > 1 and len(geometry.fmt.tiers) > 1  # what is over a multiple is in the tail
        return geometry.most_pages(tokens) + geometry.heads * ragged

    def room_for_refused(self, expected: Iterable[Expected]) -> bool:
        """Whether the last refused request would fit beside what running requests may generate yet. These make room by
        compression and by a falling estimate, not only by ending."""
        if self.refused is None:
            return False
        return self.available() + self.evictable() - self.growth_of_all(expected) > self.refused

    @property
    def idle(self) -> bool:
        """Whether no request has a row, and none is admitted."""
        return not self.manager.rows and not self.promised

    def promised_pages(self) -> int:
        return self.promised.total.pages

    @property
    def next_blocks(self) -> int:
        """Table blocks that a request may take in a step: one of each tier."""
        return max(len(self.manager.fmt.tiers), 2)

    def table_starved(self, new_blocks: int = 0) -> bool:
        """Whether the page table might not hold the next step, all promises and ``new_blocks``."""
        manager, promised = self.manager, self.promised.total.blocks
        needed = self.next_blocks * len(manager.rows) + new_blocks + promised + manager.prompts.planned_blocks()
        return needed > len(manager.space.free_blocks)

    def uncommitted_pages(self) -> int:
        """Free pages that nobody is going to take; negative if the tree must give some back first."""
        counts, planned = self.manager.counts, self.manager.prompts.planned_pages()
        taken = counts.headroom_bound() + self.promised_pages() + planned + self._reserve()
        return counts.free_bound() - taken

    def _reserve(self) -> int:
        """Pages set aside for the copy that a running request's compression is about to make, one at a time. None for a
        request that runs alone, which would be retracted for its own sake; nor where a prompt is admitted, since the
        growth that running requests have together counts copies."""
        running = self.manager.running
        if running is None or self._compressing or self._checking or self._allocating or self._requests() < 2:
            return 0
        return running.near_copy_pages

    def _requests(self) -> int:
        """Requests past their prompt, two at most, and those whose prompt is admitted or runs."""
        rows = self.manager.rows
        return len(self.promised) + sum(1 for _ in islice((row for row in rows if not rows.in_prompt(row)), 2))

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Inside, a prompt is admitted or not beside the growth that running requests have together."""
        before, self._checking = self._checking, True
        try:
            yield
        finally:
            self._checking = before

    @contextmanager
    def compressing(self) -> Iterator[None]:
        """Inside, what is set aside for a running request's compression is free."""
        before, self._compressing = self._compressing, True
        try:
            yield
        finally:
            self._compressing = before

    def uncommitted_kv_slots(self) -> int:
        """Free KV slots that no admitted prompt is going to take."""
        free = self.kv_slots_free()
        return free if self._allocating else free - self.promised.total.kv_slots

    def report(self) -> dict[str, float]:
        """For ``/server_info``: what is set aside now, in pages, and the growth estimate."""
        pressure = self.manager.pressure
        return {
            "price": self.growth_estimate(),
            "headroom_pages": self.manager.counts.headroom_bound(),
            "promised_pages": self.promised_pages(),
            "compacted_between_chunks": self.compacted,
            "waited": self.waited,
            "started_over": self.started_over,
            **({} if pressure is None else {"compressed_under_pressure": pressure.compressions}),
            **({} if self.manager.running is None else self.manager.running.report()),
        }

    def pages_of_tokens(self, tokens: int) -> int:
        """Pages that ``tokens`` of capacity stand for, at most."""
        return self.manager.geometry.heads * -(-tokens // self.manager.fmt.high.tokens)

    def _tokens(self, used_pages: int) -> int:
        """Capacity, in tokens, that ``used_pages`` take."""
        heads = self.manager.geometry.heads
        beyond_spare = max(used_pages - spare_pages(len(self.manager.fmt.tiers)) * heads, 0)
        return min(-(-beyond_spare * self.manager.fmt.high.tokens // heads), self.capacity)

    def available(self) -> int:
        """Tokens that can be stored without evicting anything."""
        if self.manager.rows and self.table_starved():
            return 0
        total = self.manager.geometry.num_pages
        free = self.uncommitted_pages()
        free += self.promised_pages() if self._allocating else self._charged
        tokens = self.capacity - self._tokens(total - free)
        if self.manager.rows:
            tokens = min(tokens, max(self.uncommitted_kv_slots(), 0))
        return tokens + self._credit

    def evictable(self) -> int:
        return self._tokens(self.tree_pages) - self.protected()

    def protected(self) -> int:
        return self._tokens(self.tree_pages - self.evictable_pages)

    def uncached(self) -> int:
        """Tokens held by running requests alone; closes SGLang's invariant while requests run.

        At idle SGLang checks the invariant without this term, so a page that neither a request
        nor the tree gives back shows there.
        """
        return self.capacity - self.available() - self._tokens(self.tree_pages)

    @contextmanager
    def prefilling(self) -> Iterator[None]:
        """While SGLang allocates the KV slots of admitted prompts, the pages promised to them are available."""
        before, self._allocating = self._allocating, True
        try:
            yield
        finally:
            self._allocating = before

    @contextmanager
    def credited(self, tokens: int) -> Iterator[None]:
        """Inside, so many tokens more are available: what a request is known to need less than SGLang asks for it."""
        before, self._credit = self._credit, tokens
        try:
            yield
        finally:
            self._credit = before

    @contextmanager
    def charging(self, prompts: Iterable[tuple[Hashable, int]]) -> Iterator[None]:
        """Inside, SGLang itself subtracts so many tokens for each of these requests, whose prompts it has admitted to
        the pass that it is making up. As many of the pages that they are promised are available, so that they are not
        subtracted twice."""
        fmt, heads = self.manager.fmt, self.manager.geometry.heads
        pages = ((self.promised.get(x, NOTHING).pages, heads * (tokens // fmt.high.tokens)) for x, tokens in prompts)
        before, self._charged = self._charged, sum(min(promised, charged) for promised, charged in pages)
        try:
            yield
        finally:
            self._charged = before

    def unlimited(self) -> AbstractContextManager[None]:
        """Inside, memory limits no chunk: its pages are promised, or it was seen to fit."""
        return self.credited(1 << 40)

    def admits(self, new_tokens: int, blocks: int) -> bool:
        """Whether a prompt of ``new_tokens`` fits, evicting pages that may go. ``blocks``: ``blocks_for`` it and its
        matched path, which is locked."""
        if self.table_starved(blocks) or self.uncommitted_kv_slots() < new_tokens:
            return False
        return self.prompt_pages(new_tokens) <= self.uncommitted_pages() + self.evictable_pages

    def has_spare(self, new_tokens: int) -> bool:
        """Whether pages and KV slots for a prompt of ``new_tokens`` are free that nobody is going to take."""
        fits = self.uncommitted_kv_slots() >= new_tokens
        return fits and self.prompt_pages(new_tokens) <= self.uncommitted_pages()

    def compacting_tokens(self, new_tokens: int, chunk: int) -> int:
        """What a prompt is expected to take at most, in high-tier tokens, if it is compacted after each chunk: all but
        the last chunk, and the window before it, by the growth estimate."""
        growth = self.growth_estimate() * PROMPT_MARGIN / GROWTH_MARGIN if self.growth_estimate() < 1 else 1.0
        whole = chunk + self._window_of(None)
        return min(math.ceil(growth * max(new_tokens - whole, 0) + self._part_filled) + whole, new_tokens)

    def given_back(self, new_tokens: int) -> int:
        """High-tier tokens that a prompt of ``new_tokens`` is expected to give back when it is compacted at its end."""
        return new_tokens - self.compacting_tokens(new_tokens, 0)

    def most_pages(self, path: Path, own_tokens: int) -> int:
        """Pages, at most, that a request of ``own_tokens`` after ``path`` keeps from others."""
        shared = {segment: segment.pages or self.prompt_pages(segment.hi - segment.lo) for segment, _, _ in path}
        return self.prompt_pages(own_tokens) + self.manager.geometry.heads + sum(shared.values())

    def may_compact(self, path: Path, new_tokens: int, most: int) -> bool:
        """Whether a prompt after a matched ``path`` (locked) may be compacted between chunks, as far as memory goes.

        How far it compresses is an estimate: where a chunk turns out not to fit, it waits until running requests have
        ended or were retracted. So the prompt and the last of them, of ``most`` pages, have to fit together even if
        nothing compresses.
        """
        spare = spare_pages(len(self.manager.fmt.tiers)) * self.manager.geometry.heads
        if self.most_pages(path, new_tokens) + most + spare > self.manager.geometry.num_pages:
            return False
        if self.uncommitted_kv_slots() < new_tokens:
            return False
        return not self.table_starved(self.blocks_for(path, new_tokens))

    def admits_compacting(self, new_tokens: int, chunk: int) -> bool:
        """``admits`` for a prompt that may be compacted between chunks: whether what it is expected to take fits."""
        expected = self.prompt_pages(self.compacting_tokens(new_tokens, chunk))
        return expected <= self.uncommitted_pages() + self.evictable_pages

    def blocks_for(self, path: Path, new_tokens: int) -> int:
        """Table blocks of an admitted prompt until its first decode step."""
        return self.manager.space.blocks_for(path, new_tokens) + self.next_blocks

    def compact_between_chunks(self, request: Hashable, chunk: int) -> None:
        """The request is admitted, and its prompt is compacted after each chunk of so many tokens."""
        self.chunks[request] = chunk
        self.compacted += 1

    def allow_chunk(self, request: Hashable, chunk: int) -> None:
        """A chunk of such a request may have so many tokens."""
        self.chunks[request] = max(self.chunks[request], chunk)

    def promise(self, request: Hashable, new_tokens: int, blocks: int | None = None) -> None:
        """Set aside pages, table blocks and KV slots for ``new_tokens`` prompt tokens that are still to be computed.
        For a prompt that is compacted between chunks: pages for the next chunk.

        Args:
            blocks: ``blocks_for`` these and a path that is still to be attached; None where nothing is.
        """
        if new_tokens > 0:
            pages = self.prompt_pages(min(new_tokens, self.chunks.get(request, new_tokens)))
            blocks = self.blocks_for([], new_tokens) if blocks is None else blocks
            self.promised[request] = Promise(pages, blocks, new_tokens)
        else:
            self.forget(request)

    def set_aside(self, request: Hashable, pages: int, blocks: int) -> None:
        """So many pages and table blocks are for a prompt that another server computes. It has its KV slots."""
        self.promised[request] = Promise(pages, blocks, 0)

    def forget(self, request: Hashable) -> None:
        """The request's prompt is computed, or it leaves."""
        self.promised.drop(request)
        self.chunks.pop(request, None)
