"""Compiles every Triton kernel for an H100 or H200 without a GPU: ``python -m tests.compile_kernels``.

Triton's driver is replaced by one that names compute capability 9.0, and launches end after compilation, so the
wrappers run as on a GPU server but compute nothing. Prints a line for each kernel: name, registers' and shared
memory's use, tensor-core instructions.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from sglang_diffkv.mem_pool.geometry import Geometry
from sglang_diffkv.mem_pool.page_format import PageFormat, Tier
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.ops.base import Step
from sglang_diffkv.ops.triton import TritonOps
from sglang_diffkv.policies.diffkv import DiffKVPolicy
from sglang_diffkv.policies.uniform import UniformPolicy

HOPPER = GPUTarget("cuda", 90, 32)
CONFIGS = {
    "llama3-8b": ("K8V4 K4V2", 128, 4),
    "qwen2.5-0.5b": ("K8V4 K4V2", 64, 7),
    "lossless": ("BF16", 128, 4),
    "raw and low": ("BF16 K8V4", 96, 1),
    "wide": ("K8V2 K4V1", 256, 2),
}
"""Name -> tiers, head_dim, query heads of a KV head."""


class Driver:
    """What ``JITFunction.run`` asks of a driver before it launches."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return HOPPER


def compile_instead_of_launching(found: dict[str, Any]) -> None:
    """Replace driver and launch; compiled kernels go to ``found`` by name."""
    run = JITFunction.run

    def compiled(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        found[f"{self.__name__} {len(found)}" if self.__name__ in found else self.__name__] = kernel
        return kernel

    triton.runtime.driver.set_active(Driver())
    JITFunction.run = compiled


def call_everything(tiers: str, head_dim: int, group: int) -> None:
    """One call of each operation, as a server's steps make them."""
    fmt = PageFormat(head_dim, head_dim, tuple(Tier.parse(x) for x in tiers.split()))
    compresses = len(fmt.tiers) > 1
    policy = DiffKVPolicy(1.0, 0.0, 64) if compresses else UniformPolicy()
    geometry = Geometry(fmt, 2, 8, 400, num_rows=8, num_segments=8, max_tokens=4096)
    manager = PageManager(geometry, policy, dtype=torch.bfloat16, device="cpu")
    state, ops = manager.state, TritonOps(manager.state, policy, 8 * group, 4096)
    rows, lengths, zero = torch.tensor([1, 2]), torch.tensor([270, 9]), torch.tensor([0, 0])
    count = int(lengths.sum())
    q = torch.zeros(count, 8 * group, head_dim, dtype=torch.bfloat16)
    key, value = (torch.zeros(count, 8, head_dim, dtype=torch.bfloat16) for _ in range(2))
    judged = {0: torch.zeros(2, 8, 30)} if compresses else {}
    for prefix in (zero, lengths):
        step = Step.extend(rows, prefix, lengths, prefix.tolist(), lengths.tolist())
        step.judged = judged if int(prefix.sum()) else {}
        ops.begin(state, step, decode=False)
        ops.append(state, 0, key, value, step)
        ops.extend(state, 0, q, key, value, step, 0.1, 0.0, compresses)
    step = ops.decode_step(state, rows, lengths, policy)
    ops.begin(state, step, decode=True)
    ops.append(state, 0, key[:2], value[:2], step)
    ops.decode(state, 0, q[:2], step, 0.1, 64, 0.0)
    ops.attach(state, 3, 1, 0, 70, kept_only=True)
    ops.trim(state, 3, 5)
    ops.release(state, 3)
    ops.count_rows(state, rows, steps=1, low_grows=compresses)
    ops.measure(state, rows, zero, lengths)
    if compresses:
        ops.rotate(q, key)
        ops.compact_step(state, rows, lengths, step.found, policy)
        ops.compact_prompt(state, 1, 70, policy)
        ops.copy_compact(state, 4, 1, 0, 70, 80, policy, judged[0])


def report(config: str, found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What each kernel takes."""
    for name, kernel in found.items():
        ptx = kernel.asm["ptx"]
        yield {
            "config": config,
            "kernel": name,
            "shared": kernel.metadata.shared,
            "warps": kernel.metadata.num_warps,
            "wgmma": ptx.count("wgmma.mma_async"),
            "mma": ptx.count("mma.sync.aligned"),
        }


def main() -> None:
    found: dict[str, Any] = {}
    compile_instead_of_launching(found)
    for config in sys.argv[1:] or CONFIGS:
        found.clear()
        call_everything(*CONFIGS[config])
        for line in report(config, found):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
