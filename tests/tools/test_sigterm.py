"""A program that is told to end takes its servers with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PROGRAM = """
import sys
from sglang_diffkv.evaluate.server import Server

server = Server("a model")
server.command = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(120)"]
print(server.log_path, flush=True)
server.start()
"""


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_sigterm_stops_the_server_too() -> None:
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
        assert run.stdout is not None
        log = Path(run.stdout.readline().strip())
        deadline = time.monotonic() + 60
        while not (text := log.read_text().strip()) and time.monotonic() < deadline:
            time.sleep(0.1)
        pid = int(text)
        assert alive(pid)
        run.send_signal(signal.SIGTERM)
        run.wait(timeout=60)
    assert run.returncode != 0
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(pid)
