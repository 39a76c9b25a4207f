"""Command lines in forks of a process that has their imports."""

import os

import pytest

from benchmarks.serving.process import environment, run_module


@pytest.fixture
def module(tmp_path, monkeypatch):
    source = (
        "import os, sys, time\n"
        "if __name__ == '__main__':\n"
        "    print(sys.argv, os.environ['NAME'], os.environ.get('USER_OF_TESTS'))\n"
        "    if sys.argv[1] == 'sleep':\n"
        "        time.sleep(60)\n"
        "    sys.exit(sys.argv[1])\n"
    )
    (tmp_path / "some_client.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    return "some_client"


def test_a_module_runs_again_and_again_in_its_own_environment(module, tmp_path, monkeypatch):
    monkeypatch.setenv("USER_OF_TESTS", "not for the client")
    env = {key: value for key, value in os.environ.items() if key != "USER_OF_TESTS"}
    log = tmp_path / "log"
    for name in ("first", "second"):
        assert run_module(module, ["3", name], {**env, "NAME": name}, log, 60) == 1
        assert log.read_text() == f"['{tmp_path}/some_client.py', '3', '{name}'] {name} None\n3\n"
    assert run_module(module, ["x"], env, log, 60) == 1 and "KeyError: 'NAME'" in log.read_text()
    assert os.environ["USER_OF_TESTS"] == "not for the client" and "NAME" not in os.environ


def test_a_run_that_does_not_end_is_killed(module, tmp_path):
    assert run_module(module, ["sleep"], {**os.environ, "NAME": ""}, tmp_path / "log", 1.0) is None


def test_the_environment_comes_back():
    with pytest.raises(KeyError), environment({"ONLY": "this"}):
        assert dict(os.environ) == {"ONLY": "this"}
        raise KeyError
    assert "ONLY" not in os.environ and os.environ["PATH"]
