"""The order in which settings are tried, and which one is taken.

Every search begins with ``DEFAULT``, what a plain server runs, and may take it. A setting is not taken if another one
that was tried takes as few bytes and loses less, even where that one is not surely within the tolerance.

``paper`` is the procedure of DiffKV (SOSP 2025, section 7.2): ``alpha_high`` first with nothing pruned, then
``alpha_low`` at the chosen ``alpha_high``. The paper takes the values of highest accuracy. Here the largest saving is
taken whose accuracy is within the tolerance of bf16, and that by a margin. Among several settings with the same loss,
the one that saves most had luck. ``grid`` tries all pairs.

Values are tried in rising order, since each saves more than the one before. A line of values ends early where the
accuracy is below the tolerance by more than two standard errors, unless the whole grid is asked for.

With several jobs the settings that a search needs next are measured at once: the next values of every line that goes
on, and more of each where there are fewer lines than jobs. What was measured behind the end of a line stays unused, so
the settings that a search has tried, and the one it takes, are those of one job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Generic, Protocol, TypeVar

from sglang_diffkv.calibration import GridPoint
from sglang_diffkv.config import DEFAULT_POLICY, DiffKVConfig, usual_rotation
from sglang_diffkv.errors import ConfigError

WINDOW, SINKS, HORIZON = DEFAULT_POLICY.window, DEFAULT_POLICY.sinks, DEFAULT_POLICY.horizon


def rotation_of(tiers: Sequence[str]) -> str:
    """What a server rotates with these tiers unless told otherwise. Raises ConfigError."""
    try:
        return usual_rotation(tiers)
    except ValueError as error:
        raise ConfigError(f"--tiers {','.join(tiers)}: {error}") from None


@dataclass(frozen=True)
class Setting:
    """What one server of the search runs; ``alpha_high`` is None with a single tier. What is left out is as a plain
    server has it, the rotation by the tiers. Raises ConfigError for names that are no tiers."""

    tiers: tuple[str, ...]
    alpha_high: float | None
    alpha_low: float
    window: int = WINDOW
    rotate: str = ""
    sinks: int = SINKS
    horizon: int = HORIZON
    heads: bool = False
    """With factors by head, those given or those fitted at this setting."""

    def __post_init__(self) -> None:
        if not self.rotate:
            object.__setattr__(self, "rotate", rotation_of(self.tiers))

    @property
    def name(self) -> str:
        """Unique among settings, and readable: what differs from a plain server is named."""
        high = "" if self.alpha_high is None else f" alpha_high={self.alpha_high:g}"
        window = "" if self.window == WINDOW else f" window={self.window}"
        rotate = "" if self.rotate == rotation_of(self.tiers) else f" rotate={self.rotate}"
        sinks = "" if self.sinks == SINKS else f" sinks={self.sinks}"
        horizon = "" if self.horizon == HORIZON else f" horizon={self.horizon}"
        heads = " heads" if self.heads else ""
        return f"{'-'.join(self.tiers)}{high} alpha_low={self.alpha_low:g}{window}{rotate}{sinks}{horizon}{heads}"


DEFAULT = Setting(DiffKVConfig().tiers, DEFAULT_POLICY.alpha_high, DEFAULT_POLICY.alpha_low)
"""What a server runs that is told nothing."""


class Figures(Protocol):
    """What a search reads of a measured setting: its difference to bf16, and the bytes it takes over bf16's."""

    @property
    def difference(self) -> float: ...

    @property
    def difference_error(self) -> float: ...

    @property
    def ratio_tokens(self) -> float: ...


def beats(a: Figures, b: Figures) -> bool:
    """Whether ``a`` loses less than ``b`` at as few bytes a token, or as little at fewer."""
    here, there = (a.ratio_tokens, -a.difference), (b.ratio_tokens, -b.difference)
    return here != there and here[0] <= there[0] and here[1] <= there[1]


def allows(point: Figures, tolerance: float, margin: float) -> bool:
    """Whether a setting loses at most the tolerance, by ``margin`` standard errors."""
    return point.difference - margin * point.difference_error >= -tolerance


S = TypeVar("S")
P = TypeVar("P", bound=Figures)


