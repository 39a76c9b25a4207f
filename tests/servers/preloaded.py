"""Servers, and other programs of SGLang's, from a process that has imported SGLang already.

A server is three processes or more, each of which imports SGLang and all of its models: ten seconds of CPU, again and
again in a run of the tests. ``Preloaded`` keeps one process that has imported them, and forks it. The fork loads
SGLang's plugins, and is forked for every server of one environment; what the server starts is forked in turn. So a
start takes about one second of CPU. Only an environment that modules read when they are imported takes another process
that imports them. All else is ``python -m sglang.launch_server``: same arguments, same environment, a session of its
own. But it looks more often than once a second whether its port is open. Tests marked ``new_process`` and all of
``make test-all`` run the real command.
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
from types import SimpleNamespace
from typing import IO, Any

from sglang_diffkv.config import CACHE_ENV, CHECK_ENV, CONFIG_ENV
from sglang_diffkv.evaluate.server import CPU_ENV, OFFLINE_ENV

SERVER = "sglang.launch_server"
MODULES = (SERVER, "sglang_diffkv.doctor", "benchmarks.reproduce.served")
"""Which may be run in a fork that has loaded the plugins."""
PLAIN_MODULES = ("sglang_diffkv.run", "sglang.benchmark.one_batch")
"""Which may be run in a fork that has not: whether they load plugins is what is tested."""
PLAIN_SCRIPTS = ("sglang", "engine.py")
"""Files of which the same is true."""
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
READ_WITH_PLUGINS = {"PYTHONPATH", "SGLANG_PLUGINS"}
"""Variables that say which plugins there are, and nothing of SGLang itself."""
READ_FIRST = {"sitecustomize", "usercustomize"}
"""Modules that Python imports before all others."""
CLOCK_SECONDS = 0.2
"""The longest that a server sleeps until it asks itself whether its port is open."""
HANDLED = (signal.SIGCHLD, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that SGLang's processes handle each in its own way."""
PR_SET_CHILD_SUBREAPER = 36
"""Of Linux: processes whose parent has ended become children of this one, which waits for them."""
LARGEST = 1 << 20
"""Bytes of a message."""


class Process:
    """A forked program, with the part of ``subprocess.Popen`` that ``Server`` uses."""

    def __init__(self, forker: Forker, pid: int, args: Sequence[str]):
        self.pid, self.args, self._forker = pid, args, forker
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Asked in any case: what the program has left behind is waited for then, and its group ends."""
        self.returncode = self._forker.ask({"status_of": self.pid})["status"]
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.02)
        return status


class Forker:
    """A process that forks itself for programs, started when it is first asked for one.

    Args:
        env: its environment. parent: the one that it is a fork of, which has imported SGLang and loaded no plugins.
            This one loads them. By default it is such a process itself.
    """

    def __init__(self, env: Mapping[str, str], parent: Forker | None = None) -> None:
        self.env, self.parent = dict(env), parent
        self.forked: list[Process] = []
        self._asking = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: Process | subprocess.Popen[bytes] | None = None

    def has(self, env: Mapping[str, str], *, plugins: bool) -> bool:
        """Whether modules, and plugins, are in this process as they are in one with this environment."""
        return (self.parent is not None) == plugins and _differs(env, self.env) <= READ_LATE

    def could_become(self, env: Mapping[str, str]) -> bool:
        """Whether a fork of this process needs but plugins to be one with this environment."""
        if self.parent is not None or not _differs(env, self.env) <= READ_LATE | READ_WITH_PLUGINS:
            return False
        names = names_in(env, self.env)
        return not READ_FIRST.intersection(names) and not self.ask({"which_imported": names})["imported"]

    def fork(self, command: Sequence[str], env: Mapping[str, str], cwd: str, output: int, errors: int) -> Process:
        found = self.ask({"argv": list(command), "env": dict(env), "cwd": cwd}, output, errors)
        self.forked.append(Process(self, found["pid"], command))
        return self.forked[-1]

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
            if self.parent is not None:
                pid = self.parent.ask({"with_plugins": self.env}, theirs.fileno())["pid"]
                self._process = Process(self.parent, pid, [__name__])
            else:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    env=self.env,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        self._socket = ours

    def idle(self) -> bool:
        """Whether all programs have ended."""
        return all(process.poll() is not None for process in self.forked)

    def stop(self) -> None:
        """End the process; servers are stopped by who started them."""
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._process.wait(timeout=60.0)


class Preloaded:
    """The processes that are forked.

    Args:
        env: the environment of the first one; by default that of servers for which a test sets nothing.
    """

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        self._forkers = [Forker({**inherited, **CPU_ENV, **OFFLINE_ENV} if env is None else env)]
        self._choosing = threading.Lock()  # servers may be started side by side

    @property
    def env(self) -> dict[str, str]:
        """The environment of the first one."""
        return self._forkers[0].env

    def popen(
        self, command: Sequence[str], *, stdout: IO[bytes], stderr: IO[bytes] | int, env: Mapping[str, str],
        cwd: str | os.PathLike[str] | None = None, **rest: Any,
    ) -> Process | subprocess.Popen[bytes]:  # fmt: skip
        """``subprocess.Popen`` for a program of SGLang's, by a fork where what is imported makes no difference."""
        if (program := program_of(command)) is None:
            return subprocess.Popen(command, stdout=stdout, stderr=stderr, env=env, cwd=cwd, **rest)
        errors = stdout if isinstance(stderr, int) else stderr  # subprocess.STDOUT
        with self._choosing:  # until one has forked, it looks as if it had ended
            forker = self._forker_for(env, plugins=program[0] in MODULES)
            return forker.fork(program, env, os.fspath(cwd or os.getcwd()), stdout.fileno(), errors.fileno())

    def _forker_for(self, env: Mapping[str, str], *, plugins: bool) -> Forker:
        """One with this environment."""
        if (known := next((x for x in self._forkers if x.has(env, plugins=plugins)), None)) is not None:
            return known
        if not plugins:
            return self._add(Forker(env))
        parent = next((x for x in self._forkers if x.could_become(env)), None)
        return self._add(Forker(env, parent or self._add(Forker(env))))

    def _add(self, new: Forker) -> Forker:
        """A new one. Before SGLang is imported again, those that did it for programs that have ended end."""
        if new.parent is None:
            for root in self._forkers[1:]:
                children = [x for x in self._forkers if x.parent is root]
                if root.parent is None and all(x.idle() for x in (root, *children)):
                    self._stop(*children, root)
        self._forkers.append(new)
        return new

    def _stop(self, *forkers: Forker) -> None:
        for forker in forkers:
            forker.stop()
            self._forkers.remove(forker)

    def stop(self) -> None:
        """End all of them, forks first."""
        self._stop(*sorted(self._forkers, key=lambda forker: forker.parent is None))


