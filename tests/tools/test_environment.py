"""Tests leave the environment as they found it: SGLang writes to it when it resolves arguments."""

import os

import pytest

from sglang_diffkv.evaluate.server import CPU_ENV, OFFLINE_ENV
from tests.conftest import PRELOADED
from tests.servers.preloaded import READ_LATE

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
