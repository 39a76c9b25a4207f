"""Servers from a process that has imported SGLang already.

A server is three processes or more, each of which imports SGLang and all of its models: ten seconds of CPU, again and
again in a run of the tests. ``Preloaded`` keeps one process that has imported them, with SGLang's plugins applied, and
forks it for every server; what the server starts is forked in turn. So a start takes about one second of CPU. A server
with another environment is forked from another such process, which the next one of its kind finds. All else is
``python -m sglang.launch_server``: same arguments, same environment, a session of its own. Tests marked ``new_process``
and all of ``make test-all`` run the real command.
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

SERVER = "sglang.launch_server"
MODULES = (SERVER, "sglang_diffkv.doctor")
"""Which may be run in a fork."""
READ_LATE = {
    CACHE_ENV,
    CHECK_ENV,
    CONFIG_ENV,
    "SGLANG_CPU_OMP_THREADS_BIND",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY",
    "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR",
    "SGLANG_INIT_NEW_TOKEN_RATIO",
    "SGLANG_MAMBA_CONV_DTYPE",
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
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

    def __init__(self, preloaded: Preloaded, pid: int, args: Sequence[str]):
        self.pid, self.args, self._preloaded = pid, args, preloaded
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._preloaded.ask({"status_of": self.pid})["status"]
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.05)
        return status


class Preloaded:
    """The process that is forked, started when the first server is.

    Args:
        env: its environment; by default that of servers for which a test sets nothing.
    """

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        self.env = {**inherited, **CPU_ENV, **OFFLINE_ENV} if env is None else dict(env)
        self._others: list[Preloaded] = []
        """For servers with other environments; they have no others."""
        self._forked: list[Process] = []
        self._asking, self._choosing = threading.Lock(), threading.Lock()  # servers may be started side by side
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def popen(
        self, command: Sequence[str], *, stdout: IO[bytes], stderr: IO[bytes] | int, env: Mapping[str, str], **rest: Any
    ) -> Process | subprocess.Popen[bytes]:
        """``subprocess.Popen`` for a server or the doctor, by a fork where what is imported makes no difference."""
        if list(command[:2]) != [sys.executable, "-m"] or command[2] not in MODULES:
            return subprocess.Popen(command, stdout=stdout, stderr=stderr, env=env, **rest)
        if not self._imports_alike(env):
            with self._choosing:  # until one has forked, it looks as if it had ended
                return self._other_for(env).popen(command, stdout=stdout, stderr=stderr, env=env, **rest)
        errors = stdout if isinstance(stderr, int) else stderr  # subprocess.STDOUT
        found = self.ask({"argv": list(command[2:]), "env": dict(env)}, stdout.fileno(), errors.fileno())
        self._forked.append(Process(self, found["pid"], command))
        return self._forked[-1]

    def _other_for(self, env: Mapping[str, str]) -> Preloaded:
        """One with this environment. Those whose servers have ended end before another is made."""
        for other in self._others:
            if other._imports_alike(env):
                return other
        for other in [x for x in self._others if all(process.poll() is not None for process in x._forked)]:
            other.stop()
            self._others.remove(other)
        self._others.append(Preloaded(env))
        return self._others[-1]

    def _imports_alike(self, env: Mapping[str, str]) -> bool:
        """Whether modules that are imported with this environment are those of the process."""
        return {k: v for k, v in env.items() if k not in READ_LATE} == {
            k: v for k, v in self.env.items() if k not in READ_LATE
        }

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
        for other in self._others:
            other.stop()
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._process.wait()


def serve(connection: socket.socket) -> None:
    """Fork a server for each message with arguments and tell the status of those asked for, until nobody asks."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(action="ignore"):
        for name in (SERVER, "sglang.srt.entrypoints.http_server", "sglang.srt.models.registry"):
            importlib.import_module(name)
        importlib.import_module("sglang.srt.plugins").load_plugins()  # a scan of all modules for each hook
        if "sglang_diffkv.srt.hooks.table" in sys.modules:  # the plugin, unless it is left out, or refuses this SGLang
            importlib.import_module("sglang_diffkv.srt.backend")
    logging.disable(logging.NOTSET)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork takes one thread along"
    gc.collect()
    gc.freeze()  # else each server looks through, and so copies, all that was imported: a second and more
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    ended: dict[int, int] = {}
    while True:
        data, rights, _, _ = connection.recvmsg(LARGEST, socket.CMSG_LEN(8))
        if not data:
            return
        message = json.loads(data)
        if "status_of" in message:
            reap(ended)
            answer = {"status": ended.get(message["status_of"])}
        else:
            files = array.array("i", rights[0][2])
            pid = os.fork()
            if not pid:
                connection.close()
                become_server(message["argv"], message["env"], *files)
            for file in files:
                os.close(file)
            answer = {"pid": pid}
        connection.send(json.dumps(answer).encode())


def reap(ended: dict[int, int]) -> None:
    """Add the exit codes of processes that have ended: servers, and what they left behind."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])


def become_server(argv: list[str], env: dict[str, str], output: int, errors: int) -> None:
    """Run ``python -m ARGV`` in this process and end it."""
    os.setsid()
    for number, file in ((1, output), (2, errors)):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(env)
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
