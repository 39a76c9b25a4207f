"""What requests are expected to take by what they generate, in the ledger's unit: tokens at the high tier.

Admission asks for it, and reserves that much. Should requests grow faster, free pages still bound each step: what runs
is compressed once more, and then SGLang retracts. What requests that hold a budget take together,
``srt/scheduling/joint_admission.py`` asks for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sglang_diffkv.layout.spans import kept_in_layers
from sglang_diffkv.mem_pool.rows import RequestRow

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sglang_diffkv.layout.page_format import PageFormat
    from sglang_diffkv.mem_pool.page_manager import PageManager

GROWTH_MARGIN = 1.1
"""Tokens behind the window are expected to take this many times the pages that running requests take for theirs."""

ESTIMATE_TOKENS = 512
"""Tokens behind the windows of running requests from which their pages tell what such a token takes."""

ROW_ESTIMATE_TOKENS = 256
"""The same of one request, whose own pages tell it then."""


def part_filled(fmt: PageFormat) -> float:
    """What the part-filled page of each tier lacks on average, in high-tier tokens."""
    return len(fmt.layouts) * fmt.high.tokens / 2


class Expected(NamedTuple):
    """``tokens`` that the request of a ``row`` may generate yet. ``row`` is None until it has one. ``certain``: SGLang
    reserves its whole reply, and does not guess where it ends."""

    row: int | None
    tokens: float
    certain: bool = False


class ExpectedGrowth:
    """What running requests, and those that wait, are expected to take yet."""

    def __init__(self, manager: PageManager):
        self.manager = manager
        self._estimate = 1.0
        self._estimated_at = (-1, -1)
        layouts = manager.fmt.layouts
        self._least_price = 0.0 if manager.policy.prunes else layouts[0].tokens / max(x.tokens for x in layouts)
        self._part_filled = part_filled(manager.fmt)
        self._given_back = 0.0
        """Tokens of a window that compression under pressure sends down. They are left out of what is reserved for a
        reply of known length. For a guessed length they stay in, as a margin for replies that grow longer."""
        if manager.pressure is not None:
            before, after = manager.policy.window, manager.pressure.rule.window
            self._given_back = self._within_spans(before) - self._within_spans(after)

    def growth_estimate(self) -> float:
        """What a token behind the window is expected to take, in high-tier tokens: at most 1. A request that generates
        moves its window on, and so grows by such tokens. Measured on the running requests whose prompt is compacted;
        where they are few, the last value stands. Requests that keep all tokens in the high tier, or have a window of
        their own, are not among them. Of layers with a sliding window those tokens count that they hold. A request that
        holds a budget grows in the high tier between its compressions.
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
        lacking = np.array([self._lacking(manager.rows.closed(row)) for row in rows])
        return manager.counts.pages[rows] * manager.fmt.high.tokens / manager.geometry.heads - lacking

    def _lacking(self, closed: int) -> float:
        """What a row's part-filled pages lack. One whose first pages are ``closed`` to it has two of each tier."""
        return self._part_filled * (2 if closed else 1)

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
            taken = pages * manager.fmt.high.tokens / manager.geometry.heads - self._lacking(known.closed)
            price = min(GROWTH_MARGIN * max((taken - inside) / (held - inside), self._least_price), 1.0)
        filling = max(window - (known.length - max(known.closed, pressed)), 0)
        given = certain and self._gives_back(row, known.length + more)
        return self._grown(known.length, more, filling, price, given_back=given)

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
