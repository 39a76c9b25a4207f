"""Streamed answers, many at once, by a client that takes little time for each token.

One thread asks for all of them. A thread for each takes 76 us for an event of 48 streams, and 117 of 128, which is more
than a server takes for a token: then the client is what is measured. Most events are read when their stream has ended.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
import requests

from benchmarks.serving.client import BenchmarkError

LONGEST_EVENT = 1 << 22
"""Bytes of a line of a stream at most: an event may tell the whole reply so far."""
SILENCE = 600.0
"""Seconds after which a stream that tells nothing is given up."""


@dataclass(frozen=True)
class Answer:
    """Of a prompt: seconds to the first token and between the others, the reply, and how many prompt tokens were
    cached."""

    first: float
    gaps: list[float]
    reply: list[int]
    cached: int


class Client:
    """Asks one server, inside ``async with``."""

    def __init__(self, url: str):
        self._url = f"{url}/generate"
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None, sock_read=SILENCE)
        # A connection for each: a server may close one that was idle just as it is used again, and nothing is repeated.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=LONGEST_EVENT)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def answered(self, prompt: Sequence[int], wanted: int) -> Answer:
        """The streamed answer to a prompt. Raises BenchmarkError unless it has ``wanted`` tokens."""
        assert self._session is not None
        parameters = {"temperature": 0, "max_new_tokens": wanted, "ignore_eos": True}
        body = {"input_ids": list(prompt), "stream": True, "sampling_params": parameters}
        begin, times, told = time.perf_counter(), [], Told()
        try:
            async with self._session.post(self._url, json=body) as answer:
                if answer.status != 200:
                    raise BenchmarkError(f"a turn was answered with {answer.status}: {(await answer.text())[:300]}")
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        times.append(time.perf_counter())
                        told.add(line[6:])
        except (aiohttp.ClientError, aiohttp.http_exceptions.HttpProcessingError, TimeoutError) as error:
            raise BenchmarkError(f"a turn ended with {type(error).__name__}: {error}") from error
        reply, meta = told.reply()
        if len(reply) != wanted:
            raise BenchmarkError(f"a turn has {len(reply)} of {wanted} tokens: {meta.get('finish_reason')}")
        gaps = [after - before for before, after in itertools.pairwise(times)]
        return Answer(times[0] - begin, gaps, reply, meta["cached_tokens"])


def token_times(url: str, prompt: Sequence[int], most: int) -> Iterator[float]:
    """When each token of one streamed reply comes, for a thread that watches it: ask no more, and the stream is cut
    off. Raises BenchmarkError for an error that the stream tells."""
    parameters = {"temperature": 0, "max_new_tokens": most, "ignore_eos": True}
    body = {"input_ids": list(prompt), "stream": True, "sampling_params": parameters}
    with requests.post(f"{url}/generate", json=body, stream=True, timeout=SILENCE) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if line.startswith(b'data: {"error"'):
                raise BenchmarkError(f"a reply ended with {line[6:306].decode(errors='replace')}")
            if line.startswith(b"data: {"):
                yield time.perf_counter()


async def ended(tasks: Sequence[asyncio.Task[Any]]) -> list[Any]:
    """Results of all tasks. Raises what the first one raises that fails, and ends the others."""
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


class Told:
    """Events of one stream. Some servers tell the whole reply each time, of which the last event is enough, and others
    what is new; the first event behind some tokens shows which."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._whole: bool | None = None
        self._tokens = False

    def add(self, event: bytes) -> None:
        """One more. Raises BenchmarkError for what cannot be read."""
        if self._whole is None:
            chunk = read(event)
            if self._tokens and "error" not in chunk:
                self._whole = len(chunk["output_ids"]) >= chunk["meta_info"]["completion_tokens"]
            self._tokens |= bool(chunk.get("output_ids"))
        if self._whole and b'"error"' not in self._events[-1]:
            self._events.pop()
        self._events.append(event)

    def reply(self) -> tuple[list[int], dict[str, Any]]:
        """The tokens, and what the last event says beside them. Raises BenchmarkError if one tells of an error."""
        reply: list[int] = []
        meta: dict[str, Any] = {}
        for chunk in map(read, self._events):
            if "error" in chunk:
                raise BenchmarkError(f"a turn ended with {chunk['error']}")
            ids, meta = chunk["output_ids"], chunk["meta_info"]
            reply = ids if len(ids) >= meta["completion_tokens"] else reply + ids
        return reply, meta


def read(event: bytes) -> dict[str, Any]:
    """Raises BenchmarkError for what is no JSON object, or tells neither tokens nor an error."""
    try:
        found = json.loads(event)
    except ValueError as error:
        raise BenchmarkError(f"a stream tells {event[:100]!r}: {error}") from error
    if not isinstance(found, dict):
        raise BenchmarkError(f"a stream tells {event[:100]!r}")
    meta = found.get("meta_info")
    counted = isinstance(meta, dict) and {"completion_tokens", "cached_tokens"} <= meta.keys()
    if "error" not in found and not (counted and isinstance(found.get("output_ids"), list)):
        raise BenchmarkError(f"a stream tells no tokens: {event[:100]!r}")
    return found
