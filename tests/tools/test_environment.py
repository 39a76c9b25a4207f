"""Tests leave the environment as they found it: SGLang writes to it when it resolves arguments."""

import os
import sys
from pathlib import Path

import pytest

from sglang_diffkv.evaluate.server import CPU_ENV, OFFLINE_ENV
from tests.conftest import PRELOADED
from tests.servers.preloaded import READ_LATE, Forker, names_in, program_of

NAME = "SGLANG_DIFFKV_LEFT_BY_A_TEST"


def test_what_a_test_leaves():
    os.environ[NAME] = "1"


def test_is_gone_after_it():
    assert NAME not in os.environ


def test_servers_of_later_tests_are_forked_too(request: pytest.FixtureRequest) -> None:
    """Their environment is that of the process that they are forked from."""
    if (preloaded := request.config.stash.get(PRELOADED, None)) is None:
        pytest.skip("servers are not forked")
    now = {**{k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}, **CPU_ENV, **OFFLINE_ENV}
    assert {k: now.get(k) for k in {*now, *preloaded.env} - READ_LATE} == {
        k: preloaded.env.get(k) for k in {*now, *preloaded.env} - READ_LATE
    }


def test_programs_that_may_be_forked() -> None:
    python = sys.executable
    assert program_of([python, "-m", "sglang.launch_server", "--port", "1"]) == ["sglang.launch_server", "--port", "1"]
    assert program_of([python, "examples/engine.py", "a"]) == ["examples/engine.py", "a"]
    assert program_of(["/bin/sglang", "serve"]) == ["/bin/sglang", "serve"]
    for other in (
        [python, "-m", "json.tool"],
        [python, "-S", "-m", "sglang.launch_server"],
        [python, "other.py"],
        [python],
    ):
        assert program_of(other) is None


def test_what_an_environment_may_differ_in(tmp_path: Path) -> None:
    """Plugins are loaded by a fork; what a folder hides of what is imported takes another process."""
    imported, plugins = Forker({"A": "1"}), {"A": "1", "SGLANG_PLUGINS": "none"}
    assert imported.has({"A": "1", "PYTEST_CURRENT_TEST": "x"}, plugins=False)
    assert not imported.has({"A": "1"}, plugins=True) and not imported.has(plugins, plugins=False)
    assert Forker(plugins, imported).has(plugins, plugins=True)
    assert not imported.could_become({"A": "2"}) and not Forker(plugins, imported).could_become(plugins)
    (tmp_path / "torch.py").touch()
    (tmp_path / "mine").mkdir()
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "sitecustomize.py").touch()
    assert not imported.could_become({"A": "1", "PYTHONPATH": str(tmp_path / "early")})
    assert sorted(names_in({"PYTHONPATH": f"{tmp_path}:"}, {})) == ["early", "mine", "torch"]
