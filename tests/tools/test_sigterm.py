"""A program that is told to end takes its servers with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers import until

PROGRAM = """
import signal, sys
from sglang_diffkv.evaluate.server import Server

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
server = Server("a model")
stubborn = "import os, signal, time; signal.signal(signal.SIGTERM, lambda *_: print('told', flush=True)); "
server.command = [sys.executable, "-c", stubborn + "print(os.getpid(), flush=True); time.sleep(120)"]
Server.stop.__defaults__ = (float(sys.argv[1]),)
print(server.log_path, flush=True)
server.start()
"""


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def was_told(log: Path) -> bool:
    """Whether the server was told to end. Its log goes with it."""
    return not log.exists() or "told" in log.read_text()


@pytest.mark.parametrize(
    ("numbers", "grace"),
    [
        ([signal.SIGTERM], 1),
        ([signal.SIGTERM, signal.SIGTERM, signal.SIGTERM], 1),
        ([signal.SIGINT, signal.SIGINT], 60),
    ],
)
def test_signals_stop_the_server_too(numbers: list[int], grace: float) -> None:
    """Though it does not end by SIGTERM itself. A second Ctrl-C waits for nothing, a second SIGTERM changes nothing."""
    command = [sys.executable, "-c", PROGRAM, str(grace)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
        assert run.stdout is not None
        log = Path(run.stdout.readline().strip())
        deadline = time.monotonic() + 60
        while not (text := log.read_text().strip()) and time.monotonic() < deadline:
            time.sleep(0.1)
        pid = int(text)
        assert alive(pid)
        for number in numbers:
            run.send_signal(number)
            until(lambda: was_told(log))  # two that come at once are one
            time.sleep(0.3)
        run.wait(timeout=30)
    assert run.returncode != 0
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(pid)
