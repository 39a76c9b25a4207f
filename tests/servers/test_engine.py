"""SGLang's offline engine, which parses no command line, on a compressed cache."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks.paths import NANO, REPOSITORY
from sglang_diffkv.config import CONFIG_ENV
from sglang_diffkv.evaluate.server import CPU_ENV, OFFLINE_ENV, has_gpu
from tests.servers.shared import completed

pytestmark = pytest.mark.server


def run_example(config: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``config``: the environment's."""
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env = {**inherited, **({} if has_gpu() else CPU_ENV), **OFFLINE_ENV, CONFIG_ENV: config}
    command = [sys.executable, "examples/engine.py", *arguments]
    return completed(command, env, cwd=REPOSITORY)


def test_engine_example() -> None:
    """And what it is given counts, not the environment."""
    run = run_example('{"tiers": ["K8V8", "K4V4"]}', str(NANO), "small")
    assert run.returncode == 0, run.stderr[-3000:]
    *replies, stats = run.stdout.splitlines()[-3:]
    assert all(" -> '" in reply and len(reply) > 60 for reply in replies)
    assert "cache of ['K8V4', 'K4V2']" in stats and "those of the preset small" in stats


def test_an_impossible_configuration_stops_the_engine() -> None:
    run = run_example('{"thresholds": "calibrated"}')
    assert run.returncode != 0
    assert "none are on file for nano" in run.stderr
