"""Several configurations: one after the other, or some at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from threading import Event

from tqdm import tqdm

from sglang_diffkv.evaluate.endpoint import Endpoint, EvaluationError
from sglang_diffkv.evaluate.runner import Suite, evaluate, missing
from sglang_diffkv.evaluate.server import stop_servers_on_sigterm
from sglang_diffkv.evaluate.store import Store

Connect = Callable[[], AbstractContextManager[Endpoint]]
"""Starts a configuration's server."""


def evaluate_all(
    servers: Mapping[str, Connect],
    suites: Sequence[Suite],
    store: Store,
    concurrency: int = 8,
    jobs: int = 1,
    done: Callable[[str], object] | None = None,
) -> None:
    """Ask every configuration what it has not answered yet, up to ``jobs`` of them at once.

    After an error no further configuration begins; those that have begun are finished, then the error is raised. The
    answers so far are in the store. Of several errors the first is raised, the others are printed.

    Args:
        servers: how each configuration's server is started, by its name.
        concurrency: requests at once to each server.
        done: called with a configuration's name once it and all before it are answered, in this thread.
    """
    if jobs > 1:
        _at_once(servers, suites, store, concurrency, jobs, done)
        return
    for number, (name, connect) in enumerate(servers.items(), 1):
        _begin(number, name, len(servers))
        evaluate(name, connect, suites, store, concurrency)
        if done is not None:
            done(name)


def _at_once(
    servers: Mapping[str, Connect],
    suites: Sequence[Suite],
    store: Store,
    concurrency: int,
    jobs: int,
    done: Callable[[str], object] | None,
) -> None:
    failed, given_up = Event(), Event()
    errors: list[tuple[str, BaseException]] = []
    total = len(servers) * sum(len(suite.questions) for suite in suites)
    stop_servers_on_sigterm()
    left = sum(len(missing(store, name, suite)) for name in servers for suite in suites)

    def advance() -> None:
        if given_up.is_set():
            raise EvaluationError("broken off")
        with tqdm.get_lock():
            bar.update()

    def work(number: int, name: str, connect: Connect) -> bool:
        if failed.is_set():
            return False
        _begin(number, name, len(servers))
        try:
            evaluate(name, connect, suites, store, concurrency, advance)
        except BaseException as error:
            errors.append((name, error))
            failed.set()
            _say(f"{name}: failed; what has begun is finished, nothing else begins")
            return False
        return True

    with (
        tqdm(total=total, initial=total - left, desc=f"{jobs} at once", unit="question", disable=not left) as bar,
        ThreadPoolExecutor(jobs) as pool,
    ):
        futures = {
            name: pool.submit(work, number, name, connect) for number, (name, connect) in enumerate(servers.items(), 1)
        }
        try:
            before = True
            for name, future in futures.items():
                before = future.result() and before
                if before and done is not None:
                    done(name)
        except BaseException:
            failed.set()
            given_up.set()
            raise
    for name, error in errors[1:]:
        _say(f"{name}: {error}")
    if errors:
        raise errors[0][1]


def _begin(number: int, name: str, total: int) -> None:
    if total > 1:
        _say(f"configuration {number} of {total}: {name}")


def _say(line: str) -> None:
    tqdm.write(line, file=sys.stderr)
