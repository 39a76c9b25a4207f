"""What requests that hold a budget take together in the steps to come.

Each grows by a token a step, falls back when it is compressed, grows again, and ends: a saw-tooth that lengths tell in
advance. They are not at their limits at the same time, so the most that all hold together is less than the sum of what
each may hold, and admission asks for that (``peak_growth``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_diffkv.mem_pool.counts import LOOKAHEAD

DELAY = 2 * LOOKAHEAD
"""Steps by which a compression, or the end of a request, may be seen later than when it is due."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Saw:
    """How requests go on that hold a budget. Pages are those of one head.

    Attributes:
        period: tokens between two compressions. free: tokens that a request's pages take yet behind one.
        page: tokens of a page. copy: pages of a copy, at most. copies: whether every compression makes one.
        slots: requests that may be about to be compressed at once; queries: steps that each of them takes.
    """

    period: int
    free: int
    page: int
    copy: int
    copies: bool
    slots: int
    queries: int


class Outlook(NamedTuple):
    """A request and its next compression. Pages are those of one head which are free again when it has let go of all.

    ``prompt``: pages when its prompt has run; ``pages``: now, or behind that; ``free``: tokens that these take yet;
    ``kept``: pages behind a compression.
    ``due``: tokens until it is compressed. ``left``: tokens that it may generate; ``expected``: those that it is
    expected to, at most ``left``. ``copies``: whether its next compression makes a copy.
    """

    prompt: int
    pages: int
    free: int
    kept: int
    due: int
    left: int
    expected: int
    copies: bool


def peak_growth(saw: Saw, requests: Sequence[Outlook]) -> int:
    """Pages of a head that ``requests`` hold together at most, from now until all have ended, beyond what they hold
    now with their prompts; what is set aside for a copy while one is about to be made counts too.

    A request that is expected to end before it is compressed keeps what it then holds until it has to end. Behind
    everybody's first compression the sum only repeats itself, less those that end, so that many steps are looked at.
    """
    if not requests:
        return 0
    prompt, pages, free, kept, due, left, expected, copies = np.array(requests, dtype=np.int64).T  # [n] each
    compressed = expected >= due
    grown = np.minimum(due, expected)
    last = int(grown.max()) + saw.period  # step
    at = due[:, None] + saw.period * np.arange(last // saw.period + 1)  # [n, m], when each is compressed
    happens = compressed[:, None] & (at < left[:, None]) & (at <= last)
    lead = saw.queries + LOOKAHEAD
    about = _level(at[happens] - lead, at[happens] + 1, last)
    over = max(int(about.max(initial=0)) - saw.slots, 0)
    delay = min(DELAY + -(-over // saw.slots) * saw.queries, saw.period - 1)
    last += delay + 1
    seen = happens & (at + delay < left[:, None])

    # From one compression to the next: what is held before, and what the tokens behind it take.
    before = np.broadcast_to((kept + _pages(saw.period - saw.free, saw.page))[:, None], at.shape).copy()
    before[:, 0] = pages + _pages(due - free, saw.page)
    grows = np.minimum(left[:, None] - at, saw.period)
    late = np.where(kept[:, None] + _pages(delay + 1 - saw.free, saw.page) > before, 0, delay)  # what rises, at once
    jumps = kept[:, None] + _pages(late + 1 - saw.free, saw.page) - before
    steps = np.zeros(last + 2, dtype=np.int64)  # [steps], the last one is not looked at
    steps[1] = (pages - prompt).sum()
    _add(steps, (at + late)[seen] + 1, jumps[seen])
    trains = np.zeros(-(-len(steps) // saw.page) * saw.page, dtype=np.int64)
    _train(trains, last, np.zeros_like(due), free, 1, np.where(seen[:, 0], due, grown), saw.page)
    _train(trains, last, at[seen], np.full(seen.sum(), saw.free), late[seen] + 2, grows[seen], saw.page)

    count = seen.sum(1)
    rows, newest = np.arange(len(due)), np.maximum(count - 1, 0)
    behind = kept + _pages(grows[rows, newest] - saw.free, saw.page)
    _add(steps, left + delay + 1, -np.where(count > 0, behind, pages + _pages(grown - free, saw.page)))

    steps += trains.reshape(-1, saw.page).cumsum(0).ravel()[: len(steps)]
    total = steps.cumsum()
    copied = happens.copy()
    copied[:, 0] &= copies.astype(bool)
    copied[:, 1:] &= saw.copies
    total += saw.copy * (_level(at[copied] - lead, at[copied] + delay + 1, last + 1) > 0)
    return max(int(total[: last + 1].max()), 0)


def _pages(tokens: Ints | int, page: int) -> Ints:
    """Pages for ``tokens`` more than the last page takes."""
    return np.maximum(-(-np.asarray(tokens) // page), 0)


def _add(steps: Ints, at: Ints, what: Ints) -> None:
    np.add.at(steps, np.minimum(at, len(steps) - 1), what)


def _level(begin: Ints, end: Ints, last: int) -> Ints:
    """[last + 1], how many of the spans ``[begin, end)`` each step is in."""
    changes = np.zeros(last + 2, dtype=np.int64)
    _add(changes, np.maximum(begin, 0), np.ones_like(begin))
    _add(changes, np.maximum(end, 0), -np.ones_like(end))
    return changes[:-1].cumsum()


def _train(steps: Ints, last: int, begin: Ints, free: Ints, first: Ints | int, tokens: Ints, page: int) -> None:
    """A page for each ``page`` tokens of those from number ``first`` to ``tokens`` that a request generates from
    ``begin`` on, behind ``free`` that need none: steps at which these begin and end, to be added up ``page`` apart."""
    number = free + 1 + page * _pages(first - free - 1, page)
    count = np.maximum((tokens - number) // page + 1, 0)
    for change, at in ((1, begin + number), (-1, begin + number + count * page)):
        looked_at = (count > 0) & (at <= last)
        np.add.at(steps, at[looked_at], change)
