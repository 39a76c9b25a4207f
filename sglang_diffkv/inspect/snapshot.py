"""What a running server says of its DiffKV cache."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import requests
from pydantic import BaseModel, ValidationError, model_validator

Quantity = Literal["bytes", "high", "low", "pruned", "out-of-window"]
QUANTITIES: dict[Quantity, str] = {
    "bytes": "KiB of pages",
    "high": "% of tokens in the high tier",
    "low": "% of tokens in the low tier",
    "pruned": "% of tokens pruned",
    "out-of-window": "% of tokens that have left a layer's window",
}


class InspectError(RuntimeError):
    """The server cannot be inspected; the message says why."""


class ByHead(BaseModel):
    """Figures by [layer][KV head]: pages held, live tokens in each tier; ``tokens`` of all live sequences.

    ``low`` counts all lower tiers, and is empty with a single one. ``sliding_layers`` have a sliding window.
    """

    pages: list[list[int]]
    high: list[list[int]]
    low: list[list[int]] = []
    sliding_layers: list[int] = []
    tokens: int

    @model_validator(mode="after")
    def _same_shape(self) -> ByHead:
        shapes = {tuple(map(len, x)) for x in (self.pages, self.high, self.low) if x}
        if len(shapes) != 1 or len(set(next(iter(shapes)))) != 1:
            raise ValueError("pages, high and low are not of one shape [layers][heads]")
        return self


class Snapshot(BaseModel):
    """The ``diffkv`` entry of ``/server_info``, as far as it is shown."""

    ratio_pages: float
    ratio_tokens: float
    share_high: float
    share_low: float
    share_pruned: float
    share_out_of_window: float = 0.0
    share_by_tier: dict[str, float] = {}
    tokens: int
    pages: int
    pages_used: int
    page_bytes: int
    by_head: ByHead | None = None
    ranks: int = 1

    @property
    def scope(self) -> str:
        """What the figures leave out, in words; empty if nothing."""
        return f"the first of {self.ranks} ranks: its KV heads alone" if self.ranks > 1 else ""

    def values(self, quantity: Quantity) -> np.ndarray:
        """[layers, heads] float64 in the units of ``QUANTITIES``; shares are 0 where no token is live.

        Raises InspectError if the server reports no figures by head.
        """
        if self.by_head is None:
            raise InspectError("this server reports no figures by head; it runs an older sglang_diffkv")
        pages, high = (np.array(x, dtype=float) for x in (self.by_head.pages, self.by_head.high))
        low = np.array(self.by_head.low, dtype=float) if self.by_head.low else np.zeros_like(high)
        if quantity == "bytes":
            return pages * self.page_bytes / 1024
        live = self.by_head.tokens or 1
        pruned = self.by_head.tokens - high - low
        left = np.zeros_like(pruned)
        left[self.by_head.sliding_layers] = pruned[self.by_head.sliding_layers]
        figures = {"high": high, "low": low, "pruned": pruned - left, "out-of-window": left}
        return 100 * figures[quantity] / live


def fetch(url: str, timeout: float = 60.0) -> Snapshot:
    """Ask a server. Raises InspectError if there is none, or it does not run diffkv."""
    url = url.rstrip("/")
    try:
        reply = requests.get(f"{url}/server_info", timeout=timeout)
        reply.raise_for_status()
        info: dict[str, Any] = reply.json()
    except (requests.RequestException, ValueError) as error:
        raise InspectError(f"no SGLang server answers at {url}: {error}") from None
    stats = (info.get("internal_states") or [{}])[0].get("diffkv")
    if stats is None:
        raise InspectError(
            f"the server at {url} does not run diffkv (its attention backend is {info.get('attention_backend')}); "
            "start it with --attention-backend diffkv"
        )
    try:
        return Snapshot.model_validate(stats)
    except ValidationError as error:
        raise InspectError(f"the server at {url} reports figures of another form: {error}") from None
