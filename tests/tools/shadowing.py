"""A shadow proxy in a thread of the test, and stand-ins for the servers behind it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

import requests

from sglang_diffkv.access import OPEN, Access
from sglang_diffkv.shadow.judge import Judge
from sglang_diffkv.shadow.proxy import Figures, Proxy, serve
from sglang_diffkv.shadow.sampler import Sampler
from sglang_diffkv.shadow.tally import Tally
from tests.tools.fake_server import Served


class Shadow:
    """Before the server at ``url`` for the time of a ``with`` block, at an address of its own.

    Attributes:
        url: of the proxy. report: of its figures.
    """

    def __init__(
        self, url: str, reference: str, *, share: float, most: int = 8, timeout: float = 60.0, access: Access = OPEN,
        reply_tokens: int = 16,
    ):  # fmt: skip
        judge = Judge(
            url, reference, access=access, reference_access=access, timeout=timeout, reply_tokens=reply_tokens
        )
        self.sampler = Sampler(judge, Tally(), most=most)
        self.proxy = Proxy(url, self.sampler, share, access)
        self.about = {"url": url, "reference": reference, "share": share}
        self.url = self.report = ""
        self._ready, self._loop = threading.Event(), asyncio.new_event_loop()
        self._until = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        figures, at = Figures(self.sampler, self.about, "127.0.0.1"), ("127.0.0.1", 0)
        self._loop.run_until_complete(serve(self.proxy, figures, at, at, self._started, self._until))

    def _started(self, url: str, report: str) -> None:
        self.url, self.report = url, report
        self._ready.set()

    def __enter__(self) -> Shadow:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._until.set)
        self._thread.join(40)
        assert not self._thread.is_alive(), "the proxy did not end"

    def told(self) -> dict[str, Any]:
        """Its figures."""
        reply = requests.get(f"{self.report}/json", timeout=10)
        reply.raise_for_status()
        return reply.json()


Thought = Callable[[Sequence[int]], list[tuple[float, int]]]


class FakeModel(Served):
    """A stand-in for a SGLang server with a model of its own, for the time of a ``with`` block.

    Args:
        thought: behind some tokens, the likeliest next ones as ``(logprob, token id)``, best first. A text has its
            characters for tokens, moved by ``offset``. delay: seconds before an answer to ``/generate``. info: of
            ``/server_info``. key: that it wants.

    Attributes:
        asked: what ``/generate`` was asked.
    """

    def __init__(
        self, thought: Thought, *, offset: int = 0, delay: float = 0.0, info: dict[str, Any] | None = None,
        key: str | None = None,
    ):  # fmt: skip
        self.thought, self.offset, self.delay, self.key = thought, offset, delay, key
        self.info, self.asked = info or {"kv_cache_dtype": "auto", "attention_backend": "triton"}, []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"fake": self}))
        self._server.handle_error = lambda *args: None  # type: ignore[method-assign]
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def tokenize(self, payload: dict[str, Any]) -> Any:
        if "messages" in payload:
            text = "".join(f"<{x['role']}>{x['content']}" for x in payload["messages"])
        else:
            text = payload["prompt"]
        return {"tokens": [ord(x) + self.offset for x in text]}

    def generate(self, payload: dict[str, Any]) -> Any:
        self.asked.append(payload)
        time.sleep(self.delay)
        ids, count = list(payload["input_ids"]), payload.get("top_logprobs_num", 0)
        meta: dict[str, Any] = {"finish_reason": {"type": "length"}, "prompt_tokens": len(ids), "cached_tokens": 0}
        start = payload.get("logprob_start_len", len(ids))
        thoughts = [self.thought(ids[:at]) for at in range(start + 1, len(ids))]
        meta["input_top_logprobs"] = [None, *([[*x, None] for x in thought[:count]] for thought in thoughts)]
        said: list[int] = []
        for _ in range(payload["sampling_params"]["max_new_tokens"]):
            thought = self.thought([*ids, *said])
            meta.setdefault("output_top_logprobs", []).append([[*x, None] for x in thought[:count]])
            said.append(thought[0][1])
        return {"text": "", "output_ids": said, "meta_info": {**meta, "completion_tokens": len(said)}}


class _Handler(BaseHTTPRequestHandler):
    fake: FakeModel

    def do_GET(self) -> None:
        self._send(self.fake.info)

    def do_POST(self) -> None:
        payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.fake.key is not None and self.headers.get("Authorization") != f"Bearer {self.fake.key}":
            self._send({"error": "Unauthorized"}, 401)
            return
        paths = {"/v1/tokenize": self.fake.tokenize, "/generate": self.fake.generate}
        self._send(paths[self.path](payload) if self.path in paths else {})

    def _send(self, reply: Any, status: int = 200) -> None:
        data = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass
