"""The examples for each way in which SGLang is used, against one server. ``engine.py`` is in ``test_engine.py``, and
``make demo`` runs ``demo.py``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.paths import REPOSITORY
from sglang_diffkv.evaluate.server import Server
from sglang_diffkv.evaluate.tasks import reference
from tests.servers.shared import STRICT, stats_of

pytestmark = pytest.mark.server
EXAMPLES = REPOSITORY / "examples"


@pytest.fixture
def server(server_of: Callable[..., Server]) -> Server:
    return server_of("diffkv", ["--max-total-tokens", "9000", "--enable-cache-report"], env=STRICT)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A module of ``examples/``, which imports others as a script there does."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


def test_each_kind_of_use_has_an_example() -> None:
    names = {x.stem for x in EXAMPLES.glob("*.py")}
    assert {"engine", "frontend", "openai_client", "router", "decode_wrapper", "demo"} == names
    assert Path(__file__).with_name("test_engine.py").is_file()


def test_a_program_in_the_frontend_language(server: Server, example: Callable[[str], Any]) -> None:
    server.flush_cache()
    replies, second = example("frontend").run(server.url, "easy-1", 4)
    right = sum(reference.grade(reply, item.answers) for item, reply in replies)
    assert right >= 3
    assert second.strip()


def test_a_chat_of_the_openai_client(server: Server, example: Callable[[str], Any], capsys: Any) -> None:
    server.flush_cache()
    before = stats_of(server)["finished"]["requests"]
    assert example("openai_client").main(["--url", server.url]) == 0
    first, *_ = out = capsys.readouterr().out.splitlines()
    second = next(x for x in out if x.startswith("turn 2"))
    assert first.endswith(" 0 of them cached") and not second.endswith(" 0 of them cached")
    assert stats_of(server)["finished"]["requests"] == before + 2


def test_a_chat_through_the_router(server: Server, example: Callable[[str], Any], capsys: Any) -> None:
    """The second turn finds the first in the server's prefix cache, behind the router too."""
    server.flush_cache()
    before = stats_of(server)["finished"]["requests"]
    assert example("router").main(["--workers", server.url]) == 0
    out = capsys.readouterr().out.splitlines()
    second = next(x for x in out if x.startswith("turn 2"))
    assert not second.endswith(" 0 of them cached")
    assert stats_of(server)["finished"]["requests"] >= before + 2