@dataclass
class Search(Generic[S, P]):
    """Settings tried so far.

    Args:
        measure: a setting's figures.
        tolerance: a share (0.01 for one point). margin: standard errors by which a loss has to stay below it.
        whole: lines do not end early.
        jobs: settings measured at once.
        measure_ahead: makes ``measure`` answer at once for these settings.
    """

    measure: Callable[[S], P]
    tolerance: float
    margin: float = 1.0
    whole: bool = False
    jobs: int = 1
    measure_ahead: Callable[[Sequence[S]], None] = lambda settings: None
    tried: dict[S, P] = field(default_factory=dict)
    _measured: dict[S, P] = field(default_factory=dict, init=False)

    def lines(self, lines: Sequence[Sequence[S]]) -> None:
        """Try lines of settings that save ever more, each up to the first that is surely outside the tolerance."""
        if self.jobs > 1:
            self._ahead(lines)
        for line in lines:
            for setting in line:
                point = self.tried[setting] = self._point(setting)
                if self._ends(point):
                    break

    def _ahead(self, lines: Sequence[Sequence[S]]) -> None:
        going = [line for line in lines if line]
        while going:
            each = max(map(len, going)) if self.whole else max(1, self.jobs // len(going))
            asked = dict.fromkeys(setting for line in going for setting in line[:each])
            self.measure_ahead([setting for setting in asked if setting not in self._measured])
            ended = [any(self._ends(self._point(setting)) for setting in line[:each]) for line in going]
            going = [line[each:] for line, end in zip(going, ended) if not end and line[each:]]

    def _point(self, setting: S) -> P:
        if setting not in self._measured:
            self._measured[setting] = self.measure(setting)
        return self._measured[setting]

    def _ends(self, point: P) -> bool:
        return not self.whole and point.difference + 2 * point.difference_error < -self.tolerance

    def best(self, tolerance: float | None = None) -> S | None:
        """Within the tolerance, or another one than the search's, the setting that takes the fewest bytes a token, none
        that is ``outdone``; None if there is none."""
        within = [x for x, point in self.tried.items() if self.within(point, tolerance) and not self.outdone(x)]
        return min(within, key=lambda x: self.tried[x].ratio_tokens, default=None)

    def outdone(self, setting: S) -> bool:
        """Whether another setting that was tried loses less at as few bytes, or as little at fewer."""
        return any(beats(point, self.tried[setting]) for point in self.tried.values())

    def verdict(self, setting: S, chosen: S | None) -> str:
        """What became of a setting, for tables."""
        if setting == chosen:
            return "chosen"
        if not self.within(self.tried[setting]):
            return "too lossy"
        return "another loses less at fewer bytes" if self.outdone(setting) else ""

    def within(self, point: P, tolerance: float | None = None) -> bool:
        """Whether a setting loses at most the tolerance, by the margin."""
        return allows(point, self.tolerance if tolerance is None else tolerance, self.margin)


def paper(
    search: Search[Setting, GridPoint],
    tiers: tuple[str, ...],
    highs: Sequence[float],
    lows: Sequence[float],
    window: int = WINDOW,
    rotate: str = "",
    sinks: int = SINKS,
    horizon: int = HORIZON,
    heads: bool = False,
) -> Setting | None:
    """``alpha_high`` over ``highs`` with ``alpha_low`` 0, or no low tier at all; then ``alpha_low`` over ``lows``. An
    empty ``rotate``: as a plain server has it."""
    rest = (window, rotate, sinks, horizon, heads)
    high_only = [Setting(tiers[:1], None, 0.0, *rest)]
    both = [Setting(tiers, high, 0.0, *rest) for high in sorted(highs)] if len(tiers) > 1 else []
    search.lines([[DEFAULT], high_only, both])
    first = search.best()
    if first is None:
        return None
    search.lines([[replace(first, alpha_low=low) for low in _lows(first, lows) if low > 0]])
    return search.best()


def grid_starts(
    choices: Sequence[tuple[str, ...]],
    highs: Sequence[float],
    windows: Sequence[int] = (WINDOW,),
    rotations: Sequence[str] = ("",),
    sinks: Sequence[int] = (SINKS,),
    horizons: Sequence[int] = (HORIZON,),
    heads: bool = False,
) -> list[Setting]:
    """Every choice of everything but ``alpha_low``, with nothing pruned. An empty rotation: as a plain server has
    it."""
    return [
        Setting(tiers, high, 0.0, *rest, heads)
        for tiers in choices
        for rest in product(windows, rotations, sinks, horizons)
        for high in (sorted(highs) if len(tiers) > 1 else [None])
    ]


def grid(search: Search[Setting, GridPoint], starts: Sequence[Setting], lows: Sequence[float]) -> Setting | None:
    """Each of ``starts`` with every ``alpha_low`` up to its ``alpha_high``."""
    search.lines([[DEFAULT], *([replace(start, alpha_low=low) for low in _lows(start, lows)] for start in starts)])
    return search.best()


def _lows(setting: Setting, lows: Sequence[float]) -> list[float]:
    return [low for low in sorted(lows) if setting.alpha_high is None or low <= setting.alpha_high]
