"""DuoAttention (Xiao et al., "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads",
ICLR 2025): few heads look far back and keep every token; the others keep the first tokens and the newest.

Which heads are which is a property of the model: a number for each layer and KV head, the larger the more it looks far
back, of which the smallest share ``sparsity`` stream. The authors find the numbers by optimisation on synthetic
passkeys and publish them for several models as ``full_attention_heads.tsv``, a line for each layer; such a file is
taken as it is. ``python -m sglang_diffkv.calibrate.retrieval`` writes one by a simpler measure.

What differs from the paper:

- exactly ``sparsity`` of the heads stream, of equal numbers the first ones; the authors' code takes a quantile;
- a prompt attends to all of itself and is cut at its end, where the paper's streaming heads see sinks and window only;
- tokens keep the positions at which they were computed;
- with two tiers and ``keep_low`` nothing is dropped: what streaming heads would drop goes to the low tier.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from sglang_diffkv.bounds import MOST_FACTOR, ByHead, ByLayer, Fraction, LooksBack, Sinks, Switch, Window
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.files import MOST_DIGITS, inside, named, parse_json, read_text
from sglang_diffkv.policies.base import Pointwise, Policy
from sglang_diffkv.policies.options import PolicyOptions

Streams = tuple[tuple[bool, ...], ...]
"""[layers][KV heads]: whether a head streams."""


@dataclass(frozen=True)
class DuoPolicy(Policy):
    """Heads that stream keep the first ``sinks`` tokens and the newest ``window``, the others all. ``keep_low``: what
    streaming heads do not keep goes to the low tier instead."""

    streams: Streams = field(repr=False)
    window: int = field()
    sinks: int = field()
    keep_low: bool

    @property
    def prompt(self) -> Pointwise:
        """No score is enough in a head that streams, any in another."""
        limits = tuple(tuple(math.inf if streams else 0.0 for streams in layer) for layer in self.streams)
        return Pointwise(limits, 0.0 if self.keep_low else limits)

    @property
    def generation(self) -> Pointwise:
        """The token that leaves the window goes, where the head streams."""
        return self.prompt

    def of_rank(self, rank: int, ranks: int, heads: int) -> DuoPolicy:
        """With the rank's heads; of more ranks than heads several have the same one."""
        first = rank * len(self.streams[0]) // ranks
        return replace(self, streams=tuple(layer[first : first + heads] for layer in self.streams))


def streaming_heads(pattern: tuple[tuple[float, ...], ...], sparsity: float) -> Streams:
    """The share ``sparsity`` of the heads, rounded, that have the smallest numbers of ``pattern`` [layers][heads]."""
    heads = len(pattern[0])
    ordered = sorted(range(len(pattern) * heads), key=lambda at: pattern[at // heads][at % heads])
    chosen = set(ordered[: round(sparsity * len(ordered))])
    return tuple(tuple(layer * heads + head in chosen for head in range(heads)) for layer in range(len(pattern)))


FOLDER = "folder"
"""In the context of a validation: the folder of the file that a policy comes with, in which all lies that it names."""
NAMED = "named"
"""In the same context: the files that were read so far."""
MOST_NAMED = 8
"""Files that a calibration may name, and its entries that may name one."""
MOST_PATTERN = 1 << 17
"""Bytes of a pattern: 128 layers of 128 heads with eight characters each."""


def read_pattern(path: Path) -> list[list[float]]:
    """A file with a number for each layer and KV head. It is JSON, a list of lists or an object that has it as
    ``pattern``, or it has a line for each layer with tabs between, as the authors publish them. Raises ConfigError,
    which quotes nothing of the file."""
    text = read_text(path, MOST_PATTERN)
    if text.lstrip().startswith(("[", "{")):
        found = parse_json(text, name_keys=False)
        found = found.get("pattern") if isinstance(found, dict) else found
        return [_numbers(layer, at) for at, layer in enumerate(found if isinstance(found, list) else [], 1)]
    lines = [line.split("\t") for line in text.splitlines() if line.strip()]
    return [_numbers([_number(x) for x in line], at) for at, line in enumerate(lines, 1)]


def _number(text: str) -> float | None:
    try:
        return float(text) if len(text) <= MOST_DIGITS else None
    except ValueError:
        return None


def _numbers(layer: Any, at: int) -> list[float]:
    """Of a layer, the ``at``-th."""
    most = f"{MOST_FACTOR:,.0f}"
    if not isinstance(layer, list) or not all(
        isinstance(x, (int, float)) and not isinstance(x, bool) and abs(x) <= MOST_FACTOR for x in layer
    ):
        raise ConfigError(f"has something else than numbers from -{most} to {most} for layer {at}")
    return layer


class DuoPolicyConfig(PolicyOptions):
    """Retrieval and streaming heads."""

    most_tiers: ClassVar[int] = 2

    name: Literal["duo"] = "duo"
    pattern: ByLayer[ByHead[LooksBack]] = Field(
        description="[layers][KV heads], or a file that has it: how much each head looks far back",
    )
    sparsity: Fraction = Field(default=0.5, description="share of the heads that stream")
    window: Window = Field(default=256, description="newest tokens that streaming heads keep")
    sinks: Sinks = Field(default=64, description="first tokens that streaming heads keep")
    keep_low: Switch = Field(
        default=False, description="with two tiers: what streaming heads would drop goes to the low tier"
    )

    @field_validator("pattern", mode="before")
    @classmethod
    def _of_file(cls, given: Any, info: ValidationInfo) -> Any:
        if not isinstance(given, str):
            return given
        context = info.context or {}
        folder = context.get(FOLDER)
        try:
            if folder is not None:
                context.setdefault(NAMED, []).append(given)
                if len(context[NAMED]) > MOST_NAMED:
                    raise ConfigError(f"is one too many: a calibration may name {MOST_NAMED} files")
            pattern = read_pattern(Path(given) if folder is None else inside(folder, given))
            if not pattern or not pattern[0] or len({len(layer) for layer in pattern}) > 1:
                raise ConfigError("does not have a list of numbers for each layer, all of one length above 0")
            return pattern
        except ConfigError as error:
            which = "the file that it names" if folder is not None else named(given)
            raise ConfigError(f"{which} {error}") from None

    @field_validator("pattern")
    @classmethod
    def _rectangular(cls, pattern: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
        if not pattern[0] or len({len(layer) for layer in pattern}) > 1:
            raise ValueError("every layer needs a number for each KV head, so all lists have one length above 0")
        return pattern

    def check_tiers(self, tiers: int) -> None:
        if self.keep_low != (tiers == 2):
            raise ValueError(
                "policy.keep_low takes two tiers, such as BF16 and K4V2"
                if self.keep_low
                else "without policy.keep_low nothing goes to a second tier: give one tier, or set keep_low"
            )

    def obstacle(self, layers: int, kv_heads: int) -> str:
        if (found := (len(self.pattern), len(self.pattern[0]))) == (layers, kv_heads):
            return ""
        of = f"{found[0]} layers with {found[1]} KV heads"
        return f"policy.pattern is of {of}, the model has {layers} with {kv_heads}"

    def build(self) -> DuoPolicy:
        return DuoPolicy(streaming_heads(self.pattern, self.sparsity), self.window, self.sinks, self.keep_low)
