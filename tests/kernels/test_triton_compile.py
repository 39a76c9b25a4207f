"""Every Triton kernel compiles for a GPU: what the interpreter accepts, the compiler may refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_diffkv.config import DiffKVConfig
from tests.kernels.kernel_configs import CONFIGS, METHODS

UNPACKING = {"paged_kernel", "page_scores_kernel", "split_kernel"}
RING = {"reserve_kernel", "prefix_sum_kernel", "grant_kernel", "drop_kernel", "release_kernel"}
ALWAYS = {"seal_kernel", "ragged_kernel", "paged_kernel", "split_kernel", "to_e4m3_kernel", *RING}
COMPACTING = {"spare_kernel", "lower_kernel", "compact_kernel", "return_kernel", "decide_kernel", "move_kernel"}
COMPRESSING = {"take_kernel", "copy_kernel", "new_scores_kernel", *COMPACTING, *UNPACKING}


WHOLE_HEADS = {"digit_kernel", "choose_kernel", "tie_kernel", "compact_kernel", "copy_kernel"}
RUNNING = {"store_kernel", "sums_kernel", "scores_kernel", "last_alike_kernel", "charge_kernel"}
ACROSS_LAYERS = {"mean_kernel", "sum_kernel", "part_kernel", "above_kernel", "smooth_kernel"}

QUICK = {"llama3-8b", "snapkv", "one head a rank"}
"""What ``make test`` compiles. Triton keeps what it compiled, by the kernels' sources and options."""


def compiled(config: str) -> list[dict[str, object]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compile_kernels", config]
    run = subprocess.run(
        command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.parametrize(
    "config", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in CONFIGS]
)
def test_kernels_compile_for_hopper(config: str) -> None:
    kernels = compiled(config)
    names = {str(x["kernel"]).split()[0] for x in kernels}
    method = json.loads(METHODS.get(config, "null"))
    rotated = DiffKVConfig(tiers=tuple(CONFIGS[config][0].split()), policy=method).rotate != "none"
    assert names >= {*ALWAYS, "rotated_append_kernel" if rotated else "append_kernel"}
    if config in ("llama3-8b", "lossless", "window alone"):
        assert "read_back_kernel" in names
    if config in ("llama3-8b", "sampled queries"):
        assert names >= {"stored_sums_kernel", "fold_sums_kernel"}
    if config in ("llama3-8b", "wide", "three tiers", "four tiers"):
        assert names >= COMPRESSING
    if method is not None and method["name"] != "diffkv":
        assert names >= {*WHOLE_HEADS, "norm_kernel" if config == "knorm" else "gather_kernel"}
        assert ("draw_kernel" in names) == (config == "random")
    if config.startswith("xkv"):
        assert names >= ACROSS_LAYERS
    if config.startswith("zipage"):
        assert names >= RUNNING and ("transfer_pages_kernel" in names) == (config == "zipage")
    assert [x["kernel"] for x in kernels if x["late"]] == [], "compiled while requests wait"
    for kernel in kernels:
        assert not kernel["rounds_products"], f"{kernel}: the reference rounds a product before it makes it whole"
        if str(kernel["kernel"]).split()[0] in UNPACKING:
            assert kernel["mma"] and not kernel["wgmma"], f"{kernel}: unpacked codes must be multiplied by mma.sync"
