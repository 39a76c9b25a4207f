"""Stands before a server: what clients ask and what it answers passes through as it comes, and some of it is sampled.

Nothing here waits for the reference. Figures are served at an address of their own, which clients of the server do not
ask, so that no path of the server means something else.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from sglang_diffkv.access import Access
from sglang_diffkv.page import POLICY
from sglang_diffkv.shadow.exchange import MOST_BYTES, PATHS, Exchange, Reason
from sglang_diffkv.shadow.report import metrics, render
from sglang_diffkv.shadow.sampler import Sampler

OF_A_CONNECTION = frozenset(
    (
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
        "transfer-encoding", "upgrade", "expect", "host",
    )
)  # fmt: skip
"""Header fields of one connection, which go no further."""
MOST_HEADER = 1 << 16
LEAVE = 30.0
"""Seconds that running answers have when the proxy is stopped."""
LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")


class Tee:
    """A request's body on its way to the server, of which a copy is kept while it is not too large."""

    def __init__(self, request: web.Request, *, kept: bool):
        self.request, self.copy = request, bytearray() if kept else None
        self.too_large = False

    async def __call__(self) -> AsyncIterator[bytes]:
        async for chunk in self.request.content.iter_any():
            if self.copy is not None:
                self.copy += chunk
                if len(self.copy) > MOST_BYTES:
                    self.copy, self.too_large = None, True
            yield chunk


class Proxy:
    """Forwards to the server at ``url``, and offers ``share`` of its generations to a sampler."""

    def __init__(
        self, url: str, sampler: Sampler, share: float, access: Access, draw: Callable[[], float] = random.random
    ):
        self.url, self.sampler, self.tally, self.share = url, sampler, sampler.tally, share
        self.access, self.draw = access, draw
        self._session: aiohttp.ClientSession | None = None

    def application(self) -> web.Application:
        """What clients ask."""
        app = web.Application(client_max_size=0)
        app.router.add_route("*", "/{path:.*}", self.handle)
        app.cleanup_ctx.append(self._connected)
        return app

    async def _connected(self, app: web.Application) -> AsyncIterator[None]:
        # A connection each: one that the server has just closed cannot be told from one that it refuses to answer on.
        tls: Any = self.access.context() if self.url.startswith("https:") else True
        connector = aiohttp.TCPConnector(limit=0, force_close=True, ssl=tls)
        async with aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30.0),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            max_line_size=MOST_HEADER,
            max_field_size=MOST_HEADER,
        ) as self._session:
            yield

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """One request."""
        if not request.raw_path.startswith("/"):
            return web.Response(status=400, text="Ask for a path.\n")
        if "upgrade" in request.headers.get("Connection", "").lower():
            return web.Response(status=501, text="The shadow proxy takes HTTP requests: ask the server itself.\n")
        sampled = request.method == "POST" and request.path in PATHS and self.draw() < self.share
        tee = Tee(request, kept=sampled)
        self.tally.forward()
        if not sampled:
            return (await self._forward(request, tee))[0]
        self.tally.sample()
        reason: Reason | None = "not_answered"
        try:
            response, whole = await self._forward(request, tee)
            if whole and response.status == 200:
                reason = "too_large" if tee.too_large else None
            return response
        finally:
            if reason is None:
                self.sampler.offer(Exchange(request.path, bytes(tee.copy or b"")))
            else:
                self.tally.leave_out(reason)

    async def _forward(self, request: web.Request, tee: Tee) -> tuple[web.StreamResponse, bool]:
        """The answer, and whether all of it went out. If the client leaves, this task ends and the server is told."""
        assert self._session is not None
        response: web.StreamResponse | None = None
        try:
            async with self._session.request(
                request.method,
                URL(self.url + request.raw_path, encoded=True),
                headers=_kept(request.headers),
                data=tee() if request.can_read_body else None,
                allow_redirects=False,
            ) as upstream:
                response = web.StreamResponse(status=upstream.status, reason=upstream.reason)
                response.headers.extend(_kept(upstream.headers))
                await response.prepare(request)
                async for chunk in upstream.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response, True
        except (aiohttp.ClientError, OSError):
            if response is None or not response.prepared:
                return web.Response(status=502, text="The server behind the shadow proxy does not answer.\n"), False
            if request.transport is not None:
                request.transport.abort()  # the client must not take a part for the whole
            return response, False


def _kept(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Header fields that are passed on."""
    named = {x.strip().lower() for value in headers.getall("Connection", ()) for x in value.split(",")}
    return CIMultiDict((name, x) for name, x in headers.items() if name.lower() not in OF_A_CONNECTION | named)


class Figures:
    """Serves ``/``, a page, ``/json`` and ``/metrics``. ``about``: as of ``report.render``, but for ``problem``."""

    def __init__(self, sampler: Sampler, about: Mapping[str, Any], host: str):
        self.sampler, self.about, self.guarded = sampler, about, host in LOOPBACK

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/", self.page)
        app.router.add_get("/json", self.data)
        app.router.add_get("/metrics", self.metrics)
        return app

    def _told(self, request: web.Request) -> tuple[dict[str, Any], dict[str, Any]]:
        """The figures, and what they are of. Raises HTTPMisdirectedRequest for a name that is not this machine's: a
        page from elsewhere may have given this address one."""
        host = request.host.rpartition(":")[0] if not request.host.endswith("]") else request.host
        if self.guarded and (host or request.host) not in LOOPBACK:
            raise web.HTTPMisdirectedRequest(text="Ask 127.0.0.1.\n")
        return self.sampler.tally.as_json(), {**self.about, "problem": self.sampler.judge.problem}

    async def page(self, request: web.Request) -> web.Response:
        return _answer("text/html", render(*self._told(request), refresh=True))

    async def data(self, request: web.Request) -> web.Response:
        told, about = self._told(request)
        return _answer("application/json", json.dumps({**told, "about": about}) + "\n")

    async def metrics(self, request: web.Request) -> web.Response:
        told, about = self._told(request)
        return _answer("text/plain", metrics(told, about["problem"]))


def _answer(kind: str, text: str) -> web.Response:
    headers = {
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }
    return web.Response(text=text, content_type=kind, charset="utf-8", headers=headers)


@asynccontextmanager
async def listening(app: web.Application, host: str, port: int) -> AsyncIterator[str]:
    """Serve for the time of the ``async with`` block; the address. Raises OSError if the port is taken."""
    runner = web.AppRunner(
        app, access_log=None, handler_cancellation=True, max_line_size=MOST_HEADER, max_field_size=MOST_HEADER,
        auto_decompress=False, shutdown_timeout=LEAVE,
    )  # fmt: skip
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        name = f"[{host}]" if ":" in host else host
        yield f"http://{name}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def serve(
    proxy: Proxy, figures: Figures, at: tuple[str, int], report_at: tuple[str, int], ready: Callable[[str, str], None],
    until: asyncio.Event,
) -> None:  # fmt: skip
    """Both, until ``until`` is set. ``ready`` is told the addresses of proxy and figures. Raises OSError."""
    async with listening(figures.application(), *report_at) as report, listening(proxy.application(), *at) as address:
        ready(address, report)
        await until.wait()
