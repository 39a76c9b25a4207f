"""Tests leave the environment as they found it: SGLang writes to it when it resolves arguments."""

import os

NAME = "SGLANG_DIFFKV_LEFT_BY_A_TEST"


def test_what_a_test_leaves():
    os.environ[NAME] = "1"


def test_is_gone_after_it():
    assert NAME not in os.environ
