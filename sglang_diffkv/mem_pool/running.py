"""Running requests that hold a budget: what is kept to score their tokens, and their compression while they run.

A request's newest queries are kept (*query slot*) from shortly before it reaches its limit. All decisions follow from
lengths, which the host knows: nothing waits for the device, and ranks agree.

A row may be scored *beside* the next pass (``score_beside``), on a stream of its own. Meanwhile it is in no decode
step, so nothing writes what is read. Its pages, its part of the page table and its query slot are its own. Pages that
others hold for it are immutable and stay while it refers to them. What is written is memory that nothing else uses. All
that changes pages, tables or counts (``compress``, or a release) is launched in order with the passes as ever, after
the scoring has ended. So no page is free, and no query slot another's, before it was read. Whether and when does not
depend on how long the device takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from sglang_diffkv.layout.geometry import Geometry, Path, rows_of
from sglang_diffkv.layout.page_format import EMPTY
from sglang_diffkv.layout.query_cache import QueryCache
from sglang_diffkv.layout.state import PageState
from sglang_diffkv.mem_pool.counts import LOOKAHEAD, PageCounts
from sglang_diffkv.mem_pool.device import Beside, PageDevice
from sglang_diffkv.mem_pool.joint_growth import Outlook, Saw
from sglang_diffkv.mem_pool.prompts import Prompts
from sglang_diffkv.mem_pool.rows import RequestRows
from sglang_diffkv.mem_pool.segments import SegmentStore
from sglang_diffkv.mem_pool.table_space import blocks_of
from sglang_diffkv.ops.base import Scaling
from sglang_diffkv.ops.decisions import ALIGNED, Scoring
from sglang_diffkv.policies.base import Policy, Running, TopCount


def query_slots(running: Running, geometry: Geometry) -> int:
    """Requests whose queries are kept at once: a share of those that fit, in the lowest tier, with their budget; with
    their limit, where no more may run."""
    tokens = geometry.num_pages // geometry.heads * geometry.fmt.low.tokens
    fitting = tokens // running.limit if running.constrained else -(-tokens // running.keep)
    return max(1, round(running.slots * min(geometry.num_rows - 1, fitting)))


def query_cache(policy: Policy, geometry: Geometry, q_heads: int, **where: Any) -> QueryCache | None:
    """What keeps the queries of running requests, if the policy scores them by these. ``where``: dtype and device."""
    rule = policy.running
    if rule is None:
        return None
    return QueryCache.create(
        slots=query_slots(rule, geometry),
        rows=geometry.num_rows,
        layers=geometry.num_layers,
        window=rule.queries,
        q_heads=q_heads,
        head_dim=geometry.fmt.head_dim,
        **where,
    )


@dataclass
class Budgeted:
    """A row past its prompt.

    Attributes:
        held, at: tokens that each head held, at most, when the row was ``at`` tokens long. own: those of them that lay
            in pages of its own. scored: whether it was compressed before. slot: its query slot; since: its length when
            it got it.
    """

    held: int
    at: int
    own: int
    scored: bool
    slot: int | None = None
    since: int = 0


class RunningCompression:
    """Rows of running requests, each with its budget.

    Attributes:
        scaling: of the model's layers, all alike. copies: whether rows may have to move to be compressed.
        exact_prefixes: whether the prefix cache keeps all of a prompt's tokens.
        compressions: so far; beside: those of them that were scored so. waited: steps that rows at their limit waited
            for a query slot or for pages. late: tokens of rows beyond their limit when they were compressed.
    """

    def __init__(
        self,
        device: PageDevice,
        rows: RequestRows,
        counts: PageCounts,
        segments: SegmentStore,
        prompts: Prompts,
        policy: Policy,
        cache: QueryCache,
        scaling: Scaling,
    ):
        assert policy.running is not None
        self.device, self.rows, self.counts = device, rows, counts
        self.segments, self.prompts, self.policy = segments, prompts, policy
        self.rule: Running = policy.running
        self.cache, self.scaling = cache, scaling
        self.copies = len(device.fmt.tiers) > 1
        self.exact_prefixes = False
        self.compressions = self.beside = self.waited = self.late = 0
        self._one_tier, self._page = len(device.fmt.tiers) == 1, device.fmt.high.tokens
        high = policy.prompt.high if isinstance(policy.prompt, TopCount) and not self._one_tier else None
        self._high = high.tokens if high is not None and isinstance(high.tokens, int) else None
        self._kept = self._pages_of(self.rule.keep)
        free, copy = (0, self.copy_pages // device.geometry.heads) if self.copies else (-self.rule.keep % self._page, 0)
        sizes = {"free": free, "page": self._page, "copy": copy, "slots": cache.slots, "queries": self.rule.queries}
        sizes["missed"] = int(self.rule.asynchronous)  # while it is scored
        self.saw = Saw(self.rule.limit - self.rule.keep, **sizes)
        """How rows go on that hold their budget."""
        self._rows: dict[int, Budgeted] = {}
        self._about: set[int] = set()  # rows that have a query slot
        self._free = list(range(cache.slots - 1, -1, -1))
        self._scored: dict[int, tuple[int, Beside[Scoring]]] = {}  # row -> its length, and what was scored
        self._positions = 0  # of the memory for these, in use

    def share_prefixes(self, *, exact: bool) -> None:
        """A prefix cache shares what rows hold, so that these may have to move. ``exact``: it keeps all of a prompt's
        tokens."""
        self.copies, self.exact_prefixes = True, exact

    def wait(self) -> None:
        """A row at its limit waits a step."""
        self.waited += 1

    # What rows hold

    def began(self, row: int) -> None:
        """The prompt of a row has run.

        Unless it was to stay as it is, its own tokens were compressed. Of what it shares ``exact_prefixes`` hold every
        token; of others, which were compressed each for itself, its table says how many tokens there are at most.
        """
        length, shared, keep = self.rows.length(row), self.rows.shared(row), self.rule.keep
        own = length - shared
        if row not in self.prompts.untouched:
            own = min(own, keep)
            shared = shared if self.exact_prefixes else min(shared, self.device.space.most_tokens(row))
        self._rows[row] = Budgeted(shared + own, length, own, scored=length - shared > keep)

    def held(self, row: int) -> int:
        """Tokens that each head of a row holds, at most; its length where it is not past its prompt."""
        known, length = self._rows.get(row), self.rows.length(row)
        return length if known is None else known.held + length - known.at

    def growing(self, length: int, more: int) -> int:
        """Of ``more`` tokens that a request of ``length`` tokens may still generate, those by which what it holds may
        grow."""
        rule = self.rule
        return min(more, rule.limit - (length if length <= rule.limit else rule.keep))

    def _pages_of(self, tokens: int) -> int:
        """Pages, at most, of a head that keeps ``tokens`` of a row's own as they were scored. What is low stays low."""
        if self._high is None:
            return -(-tokens // self._page)
        high = min(tokens, self._high)
        return -(-high // self._page) + -(-(tokens - high) // self.device.fmt.low.tokens) + 1

    def _copy_pages(self, row: int, more: int) -> int:
        """Pages of a head, at most, that the compression of a row past its prompt takes for the moment when the row has
        grown by ``more`` tokens. In one tier its own pages are compressed where they are and the rest joins them."""
        if not self._one_tier:
            return self.copy_pages // self.device.geometry.heads
        if self.alone(row):
            return 0
        known, writable = self._rows[row], self.rows.length(row) - self._rows[row].at + more
        if self.rows.frozen(row) is None:
            writable += known.own
        return max(self._kept - self._pages_of(writable), 0)

    def outlook(self, row: int, left: int, expected: int, shared_pages: int) -> Outlook | None:
        """A row past its prompt; None where it is not. It may generate ``left`` tokens and is expected to generate
        ``expected``. ``shared_pages``: of each head, those that the prefix cache holds for it alone."""
        known = self._rows.get(row)
        if known is None:
            return None
        row_of, page, kept = self.rows.of(row), self._page, self._kept
        grown = row_of.length - known.at
        due = max(self.rule.limit - known.held - grown, 0)
        published = row_of.shared >= known.at  # the tree has all of the prompt
        pages = 0 if published else self._pages_of(known.own)
        free = -known.own % page if self._one_tier and row_of.frozen is None else 0
        if grown > free:
            pages -= (free - grown) // page
        free = (free - grown) % page if self._one_tier else 0
        if not self._one_tier and (counted := -(-int(self.counts.private[row]) // self.device.geometry.heads)):
            pages = counted
            if known.scored and not published:
                kept = min(kept, counted - grown // page)
        pages, copy = pages + shared_pages, self._copy_pages(row, due)
        return Outlook(pages, pages, free, kept, due, left, min(expected, left), copy)

    def outlook_of_prompt(self, own: int, shared: int, left: int, expected: int, shared_pages: int) -> Outlook:
        """A prompt of ``own`` tokens behind ``shared`` ones that is still to run; the rest as for ``outlook``."""
        keep, page, least = self.rule.keep, self._page, self.prompts.share_min_tokens
        kept, due = min(own, keep), max(self.rule.limit - shared - min(own, keep), 0)
        frozen, full, copy = least is not None and own >= least, self._kept, self.saw.copy
        if self._one_tier and (shared or frozen):
            copy = max(full - self._pages_of(due if frozen else kept + due), 0)
        pages, behind = -(-own // page) + shared_pages, self._pages_of(kept) + shared_pages
        return Outlook(pages, behind, 0, full, due, left, min(expected, left), copy)

    # Behind a step

    def follow(self, row: int) -> bool:
        """Behind a step of the row: keep its queries from now on if it is about to reach its limit. True if it is
        there, and was seen by as many queries as score it."""
        known, length, rule = self._rows.get(row), self.rows.length(row), self.rule
        if known is None:
            return False
        held = self.held(row)
        if known.slot is None and held >= rule.limit - rule.queries - LOOKAHEAD and self._free:
            known.slot, known.since = self._free.pop(), length
            self._about.add(row)
            self._set_slot(row, known.slot)
        if held < rule.limit:
            return False
        due = known.slot is not None and length - known.since >= rule.queries
        self.waited += not due
        return due

    def alone(self, row: int) -> bool:
        """Whether a row may be compressed where it is: it has its pages to itself, all of one tier."""
        frozen = self.rows.frozen(row) is not None
        return len(self.device.fmt.tiers) == 1 and not self.rows.shared(row) and not frozen

    @property
    def least_capacity(self) -> int:
        """Tokens of the pool in which a request that runs alone can be compressed."""
        return self.rule.limit + self.rule.keep

    @property
    def near_copy_pages(self) -> int:
        """Pages, at most, that one of the rows that are about to be compressed takes for it."""
        rows = self._about if self._one_tier else islice(self._about, 1)  # of two tiers every row takes the same
        return max(map(self.pages_to_compress, rows), default=0)

    @property
    def copy_pages(self) -> int:
        """Pages, at most, of what a row keeps, in pages of their own."""
        return self.device.geometry.most_pages(self.rule.keep)

    def pages_to_compress(self, row: int) -> int:
        """Pages, at most, that the compression of a row takes for the moment."""
        return self._copy_pages(row, 0) * self.device.geometry.heads

    def copy_blocks(self, row: int) -> int:
        """Table blocks, at most, of a copy of what a row keeps, beside those that the row has."""
        space = self.device.space
        return blocks_of(space.bound(row)) + blocks_of(space.dense_entries(self.rule.keep))

    def take_memory(self) -> None:
        """At start, with no rows: score nothing beside the passes, at the longest length, so that what PyTorch keeps
        for scorings there is taken now and not while requests run."""
        if not self.rule.asynchronous:
            return
        device, longest = self.device, self.device.geometry.max_tokens
        score = partial(
            device.ops.score_running,
            device.state, 1, longest, self.cache.queries[0], self.scaling,
            first=False, most=min(longest, self.rule.limit + 2 * self._page), beside=0,
        )  # fmt: skip
        device.join(device.launch_beside(score))

    def score_beside(self, row: int) -> bool:
        """Score all that a row holds, which must not change until it is compressed or the scoring is dropped, beside
        what is launched next. Between steps. False, doing nothing, if the memory for that is taken by others."""
        length = self.rows.length(row)
        if self._positions + length > self.device.geometry.max_tokens:
            return False
        score = self._scoring_of(row, row, self._positions)
        self._scored[row] = length, self.device.launch_beside(partial(score, slice(None), self.device.state))
        self._positions += -(-length // ALIGNED) * ALIGNED
        return True

    def drop_scoring(self, row: int) -> Scoring | None:
        """What is launched from now on may change the row. Returns what it was scored beside the passes, if it was."""
        found = self._scored.pop(row, None)
        if not self._scored:
            self._positions = 0
        return None if found is None else self.device.join(found[1])

    def _scoring_of(self, row: int, holder: int, beside: int | None) -> Callable[[slice, PageState], Scoring]:
        """What launches the scoring of a row in some layers, whose tokens ``holder`` holds by then, in the memory for
        those beside passes from position ``beside`` on."""
        device, known, length = self.device, self._rows[row], self.rows.length(row)
        assert known.slot is not None
        queries, first, most = self.cache.queries[known.slot], not known.scored, device.space.most_tokens(row)

        def score(at: slice, layers: PageState) -> Scoring:
            return device.ops.score_running(
                layers, holder, length, queries[at], self.scaling,
                first=first, most=min(length, most), beside=beside,
            )  # fmt: skip

        return score

    def _scorings(self, row: int, holder: int) -> Iterator[tuple[PageState, Scoring]]:
        """Of a row that is compressed now, one group of layers after the other: each is in the memory of the one
        before, which was carried out by then. Called before anything changes; ``holder`` as for ``_scoring_of``."""
        scoring = self.drop_scoring(row)
        if scoring is not None:
            assert scoring.scores.shape[2] == self.rows.length(row), "a row grew while it was scored"
            self.beside += 1
            return iter([(self.device.state, scoring)])
        return self._scored_in_turn(self._scoring_of(row, holder, None))

    def _scored_in_turn(self, score: Callable[[slice, PageState], Scoring]) -> Iterator[tuple[PageState, Scoring]]:
        for at, layers in self.device.state.groups(self.policy.layer_stride):
            with self.device.launching():
                scoring = score(at, layers)
            yield layers, scoring

    def compress(self, row: int, path: Path) -> bool:
        """All that a row holds is scored, if it was not, and what stays moves together. It moves in the row's own
        pages, which in one tier take in what others hold for it too, or in new ones. Then it holds nothing of the
        prefix cache any more. Between steps; the caller has made sure of ``pages_to_compress`` and ``copy_blocks``.

        Args:
            path: what the prefix cache holds of the row's tokens.

        Returns False, changing nothing, if no segment row or table block is left.
        """
        device, known, length = self.device, self._rows[row], self.rows.length(row)
        alone, pages = self.alone(row), self.pages_to_compress(row)
        old = None if alone else self.segments.take_row(device.space.bound(row))
        if old is None and not alone:
            self.waited += 1
            return False
        if self._one_tier:
            self._gather(row, old, length)
            self.counts.record(-pages)
        else:
            assert old is not None
            self._copy(row, old, path, length)
            self.counts.record(int(self.counts.private[row]) - self.copy_pages)
        self.counts.touch(row, decoded=True)
        self._return_slot(row, known)
        self.late += self.held(row) - self.rule.limit
        known.held, known.at, known.scored = min(self.rule.keep, self.held(row)), length, True
        known.own = known.held
        self.compressions += 1
        return True

    def _gather(self, row: int, old: int | None, length: int) -> None:
        """Compress a row in its own pages, and add what stays of the rest (Zipage, 4.4), which goes to row ``old``."""
        device = self.device
        for layers, scoring in self._scorings(row, row):
            with device.launching():
                device.ops.compact_scored(layers, row, length, scoring)
            if old is not None:
                device.transfer_pages(layers, row, old)
                with device.launching():
                    device.ops.copy_scored(layers, row, [(old, 0, length)], length, scoring)
        if old is None:
            return
        self.segments.return_row(old)
        self.rows.share(row, 0)
        self.rows.unseal(row)

    def _copy(self, row: int, old: int, path: Path, length: int) -> None:
        """Compress a row in new pages; row ``old`` has what is its own until then. Where layers are scored in turn, the
        row has parted with its pages when the second group is, so ``old`` has all that it held."""
        device, shared, stride = self.device, self.rows.shared(row), self.policy.layer_stride
        if stride is None:
            scorings: Iterable[tuple[PageState, Scoring]] = [*self._scorings(row, row)]
            device.share(old, row, shared, length, kept_only=True)
        else:
            scorings = self._scorings(row, old)
            device.share(old, row, 0, length)
        self.prompts.restart(row, [], length, room=self.rule.keep)
        parts = [*rows_of(path), (old, shared, length)]
        for layers, scoring in scorings:
            with device.launching():
                device.ops.copy_scored(layers, row, parts, length, scoring)
        self.segments.return_row(old)
        self.rows.unseal(row)

    # Query slots

    def forget(self, row: int) -> None:
        """The row is released."""
        self.drop_scoring(row)
        known = self._rows.pop(row, None)
        if known is not None:
            self._return_slot(row, known)

    def _return_slot(self, row: int, known: Budgeted) -> None:
        if known.slot is not None:
            self._free.append(known.slot)
            self._about.discard(row)
            known.slot = None
            self._set_slot(row, EMPTY)

    def _set_slot(self, row: int, slot: int) -> None:
        with self.device.launching():
            self.cache.slot_of[row].fill_(slot)  # to assign a number is to copy it from the host, which waits

    def report(self) -> dict[str, int]:
        """For ``/server_info``."""
        found = {
            "budget_compressions": self.compressions,
            "budget_waited_steps": self.waited,
            "budget_late_tokens": self.late,
        }
        return {**found, "budget_judged_beside": self.beside} if self.rule.asynchronous else found

    def digest(self) -> list[Sequence[int]]:
        """All that ranks have to agree on."""
        rows = [(row, x.held, x.at, -1 if x.slot is None else x.slot) for row, x in self._rows.items()]
        return [*rows, [*self._scored]]

    def check_integrity(self) -> None:
        """Raise AssertionError unless query slots have one holder each, on the host and on the device, and no row of
        its own pages alone holds more than the host believes. Waits for the device."""
        taken = {x.slot: row for row, x in self._rows.items() if x.slot is not None}
        assert len(taken) + len(self._free) == self.cache.slots == len({*taken, *self._free}), "a query slot is lost"
        found = self.cache.slot_of.tolist()
        assert all(slot == EMPTY or taken.get(slot) == row for row, slot in enumerate(found)), "a slot's row differs"
        assert all(found[row] == slot for slot, row in taken.items()), "the device does not know of a query slot"
        assert all(row in self.rows for row in self._rows), "a row that was released has a budget"
        assert self._about == set(taken.values()), "rows with a query slot miscounted"
        for row, (length, _) in self._scored.items():
            assert row in self._about and length == self.rows.length(row), f"row {row} changed while it was scored"
        assert self._scored or not self._positions, "memory of scorings is lost"
        tokens = self.device.state.own_tokens
        for row in self._rows:
            if not self.rows.shared(row) and self.rows.frozen(row) is None:
                assert int(tokens[row].sum(2).max()) <= self.held(row), f"row {row} holds more than its budget says"
