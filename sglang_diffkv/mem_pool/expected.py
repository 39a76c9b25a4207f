"""What a running request is expected to generate yet."""

from __future__ import annotations

from typing import NamedTuple


class Expected(NamedTuple):
    """``tokens`` that the request of a ``row`` may generate yet. ``row`` is None until it has one. ``certain``: SGLang
    reserves its whole reply, and does not guess where it ends."""

    row: int | None
    tokens: float
    certain: bool = False
