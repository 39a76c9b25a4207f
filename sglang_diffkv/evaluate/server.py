"""A SGLang server in a process of its own, for as long as a ``with`` block lasts."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import requests

from sglang_diffkv.access import OPEN, Access, hidden
from sglang_diffkv.evaluate.ports import Port

READY = "fired up and ready to roll"
CPU_ENV = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
OFFLINE_ENV = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
CPU_ARGS = ("--device", "cpu", "--dtype", "bfloat16", "--max-total-tokens", "65536", "--sleep-on-idle")
DATA_PARALLEL = {"--dp-size", "--data-parallel-size"}
"""With these SGLang needs a rendezvous port for each replica and chooses them."""


class ServerError(RuntimeError):
    """The server did not start; the message ends with the tail of its log."""


def has_gpu() -> bool:
    """Whether torch sees a CUDA device."""
    import torch

    return torch.cuda.is_available()


def stock_backend() -> str:
    """SGLang's own attention backend to compare with on this machine."""
    return "triton" if has_gpu() else "torch_native"


def stop_servers_on_sigterm() -> None:
    """From now on SIGTERM ends this program as Ctrl-C does, so that its servers are stopped too. ``timeout`` sends it
    twice, to the program and to its group: the second is not to interrupt the stopping.

    No effect outside of the main thread, or where the program handles the signal itself.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: object) -> None:
    signal.signal(number, lambda *_: None)
    raise KeyboardInterrupt


def flush_cache(url: str, access: Access = OPEN) -> None:
    """Empty the prefix cache of the server at ``url``; raises if requests are still running after a few seconds.

    A request has left the scheduler only some steps after its reply, so a refusal is tried again.
    """
    deadline = time.monotonic() + 10.0
    while not (response := access.post(url, "/flush_cache", timeout=60.0)).ok and time.monotonic() < deadline:
        time.sleep(0.1)
    response.raise_for_status()


class Server:
    """``python -m sglang.launch_server`` as a context manager.

    ``args`` come last on the command line and so override the defaults given here, which on a machine without
    a GPU are those that SGLang needs on a CPU. With ``--api-key`` among them requests show it. ``diffkv_config`` is
    passed as ``--diffkv-config``. The server's ports are its own as long as this object lives, so several may start at
    once. It is ready when ``ready`` stands in its log; an empty one is not waited for (a host that takes no requests).
    """

    popen: ClassVar[Callable[..., Any]] = subprocess.Popen
    """Starts the process."""
    grace: ClassVar[float] = 15.0
    """Seconds in which it may end in its own time. SGLang takes five of them, also where nothing runs."""

    def __init__(
        self,
        model: str | Path,
        backend: str = "diffkv",
        args: Sequence[str] = (),
        *,
        diffkv_config: Mapping[str, Any] | str | None = None,
        env: Mapping[str, str] | None = None,
        log_path: str | Path | None = None,
        timeout: float = 300.0,
        ready: str = READY,
    ) -> None:
        cpu = not has_gpu()
        self._ports = (Port(), Port())
        self.port, rendezvous = (port.number for port in self._ports)
        self.url = f"http://127.0.0.1:{self.port}"
        self.timeout = timeout
        self._ready = ready
        self.command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
        self.command += ["--attention-backend", backend, "--host", "127.0.0.1", "--port", str(self.port)]
        if not DATA_PARALLEL.intersection(arg.partition("=")[0] for arg in args):
            self.command += ["--nccl-port", str(rendezvous)]
        self.command += CPU_ARGS if cpu else ()
        if diffkv_config is not None:
            text = diffkv_config if isinstance(diffkv_config, str) else json.dumps(dict(diffkv_config))
            self.command += ["--diffkv-config", text]
        self.command += args
        self.access = Access.of_server_args(args)
        inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        self._env = {**inherited, **(CPU_ENV if cpu else {}), **OFFLINE_ENV, **(env or {})}
        self._keep_log = log_path is not None
        if log_path is None:
            handle, log_path = tempfile.mkstemp(prefix="sglang-", suffix=".log")
            os.close(handle)
        self.log_path = Path(log_path)
        self._last_log = ""
        self._process: Any = None  # as subprocess.Popen

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(self.grace)

    def start(self) -> None:
        """Start the process and wait until it is ready; ``ServerError`` if it ends or takes too long."""
        stop_servers_on_sigterm()
        with self.log_path.open("wb") as log:
            self._process = type(self).popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )
        try:
            self._wait_ready(self._process)
        except BaseException:
            self.stop()
            raise

    def _wait_ready(self, process: Any) -> None:
        deadline = time.monotonic() + self.timeout
        while self._ready not in self.log_text():
            if (status := process.poll()) is not None:
                raise self._failure(f"ended with status {status} before it was ready")
            if time.monotonic() > deadline:
                raise self._failure(f"was not ready after {self.timeout:.0f} s")
            time.sleep(0.05)

    def _failure(self, what: str) -> ServerError:
        tail = "\n".join(self.log_text().splitlines()[-60:])
        return ServerError(hidden(f"the server {what}\n$ {shlex.join(self.command)}\n{tail}", self.access))

    def stop(self, grace: float = grace) -> None:
        """End the server and all its processes: SIGTERM, then SIGKILL for what is left after ``grace`` s, or at once
        when this is interrupted."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            for number, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, 5.0)):
                if not _signal_group(process.pid, number):
                    break
                deadline = time.monotonic() + patience
                while time.monotonic() < deadline:
                    process.poll()
                    if not _signal_group(process.pid, 0):
                        break
                    time.sleep(0.02)
        except BaseException:
            _signal_group(process.pid, signal.SIGKILL)
            raise
        process.wait(timeout=5.0)
        if not self._keep_log:
            self._last_log = self.log_text()
            self.log_path.unlink(missing_ok=True)

    def alive(self) -> bool:
        """Whether the main process is running."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """Process id of the main process, None while it is not started."""
        return None if self._process is None else self._process.pid

    def log_text(self) -> str:
        """All that the server has written to standard output and error."""
        if not self.log_path.exists():
            return self._last_log
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def get(self, path: str, *, timeout: float = 60.0) -> requests.Response:
        """``GET`` a path of the server."""
        return self.access.get(self.url, path, timeout)

    def post(self, path: str, payload: Any = None, *, timeout: float = 600.0) -> requests.Response:
        """``POST`` JSON to a path of the server."""
        return self.access.post(self.url, path, payload, timeout=timeout)

    def generate(self, payload: Mapping[str, Any], *, timeout: float = 600.0) -> Any:
        """The decoded reply of ``/generate``; raises ``requests.HTTPError`` if the server refuses."""
        response = self.post("/generate", dict(payload), timeout=timeout)
        response.raise_for_status()
        return response.json()

    def flush_cache(self) -> None:
        """``flush_cache`` of this server."""
        flush_cache(self.url, self.access)

    def server_info(self) -> dict[str, Any]:
        """The reply of ``/server_info``: the resolved arguments and the schedulers' state."""
        response = self.get("/server_info")
        response.raise_for_status()
        return response.json()

    def stats(self) -> dict[str, Any] | None:
        """DiffKV's figures as ``/server_info`` gives them, or None if the server has none."""
        states = self.server_info().get("internal_states") or [{}]
        return states[0].get("diffkv")


def _signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group; False if it has no process left."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True
