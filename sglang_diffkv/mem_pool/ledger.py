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
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sglang_diffkv.layout.geometry import Path
from sglang_diffkv.layout.spans import kept_in_layers
from sglang_diffkv.mem_pool.expected import Expected
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.mem_pool.rows import RequestRow
from sglang_diffkv.policies.base import kv_slots_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


def spare_pages(tiers: int) -> int:
    """Pages of each (layer, head) that a pool has beyond its nominal capacity, so that one request can always reach it.
    These are a part-filled page of each of two tiers or more and the page a step takes before it returns another."""
    return max(tiers, 2) + 1


def pages_for(capacity: int, page_tokens: int, heads: int, tiers: int = 2) -> int:
    """Pages of a pool that holds ``capacity`` tokens at the high tier."""
    return heads * (-(-capacity // page_tokens) + spare_pages(tiers))


GROWTH_MARGIN = 1.1
"""Tokens behind the window are expected to take this many times the pages that running requests take for theirs."""

PROMPT_MARGIN = 1.05
"""The same for prompts that are compacted between chunks."""

ESTIMATE_TOKENS = 512
"""Tokens behind the windows of running requests from which their pages tell what such a token takes."""

ROW_ESTIMATE_TOKENS = 256
"""The same of one request, whose own pages tell it then."""


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


class PageLedger:
    """Free, promised and shared pages of a manager, in tokens.

    Args:
        owning: whether a draft model has a cache by KV slot. draft_slots: KV slots that SGLang sets aside for the
            drafts of a request in a pass; 0 without speculation.

    Attributes:
        tree_pages: pages that the prefix cache holds. evictable_pages: those of them that no request has locked.
    """

    def __init__(self, manager: PageManager, capacity: int, *, owning: bool = False, draft_slots: int = 0):
        self.manager, self.draft_slots = manager, draft_slots
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
        self._credit = 0
        self._estimate = 1.0
        self._estimated_at = (-1, -1)
        layouts = manager.fmt.layouts
        self._least_price = 0.0 if manager.policy.prunes else layouts[0].tokens / max(x.tokens for x in layouts)
        self._part_filled = len(layouts) * manager.fmt.high.tokens / 2
        """What the part-filled page of each tier lacks on average, in high-tier tokens. A row whose first pages are
        shared or frozen has two of each."""
        self._given_back = 0.0
        """Tokens of a window that compression under pressure sends down. They are left out of what is reserved for a
        reply of known length. For a guessed length they stay in, as a margin for replies that grow longer."""
        if manager.pressure is not None:
            before, after = manager.policy.window, manager.pressure.rule.window
            self._given_back = self._within_spans(before) - self._within_spans(after)
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

    def growth_estimate(self) -> float:
        """What a token behind the window is expected to take, in high-tier tokens: at most 1. A request that generates
        moves its window on, and so grows by such tokens. Measured on the running requests whose prompt is compacted;
        where they are few, the last value stands. Requests that keep all tokens in the high tier, or have a window of
        their own, are not among them. Of layers with a sliding window those tokens count that they hold.

        An estimate for admission only. Should requests grow faster, free pages still bound each step, and SGLang
        retracts. A request that holds a budget grows in the high tier between its compressions; what such requests take
        together, ``srt/scheduling/joint_admission.py`` asks for.
        """
        manager = self.manager
        if manager.running is not None:
            return self._estimate
        now = (manager.counts.tick, manager.counts.counted_step)
        if now == self._estimated_at:
            return self._estimate
        self._estimated_at = now
        rows = [row for row in manager.rows if not manager.rows.in_prompt(row) and manager.counts.pages[row]]
        rows = [row for row in rows if row not in manager.high and row not in manager.windows]
        inside, behind = self._parts(np.array([manager.rows.length(row) for row in rows]), self._insides(rows))
        if (all_behind := float(behind.sum())) >= ESTIMATE_TOKENS:
            self._estimate = float(self._price(self._taken(rows).sum(), float(inside.sum()), all_behind))
        return self._estimate

    def _taken(self, rows: Sequence[int]) -> np.ndarray:
        """High-tier tokens that the pages of rows stand for ([n]), as they were counted last, less the unused slots of
        part-filled pages: a request has as many of these however long it grows."""
        manager = self.manager
        lacking = np.array([self._part_filled * (2 if manager.rows.closed(row) else 1) for row in rows])
        return manager.counts.pages[rows] * manager.fmt.high.tokens / manager.geometry.heads - lacking

    def _windows(self, rows: Sequence[int]) -> np.ndarray:
        """The windows of rows, [n], or [1] where all have the same one."""
        some: Sequence[int | None] = rows if len(self.manager.windows) else [None]
        return np.array([self._window_of(row) for row in some])

    def _pressed(self, rows: Sequence[int]) -> np.ndarray:
        """Positions from which on windows were not compressed under pressure, [n], or [1] where none was."""
        pressure = self.manager.pressure
        return np.array(
            [pressure.begun(row) for row in rows] if pressure is not None and pressure.compressions else [0]
        )

    def _insides(self, rows: Sequence[int]) -> np.ndarray:
        """Tokens inside the windows of rows ([n]), all in the high tier: fewer where some were compressed under
        pressure."""
        lengths = np.array([self.manager.rows.length(row) for row in rows])
        return np.minimum(lengths - self._pressed(rows), self._windows(rows))

    def _filling(self, rows: Sequence[int]) -> np.ndarray:
        """Tokens that rows take whole yet ([n]). What leaves a window meanwhile cannot go down: segments hold it, it is
        frozen, or it went down under pressure."""
        known = [self.manager.rows.of(row) if row in self.manager.rows else RequestRow() for row in rows]
        begun = np.maximum([x.closed for x in known], self._pressed(rows))
        return np.maximum(self._windows(rows) - (np.array([x.length for x in known]) - begun), 0)

    def _parts(self, length: np.ndarray, inside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of rows of so many tokens ([n]), those ``inside`` their windows and those behind them: as many as layers hold
        on average."""
        if not any(self.manager.geometry.attention_spans):
            return inside, length - inside
        held, inside = (np.array([self._within_spans(x) for x in part.tolist()]) for part in (length, inside))
        return inside, held - inside

    def _window_of(self, row: int | None) -> int:
        """Newest tokens of a row that stay in the high tier; None: of most rows. Where tokens are dropped that tells
        little, and all count as behind the window."""
        manager = self.manager
        if manager.policy.prunes:
            return 0
        return manager.policy.window if row is None else manager.windows.window_of(row)

    def _price(self, taken: Any, inside: Any, behind: Any) -> Any:
        """What a token behind a window takes, where so many take so much with those inside: of one row or of several.
        Of windows of their own a part may be in a prefix that is compressed already; no token takes less than one of
        the smallest tier."""
        found = GROWTH_MARGIN * np.maximum((taken - inside) / np.maximum(behind, 1), self._least_price)
        return np.minimum(found, 1.0)

    @property
    def last_estimate(self) -> float:
        """``growth_estimate`` as it was last asked for: reading it on one rank alone leaves the others' equal."""
        return self._estimate

    def _within_spans(self, length: float) -> float:
        """Of a sequence of ``length`` tokens, those that layers hold on average as far as they see."""
        return length * kept_in_layers(self.manager.geometry.attention_spans, length) if length else 0.0

    def _gives_back(self, row: int | None, length: float) -> bool:
        """Whether a row of so many tokens is compressed under pressure; None: one that holds nothing yet. Rows with a
        window of their own are not, nor those that have grown too little."""
        pressure = self.manager.pressure
        if pressure is None or (row is not None and row in self.manager.windows):
            return False
        return length >= pressure.next_at(row)

    def _grown(self, length: float, more: float, filling: float, price: float, *, given_back: bool) -> float:
        """High-tier tokens that ``more`` tokens behind ``length`` take: whole until the window is full, by so many
        (``filling``), and then at the price of those that leave it. ``given_back``: without what is given back of the
        window under pressure."""
        full = min(filling, more)
        before, filled = self._within_spans(length), self._within_spans(length + full)
        grown = filled - before + (self._within_spans(length + more) - filled) * price
        if not given_back:
            return grown
        return max(grown - max(self._given_back - (filling - full), 0.0) * (1 - price), 0.0)

    def growth(self, length: int, more: int, *, closed: int = 0, certain: bool = False) -> float:
        """High-tier tokens that ``more`` generated ones are expected to take behind ``length``, by the growth
        estimate: up to its budget where a request holds one, and in sliding layers up to their windows. ``closed``: of
        the length, the first tokens that a prefix holds already. ``certain``: as of ``Expected``."""
        running, price = self.manager.running, self.growth_estimate()
        if running is not None:
            return running.growing(length, more) * price
        filling = max(self._window_of(None) - (length - closed), 0)
        given = certain and self._gives_back(None, length + more - closed)
        return self._grown(length, more, filling, price, given_back=given)

    def whole_growth(self, length: int, more: float) -> float:
        """The same of a request that keeps all tokens in the high tier."""
        return self._within_spans(length + more) - self._within_spans(length)

    def growth_of(self, row: int | None, more: float, certain: bool = False) -> float:
        """``growth`` of a running request, given as ``Expected``, by its own pages where it is long enough."""
        manager, running = self.manager, self.manager.running
        length = 0 if row is None else manager.rows.length(row)
        if row is not None and row in manager.high:
            return self.whole_growth(length, more)
        if row is None or not length:
            return more * self.growth_estimate()
        if running is not None:
            return min(more, max(running.rule.limit - running.held(row), 0)) * self.growth_estimate()
        return self._growth_of_row(row, more, certain)

    def _growth_of_row(self, row: int, more: float, certain: bool) -> float:
        """As ``growth_of_all`` has it, without arrays: SGLang asks for each running request before each pass."""
        manager, pressure, known = self.manager, self.manager.pressure, self.manager.rows.of(row)
        price, window = self.growth_estimate(), self._window_of(row)  # measured anew whoever asks
        pressed = pressure.begun(row) if pressure is not None and pressure.compressions else 0
        inside: float = min(known.length - pressed, window)
        held: float = known.length
        if any(manager.geometry.attention_spans):
            inside, held = self._within_spans(inside), self._within_spans(held)
        if held - inside >= ROW_ESTIMATE_TOKENS and not known.in_prompt and (pages := int(manager.counts.pages[row])):
            lacking = self._part_filled * (2 if known.closed else 1)
            taken = pages * manager.fmt.high.tokens / manager.geometry.heads - lacking
            price = min(GROWTH_MARGIN * max((taken - inside) / (held - inside), self._least_price), 1.0)
        filling = max(window - (known.length - max(known.closed, pressed)), 0)
        given = certain and self._gives_back(row, known.length + more)
        return self._grown(known.length, more, filling, price, given_back=given)

    def room_for_refused(self, expected: Iterable[Expected]) -> bool:
        """Whether the last refused request would fit beside what running requests may generate yet. These make room by
        compression and by a falling estimate, not only by ending."""
        if self.refused is None:
            return False
        return self.available() + self.evictable() - self.growth_of_all(expected) > self.refused

    def growth_of_all(self, expected: Iterable[Expected]) -> float:
        """The sum of ``growth_of`` over running requests."""
        manager, wanted = self.manager, list(expected)
        alike = [x for x in wanted if x.row is not None and (x.row in manager.high or manager.rows.length(x.row))]
        if manager.running is not None or any(manager.geometry.attention_spans) or not alike:
            return sum(self.growth_of(*x) for x in wanted)
        usual, rows = self.growth_estimate(), [x.row for x in alike if x.row is not None]
        more = np.array([x.tokens for x in alike], dtype=float)  # [n], as all that follows
        length = np.array([manager.rows.length(row) for row in rows])
        inside, behind = self._parts(length, self._insides(rows))
        tells = (manager.counts.pages[rows] > 0) & (behind >= ROW_ESTIMATE_TOKENS)
        tells &= ~np.array([manager.rows.in_prompt(row) for row in rows])
        price = np.where(tells, self._price(self._taken(rows), inside, behind), usual)
        if len(manager.high):
            price[[row in manager.high for row in rows]] = 1.0
        filling = self._filling(rows)
        full = np.minimum(filling, more)
        grown = full + (more - full) * price
        ends = zip(alike, rows, (length + more).tolist(), strict=True)
        gives = np.array([x.certain and self._gives_back(row, end) for x, row, end in ends])
        given_back = np.maximum(self._given_back - (filling - full), 0) * (1 - price)
        grown = np.where(gives, np.maximum(grown - given_back, 0), grown)
        others = sum(x.tokens for x in wanted) - more.sum()  # of requests that hold nothing yet
        return float(grown.sum() + others * usual)

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
        if self._allocating:
            free += self.promised_pages()
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
