"""Runs a module's command line again and again in processes that start with its imports already made.

SGLang's benchmark client imports for longer than many a load takes. A server process (``multiprocessing``'s fork
server) imports it once; every run is a fork of that, with its own environment and output.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Replace this process's environment for a while."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _main(module: str, args: Sequence[str], env: Mapping[str, str], log: str) -> None:
    """In the fork: the module's command line, its output to ``log``."""
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [module, *args]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def run_module(
    module: str, args: Sequence[str], env: Mapping[str, str], log: Path, timeout: float | None
) -> int | None:
    """``python -m module args`` in environment ``env``, its output in the file ``log``: the exit status, or None if it
    had to be killed after ``timeout`` seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    with environment(env):
        forkserver.ensure_running()
    process = context.Process(target=_main, args=(module, list(args), dict(env), str(log)), daemon=True)
    process.start()
    try:
        process.join(timeout)
        return process.exitcode
    finally:
        if process.exitcode is None:
            process.kill()
            process.join()
