"""A stand-in for a SGLang server: its HTTP interface, a prefix cache of token ids, and DiffKV's figures."""

from __future__ import annotations

import json
import ssl
import sys
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sglang_diffkv.evaluate.report import TOTALS

BF16_BYTES = 100
"""Bytes of a token in bf16, as the fake counts them."""


class Refusal(Exception):
    """Raised by ``reply``: the request is refused with status 400."""


class HangUp(Exception):
    """Raised by ``reply``: the connection is closed without an answer."""


class Served:
    """Serves what ``_server`` answers for as long as a ``with`` block lasts."""

    _server: ThreadingHTTPServer

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class FakeServer(Served):
    """Serves on a port of its own for the time of a ``with`` block.

    Args:
        reply: text for a prompt's token ids; an exception's message becomes the reason of an abort.
        share: pages' bytes over bf16 bytes, None for a server without DiffKV.
        logprob: of every scored token, by its position.
        tops: likeliest tokens as ``(logprob, token id)`` at a scored position, best first.
        cut_streams: streams end before their last part. flush_status: of the reply to /flush_cache.
        keys: which key a path wants, or None, as SGLang's. certificate: PEM files of a certificate and its key: https.
    """

    def __init__(
        self,
        reply: Callable[[Sequence[int]], str] = lambda ids: "",
        *,
        share: float | None = 0.5,
        context: int = 512,
        logprob: Callable[[int], float] = lambda position: -1.0,
        tops: Callable[[int], list[tuple[float, int]]] = lambda position: [(-1.0, 7), (-2.0, 8)],
        stats: dict[str, Any] | None = None,
        caches: bool = True,
        cut_streams: bool = False,
        flush_status: int = 200,
        keys: Callable[[str], str | None] = lambda path: None,
        certificate: tuple[Path, Path] | None = None,
    ):
        self.reply, self.share, self.context, self.logprob = reply, share, context, logprob
        self.tops = tops
        self.stats, self.caches, self.cut_streams = stats or {}, caches, cut_streams
        self.flush_status, self.keys = flush_status, keys
        self.aborted: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.flushes = 0
        self.cached: list[list[int]] = []
        self.finished = dict.fromkeys(TOTALS, 0)
        self.finished_1k = dict.fromkeys(TOTALS, 0)
        self.by_tier: dict[str, int] = {}  # a sequence token's (layer, KV head) pairs in each tier, if it says so
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"fake": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
            self.url = self.url.replace("http:", "https:")

    def info(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        if self.share is not None:
            totals = {"finished": self.finished, "finished_1k": self.finished_1k}
            tiers = {
                key: {name: count * x["tokens"] for name, count in self.by_tier.items()} for key, x in totals.items()
            }
            state["diffkv"] = {**self.stats, **{key: {**x, "by_tier": tiers[key]} for key, x in totals.items()}}
        return {
            "internal_states": [state],
            "model_path": "/models/fake",
            "attention_backend": "torch_native" if self.share is None else "diffkv",
            "kv_cache_dtype": "auto",
            "device": "cpu",
            "version": "0",
        }

    def generate(self, payload: dict[str, Any]) -> dict[str, Any]:
        ids, limit = payload["input_ids"], payload["sampling_params"]["max_new_tokens"]
        start = payload.get("logprob_start_len", len(ids) - 1)
        with self._lock:
            self.requests.append(payload)
            hits = [next((i for i, (a, b) in enumerate(zip(x, ids)) if a != b), len(x)) for x in self.cached]
            if self.caches:
                self.cached.append(ids)
        try:
            text = self.reply(ids) if limit else ""
        except ValueError as error:
            meta = {"id": payload.get("rid", ""), "finish_reason": _abort(str(error))}
            return {"text": "", "output_ids": [], "meta_info": meta}
        completion = min(limit, len(text))
        with self._lock:
            self._count(len(ids) + completion)
        meta = {
            "id": payload.get("rid", ""),
            "finish_reason": {"type": "stop"},
            "prompt_tokens": len(ids),
            "completion_tokens": completion,
            "cached_tokens": min(max(hits, default=0), start),
        }
        if payload.get("return_logprob"):
            scored = [[self.logprob(at), ids[at], None] for at in range(start + 1, len(ids))]
            meta["input_token_logprobs"] = [[None, ids[start], None], *scored]
            if count := payload.get("top_logprobs_num"):
                tops = [[[*entry, None] for entry in self.tops(at)[:count]] for at in range(start + 1, len(ids))]
                meta["input_top_logprobs"] = [None, *tops]
        return {"text": text, "output_ids": [], "meta_info": meta}

    def _count(self, tokens: int) -> None:
        full = tokens * BF16_BYTES
        share = self.share or 0.0
        values = (1, tokens, int(full * share), int(full * share * 0.9), full, 6 * tokens, 3 * tokens, tokens)
        for name, value in zip(TOTALS, values):
            self.finished[name] += value
            if tokens >= 1000:
                self.finished_1k[name] += value


def _abort(message: str) -> dict[str, str]:
    return {"type": "abort", "message": message}


class _Server(ThreadingHTTPServer):
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that is gone is no news."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    fake: FakeServer

    def _refuses(self) -> bool:
        """Whether the request lacks its key; it is answered then."""
        key = self.fake.keys(self.path)
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return False
        self._send({"error": "Unauthorized"}, 401)
        return True

    def do_GET(self) -> None:
        if self._refuses():
            return
        replies = {
            "/v1/models": lambda: {"data": [{"max_model_len": self.fake.context}]},
            "/server_info": self.fake.info,
            "/v1/loads": lambda: {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]},
        }
        self._send(replies[self.path]() if self.path in replies else None)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self._refuses():
            return
        if self.path == "/generate":
            self._generate(json.loads(body))
        elif self.path == "/abort_request":
            self.fake.aborted.append(json.loads(body).get("rid", "all"))
            self._send({})
        elif self.path == "/flush_cache":
            self.fake.flushes += 1
            if self.fake.flush_status == 200:
                self.fake.cached.clear()
            self._send({}, self.fake.flush_status)
        else:
            self._send(None)

    def _generate(self, payload: dict[str, Any]) -> None:
        samples = payload["sampling_params"].get("n", 1)
        try:
            replies = [self.fake.generate({**payload, "rid": f"{payload.get('rid')}{i}"}) for i in range(samples)]
        except Refusal as error:
            self._send({"error": {"message": str(error)}}, 400)
        except HangUp:
            self.close_connection = True
        else:
            if payload.get("stream"):
                self._stream(replies)
            else:
                self._send(replies[0] if samples == 1 else replies)

    def _stream(self, replies: list[dict[str, Any]]) -> None:
        self.send_response(200)
        self.end_headers()
        begun = [{**x, "meta_info": {**x["meta_info"], "finish_reason": None, "completion_tokens": 1}} for x in replies]
        for part in [*begun, *([] if self.fake.cut_streams else replies)]:
            self.wfile.write(b"data: " + json.dumps(part).encode() + b"\n\n")
        if not self.fake.cut_streams:
            self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, reply: Any, status: int = 200) -> None:
        data = json.dumps(reply).encode()
        self.send_response(404 if reply is None else status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass
