"""The range of every number that a configuration, a calibration or a file that they name can hold.

Each is a type: a number of another type or outside the range is refused before it is used. Kernels count in 32 bits, so
tokens end at ``MOST_TOKENS``; thresholds and factors stay finite in float32 when they are multiplied.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import Discriminator, Field, Tag

MOST_TOKENS = 1 << 30
MOST_LAYERS = MOST_KV_HEADS = 1024
MOST_FACTOR = 1e6
MOST_WINDOW = 4096
MOST_KEEP_SECONDS = 86_400
MOST_KEY_MEAN = 1e4
"""Of a file of key means: above what any model's keys reach, and small enough that float32 keeps what is left."""
MOST_PATH = 4096
MOST_NAME = 1000
MOST_ENTRIES = 256
MOST_POINTS = 4096
"""Of a calibration file, and of the settings that it lists as tried."""

Tokens = Annotated[int, Field(strict=True, ge=0, le=MOST_TOKENS)]
SomeTokens = Annotated[int, Field(strict=True, ge=1, le=MOST_TOKENS)]
PageTokens = Annotated[int, Field(strict=True, ge=4, le=256)]
Window = Annotated[int, Field(strict=True, ge=1, le=MOST_WINDOW)]
KeepSeconds = Annotated[int, Field(strict=True, ge=1, le=MOST_KEEP_SECONDS)]
MostKeepSeconds = Annotated[int, Field(strict=True, ge=0, le=MOST_KEEP_SECONDS)]
RequestWindow = Annotated[int, Field(strict=True, ge=0, le=MOST_WINDOW)]
Observers = Annotated[int, Field(strict=True, ge=1, le=256)]
Sinks = Annotated[int, Field(strict=True, ge=0, le=4096)]
Every = Annotated[int, Field(strict=True, ge=1, le=64)]
Pool = Annotated[int, Field(strict=True, ge=1, le=63)]
Beta = Annotated[int, Field(strict=True, ge=1, le=1 << 20)]
Block = Annotated[int, Field(strict=True, ge=16, le=4096)]
Blocks = Annotated[int, Field(strict=True, ge=2, le=MOST_TOKENS // 4096)]
Seed = Annotated[int, Field(strict=True, ge=0, le=(1 << 32) - 1)]
Layers = Annotated[int, Field(strict=True, ge=1, le=MOST_LAYERS)]

Alpha = Annotated[float, Field(strict=True, ge=0, le=1e12)]
Factor = Annotated[float, Field(strict=True, ge=1 / MOST_FACTOR, le=MOST_FACTOR)]
Fraction = Annotated[float, Field(strict=True, ge=0, le=1)]
SomeFraction = Annotated[float, Field(strict=True, gt=0, le=1)]
Cosine = Annotated[float, Field(strict=True, ge=-1, le=1)]
Weight = Annotated[float, Field(strict=True, ge=0, le=10)]
Temperature = Annotated[float, Field(strict=True, ge=1e-3, le=1e3)]
LooksBack = Annotated[float, Field(strict=True, ge=-MOST_FACTOR, le=MOST_FACTOR)]
HostGib = Annotated[float, Field(strict=True, ge=0, le=2048)]

Switch = Annotated[bool, Field(strict=True)]
PathName = Annotated[str, Field(strict=True, min_length=1, max_length=MOST_PATH, description="the path of a file")]
Text = Annotated[str, Field(strict=True, max_length=MOST_NAME)]

# What calibration files say of how they were made

Count = Annotated[int, Field(strict=True, ge=0, le=1 << 53)]
Whole = Annotated[int, Field(strict=True, ge=-(1 << 63), le=(1 << 63) - 1)]
Figure = Annotated[float, Field(strict=True, ge=-1e38, le=1e38)]

# What tools take on their command lines

SomeCount = Annotated[int, Field(strict=True, ge=1, le=1 << 53)]
Some = Annotated[int, Field(strict=True, ge=1, le=256)]
Port = Annotated[int, Field(strict=True, ge=0, le=65535)]
Patience = Annotated[float, Field(strict=True, ge=1, le=1e5)]
"""Seconds."""
Budget = Annotated[float, Field(strict=True, ge=0, le=1e4)]
"""A loss that is allowed: nats a token, points or per cent; and standard errors."""

T = TypeVar("T")

ByLayer = Annotated[tuple[T, ...], Field(fail_fast=True, min_length=1, max_length=MOST_LAYERS)]
ByHead = Annotated[tuple[T, ...], Field(fail_fast=True, max_length=MOST_KV_HEADS)]
"""Lists, which end at their first mistake."""


def _one_or_more(given: Any) -> str:
    return "layers" if isinstance(given, (list, tuple)) else "one"


OneOrByLayer = Annotated[Annotated[T, Tag("one")] | Annotated[ByLayer[T], Tag("layers")], Discriminator(_one_or_more)]
"""One for all layers, or a list with one for each."""
