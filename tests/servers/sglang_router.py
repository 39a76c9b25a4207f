"""SGLang's router in front of servers."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests

from sglang_diffkv.evaluate.ports import Port
from tests.servers.shared import START_TIMEOUT

needs_router = pytest.mark.skipif(
    importlib.util.find_spec("sglang_router") is None, reason="the package sglang-router is missing"
)


@contextmanager
def router(args: Sequence[str], workers: int, log_path: Path) -> Iterator[str]:
    """The router with ``args``, which name so many ``workers``, once it has found all of them healthy; its address."""
    ports = Port(), Port()
    url = f"http://127.0.0.1:{ports[0].number}"
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", *args]
    command += ["--port", str(ports[0].number), "--prometheus-port", str(ports[1].number)]
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + START_TIMEOUT
        while not _ready(url, workers):
            assert process.poll() is None and time.monotonic() < deadline, log_path.read_text()
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ready(url: str, workers: int) -> bool:
    try:
        found = requests.get(f"{url}/workers", timeout=5).json()["workers"]
    except (requests.RequestException, KeyError):
        return False
    return sum(x["is_healthy"] for x in found) == workers