def program_of(command: Sequence[str]) -> list[str] | None:
    """Name or path and arguments of what may run in a fork, of a command that is such a program."""
    first, *others = command
    if first == sys.executable and others[:1] == ["-m"]:
        return list(others[1:]) if others[1] in MODULES + PLAIN_MODULES else None
    path = others[:1] if first == sys.executable else [first]
    return list(command[command.index(path[0]) :]) if path and os.path.basename(path[0]) in PLAIN_SCRIPTS else None


def _differs(a: Mapping[str, str], b: Mapping[str, str]) -> set[str]:
    """Variables that two environments do not share."""
    return {name for name in {*a, *b} if a.get(name) != b.get(name)}


def _paths(env: Mapping[str, str]) -> list[str]:
    return [x for x in env.get("PYTHONPATH", "").split(os.pathsep) if x]


def names_in(env: Mapping[str, str], before: Mapping[str, str]) -> list[str]:
    """Modules that folders of one ``PYTHONPATH`` add to those of another, or take away."""
    folders = {*_paths(env)}.symmetric_difference(_paths(before))
    return [name.partition(".")[0] for folder in folders if os.path.isdir(folder) for name in os.listdir(folder)]


def serve(connection: socket.socket) -> None:
    """Fork a program for each message with arguments, and this process for one with an environment. Tell the status of
    those asked for, until nobody asks."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(action="ignore"):
        for name in (SERVER, "sglang.srt.entrypoints.http_server", "sglang.srt.models.registry"):
            importlib.import_module(name)
    look_often()
    logging.disable(logging.NOTSET)
    gc.collect()
    settle()
    ended: dict[int, int] = {}
    while True:
        data, rights, _, _ = connection.recvmsg(LARGEST, socket.CMSG_LEN(8))
        if not data:
            return
        message = json.loads(data)
        files = array.array("i", rights[0][2]) if rights else ()
        if "which_imported" in message:
            answer: dict[str, Any] = {"imported": [x for x in message["which_imported"] if x in sys.modules]}
        elif "status_of" in message:
            reap(ended)
            answer = {"status": ended.get(message["status_of"])}
        else:
            pid = os.fork()
            if not pid:
                connection.close()
                if "with_plugins" not in message:
                    become_program(message["argv"], message["env"], message["cwd"], *files)
                connection, ended = socket.socket(fileno=files[0]), {}
                load_plugins(message["with_plugins"])
                continue
            for file in files:
                os.close(file)
            answer = {"pid": pid}
        connection.send(json.dumps(answer).encode())


def look_often() -> None:
    """A server sleeps for a second before it looks for its own port."""
    server = importlib.import_module("sglang.srt.entrypoints.http_server")
    server.time = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: time.sleep(min(seconds, CLOCK_SECONDS))})


def settle() -> None:
    """Be ready to be forked, and told of what forks leave behind."""
    assert len(os.listdir("/proc/self/task")) == 1, "a fork takes one thread along"
    gc.freeze()  # else each server looks through, and so copies, all that was imported: a second and more
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def take_environment(env: Mapping[str, str]) -> None:
    """Be a process with this environment."""
    before = _paths(os.environ)
    os.environ.clear()
    os.environ.update(env)
    if _paths(env) != before:
        sys.path[1:] = [*_paths(env), *(x for x in sys.path[1:] if x not in before)]
        importlib.invalidate_caches()


def load_plugins(env: Mapping[str, str]) -> None:
    """Apply SGLang's plugins: a scan of all modules for each hook."""
    take_environment(env)
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(action="ignore"):
        importlib.import_module("sglang.srt.plugins").load_plugins()
        if "sglang_diffkv.srt.hooks.table" in sys.modules:  # the plugin, unless it is left out, or refuses this SGLang
            importlib.import_module("sglang_diffkv.srt.backend")
    logging.disable(logging.NOTSET)
    settle()


def reap(ended: dict[int, int]) -> None:
    """Add the exit codes of processes that have ended: servers, and what they left behind."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])


def become_program(argv: list[str], env: dict[str, str], cwd: str, output: int, errors: int) -> None:
    """Run ``python -m ARGV``, or ``python ARGV`` where that is a file, in this process and end it."""
    os.setsid()
    for number, file in ((1, output), (2, errors)):
        os.dup2(file, number)
        os.close(file)
    take_environment(env)
    os.chdir(cwd)
    fork_children()
    sys.argv = list(argv)
    status = 0
    try:
        if os.path.exists(argv[0]):
            sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
            runpy.run_path(argv[0], run_name="__main__")
        else:
            sys.path[0] = cwd
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
    os._exit(0)
