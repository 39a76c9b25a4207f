"""What is found: shares by layer, as ``layer_fractions`` of ``xkv`` takes them, and how they were found."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from sglang_diffkv.calibration import ModelGeometry


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LayerProvenance(_Strict):
    """How shares were found.

    Attributes:
        selection: what chose the prompts. n: prompts. questions: of the file. skipped: of the questions looked at,
            those not longer than the window or longer than allowed.
        tokens: of all prompts, windows left out.
        rule: window, pool, and keep or min_retention.
        spread: [layers] standard deviation of the shares over prompts.
        retained: [layers] share of importance that what is kept has, mean over prompts.
        retention: [layers][shares] the same of the first ``shares`` of the tokens; isr: over log2 of their number, None
            where it is of one token at most.
    """

    date: str
    model: str
    geometry: ModelGeometry | None
    task_file: str
    task_sha256: str
    questions: int
    n: int
    skipped: int
    selection: dict[str, Any]
    tokens: int
    rule: dict[str, Any]
    spread: tuple[float, ...]
    retained: tuple[float, ...]
    shares: tuple[float, ...]
    retention: tuple[tuple[float, ...], ...]
    isr: tuple[tuple[float | None, ...], ...]
    versions: dict[str, str | None]
    device: str


class LayerFractions(_Strict):
    """``layer_fractions``: [layers]."""

    layer_fractions: tuple[float, ...]
    provenance: LayerProvenance
