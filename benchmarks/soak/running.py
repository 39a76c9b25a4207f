"""A server that somebody else has started, with the methods of ``Server`` that a soak calls."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import requests

from sglang_diffkv.access import Access
from sglang_diffkv.evaluate.server import flush_cache


class RunningServer:
    """The server at ``url``. Its log and its memory are not seen, and leaving the ``with`` block does not end it."""

    pid: None = None
    log_path: None = None

    def __init__(self, url: str, access: Access):
        self.url, self.access = url, access

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def alive(self) -> bool:
        """True: its process is not seen. One that is gone loses all requests, which fails the soak."""
        return True

    def log_text(self) -> str:
        """Nothing: the log is elsewhere."""
        return ""

    def get(self, path: str) -> requests.Response:
        """``GET`` a path of the server. Raises AccessError, requests.RequestException."""
        return self.access.get(self.url, path, timeout=60.0)

    def server_info(self) -> dict[str, Any]:
        """The reply of ``/server_info``. Raises AccessError, requests.RequestException."""
        response = self.get("/server_info")
        response.raise_for_status()
        found: dict[str, Any] = response.json()
        return found

    def flush_cache(self) -> None:
        """Empty its prefix cache. Raises AccessError, requests.RequestException."""
        flush_cache(self.url, self.access)
