"""Servers that tests share, and how strictly they check themselves.

A server takes most of a minute to start, so tests with equal configurations get the same one: ``server_of`` of
``tests/conftest.py`` keeps the last server until a test asks for another. Such tests follow one another in a file
``test_server_*.py``; the tests of such a file never run side by side.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.paths import NANO
from sglang_diffkv.config import CHECK_ENV
from sglang_diffkv.evaluate.server import Server

EVERY_STEP = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", CHECK_ENV: "1"}
"""All structures are checked after every step."""

STRICT = {**EVERY_STEP, CHECK_ENV: os.environ.get(CHECK_ENV, "1")}
"""The same after every so many steps, if the environment says so: ``make test`` does."""

SHALLOW = ("--json-model-override-args", '{"num_hidden_layers": 2}')
"""Two of nano's six layers: for tests that compare no tokens, since such a model repeats itself. A decode step takes
less than half as long."""

START_TIMEOUT = 600.0
"""Seconds; two servers may start on two busy cores."""


def completed(
    command: Sequence[str], env: Mapping[str, str], cwd: str | Path | None = None, timeout: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` of a program of SGLang's, forked where servers are. It is killed if it takes ``timeout`` s."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = Server.popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, cwd=cwd)
        try:
            status = process.wait(timeout)
        finally:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode())
    return subprocess.CompletedProcess(command, status, *said)


class SharedServer:
    """The server that the last test asked for."""

    def __init__(self) -> None:
        self.server: Server | None = None
        self._key = ""

    def get(
        self,
        backend: str = "diffkv",
        args: Sequence[str] = (),
        *,
        model: str | Path = NANO,
        config: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Server:
        """A running server of this configuration: the last one, if it was started with the same. Without one it is
        ``{}``, of a server that was told so: one that was told nothing reads a text first."""
        config = {} if config is None and backend == "diffkv" else config
        key = json.dumps([backend, list(args), str(model), config, env], sort_keys=True)
        if self.server is not None and key == self._key and self.server.alive():
            return self.server
        self.stop()
        server = Server(model, backend, args, diffkv_config=config, env=env, timeout=START_TIMEOUT)
        server.start()
        self.server, self._key = server, key
        return server

    def check(self) -> None:
        """Raise AssertionError, and end the server, if it died or holds pages while nothing runs."""
        if self.server is None:
            return
        try:
            check_idle(self.server)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server."""
        server, self.server = self.server, None
        if server is not None:
            server.stop(grace=0.0)  # idle or broken, it has nothing to end in its own time


def stats_of(server: Server) -> dict[str, Any]:
    """DiffKV's figures; AssertionError if the server has none."""
    stats = server.stats()
    assert stats is not None
    return stats


def check_idle(server: Server) -> None:
    """Raise AssertionError if a server died, or if requests that ended or an empty tree hold pages, host memory or
    states."""
    assert server.alive(), "the server died during the test"
    server.flush_cache()
    stats = server.stats()
    if stats is not None:
        assert (stats["pages_used"], stats["segments"]) == (0, 0), "pages are lost"
        for part in ("retracted", "host_prefixes"):
            assert stats.get(part, {}).get("host_bytes", 0) == 0, "host memory is lost"
        states = stats.get("states", {})
        assert states.get("free") == states.get("slots"), f"state slots are lost: {states}"


def tokens(count: int, seed: int) -> list[int]:
    """A prompt of random words; equal seeds begin alike."""
    source = random.Random(seed)
    return [source.randrange(100, 1900) for _ in range(count)]
