"""Servers from a process that has imported SGLang already.

A server is three processes or more, each of which imports SGLang and all of its models: ten seconds of CPU, again and
again in a run of the tests. ``Preloaded`` keeps one process that has imported them, with SGLang's plugins applied, and
forks it for every server; what the server starts is forked in turn. So a start takes about one second of CPU. All else
is ``python -m sglang.launch_server``: same arguments, same environment, a session of its own. Tests marked
``new_process`` and all of ``make test-all`` run the real command.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import importlib
import json
import logging
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from typing import IO, Any

from sglang_diffkv.config import CACHE_ENV, CHECK_ENV, CONFIG_ENV
from sglang_diffkv.evaluate.server import CPU_ENV, OFFLINE_ENV

MODULE = "sglang.launch_server"
READ_LATE = {
    CACHE_ENV,
    CHECK_ENV,
    CONFIG_ENV,
    "SGLANG_CPU_OMP_THREADS_BIND",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY",
    "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR",
    "SGLANG_INIT_NEW_TOKEN_RATIO",
    "PYTEST_CURRENT_TEST",
    "PYTHONPATH",
    "SGLANG_HOST_IP",
    "LOOPBACK_ENGINE_SECONDS",
}
"""Variables that no module reads when it is imported."""
HANDLED = (signal.SIGCHLD, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that SGLang's processes handle each in its own way."""
PR_SET_CHILD_SUBREAPER = 36
"""Of Linux: processes whose parent has ended become children of this one, which waits for them."""
LARGEST = 1 << 20
"""Bytes of a message."""


class Process:
    """A forked server, with the part of ``subprocess.Popen`` that ``Server`` uses."""

    def __init__(self, preloaded: Preloaded, pid: int):
        self.pid, self._preloaded = pid, preloaded
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._preloaded.ask({"status_of": self.pid})["status"]
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(MODULE, timeout)
            time.sleep(0.05)
        return status


class Preloaded:
    """The process that is forked, started when the first server is."""

    def __init__(self) -> None:
        inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        self.env = {**inherited, **CPU_ENV, **OFFLINE_ENV}
        self._asking = threading.Lock()  # servers may be started side by side
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def popen(
        self, command: Sequence[str], *, stdout: IO[bytes], env: Mapping[str, str], **rest: Any
    ) -> Process | subprocess.Popen[bytes]:
        """``subprocess.Popen`` for a server, by a fork where imported modules cannot make a difference."""
        late = READ_LATE.intersection(env) | READ_LATE.intersection(self.env)
        same = {k: v for k, v in env.items() if k not in late} == {k: v for k, v in self.env.items() if k not in late}
        if not same or list(command[:3]) != [sys.executable, "-m", MODULE]:
            return subprocess.Popen(command, stdout=stdout, env=env, **rest)
        found = self.ask({"argv": list(command[2:]), "env": dict(env)}, stdout.fileno())
        return Process(self, found["pid"])

    def ask(self, message: dict[str, Any], *files: int) -> dict[str, Any]:
        """The answer to a message, with which open files may go."""
        data = json.dumps(message).encode()
        assert len(data) < LARGEST
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
        with self._asking:
            if self._socket is None:
                self._start()
            assert self._socket is not None
            self._socket.sendmsg([data], rights)
            answer = self._socket.recv(LARGEST)
        if not answer:
            raise RuntimeError("the process that servers are forked from has ended")
        return dict(json.loads(answer))

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=self.env,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._socket = ours

    def stop(self) -> None:
        """End the process; servers are stopped by who started them."""
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._process.wait()


def serve(connection: socket.socket) -> None:
    """Fork a server for each message with arguments and tell the status of those asked for, until nobody asks."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(action="ignore"):
        for name in (MODULE, "sglang.srt.entrypoints.http_server", "sglang.srt.models.registry"):
            importlib.import_module(name)
        importlib.import_module("sglang_diffkv.srt.backend")
        importlib.import_module("sglang.srt.plugins").load_plugins()  # a scan of all modules for each hook
    logging.disable(logging.NOTSET)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork takes one thread along"
    gc.collect()
    gc.freeze()  # else each server looks through, and so copies, all that was imported: a second and more
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    ended: dict[int, int] = {}
    while True:
        data, rights, _, _ = connection.recvmsg(LARGEST, socket.CMSG_LEN(4))
        if not data:
            return
        message = json.loads(data)
        if "status_of" in message:
            reap(ended)
            answer = {"status": ended.get(message["status_of"])}
        else:
            log = int.from_bytes(rights[0][2], sys.byteorder)
            pid = os.fork()
            if not pid:
                connection.close()
                become_server(message["argv"], message["env"], log)
            os.close(log)
            answer = {"pid": pid}
        connection.send(json.dumps(answer).encode())


def reap(ended: dict[int, int]) -> None:
    """Add the exit codes of processes that have ended: servers, and what they left behind."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])


def become_server(argv: list[str], env: dict[str, str], log: int) -> None:
    """Run ``python -m ARGV`` in this process and end it."""
    os.setsid()
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", *sys.path)]
    fork_children()
    sys.argv = list(argv)
    status = 0
    try:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def fork_children() -> None:
    """Processes that this one starts are forked, whatever SGLang asks for, and handle signals as new ones do."""
    import torch.multiprocessing

    multiprocessing.set_start_method("fork", force=True)
    for module in (multiprocessing, torch.multiprocessing):
        module.set_start_method = lambda *args, **kwargs: None  # type: ignore[attr-defined]
    os.register_at_fork(after_in_child=forget_handlers)


def forget_handlers() -> None:
    """As ``multiprocessing.spawn`` leaves them."""
    for number in HANDLED:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
