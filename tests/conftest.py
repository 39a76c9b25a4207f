"""What all tests share: how Triton runs, how many examples are drawn, which variants are quick, and servers.

Without a GPU the Triton kernels run in Triton's interpreter, which must be chosen before Triton is imported.

Property tests run the same examples each time. ``HYPOTHESIS_PROFILE=quick`` (``make test``) runs fewer,
``HYPOTHESIS_PROFILE=fuzz`` (``make fuzz``) draws new and more. None has to be fast: Hypothesis's 200 ms an example are
less than a busy machine may stand still.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.covering import covering
from tests.quick_interpreter import quick

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

if TYPE_CHECKING:
    from sglang_diffkv.evaluate.server import Server
    from tests.browser import Browser
    from tests.servers.preloaded import Preloaded
    from tests.servers.shared import SharedServer

PRELOADED: pytest.StashKey[Preloaded] = pytest.StashKey()
ENVIRONMENT: pytest.StashKey[dict[str, str]] = pytest.StashKey()
"""The environment of the process before its first test, when all of them are imported."""

PATIENT = settings(print_blob=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", PATIENT, derandomize=True)
settings.register_profile("quick", PATIENT, derandomize=True, max_examples=20)
settings.register_profile("fuzz", PATIENT, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fork-servers",
        action="store_true",
        help="fork servers from a process that has imported SGLang (tests/servers/preloaded.py), where a test is not "
        "marked new_process; not on a GPU",
    )
    parser.addoption(
        "--need-programs",
        action="store_true",
        help="a test whose program (a browser, Prometheus, docker-compose, Mooncake: make programs) is missing fails, "
        "and is not skipped",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before the first server of a test starts: how its servers do."""
    from sglang_diffkv.evaluate.server import Server

    forks = item.config.getoption("--fork-servers") and not torch.cuda.is_available()
    if forks and item.get_closest_marker("new_process") is None:
        if PRELOADED not in item.config.stash:
            from tests.servers.preloaded import Preloaded

            item.config.stash[PRELOADED] = Preloaded()
        Server.popen = item.config.stash[PRELOADED].popen
    else:
        Server.popen = subprocess.Popen


def pytest_configure(config: pytest.Config) -> None:
    from sglang_diffkv.evaluate.server import Server

    Server.grace = 0.0  # a test that wants a server to end in its own time says so
    config.add_cleanup(entered(own_cache()))
    if os.environ.get("TRITON_INTERPRET") == "1":
        config.add_cleanup(entered(quick()))


@contextmanager
def own_cache() -> Iterator[None]:
    """What servers of tests measure of their models is kept for this run alone."""
    with tempfile.TemporaryDirectory(prefix="diffkv-cache-") as folder:
        os.environ.setdefault("SGLANG_DIFFKV_CACHE_DIR", folder)
        yield


def entered(context: AbstractContextManager[Any]) -> Callable[[], object]:
    """Enter a context; what leaves it."""
    stack = ExitStack()
    stack.enter_context(context)
    return stack.close


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """After a test the environment is as before. SGLang writes to it when it resolves arguments, and a server with
    another environment is not forked: it imports SGLang again, three times or more."""
    try:
        return (yield)
    finally:
        kept, current = item.config.stash[ENVIRONMENT], os.environ.get("PYTEST_CURRENT_TEST")
        if {**os.environ, "PYTEST_CURRENT_TEST": ""} != {**kept, "PYTEST_CURRENT_TEST": ""}:
            os.environ.clear()
            os.environ.update(kept)
            if current is not None:
                os.environ["PYTEST_CURRENT_TEST"] = current


def pytest_collection_finish(session: pytest.Session) -> None:
    """What modules of SGLang set when tests import them belongs to the environment."""
    session.config.stash[ENVIRONMENT] = dict(os.environ)


def pytest_unconfigure(config: pytest.Config) -> None:
    if preloaded := config.stash.get(PRELOADED, None):
        preloaded.stop()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The tests of a file ``test_server_*.py``, which share servers, go to one process, in order; any other test
    goes to whichever is free. (``--dist loadgroup`` of pytest-xdist 3.8 finds no groups with pytest 9.2.)"""
    from xdist.scheduler import LoadScopeScheduling

    class ByServer(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return path if path.rpartition("/")[2].startswith("test_server_") else nodeid

    return ByServer(config, log)


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Mark ``full`` the variants of tests marked ``cover(k)`` that ``covering`` does not choose."""
    tests: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("cover") is not None and isinstance(item, pytest.Function):
            tests[item.nodeid.partition("[")[0]].append(item)
    for variants in tests.values():
        marker = variants[0].get_closest_marker("cover")
        assert marker is not None
        chosen = covering([item.callspec.params for item in variants], *marker.args)
        for index in set(range(len(variants))).difference(chosen):
            variants[index].add_marker("full")


@pytest.fixture(scope="session")
def missing(request: pytest.FixtureRequest) -> Callable[[str], NoReturn]:
    """Skips a test for want of what it is called with, or fails it if that is asked."""

    def end(what: str) -> NoReturn:
        if request.config.getoption("--need-programs"):
            pytest.fail(what)
        pytest.skip(what)

    return end


@pytest.fixture(scope="session")
def program(missing: Callable[[str], NoReturn]) -> Callable[[str], str]:
    """The path of a program that is no Python package. Without it the test is skipped, or fails if that is asked."""

    def found(name: str) -> str:
        return shutil.which(name) or missing(f"{name} is not installed (make programs)")

    return found


@pytest.fixture(scope="session")
def browser(program: Callable[[str], str]) -> Iterator[Browser]:
    """A real one, for all tests of this process."""
    from tests.browser import chromium

    with chromium(program("chromedriver")) as opened:
        yield opened


@pytest.fixture(scope="session")
def shared_server() -> Iterator[SharedServer]:
    """The server that outlives a test."""
    from tests.servers.shared import SharedServer

    shared = SharedServer()
    yield shared
    shared.stop()


@pytest.fixture
def server_of(shared_server: SharedServer) -> Iterator[Callable[..., Server]]:
    """``SharedServer.get``. After the test its last server must be alive and, flushed, hold no page."""
    yield shared_server.get
    shared_server.check()
