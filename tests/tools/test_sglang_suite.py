"""The driver of SGLang's own tests: what it reads from pytest's report, and what counts as lost."""

from __future__ import annotations

import os
from pathlib import Path

from tests.sglang_suite.__main__ import CONFIGS, SERVERS, lost, run_pytest, table, without_skipped
from tests.sglang_suite.hosts import KITS

TESTS = """
import os
import unittest


class TestSomething(unittest.TestCase):
    def test_good(self):
        assert os.environ["SUITE_GROUP"] == "api"

    def test_bad(self):
        self.fail("as expected")

    @unittest.skip("no reason")
    def test_skipped(self):
        pass


class TestBroken(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        raise RuntimeError("no server")

    def test_never_runs(self):
        pass
"""


def test_outcomes_are_those_of_the_tests(tmp_path: Path) -> None:
    path = tmp_path / "test_something.py"
    path.write_text(TESTS)
    found = run_pytest(path, {"SUITE_GROUP": "api"})
    assert found == {
        "TestSomething.test_good": "passed",
        "TestSomething.test_bad": "failed",
        "TestSomething.test_skipped": "skipped",
        "TestBroken.test_never_runs": "failed",
    }
    assert len(without_skipped(found)) == 3


def test_a_file_that_does_not_import_fails(tmp_path: Path) -> None:
    path = tmp_path / "test_something.py"
    path.write_text("import no_such_module\n")
    assert "failed" in run_pytest(path, {}).values()


LAUNCH = """
import json
import sys

from sglang.test.test_utils import DEFAULT_SMALL_MODEL_NAME_FOR_TEST, popen_launch_server


def test_launch():
    from tests.sglang_suite import launches

    launches._launch = lambda *args, **more: (args, more)
    args, more = popen_launch_server("meta/model", "http://127.0.0.1:1", 5, other_args=["--a"], env={"X": "1"})
    assert args[:3] == ("/the/model", "http://127.0.0.1:1", 600)
    assert more == {"other_args": ["--a", "--attention-backend", "diffkv"], "env": {"X": "1", "Y": "2"}}
    assert DEFAULT_SMALL_MODEL_NAME_FOR_TEST == "/the/model"
"""


def test_files_of_a_checkout_launch_our_servers(tmp_path: Path) -> None:
    path = tmp_path / "test_launch.py"
    path.write_text(LAUNCH)
    env = {
        "SUITE_MODEL": "/the/model",
        "SUITE_ARGS": '["--attention-backend", "diffkv"]',
        "SUITE_ENV": '{"Y": "2"}',
        "SGLANG_USE_CPU_ENGINE": os.environ.get("SGLANG_USE_CPU_ENGINE", "1"),
    }
    found = run_pytest(path, env, "-p", "tests.sglang_suite.launches")
    assert list(found.values()) == ["passed"]


def test_what_is_lost_is_told() -> None:
    found = {
        "stock": {"a": "passed", "b": "failed", "c": "passed", "d": "passed"},
        "lossless": {"a": "passed", "b": "passed", "c": "failed"},
    }
    assert lost(found, "lossless") == ["c", "d"]
    text = table(found)
    assert "| `c` | passed | failed |" in text and "| `d` | passed | not run |" in text
    assert "`a`" not in text and "Failed on stock: `b`" in text


def test_every_group_of_kits_has_a_server() -> None:
    assert set(KITS) == set(SERVERS)
    assert list(CONFIGS)[:2] == ["stock", "lossless"]
