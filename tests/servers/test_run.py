"""Programs of SGLang's that load no plugins."""

from __future__ import annotations

import os
import re
import sys

import pytest

from benchmarks.paths import NANO, REPOSITORY
from sglang_diffkv import run
from sglang_diffkv.config import CONFIG_ENV
from sglang_diffkv.evaluate.server import CPU_ENV, OFFLINE_ENV, has_gpu, stock_backend
from tests.servers.shared import completed


def _one_batch(backend: str, *program: str) -> list[str]:
    """What SGLang's ``one_batch`` continues its three prompts with."""
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env = {**inherited, **({} if has_gpu() else CPU_ENV), **OFFLINE_ENV, CONFIG_ENV: '{"tiers": ["BF16"]}'}
    command = [sys.executable, "-m", *program, "--model-path", str(NANO), "--attention-backend", backend]
    command += ["--dtype", "bfloat16", "--max-total-tokens", "4000", "--disable-cuda-graph", "--correctness-test"]
    command += [] if has_gpu() else ["--device", "cpu"]
    done = completed(command, env, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr[-3000:]
    return re.findall(r"^=+ Prompt \d =+\s*\n(.*)$", done.stdout, re.MULTILINE)


@pytest.mark.server
def test_one_batch_gives_stock_s_tokens() -> None:
    program = "sglang.benchmark.one_batch"
    found = _one_batch("diffkv", "sglang_diffkv.run", program)
    assert len(found) == 3 and all(len(x) > 40 for x in found)
    assert found == _one_batch(stock_backend(), program)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sglang.no_such_program"], "SGLang has no module"),
        (["json.tool"], "SGLang has no module"),
        (["sglang.benchmark.one_batch", "--tp", "2"], "runs on one rank here"),
        (["sglang.benchmark.one_batch", "--tp-size=2"], "runs on one rank here"),
        ([], "required: module"),
    ],
)
def test_what_cannot_run_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run.main(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err
