"""The order in which settings are tried, and which one is taken.

``paper`` is the procedure of DiffKV (SOSP 2025, section 7.2): ``alpha_high`` first with nothing pruned, then
``alpha_low`` at the chosen ``alpha_high``. The paper takes the values of highest accuracy; here the largest saving
is taken whose accuracy is within the tolerance of bf16. ``grid`` tries all pairs.

Values are tried in rising order, since each saves more than the one before. A line of values ends early where the
accuracy is below the tolerance by more than two standard errors, unless the whole grid is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from sglang_diffkv.calibration import GridPoint


@dataclass(frozen=True)
class Setting:
    """What one server of the search runs; ``alpha_high`` is None with a single tier."""

    tiers: tuple[str, ...]
    alpha_high: float | None
    alpha_low: float
    window: int = 64
    rotate: str = "none"

    @property
    def name(self) -> str:
        """Unique among settings, and readable."""
        high = "" if self.alpha_high is None else f" alpha_high={self.alpha_high:g}"
        window = "" if self.window == 64 else f" window={self.window}"
        rotate = "" if self.rotate == "none" else f" rotate={self.rotate}"
        return f"{'-'.join(self.tiers)}{high} alpha_low={self.alpha_low:g}{window}{rotate}"


@dataclass
class Search:
    """Settings tried so far. ``tolerance`` is a share (0.01 for one point)."""

    measure: Callable[[Setting], GridPoint]
    tolerance: float
    whole: bool = False
    tried: dict[Setting, GridPoint] = field(default_factory=dict)

    def try_(self, setting: Setting) -> GridPoint:
        """The setting's figures, measured once."""
        if setting not in self.tried:
            self.tried[setting] = self.measure(setting)
        return self.tried[setting]

    def line(self, settings: Sequence[Setting]) -> None:
        """Try settings that save ever more, up to the first that is surely outside the tolerance."""
        for setting in settings:
            point = self.try_(setting)
            surely = point.difference + 2 * point.difference_error < -self.tolerance
            if surely and not self.whole:
                return

    def best(self) -> Setting | None:
        """Within the tolerance, the setting that takes the fewest bytes a token; None if there is none."""
        within = [x for x, point in self.tried.items() if self.within(point)]
        return min(within, key=lambda x: self.tried[x].ratio_tokens, default=None)

    def within(self, point: GridPoint) -> bool:
        """Whether a setting loses at most the tolerance."""
        return point.difference >= -self.tolerance


def paper(
    search: Search,
    tiers: tuple[str, ...],
    highs: Sequence[float],
    lows: Sequence[float],
    window: int = 64,
    rotate: str = "none",
) -> Setting | None:
    """``alpha_high`` over ``highs`` with ``alpha_low`` 0, or no low tier at all; then ``alpha_low`` over ``lows``."""
    search.try_(Setting(tiers[:1], None, 0.0, window, rotate))
    if len(tiers) > 1:
        search.line([Setting(tiers, high, 0.0, window, rotate) for high in sorted(highs)])
    first = search.best()
    if first is None:
        return None
    search.line([replace(first, alpha_low=low) for low in _lows(first, lows) if low > 0])
    return search.best()


def grid(
    search: Search,
    choices: Sequence[tuple[str, ...]],
    highs: Sequence[float],
    lows: Sequence[float],
    windows: Sequence[int] = (64,),
    rotations: Sequence[str] = ("none",),
) -> Setting | None:
    """Every choice of tiers, window and rotation with every ``alpha_high`` and ``alpha_low`` that go together."""
    for tiers, window, rotate in product(choices, windows, rotations):
        for high in sorted(highs) if len(tiers) > 1 else [None]:
            line = Setting(tiers, high, 0.0, window, rotate)
            search.line([replace(line, alpha_low=low) for low in _lows(line, lows)])
    return search.best()


def _lows(setting: Setting, lows: Sequence[float]) -> list[float]:
    return [low for low in sorted(lows) if setting.alpha_high is None or low <= setting.alpha_high]
