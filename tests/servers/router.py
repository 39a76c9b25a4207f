"""What a router does with a request of two servers, and what becomes of it: whoever asks may leave at any time, and
either server may be killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import requests

from sglang_diffkv.evaluate.server import Server
from tests.servers.pair import Pair

HANGS_UP, ON_PREFILL, ON_DECODE, ON_BOTH = "hangs up", "aborts on prefill", "aborts on decode", "aborts on both"
LEAVES = (HANGS_UP, ON_PREFILL, ON_DECODE, ON_BOTH)
"""How whoever asks leaves. A router closes both connections; a client may know of one server alone."""

WHOLE, LOST = "whole", "lost"
NOTICED_SECONDS = 8.0
"""For which requests may still meet a server that was killed and is back: the other one looks every five seconds."""


@dataclass
class Downtime:
    """When a server was killed, and when requests meet the new one."""

    server: Server
    start: float
    end: float = float("inf")

    def meets(self, start: float, end: float) -> bool:
        return start < self.end and end > self.start


@dataclass
class Asked:
    """A request. ``halves``: what each server has said, once it has: ``WHOLE``, ``LOST`` and
    why, or a message."""

    name: str
    new_tokens: int
    leaves: str
    begun: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    halves: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


def kill(server: Server) -> Downtime:
    """SIGKILL to all processes of a server."""
    assert server.pid is not None
    found = Downtime(server, time.monotonic())
    os.killpg(server.pid, signal.SIGKILL)
    server.stop(grace=0.0)
    return found


def start_again(down: Downtime) -> None:
    """Start the server that was killed."""
    down.server.start()
    down.end = time.monotonic() + NOTICED_SECONDS


def ask(pair: Pair, payload: Mapping[str, Any], asked: Asked, after: float, patience: float) -> Asked:
    """Ask both servers, and leave ``after`` so many seconds if the request does. Where one half fails the other is
    given up, as a router does. Raises AssertionError if a server says nothing for ``patience`` s, or no message."""
    hangs_up, servers = asked.leaves == HANGS_UP, (pair.prefill, pair.decode)
    halves = pair.send({**payload, "rid": asked.name}, timeout=after if hangs_up else patience)
    end, given_up = asked.begun + patience, asked.leaves not in (ON_PREFILL, ON_DECODE, ON_BOTH)
    while not all(half.done() for half in halves):
        assert time.monotonic() < end, f"{asked} has no answer: {[half.done() for half in halves]}"
        if not given_up and time.monotonic() >= asked.begun + after:
            given_up = True
            for server, what in zip(servers, (ON_PREFILL, ON_DECODE), strict=True):
                if asked.leaves in (what, ON_BOTH):
                    _abort(server, asked.name)
        for number, half in enumerate(halves):
            if half.done() and _said(half) != WHOLE and not halves[1 - number].done() and not hangs_up:
                _abort(servers[1 - number], asked.name)  # again and again: it may not have come there yet
        time.sleep(0.1)
    asked.ended, asked.halves = time.monotonic(), [_said(half) for half in halves]
    if asked.halves[1] == WHOLE:
        asked.tokens = halves[1].result().json()["output_ids"]
    return asked


def _abort(server: Server, name: str) -> None:
    with suppress(requests.RequestException):  # it may be the one that is dead
        server.post("/abort_request", {"rid": name}, timeout=10.0)


def _said(half: Future[requests.Response]) -> str:
    """What a server has said."""
    error = half.exception()
    if error is not None:
        assert isinstance(error, requests.ConnectionError | requests.Timeout), repr(error)
        return f"{LOST}: {error}" if isinstance(error, requests.ConnectionError) else "no answer in time"
    told = half.result().json()
    if half.result().status_code == 200:
        reason = told["meta_info"]["finish_reason"]
        found = WHOLE if reason["type"] == "length" else str(reason.get("message", ""))
    else:
        found = str(told.get("error", told)["message"])
    assert found, f"a server says nothing: {told}"
    return found
