"""What is written: the factors, as a configuration takes them, and how they were found."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from sglang_diffkv.calibration import HeadScale, ModelGeometry


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Predicted(_Strict):
    """Sums over layers and heads, per sequence: ``error`` is the squared change over the squared norm of the residual
    stream, mean over queries; ``ratio`` is bytes over bf16 bytes."""

    error: float
    bytes: float
    ratio: float


class Change(_Strict):
    """Factor 1 everywhere, and the fitted factors."""

    before: Predicted
    after: Predicted

    @property
    def error_percent(self) -> float:
        """How much less error, in % of that before: negative is better."""
        return 100 * (self.after.error / self.before.error - 1) if self.before.error else 0.0

    @property
    def bytes_percent(self) -> float:
        """How many more bytes, in %."""
        return 100 * (self.after.bytes / self.before.bytes - 1)


class HeadProvenance(_Strict):
    """How factors were found.

    Attributes:
        selection: what chose the questions. skipped: of the questions looked at, those shorter than the window or
            longer than allowed.
        prompt_tokens, reply_tokens: of all sequences.
        rule: thresholds, window, tiers and rotation that the factors were fitted at.
        change: predicted on the sequences fitted to. held_out: on each half of them, with factors fitted to the other;
            None for a single sequence.
        error_by_head: [layers][KV heads], at factor 1.
    """

    date: str
    model: str
    geometry: ModelGeometry | None
    task_file: str
    task_sha256: str
    n: int
    skipped: int
    selection: dict[str, Any]
    prompt_tokens: int
    reply_tokens: int
    rule: dict[str, Any]
    factors: tuple[float, ...]
    change: Change
    held_out: Change | None
    error_by_head: HeadScale
    versions: dict[str, str | None]
    device: str


class HeadScaleFile(_Strict):
    """The content of a file. ``head_scale``: [layers][KV heads]."""

    format: Literal[1] = 1
    head_scale: HeadScale
    provenance: HeadProvenance
