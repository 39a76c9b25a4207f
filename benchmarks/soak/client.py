"""Sends the soak's requests and finds out how each one ended."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.soak.load import DISCONNECT, Order

ANSWERED, REFUSED, ABORTED, LOST = "answered", "refused", "aborted", "lost"
ENDS = (ANSWERED, REFUSED, ABORTED, LOST)
ABORT_MESSAGES = ("Aborted", "Abort in waiting queue")
"""What SGLang says of a request that was aborted on demand."""
ABORT_STATUS = "499:"
"""The status of several samples aborted before all of them had begun."""


@dataclass
class Reply:
    """What came back: the last state of every sample, or the server's error.

    Attributes:
        complete: all of the answer arrived, as far as the transport tells.
    """

    choices: dict[str, dict[str, Any]] = field(default_factory=dict)
    error: str | None = None
    complete: bool = False
    first: float | None = None  # seconds to the first token, of a streamed reply
    tokens: int = 0  # of the first sample that has any

    def take(self, name: str, choice: dict[str, Any]) -> None:
        """A state of the sample ``name``: the final one, or one on the way."""
        self.choices[name] = choice
        self.tokens = max(self.tokens, choice["meta_info"].get("completion_tokens") or 0)


@dataclass
class Outcome:
    """How a request ended: one of ``ENDS`` with the reason, seconds it took, and what the server counted."""

    order: Order
    end: str
    detail: str
    seconds: float
    first: float | None
    choices: list[dict[str, Any]]
    tokens: int

    def total(self, name: str) -> int:
        """Sum over the samples of a field of ``meta_info``."""
        return sum(x["meta_info"].get(name) or 0 for x in self.choices)


def grade(order: Order, reply: Reply, asked_to_abort: bool) -> tuple[str, str]:
    """The end of a request and its reason. An answer that is not what was asked for counts as lost."""
    if reply.error is not None:
        ours = asked_to_abort and reply.error.startswith(ABORT_STATUS)
        return (ABORTED if ours else REFUSED), reply.error
    if not reply.complete:
        return LOST, "the stream broke off"
    found = [x["meta_info"] for x in reply.choices.values()]
    reasons = [x.get("finish_reason") or {} for x in found]
    for reason in reasons:
        if reason.get("type") == "abort":
            message = str(reason.get("message"))
            ours = asked_to_abort and message in ABORT_MESSAGES and not reason.get("status_code")
            return (ABORTED if ours else REFUSED), message
    if len(found) != order.samples:
        return LOST, f"{len(found)} replies, {order.samples} asked for"
    if not all(x.get("type") in ("stop", "length") for x in reasons):
        return LOST, f"no end of the reply: {reasons}"
    for meta in found:
        if meta["prompt_tokens"] != len(order.ids):
            return LOST, f"a prompt of {meta['prompt_tokens']} tokens, {len(order.ids)} sent"
        if order.exact and meta["completion_tokens"] != order.new_tokens:
            return LOST, f"a reply of {meta['completion_tokens']} tokens, {order.new_tokens} asked for"
    return ANSWERED, ""


class Client:
    """Sends orders to one server.

    Args:
        session: shows the server's key. deadline: seconds after which a request without an end counts as lost.
        abort_headers: they show the key of who may abort requests, if that is another one.
    """

    def __init__(
        self, url: str, session: aiohttp.ClientSession, deadline: float, abort_headers: Mapping[str, str] | None = None
    ):
        self.url, self.session, self.deadline, self.abort_headers = url, session, deadline, abort_headers
        self.in_flight = 0
        self.aborting_all = False

    async def send(self, order: Order) -> Outcome:
        """Send one request and see it to its end."""
        self.in_flight += 1
        start, reply, rid = time.monotonic(), Reply(), order.rid or uuid.uuid4().hex
        reader = asyncio.create_task(self._read(order, rid, reply, start))
        try:
            end, detail = await self._follow(order, rid, reply, reader, start)
        finally:
            self.in_flight -= 1
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
        choices = [*reply.choices.values()]
        return Outcome(order, end, detail, time.monotonic() - start, reply.first, choices, reply.tokens)

    async def abort_all(self) -> None:
        """Ask the server to end all that it has; what ends so from now on is our doing."""
        self.aborting_all = True
        async with self.session.post(f"{self.url}/abort_request", json={"abort_all": True}, headers=self.abort_headers):
            pass

    async def _follow(
        self, order: Order, rid: str, reply: Reply, reader: asyncio.Task[None], start: float
    ) -> tuple[str, str]:
        asked = False
        if order.abort is not None:
            due = asyncio.create_task(self._due(order, reply))
            await asyncio.wait({reader, due}, timeout=self.deadline, return_when=asyncio.FIRST_COMPLETED)
            asked = due.done() and not reader.done()
            due.cancel()
        if asked and order.abort is not None:
            if order.abort.how == DISCONNECT:
                return ABORTED, "cut"
            async with self.session.post(f"{self.url}/abort_request", json={"rid": rid}, headers=self.abort_headers):
                pass
        await asyncio.wait({reader}, timeout=max(0.0, self.deadline - (time.monotonic() - start)))
        if not reader.done():
            return LOST, f"no end within {self.deadline:.0f} s"
        if error := reader.exception():
            return LOST, f"{type(error).__name__}: {error}"
        return grade(order, reply, asked or self.aborting_all)

    async def _due(self, order: Order, reply: Reply) -> None:
        """Wait until the request is to be aborted."""
        assert order.abort is not None
        if order.abort.seconds is not None:
            await asyncio.sleep(order.abort.seconds)
            return
        while reply.tokens < (order.abort.tokens or 1):
            await asyncio.sleep(0.02)

    async def _read(self, order: Order, rid: str, reply: Reply, start: float) -> None:
        timeout = aiohttp.ClientTimeout(total=None)
        async with self.session.post(f"{self.url}/generate", json=order.payload(rid), timeout=timeout) as response:
            if response.status != 200:
                reply.error = f"{response.status}: {(await response.text())[:300]}"
            elif order.stream:
                await self._read_stream(response, reply, start)
            else:
                found = await response.json()
                for number, choice in enumerate(found if isinstance(found, list) else [found]):
                    reply.take(str(number), choice)
                reply.complete = True

    async def _read_stream(self, response: aiohttp.ClientResponse, reply: Reply, start: float) -> None:
        async for line in response.content:
            if line.startswith(b"data: [DONE]"):
                reply.complete = True
            elif line.startswith(b"data: "):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    reply.error = f"{chunk['error'].get('code')}: {chunk['error'].get('message')}"[:300]
                else:
                    reply.take(chunk["meta_info"]["id"], chunk)
                    if reply.first is None and reply.tokens:
                        reply.first = time.monotonic() - start
