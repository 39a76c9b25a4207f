"""What requests that hold a budget take together in the steps to come.

Each grows by a token a step, falls back when it is compressed, grows again, and ends: a saw-tooth that lengths tell in
advance. They are not at their limits at the same time, so the most that all hold together is less than the sum of what
each may hold, and admission asks for that (``peak_growth``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_diffkv.mem_pool.counts import LOOKAHEAD

DELAY = 2 * LOOKAHEAD
"""Steps of ``Saw.late``."""

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Saw:
    """How requests go on that hold a budget. Pages are those of one head.

    Attributes:
        period: tokens between two compressions. free: tokens that a request's pages take yet behind one.
        page: tokens of a page. copy: pages that each compression but the first takes for the moment.
        slots: requests that may be about to be compressed at once; queries: steps that each of them takes.
        late: steps by which a compression, or the end of a request, may be seen later than when it is due.
        missed: steps that a request misses for each compression, so that all that follows comes later by as many.
    """

    period: int
    free: int
    page: int
    copy: int
    slots: int
    queries: int
    late: int = DELAY
    missed: int = 0


class Outlook(NamedTuple):
    """A request and its next compression. Pages are those of one head that are free again when it has let go of all.

    ``prompt``: pages when its prompt has run; ``pages``: now, or behind that; ``free``: tokens that these take yet;
    ``kept``: pages behind a compression. ``due``: tokens until it is compressed. ``left``: tokens that it may generate;
    ``expected``: those that it is expected to, at most ``left``. ``copy``: pages that the next compression takes
    for the moment.
    """

    prompt: int
    pages: int
    free: int
    kept: int
    due: int
    left: int
    expected: int
    copy: int


class Columns(NamedTuple):
    """The same of several requests, [n] each."""

    prompt: Ints
    pages: Ints
    free: Ints
    kept: Ints
    due: Ints
    left: Ints
    expected: Ints
    copy: Ints


def peak_growth(saw: Saw, requests: Sequence[Outlook]) -> int:
    """Pages of a head that ``requests`` hold together at most, from now until all have ended, beyond what they hold now
    with their prompts. What is set aside for a copy that is about to be made counts too.

    A request that is expected to end before it is compressed keeps what it then holds until it has to end. Behind
    everybody's first compression the sum only repeats itself, less those that end, so that many steps are looked at.
    """
    if not requests:
        return 0
    found = Columns(*np.array(requests, dtype=np.int64).T)
    compressed = found.expected >= found.due
    last = int(np.minimum(found.due, found.expected).max()) + saw.period  # step
    at = found.due[:, None] + saw.period * np.arange(last // saw.period + 1)  # [n, m], when each is compressed
    happens = compressed[:, None] & (at < found.left[:, None]) & (at <= last)
    lead = saw.queries + LOOKAHEAD
    waiting = max(int(_level(at[happens] - lead, at[happens] + 1, last).max()) - saw.slots, 0)
    missed = saw.missed * at.shape[1]  # by the last compression that is looked at
    delay = min(saw.late + missed + -(-waiting // saw.slots) * saw.queries, saw.period - 1)
    last += delay + 1
    total = _held(saw, found, compressed, at, happens & (at + delay < found.left[:, None]), delay, last)
    total += _copied(saw, found, at, happens, lead, delay, last)
    return max(int(total.max()), 0)


def _copied(saw: Saw, found: Columns, at: Ints, happens: Bools, lead: int, delay: int, last: int) -> Ints:
    """[last + 1], pages set aside in each step for what the next compression takes for the moment: one at a time."""
    later = at[:, 1:][happens[:, 1:]]
    most = saw.copy * (_level(later - lead, later + delay + 1, last) > 0) if saw.copy else np.zeros(last + 1, np.int64)
    copied = happens[:, 0] & (found.copy > 0)
    steps = np.clip(found.due[copied, None] + np.arange(-lead, delay + 1), 0, last)
    np.maximum.at(most, steps, np.broadcast_to(found.copy[copied, None], steps.shape))
    return most


def _held(saw: Saw, found: Columns, compressed: Bools, at: Ints, seen: Bools, delay: int, last: int) -> Ints:
    """[last + 1], pages of a head that all hold in each step beyond those of now.

    Args:
        compressed: [n], those that live to be. at: [n, m], when. seen: [n, m], whether it is done for certain before
            the request ends. delay: steps by which it may come late.
    """
    prompt, pages, free, kept, due, left, expected, _ = found
    # [n, m + 1] each: a request as it is, and behind each compression.
    begin, exists = _beside(np.zeros_like(due), at), _beside(compressed | True, seen)
    start = _beside(pages, np.broadcast_to(kept[:, None], at.shape))
    room, length = (_beside(now, np.full(at.shape, then)) for now, then in ((free, saw.free), (due, saw.period)))
    # Before a compression that comes late more is held; where less is held before it than behind, it may come in time.
    before = (start + _pages(length + delay - room, saw.page))[:, :-1]
    late = np.where(kept[:, None] + _pages(delay + 1 - saw.free, saw.page) > before, 0, delay)
    tokens = np.minimum(length + np.append(late, np.full((len(due), 1), delay), 1), left[:, None] - begin)
    tokens[:, 0] = np.where(compressed, tokens[:, 0], np.minimum(due, expected))
    end = start + _pages(tokens - room, saw.page)
    jumps = start[:, 1:] + _pages(late + 1 - saw.free, saw.page) - end[:, :-1]

    steps = np.zeros(last + 2, dtype=np.int64)  # what changes in each; the last one is not looked at
    steps[1] = (pages - prompt).sum()
    _add(steps, (at + late)[seen] + 1, jumps[seen])
    _add(steps, left + delay + 1, -end[np.arange(len(due)), seen.sum(1)])
    first = _beside(np.ones_like(due), late + 2)
    steps += _taken(len(steps), begin[exists], room[exists], first[exists], tokens[exists], saw.page)
    return steps.cumsum()[:-1]


def _taken(steps: int, begin: Ints, free: Ints, first: Ints, tokens: Ints, page: int) -> Ints:
    """[steps], pages taken in each for the tokens from number ``first`` to ``tokens`` that requests generate from
    ``begin`` on, one for each ``page`` of them behind the ``free`` ones that need none."""
    number = free + 1 + page * _pages(first - free - 1, page)
    count = np.maximum((tokens - number) // page + 1, 0)
    # Each of these trains of pages begins at a step and ends at another: a sum over the steps that are ``page`` apart.
    changes = np.zeros(-(-steps // page) * page, dtype=np.int64)
    for change, at in ((1, begin + number), (-1, begin + number + count * page)):
        looked_at = (count > 0) & (at < steps)
        np.add.at(changes, at[looked_at], change)
    return changes.reshape(-1, page).cumsum(0).ravel()[:steps]


def _beside(now: Any, then: Any) -> Any:
    """[n, m + 1] from [n] and [n, m]."""
    return np.concatenate((now[:, None], then), 1)


def _pages(tokens: Ints | int, page: int) -> Ints:
    """Pages for ``tokens`` more than the last page takes."""
    return np.maximum(-(-np.asarray(tokens) // page), 0)


def _add(steps: Ints, at: Ints, what: Ints) -> None:
    """Add ``what`` at steps, those behind the last one at that."""
    np.add.at(steps, np.minimum(at, len(steps) - 1), what)


def _level(begin: Ints, end: Ints, last: int) -> Ints:
    """[last + 1], how many of the spans ``[begin, end)`` each step is in."""
    changes = np.zeros(last + 2, dtype=np.int64)
    _add(changes, np.maximum(begin, 0), np.ones_like(begin))
    _add(changes, np.maximum(end, 0), -np.ones_like(end))
    return changes[:-1].cumsum()
