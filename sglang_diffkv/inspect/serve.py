"""The page of a running server, read anew whenever it is asked for."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sglang_diffkv.inspect.page import render
from sglang_diffkv.inspect.snapshot import InspectError, Report
from sglang_diffkv.page import POLICY, document

HOST = "127.0.0.1"
"""Nobody else's machine: pages are not asked for a key."""
PATIENCE = 30.0
"""Seconds for a browser's request."""


class PageServer(ThreadingHTTPServer):
    """Serves ``/``, a page, and ``/json``, on this machine alone. ``read`` asks the watched server, once at a time.

    Raises OSError if the port is taken; port 0 takes any, see ``url``.
    """

    daemon_threads = True

    def __init__(self, port: int, read: Callable[[], Report]):
        super().__init__((HOST, port), _Handler)
        self.reading, self.read = threading.Lock(), read

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that is gone is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = PATIENCE
    server_version = "sglang_diffkv"
    sys_version = ""

    def do_GET(self) -> None:
        if not self._is_asked_here():
            self._send(421, "text/plain", f"Ask {self.server.url}\n")
            return
        path = self.path.partition("?")[0]
        if path not in ("/", "/json"):
            self._send(404, "text/plain", "There is / and /json.\n")
            return
        try:
            with self.server.reading:
                report = self.server.read()
        except InspectError as error:
            kind, text = ("application/json", json.dumps({"error": str(error)}) + "\n") if path == "/json" else (
                "text/html", document("No figures", [str(error)], [], refresh=True))  # fmt: skip
            self._send(502, kind, text)
            return
        if path == "/json":
            self._send(200, "application/json", json.dumps(report.as_json()) + "\n")
        else:
            self._send(200, "text/html", render(report, refresh=True))

    do_HEAD = do_GET

    def _is_asked_here(self) -> bool:
        """Whether the browser knows whom it asks: a page from elsewhere may have given this address a name."""
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        return host in (HOST, "localhost")

    def _send(self, status: int, kind: str, text: str) -> None:
        data = text.encode("utf-8", "replace")
        self.send_response(status)
        for name, value in (
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Content-Length", str(len(data))),
            ("Content-Security-Policy", POLICY),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal has the address alone."""
