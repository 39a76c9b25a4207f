"""What a figure is drawn from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Ratio = Literal["pages", "tokens"]
RATIO_LABELS: dict[Ratio, str] = {
    "pages": "KV cache, % of bf16 bytes (pages held)",
    "tokens": "KV cache, % of bf16 bytes (tokens, without free slots)",
}


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, ser_json_inf_nan="null")


class Point(_Frozen):
    """One configuration on one task file.

    Attributes:
        series: the line that it belongs to. label: its name within the line.
        alpha_high, alpha_low: thresholds of a DiffKV configuration. fraction: share of tokens that a static one keeps.
        matched_to: of a static configuration, the dynamic one that it is to prune as much as.
        accuracy, error: share of right answers and its standard error; the differences are to stock bf16, paired.
        ratio_pages, ratio_tokens: bytes over bf16 bytes of the same tokens; shares are of tokens and sum to 1.
        failed: requests that the server ended, counted as wrong.
    """

    configuration: str
    suite: str
    series: str
    label: str
    alpha_high: float | None = None
    alpha_low: float | None = None
    fraction: float | None = None
    matched_to: str | None = None
    n: int
    accuracy: float
    error: float
    difference: float | None = None
    difference_error: float | None = None
    p: float | None = None
    ratio_pages: float | None = None
    ratio_tokens: float | None = None
    share_high: float | None = None
    share_low: float | None = None
    share_pruned: float | None = None
    failed: int = 0

    def ratio(self, kind: Ratio) -> float:
        """Bytes over bf16 bytes; nan where they are not known."""
        value = self.ratio_pages if kind == "pages" else self.ratio_tokens
        return math.nan if value is None else value


class FigureData(_Frozen):
    """A figure of accuracies or of token shares.

    Attributes:
        skipped: configurations that are not in it, and why. notes: what a reader must know beside them.
        about: command, commit, versions and hardware.
    """

    kind: Literal["figure"] = "figure"
    figure: str
    model: str
    ratio: Ratio
    points: list[Point]
    skipped: dict[str, str] = {}
    notes: list[str] = []
    about: dict[str, Any] = {}

    def suites(self) -> list[str]:
        """Task files, in the order of the points."""
        return unique(point.suite for point in self.points)

    def of(self, suite: str) -> list[Point]:
        """Points on one task file."""
        return [point for point in self.points if point.suite == suite]

    def remarks(self) -> list[str]:
        """What stands below the figure: what is not shown, and requests that failed."""
        failed = [f"{x.configuration}: {x.failed} requests failed on {x.suite}" for x in self.points if x.failed]
        return [f"not shown: {name}: {why}" for name, why in self.skipped.items()] + failed + self.notes


def unique(values: Iterable[str]) -> list[str]:
    """Each value once, in the order of the first."""
    return list(dict.fromkeys(values))


def by_series(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Points by line."""
    return {name: [x for x in points if x.series == name] for name in unique(x.series for x in points)}
