"""Prefixes on a disk, behind those in host memory: what a server writes there, it and others find again.

Each segment that the host tier has copied is written (``StoredSegments``), so a restart loses little. Where a match
ends in tree and host memory, an admitted request asks for what continues it. What is found comes to host memory, and
from there as all else does. So a request meets the disk only before it is admitted, and others go on meanwhile.

How long it waits is SGLang's ``--hicache-storage-prefetch-policy``: until all is there (``wait_complete``), so long at
most (``timeout``), or not at all (``best_effort``): then later requests have what was read. No policy waits longer than
``LONGEST`` seconds for a disk that hangs, nor for a store that is known to hang.

Each rank has objects of its own, and threads that read them. Before they schedule, ranks exchange what has arrived. A
prefix is found as far as all of them have found it, and is there once it has arrived on all.

A flush empties tree and host memory, not the disk, as in SGLang: it has what the same weights compute. A change of
weights changes the names of all, so nothing that others computed is found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sglang_diffkv.mem_pool.saved_segments import SavedSegment
from sglang_diffkv.mem_pool.segment_object import namespace_digest
from sglang_diffkv.mem_pool.stored_segments import Found, Load, Lookup, StoredSegments
from sglang_diffkv.srt.tree.host_index import HostIndex
from sglang_diffkv.srt.tree.private_space import PrivateSpace

BEST_EFFORT, WAIT_COMPLETE, TIMEOUT = "best_effort", "wait_complete", "timeout"

LONGEST = 60.0
"""Seconds that a request waits for the disk, whatever the policy."""

MOST_FETCHES = 64
"""Requests for which the disk is asked at once."""

IDLE_SECONDS = 0.001
"""For which a scheduler that has nothing else to do leaves the processor to the reading threads."""

COUNTS = ("hits", "tokens_read", "late", "no_host_memory")
"""Since the start: requests for which something came from the disk, and its tokens; requests that waited long enough;
objects for which there was no host memory."""


@dataclass(frozen=True)
class Prefetch:
    """How requests wait for the disk.

    Attributes:
        policy: SGLang's name. threshold: tokens; the disk is not asked for fewer. base, per_ki_token: seconds that
            ``timeout`` allows, and those for each 1,024 tokens.
    """

    policy: str = TIMEOUT
    threshold: int = 256
    base: float = 1.0
    per_ki_token: float = 0.25

    def seconds(self, tokens: int) -> float:
        """That a request may wait for so many tokens."""
        if self.policy == TIMEOUT:
            return min(self.base + self.per_ki_token * tokens / 1024, LONGEST)
        return LONGEST if self.policy == WAIT_COMPLETE else 0.0


@dataclass(eq=False)
class Loading:
    """A load, and what the index is to know of it. ``fetches``: how many wait for it. ``over``: it was taken over.
    ``good``: it arrived on all ranks."""

    load: Load
    space: Hashable
    tokens: np.ndarray
    fetches: int = 0
    over: bool = False
    good: bool = False


@dataclass(eq=False)
class Fetch:
    """What comes from the disk for a request; ``req`` is None once that has been admitted.

    Attributes:
        began, until: readings of ``time.monotonic``; the request waits no longer than between these. late: the second
            is past, on any rank.
    """

    req: Any
    space: Hashable
    lookup: Lookup | None
    began: float
    until: float
    late: bool = False
    loadings: list[Loading] = field(default_factory=list)


class NoDisk:
    """A server without a disk tier."""

    def finished(self, saved: Iterable[SavedSegment]) -> None:
        """These are on the host now."""

    def copied(self, saved: SavedSegment, space: Hashable, tokens: np.ndarray) -> None:
        """The end of a prefix is on its way to the host."""

    def holds_up(self, req: Any, space: Hashable, tokens: np.ndarray, at: int, starts: list[int]) -> bool:
        """Whether a request waits for what continues its match from position ``at``."""
        return False

    def queue_seen(self, waiting: Iterable[Any]) -> None:
        """As ``RequestListener``."""

    def prefill_begins(self, reqs: Sequence[Any]) -> None:
        """As ``RequestListener``."""

    def poll(self) -> None:
        """Take over what has arrived."""

    def forget_all(self) -> None:
        """Nothing that is on its way is wanted."""

    def weights_change(self) -> None:
        """As ``RequestListener``."""

    def check_integrity(self) -> None:
        """As ``RequestListener``."""

    def digest(self) -> Any:
        """As ``RequestListener``."""
        return None

    def report(self) -> dict[str, float]:
        """For ``/server_info``."""
        return {}


class DiskTier(NoDisk):
    """Asks a store for what continues a match, for requests that are about to be admitted.

    Args:
        index: of host memory. make_room: has the host forget prefixes until so many pages are free, as far as possible.
        idle: whether nothing runs.
    """

    def __init__(
        self,
        stored: StoredSegments,
        index: HostIndex,
        prefetch: Prefetch,
        make_room: Callable[[int], None],
        idle: Callable[[], bool],
    ):
        self.stored, self.index, self.prefetch = stored, index, prefetch
        self._make_room, self._idle, self.ranks = make_room, idle, stored.saved.ranks
        self._fetches: list[Fetch] = []
        self._loadings: dict[Hashable, Loading] = {}
        self._coming: dict[SavedSegment, tuple[str, np.ndarray]] = {}
        self.counts, self.seconds_waited = dict.fromkeys(COUNTS, 0), 0.0

    # Out

    def copied(self, saved: SavedSegment, space: Hashable, tokens: np.ndarray) -> None:
        """It is written once it is there, if the tree has all of the segment."""
        namespace = _namespace(space)
        if namespace is not None and len(tokens) == saved.hi and _writable(tokens):
            self._coming[saved] = namespace, tokens

    def finished(self, saved: Iterable[SavedSegment]) -> None:
        for x in saved:
            known = self._coming.pop(x, None)
            if known is not None and x.nodes:
                self.stored.write(x, *known)
        for x in [x for x in self._coming if not x.nodes]:  # it was dropped on its way
            del self._coming[x]

    # In

    def holds_up(self, req: Any, space: Hashable, tokens: np.ndarray, at: int, starts: list[int]) -> bool:
        fetch = next((x for x in self._fetches if x.req is req), None)
        if fetch is None and not getattr(req, "diffkv_asked_store", False) and len(self._fetches) < MOST_FETCHES:
            fetch = self._ask(req, space, tokens, at, starts)
        if fetch is None or self.prefetch.policy == BEST_EFFORT:
            return False
        if not fetch.late:
            return True
        self.counts["late"] += 1
        self._waits_no_longer(fetch)
        return False

    def _waits_no_longer(self, fetch: Fetch) -> None:
        """Its request does not. What comes yet is there for others."""
        if fetch.req is not None and self.prefetch.policy != BEST_EFFORT:
            self.seconds_waited += time.monotonic() - fetch.began
        fetch.req = None

    def _ask(self, req: Any, space: Hashable, tokens: np.ndarray, at: int, starts: list[int]) -> Fetch | None:
        left, namespace = len(tokens) - at, _namespace(space)
        if left < self.prefetch.threshold or namespace is None or not _writable(tokens):
            return None
        req.diffkv_asked_store = True
        lookup, now = self.stored.look(namespace, tokens, at, starts), time.monotonic()
        fetch = Fetch(req, space, lookup, now, now + self.prefetch.seconds(left))
        self._fetches.append(fetch)
        return fetch

    def poll(self) -> None:
        """Take over what has arrived on all ranks. With several all have to call it."""
        if not self._fetches and not self._loadings:
            return
        looking = [(x, x.lookup) for x in self._fetches if x.lookup is not None]
        loading, now = list(self._loadings.items()), time.monotonic()
        done, hangs = [lookup.done for _, lookup in looking], self.stored.folder.hangs
        asked, lengths, unread, bad, late = self.ranks.largest_of(
            [not there for there in done],
            [-len(lookup.found) * there for (_, lookup), there in zip(looking, done, strict=True)],
            [not x.load.done for _, x in loading],
            [not x.load.good for _, x in loading],
            [hangs or now >= x.until for x in self._fetches],
        )
        for fetch, past in zip(self._fetches, late, strict=True):
            fetch.late = bool(past)
        self._looked([(*x, -length) for x, waits, length in zip(looking, asked, lengths, strict=True) if not waits])
        for (which, x), waits, failed in zip(loading, unread, bad, strict=True):
            if not waits:
                del self._loadings[which]
                x.good = not failed
                self._take_over(x)
        self._fetches = [x for x in self._fetches if x.lookup is not None or not self._arrived(x)]

    def _looked(self, looked: list[tuple[Fetch, Lookup, int]]) -> None:
        """Lookups are done, in which each rank has found so many objects at least."""
        chains = self._found_by_all([lookup.found[:length] for _, lookup, length in looked])
        for (fetch, lookup, _), chain in zip(looked, chains, strict=True):
            fetch.lookup = None
            self._load_all(fetch, lookup, chain)

    def _found_by_all(self, chains: list[list[Found]]) -> list[list[Found]]:
        """Of objects by position, each list as long on all ranks: those before the first one of which ranks have found
        another. Each with the host pages that the rank with most needs."""
        every = [found for chain in chains for found in chain]
        if not every:
            return chains
        mine = np.array([[*x.key_numbers, *(-n for n in x.key_numbers), x.room] for x in every], dtype=np.int64)
        worst = self.ranks.largest(mine.ravel()).reshape(mine.shape)
        count = len(every[0].key_numbers)
        same = (worst[:, :count] == -worst[:, count:-1]).all(1).tolist()
        rooms, at, agreed = worst[:, -1].tolist(), 0, list[list[Found]]()
        for chain in chains:
            here = same[at : at + len(chain)]
            length = here.index(False) if False in here else len(chain)
            agreed.append([replace(x, room=rooms[at + index]) for index, x in enumerate(chain[:length])])
            at += len(chain)
        return agreed

    def _arrived(self, fetch: Fetch) -> bool:
        if not all(x.over for x in fetch.loadings):
            return False
        self._waits_no_longer(fetch)
        self.counts["hits"] += any(x.good for x in fetch.loadings)
        return True

    def _load_all(self, fetch: Fetch, lookup: Lookup, chain: list[Found]) -> None:
        """Read what was found, but what the host has by now."""
        for found in () if lookup.given_up else chain:
            tokens = np.concatenate([lookup.tokens[: found.head.lo], found.head.tokens])
            if not self.index.lacks(fetch.space, tokens, found.head.lo):
                continue
            loading = self._loadings.get(found.identity) or self._load(found, fetch.space, tokens)
            if loading is None:
                return
            loading.fetches += 1
            fetch.loadings.append(loading)

    def _load(self, found: Found, space: Hashable, tokens: np.ndarray) -> Loading | None:
        self._make_room(found.room)
        load = self.stored.load(found)
        if load is None:
            self.counts["no_host_memory"] += 1
            return None
        loading = self._loadings[found.identity] = Loading(load, space, tokens)
        return loading

    def _take_over(self, loading: Loading) -> None:
        saved, loading.over = self.stored.take_over(loading.load, good=loading.good), True
        if saved is not None:
            self.counts["tokens_read"] += saved.hi - saved.start
            self.index.insert(loading.space, loading.tokens, saved, used=time.monotonic(), priority=0)

    # The end

    def prefill_begins(self, reqs: Sequence[Any]) -> None:
        """They are admitted. What comes yet is there for others."""
        admitted = {id(req) for req in reqs}
        for fetch in self._fetches:
            if id(fetch.req) in admitted:
                self._waits_no_longer(fetch)

    def queue_seen(self, waiting: Iterable[Any]) -> None:
        """What was asked for requests that wait no longer, and were not admitted, is not wanted."""
        if not self._fetches:
            return
        here = {id(req) for req in waiting}
        gone = [x for x in self._fetches if x.req is not None and id(x.req) not in here]
        for fetch in gone:
            self._give_up(fetch)
        self._fetches = [x for x in self._fetches if x not in gone]
        if self._idle() and any(x.req is not None for x in self._fetches):
            time.sleep(IDLE_SECONDS)

    def _give_up(self, fetch: Fetch) -> None:
        self._waits_no_longer(fetch)
        if fetch.lookup is not None:
            fetch.lookup.given_up = True
        for loading in fetch.loadings:
            loading.fetches -= 1
            loading.load.given_up |= loading.fetches == 0

    def forget_all(self) -> None:
        self._coming.clear()
        for fetch in self._fetches:
            self._give_up(fetch)
        for loading in self._loadings.values():
            loading.load.given_up = True
        self._fetches.clear()
        self.poll()

    def weights_change(self) -> None:
        self.stored.change_identity()

    def check_integrity(self) -> None:
        """Raise AssertionError unless each host page that waits for the disk has a load, and each fetch an end."""
        expected = {id(runs) for runs in self.stored.saved.incoming}
        assert expected == {id(x.load.runs) for x in self._loadings.values()}, "host pages wait for nothing"
        coming = set(map(id, self._loadings.values()))
        for fetch in self._fetches:
            assert all(x.over or id(x) in coming for x in fetch.loadings), "a request waits for what nobody reads"

    def digest(self) -> Any:
        return [*self.counts.values(), len(self._fetches), [x.load.found.room for x in self._loadings.values()]]

    def report(self) -> dict[str, float]:
        now = {"fetching": len(self._fetches), "seconds_waited": self.seconds_waited}
        return {**self.counts, **self.stored.report(), **now}


def _namespace(space: Hashable) -> str | None:
    """The digest of a namespace; None for one that no other server would know."""
    assert isinstance(space, tuple)
    if not all(x is None or isinstance(x, (str, PrivateSpace)) for x in space):
        return None
    known = [x.fields() if isinstance(x, PrivateSpace) else x for x in space]
    return (
        None if any(x is None and y is not None for x, y in zip(known, space, strict=True)) else namespace_digest(known)
    )


def _writable(tokens: np.ndarray) -> bool:
    """Whether objects can have these token ids."""
    return len(tokens) > 0 and int(tokens.min()) >= 0 and int(tokens.max()) < 1 << 31
