"""Compiles every Triton kernel for an H100 or H200 without a GPU: ``python -m tests.kernels.compile_kernels``.

Triton's driver is replaced by one that names compute capability 9.0, and launches end after compilation, so the
wrappers run as on a GPU server but compute nothing. What they launch again (``kernels/launch.py``) is compared with
what Triton would choose for it. Prints a line for each kernel: name, registers' and shared memory's use, tensor-core
instructions.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.kernels import device
from sglang_diffkv.kernels.rotate.reference import NO_ROTATION, Rotation
from sglang_diffkv.kernels.to_e4m3.triton import to_e4m3
from sglang_diffkv.layout.geometry import Geometry
from sglang_diffkv.layout.page_format import PageFormat, Tier, position_bytes_for
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.ops.base import Scaling, Step
from sglang_diffkv.ops.decisions import tail_tokens
from sglang_diffkv.ops.triton import TritonOps
from sglang_diffkv.ops.warm_up import warm_up
from sglang_diffkv.policies.base import Policy
from sglang_diffkv.policies.diffkv import KEEP
from sglang_diffkv.policies.uniform import UniformPolicy
from tests.kernels.kernel_configs import CONFIGS, KV_HEADS, LONGEST, METHODS, NO_MEANS, REACHES, SCALINGS, SINKS
from tests.policies import diffkv_policy

HOPPER = GPUTarget("cuda", 90, 32)
HOPPER_PROCESSORS = 132
ROUND_BITS = "4B000000"
"""2^23, as PTX writes it: what rounds a number to a whole one."""
DRAFTS = 4


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
    chosen: dict[CompiledKernel, tuple[JITFunction, dict[str, Any]]] = {}

    def compiled(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        chosen[kernel] = self, {name: x for name, x in kwargs.items() if name not in self.arg_names}
        if kernel not in found.values():
            found[f"{self.__name__} {len(found)}" if self.__name__ in found else self.__name__] = kernel
        return kernel

    def again(kernel: CompiledKernel, grid: tuple[int, int, int]) -> Callable[..., None]:
        function, options = chosen[kernel]

        def launched(*args: Any) -> None:
            assert len(args) == len(function.arg_names)
            assert run(function, *args, grid=grid, warmup=True, **options) is kernel, f"{function.__name__} differs"

        return launched

    triton.runtime.driver.set_active(Driver())
    device.FEW = HOPPER_PROCESSORS
    JITFunction.run = compiled
    CompiledKernel.__getitem__ = again


class Planned:
    """What the ops ask of a library, which computes nothing here."""

    lse_unit = math.log2(math.e)
    copy_bytes = 0

    def __init__(self, scaling: Scaling):
        self.scale, self.logit_cap = scaling

    def serves(self, scaling: Scaling) -> bool:
        return scaling == (self.scale, self.logit_cap)

    def plan(self, step: Step) -> None: ...

    def run(
        self, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: Scaling, *, lse: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(*q.shape[:2], value.shape[2], dtype=q.dtype), torch.zeros(q.shape[1], q.shape[0]).t()


def start(
    tiers: str, head_dim: int, group: int, scalings: Sequence[Scaling], method: str = "",
    attention_spans: tuple[int, ...] = (), sinks: torch.dtype | None = None, longest: int = 4096, heads: int = 8, *,
    key_means: bool = True,
) -> tuple[PageManager, TritonOps, dict[str, Any]]:  # fmt: skip
    """What a server calls at its start, before it captures graphs. The last: in which form tokens are stored."""
    parsed = tuple(Tier.parse(x) for x in tiers.split())
    config = DiffKVConfig(tiers=tuple(tiers.split()), policy=json.loads(method) if method else None)
    policy: Policy = diffkv_policy(1.0, 0.0, 64) if len(parsed) > 1 else UniformPolicy()
    if method:
        policy = config.build_policy()
    scored, position_bytes = policy.scored_tiers(len(parsed)), position_bytes_for(longest)
    fmt = PageFormat(
        head_dim, head_dim, parsed, scored=scored, position_bytes=position_bytes, turned=config.turned
    )  # fmt: skip
    compresses = policy.compresses or any(attention_spans)
    geometry = Geometry(
        fmt, 2, heads, 400, num_rows=8, num_segments=8, max_tokens=4096, attention_spans=attention_spans
    )
    manager = PageManager(geometry, policy, dtype=torch.bfloat16, device="cpu", q_heads=heads * group)
    state, ops = manager.state, TritonOps(manager.state, policy, heads * group, 4096)
    if policy.least_window is not None:
        ops.decisions.allow_windows()
    ops.prepare_graphs(64)
    rotation = Rotation.named(config.rotate)
    queries = None if manager.running is None else manager.running.cache
    less = key_means and rotation.keys and queries is None and sinks is None
    means = torch.zeros(2, heads, head_dim) if less else None
    to_e4m3(*(torch.zeros(77, n, head_dim, dtype=torch.bfloat16) for n in (heads * group, heads, heads)))
    planned: Any = Planned(scalings[0]) if len(scalings) == 1 and not all(attention_spans or (0,)) else None
    for ragged, trees in ((None, False), (planned, not any(attention_spans))):
        ops.ragged, ops.has_sinks = ragged, sinks is not None
        warm_up(
            ops,
            state,
            policy,
            dtype=torch.bfloat16,
            scalings=scalings,
            queries=queries,
            copies=compresses,
            rotation=rotation,
            sinks=sinks,
            key_means=means,
            drafts=DRAFTS if queries is None else 0,
            trees=trees,
        )
    return manager, ops, {"rotation": rotation, "key_means": None if means is None else means[1]}


def call_again(
    manager: PageManager, ops: TritonOps, form: dict[str, Any], batch: int, scaling: Scaling,
    sinks: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """What servers call in all sizes: unaligned parts of tensors, batches and numbers of 1, of 16 and others."""
    state, policy, heads = manager.state, manager.policy, manager.geometry.num_heads
    compresses, dim = policy.compresses or state.slides, state.fmt.head_dim
    lengths = torch.arange(batch + 1)[1:] * 7 % 40 + 1
    rows = torch.ones(batch + 1, dtype=torch.int64)[1:]
    prefix = lengths + 3
    prefix[: batch // 3 * 2] = 0  # whom others with stored tokens follow
    count = int(lengths.sum())
    q = torch.zeros(count, ops.q_heads, dim, dtype=torch.bfloat16)
    wide = torch.zeros(batch, heads + ops.q_heads, dim, dtype=torch.bfloat16)
    key, value = (torch.zeros(count, 3 * heads, dim, dtype=torch.bfloat16)[:, heads : 2 * heads] for _ in range(2))
    to_e4m3(q, key, value)
    for before, ragged, kept in product((torch.zeros_like(prefix), prefix), (None, ops.ragged), (False, True)):
        since = (before + 2).tolist() if policy.observation.queries else None
        step = Step.extend(rows, before, lengths, before.tolist(), lengths.tolist(), since)
        if compresses and before is prefix:
            step.shared_scores = {batch - 1: torch.zeros(state.num_layers, heads, 8 * batch + 1)}
        planned, ops.ragged, step.as_computed = ops.ragged, ragged, kept
        ops.begin(step, decode=False)
        for layer in range(2):
            ops.append(layer, key, value, step, **form)
            if ops.extend_unpacked(layer, q, key, value, step, scaling, **form, sink_logits=sinks) is None:
                ops.extend(layer, q, key, value, step, scaling, sinks)
        ops.ragged = planned
    if manager.running is None:
        trees = None if state.slides else torch.ones(batch * DRAFTS + 1, dtype=torch.int64)[1:]
        ahead = torch.zeros(batch * DRAFTS, 3 * heads + ops.q_heads, dim, dtype=torch.bfloat16)
        new = ahead[:, : ops.q_heads], ahead[:, -2 * heads : -heads], ahead[:, -heads:]
        for layer, ancestors in product(range(2), (None, trees)):
            ops.verify(layer, *new, Step.verification(rows, prefix, DRAFTS, ancestors), scaling, sinks)
    ops.reserve(rows, lengths, 1)
    for number in (1, 16, 17):
        ops.attach(number + 1, number, number, 2 * number, kept_only=True)
        ops.attach(number + 1, number, number, 2 * number)
        ops.attach_paths([(number + 1, [(number, number, 2 * number)] * number)])
        ops.attach_paths([(row, [(number, number, 2 * number)] * number) for row in range(20, 21 + number)])
        ops.seal(number)
        ops.trim(number, number)
        ops.release(number)
        ops.copy_compact(number + 1, [(number, number, 2 * number)], 5 * number, KEEP, None)
        if compresses:
            ops.compact_prompts([(number, number)], policy)
            ops.compact_prompts([(2, number), (1, 5), (3, number)], policy)
            if tail_tokens(state, policy):
                ops.compact_prompts([(2, number), (1, 5), (3, number)], policy, [number, 0, 1])
            for shared_scores in (None, torch.zeros(state.num_layers, heads, number)):
                ops.copy_compact(number + 1, [(number, number, 2 * number)], 5 * number, policy, shared_scores)
    for steps in (1, 3):
        ops.count_rows(rows, steps=steps, low_grows=policy.compresses and len(state.fmt.tiers) > 1)
    ops.measure(rows, prefix, lengths)
    for number in (1, 16, 17):
        ops.tally(number, number, torch.zeros(20, len(state.fmt.tiers) + 2, dtype=torch.int64), number)
        ops.set_blocks([number] * number, [1] * number)
    for number in (1, 16, 17):
        ops.list_pages(torch.ones(5, number, dtype=torch.int64), number)
    ops.count_owners(rows)
    if form["rotation"] != NO_ROTATION:
        for tensors in ((q, key, value), (q,), (q,)):
            ops.rotate(*tensors, launches=step.launches)
    step = ops.decode_step(rows, lengths)
    ops.begin(step, decode=True)
    for layer in range(2):
        ops.append(layer, key[:batch], value[:batch], step, **form, query=wide[:batch, heads:])
        ops.decode(layer, q[:batch], step, scaling, sinks)
    if manager.running is None and step.found is not None:
        chain_q = torch.zeros(2, batch, ops.q_heads, dim, dtype=torch.bfloat16)
        chosen = torch.arange(batch + 1)[1:]
        for first in range(2):
            ops.score_step(range(first, 2), chain_q, chain_q[..., 0].float(), chosen, step, scaling)
    ops.slide(rows, lengths)
    if step.found is not None:
        ops.compact_step(rows, lengths, step.found)
    if manager.running is not None:
        queries = manager.running.cache
        ops.store_queries(queries, 1, q[:batch], step)
        for number, (at, layers) in product((16, 17, 64), state.groups(policy.layer_stride)):
            asked, length = queries.queries[-1, at], number + 16
            scoring = ops.score_running(
                layers, number, length, asked, scaling, first=number == 17, most=length
            )  # fmt: skip
            ops.copy_scored(layers, number + 1, [(number, number, 2 * number)], length, scoring)
            if len(state.fmt.tiers) == 1:
                ops.compact_scored(layers, number, length, scoring)
                ops.transfer_pages(layers, number, number + 1)


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
            "rounds_products": len(re.findall(rf"fma\.rn\.f32[^;]*0f{ROUND_BITS}", ptx)),
        }


def main() -> None:
    found: dict[str, Any] = {}
    compile_instead_of_launching(found)
    for config in sys.argv[1:] or CONFIGS:
        found.clear()
        scalings = [Scaling(*x) for x in SCALINGS.get(config, ((0.1,),))]
        sinks = torch.zeros(8 * CONFIGS[config][2] + 1, dtype=torch.bfloat16)[1:] if config in SINKS else None
        more = (METHODS.get(config, ""), REACHES.get(config, ()), None if sinks is None else sinks.dtype)
        sizes = (LONGEST.get(config, 4096), KV_HEADS.get(config, 8))
        served = start(*CONFIGS[config], scalings, *more, *sizes, key_means=config not in NO_MEANS)
        at_start = set(found)
        for batch in (1, 3, 16, 64):
            for scaling in scalings:
                call_again(*served, batch, scaling, sinks)
        for line in report(config, found):
            print(json.dumps({**line, "late": line["kernel"] not in at_start}), flush=True)


if __name__ == "__main__":
    main()
