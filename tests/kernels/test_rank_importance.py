"""XKV's importance on ranks that are processes, over the library that a server's ranks add tensors with: NCCL on GPUs,
gloo on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_diffkv.kernels.importance import reference
from sglang_diffkv.layout.ranks import Ranks
from tests.kernels.rank_importance import CASES, LAYERS, importance_of
from tests.ranks import with_one_sum

SIZE = 2
"""Of two numbers the sum is the same bits in either order."""

GPUS = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < SIZE, reason=f"needs {SIZE} CUDA GPUs")]


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=GPUS)])
def test_ranks_in_processes_decide_alike(backend: str, tmp_path: Path) -> None:
    """Bit for bit, and as ranks do that exchange numbers within one process."""
    module = [sys.executable, "-m", "tests.kernels.rank_importance"]
    started = [
        subprocess.Popen(
            [*module, str(rank), str(SIZE), backend, str(tmp_path / "meeting")],
            cwd=Path(__file__).parents[2], env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=(tmp_path / f"{rank}.jsonl").open("w"), stderr=(tmp_path / f"{rank}.log").open("w"),
        )
        for rank in range(SIZE)
    ]  # fmt: skip
    try:
        for process in started:
            process.wait(timeout=240)
    finally:
        for process in started:
            process.kill()
    for rank, process in enumerate(started):
        assert process.returncode == 0, (tmp_path / f"{rank}.log").read_text()[-3000:]
    said = [(tmp_path / f"{rank}.jsonl").read_text() for rank in range(SIZE)]
    ranks = [[json.loads(line) for line in text.splitlines() if line.startswith('["')] for text in said]
    assert ranks[0] == ranks[1] and len(ranks[0]) == len(CASES)
    for (kind, length), found in zip(CASES, ranks[0], strict=True):
        values = importance_of(kind, length, SIZE)
        out = torch.empty(SIZE, LAYERS, 1, length)

        def score(of: Ranks, values=values, out=out, length=length) -> list[int]:
            mine = values[:, 2 * of.rank : 2 * of.rank + 2].contiguous()
            room = torch.empty(2, LAYERS, length)
            return reference.importance(mine, out[of.rank], reference.Shared(of.size, of.add, room)).tolist()

        tokens, _ = with_one_sum(score, SIZE)
        bits = out[0].nan_to_num(nan=-1.0).view(torch.int32).flatten().tolist()
        assert found == [kind, length, tokens, bits]
