"""Orders, replies and outcomes of the soak's tests."""

from __future__ import annotations

from typing import Any

from benchmarks.soak.client import ANSWERED, Outcome, Reply
from benchmarks.soak.load import Order


def order(**changes: Any) -> Order:
    """A filler of three tokens that wants five."""
    return Order(**{"kind": "filler", "ids": [1, 2, 3], "new_tokens": 5, **changes})


def reply(reason: str = "length", **meta: Any) -> Reply:
    """A complete answer to ``order()``."""
    meta = {"finish_reason": {"type": reason}, "prompt_tokens": 3, "completion_tokens": 5, **meta}
    return Reply({"0": {"text": "", "output_ids": [], "meta_info": meta}}, complete=True)


def outcome(end: str, detail: str = "", **changes: Any) -> Outcome:
    """The end of ``order(**changes)`` after a second."""
    return Outcome(order(**changes), end, detail, 1.0, None, [reply().choices["0"]] if end == ANSWERED else [], 0)
