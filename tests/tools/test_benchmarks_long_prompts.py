"""A long prompt among short requests: what is counted, on a server that is only played."""

from __future__ import annotations

import json
import threading
import time
from argparse import Namespace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from benchmarks.serving import long_prompts
from benchmarks.serving.client import BenchmarkError

STEP, READ = 0.01, 1.0


class Streaming(BaseHTTPRequestHandler):
    """A token each ``STEP``; while a prompt of more than 10 tokens is read, for ``READ`` seconds, nobody gets one."""

    protocol_version = "HTTP/1.1"
    reading = threading.Lock()
    error: bytes = b""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if len(body["input_ids"]) > 10:
            with self.reading:
                time.sleep(READ)
        try:
            for _ in range(body["sampling_params"]["max_new_tokens"]):
                with self.reading:
                    pass
                self._chunk(self.error or b"data: {}\n\n")
                time.sleep(STEP)
            self.wfile.write(b"0\r\n\r\n")
        except (BrokenPipeError, ConnectionResetError):
            pass

    def _chunk(self, text: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text))
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Streaming) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield SimpleNamespace(url=f"http://127.0.0.1:{httpd.server_address[1]}")
        httpd.shutdown()


def test_gaps_are_of_the_part_in_which_they_lie(server):
    args = Namespace(short=2, tokens=3, reply=1000, watched=10)
    found = long_prompts.beside(server, args, lambda length: [7] * length, 50)
    before, read, beside = (found["gaps"][part] for part in long_prompts.PARTS)
    assert READ <= found["beside"] < 2 * READ
    assert before["most"] < READ * 1e3 and beside["p50"] < READ * 1e3 / 2
    assert READ * 1e3 <= read["most"] < 2 * READ * 1e3, "all wait while it is read"
    assert before["n"] >= 2 * 9 and beside["n"] >= 2 * 5


@pytest.mark.parametrize(
    ("reply", "error", "said"),
    [(12, b"", "give --reply more"), (1000, b'data: {"error": {"message": "too long"}}\n\n', "too long")],
)
def test_what_ends_too_early_is_an_error(server, monkeypatch, reply, error, said):
    monkeypatch.setattr(Streaming, "error", error)
    args = Namespace(short=2, tokens=3, reply=reply, watched=10)
    with pytest.raises(BenchmarkError, match=said):
        long_prompts.beside(server, args, lambda length: [7] * length, 50)


def test_the_table_has_a_row_for_each_prompt_and_says_what_failed():
    gaps = {part: {"n": 9, "p50": 8.0, "p99": 9.5, "most": 2000.0} for part in long_prompts.PARTS}
    record = {
        "backend": "x",
        "status": "ok",
        "prompts": [{"length": 65536, "alone": 2.5, "beside": 2.75, "gaps": gaps}],
    }
    text = long_prompts.table([record, {"backend": "y", "status": "failed", "error": "e"}], Namespace())
    assert "| x | 65,536 | 2.50 | 2.75 | 8.0 / 9.5 | 8.0 / 2000 | 8.0 / 9.5 |" in text and "| y | e |" in text


def test_a_geometry_may_have_more_positions(tmp_path):
    args = long_prompts.parse_args(["--context", "140000", "--output", str(tmp_path), "--diffkv", "default={}"])
    from benchmarks.serving.cli import prepare

    setup = prepare(args, tmp_path / "model", 40)
    config = json.loads((tmp_path / "model" / "llama3-8b" / "config.json").read_text())
    assert config["max_position_embeddings"] == 140000
    assert setup.shape.context == 140000
