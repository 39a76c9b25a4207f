"""What a running server says of its DiffKV cache."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import PurePosixPath
from typing import Any, Literal

import numpy as np
import requests
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError, model_validator

from sglang_diffkv.access import OPEN, Access, AccessError, cause

FORM = 1
"""Of what ``Report.as_json`` gives; it changes where a name is taken away or means something else."""
ABOUT = (
    "served_model_name",
    "model_path",
    "version",
    "device",
    "dtype",
    "attention_backend",
    "tp_size",
    "dp_size",
    "max_total_num_tokens",
    "max_running_requests",
)
"""What is taken of a server's arguments. Others, its keys among them, are not shown."""

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

    pages: list[list[NonNegativeInt]]
    high: list[list[NonNegativeInt]]
    low: list[list[NonNegativeInt]] = []
    sliding_layers: list[NonNegativeInt] = []
    tokens: NonNegativeInt

    @model_validator(mode="after")
    def _same_shape(self) -> ByHead:
        shapes = {tuple(map(len, x)) for x in (self.pages, self.high, self.low) if x}
        if len(shapes) != 1 or len(set(next(iter(shapes)))) != 1:
            raise ValueError("pages, high and low are not of one shape [layers][heads]")
        if any(layer >= len(self.pages) for layer in self.sliding_layers):
            raise ValueError("sliding_layers names a layer that there is not")
        return self


class Snapshot(BaseModel):
    """The ``diffkv`` entry of ``/server_info``, as far as it is shown."""

    model_config = ConfigDict(allow_inf_nan=False)

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
    owners: dict[str, NonNegativeInt] = {}
    requests: int | None = None
    faults: int = 0
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


@dataclass(frozen=True)
class Report:
    """What a server said at one moment.

    Attributes:
        at: when. about: what the server is (``ABOUT``). replicas: how many it has; the figures are the first one's.
        stats: the whole ``diffkv`` entry of ``/server_info``. snapshot: what of it is known.
    """

    url: str
    at: datetime
    about: dict[str, Any]
    replicas: int
    stats: dict[str, Any]
    snapshot: Snapshot

    @property
    def scope(self) -> str:
        """What the figures leave out, in words; empty if nothing."""
        replicas = f"the first of {self.replicas} replicas" if self.replicas > 1 else ""
        return ", ".join(filter(None, (replicas, self.snapshot.scope)))

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON data: ``form``, ``url``, ``at`` (UTC), ``server``, ``replicas``, ``diffkv``."""
        at = self.at.isoformat(timespec="seconds")
        head = {"form": FORM, "url": self.url, "at": at, "server": self.about, "replicas": self.replicas}
        return {**head, "diffkv": self.stats}


def read(url: str, timeout: float = 60.0, access: Access = OPEN) -> Report:
    """Ask a server. Raises InspectError if there is none, it wants another key, or it does not run diffkv."""
    url = url.rstrip("/")
    try:
        reply = access.get(url, "/server_info", timeout)
        reply.raise_for_status()
        info: dict[str, Any] = reply.json()
        states = info.get("internal_states") or [{}]
        stats = states[0].get("diffkv")
    except AccessError as error:
        raise InspectError(str(error)) from None
    except (requests.RequestException, ValueError) as error:
        raise InspectError(f"no SGLang server answers at {url}: {cause(error)}") from None
    except (AttributeError, LookupError, TypeError):
        raise InspectError(f"no SGLang server answers at {url}: its /server_info has another form") from None
    if stats is None:
        raise InspectError(
            f"the server at {url} does not run diffkv (its attention backend is {info.get('attention_backend')}); "
            "start it with --attention-backend diffkv"
        )
    try:
        snapshot = Snapshot.model_validate(stats)
    except ValidationError as error:
        raise InspectError(f"the server at {url} reports figures of another form: {error}") from None
    about = {name: info[name] for name in ABOUT if info.get(name) is not None}
    for name in {"model_path", "served_model_name"} & {*about}:
        about[name] = _without_folders(str(about[name]))
    return Report(url, datetime.now(timezone.utc), about, len(states), stats, snapshot)


def _without_folders(name: str) -> str:
    """A model's name; of a path its last part."""
    return PurePosixPath(name).name if name.startswith(("/", ".")) else name


def fetch(url: str, timeout: float = 60.0) -> Snapshot:
    """The ``snapshot`` of ``read``."""
    return read(url, timeout).snapshot
