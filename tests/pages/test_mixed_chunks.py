"""A pass over prompts in which other requests decode is those two passes, one behind the other."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from sglang_diffkv.attention.mixed import MixedWrapper
from sglang_diffkv.attention.wrappers import DecodeWrapper, ExtendWrapper
from sglang_diffkv.mem_pool.integrity import check_bounds, check_integrity
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.mem_pool.table_space import TableFull
from sglang_diffkv.ops import ReferenceOps, Scaling
from sglang_diffkv.ops.triton import TritonOps
from sglang_diffkv.policies.base import Policy
from sglang_diffkv.policies.h2o import H2OPolicyConfig
from sglang_diffkv.policies.leankv import LeanKVPolicyConfig
from sglang_diffkv.policies.snapkv import SnapKVPolicyConfig
from sglang_diffkv.policies.zipage import ZipagePolicyConfig
from tests.helpers import faults, make_format, make_manager, visible
from tests.policies import diffkv_policy

LAYERS, HEADS, GROUP, DIM, LONGEST = 2, 2, 2, 64, 200
CHUNK = 23
PROMPTS = {"reference": {1: 40, 2: 9, 3: 61, 4: 17}, "triton": {1: 9, 2: 31, 3: 12}}
"""Kernels -> row -> tokens of its prompt; each row begins when the one before it decodes. Triton's run in a slow
interpreter."""

POLICIES: dict[str, tuple[tuple[str, ...], Policy]] = {
    "lossless": (("BF16",), diffkv_policy(0.0, 0.0, window=600)),
    "diffkv": (("K8V4", "K4V2"), diffkv_policy(1.0, 0.1, window=8)),
    "three tiers": (("BF16", "K8V4", "K4V2"), diffkv_policy(2.0, 0.1, window=8, alpha_between=(1.0,))),
    "h2o": (("K8V4",), H2OPolicyConfig(name="h2o", fraction=0.5, window=8).build()),
    "snapkv": (("K8V4", "K4V2"), SnapKVPolicyConfig(name="snapkv", fraction=0.5, window=8).build()),
    "leankv": (("K8V4", "K4V2"), LeanKVPolicyConfig(name="leankv", mass_high=0.2, mass_low=0.02, window=8).build()),
    "zipage": (("BF16",), ZipagePolicyConfig(name="zipage", max_blocks=2, block=16, window=4, pool=3).build()),
}


class Passes:
    """A manager that is driven pass by pass; ``mixed``: prompts and decode steps together."""

    def __init__(self, tiers: tuple[str, ...], policy: Policy, kernels: str, *, mixed: bool):
        triton = partial(TritonOps, policy=policy, q_heads=HEADS * GROUP, max_tokens=LONGEST)
        ops: Any = triton if kernels == "triton" else lambda state: ReferenceOps(state, policy)
        fmt = make_format(tiers, DIM, DIM, page_tokens=4 if tiers == ("BF16",) else 8)
        self.manager: PageManager = make_manager(
            fmt, policy=policy, layers=LAYERS, heads=HEADS, max_tokens=LONGEST, make_ops=ops, q_heads=HEADS * GROUP
        )
        manager, queries = self.manager, None
        if manager.running is not None:
            queries = manager.running.cache
        self.extend, self.decode = ExtendWrapper(manager.ops), DecodeWrapper(manager.ops, queries=queries)
        self.together, self.mixed = MixedWrapper(self.extend, self.decode), mixed

    def run(self, prompt: tuple[int, int] | None, decoding: list[int], seed: int) -> list[torch.Tensor]:
        """The next chunk of a prompt, (row, tokens of the prompt), and a token of each of ``decoding``. What all layers
        give, [prompt's tokens + decoding, Hq, dim] each."""
        manager, generator = self.manager, torch.Generator().manual_seed(seed)
        begun = 0 if prompt is None else manager.rows.length(prompt[0])
        count = 0 if prompt is None else min(prompt[1] - begun, CHUNK)
        starts = [manager.rows.length(row) for row in decoding]
        shapes = [(count + len(decoding), heads, DIM) for heads in (HEADS * GROUP, HEADS, HEADS)]
        data = [[torch.randn(x, generator=generator).bfloat16() for x in shapes] for _ in range(LAYERS)]
        if prompt is None:
            return self._decode(decoding, starts, data)
        plan = partial(self._plan_prompt, *prompt, begun, count)
        if self.mixed and decoding:
            plan()
            step = manager.decode_beside_prompts(decoding, starts)
            assert step.decoding == len(decoding) and step.rows == [prompt[0], *decoding]
            launched = manager.launch_step()
            self._extend(*prompt, begun, count)
            self._plan_decode(decoding, starts)
            out = self._attend(self.together, data)
            step = self.extend.step
            assert step is not None
            common = step.launches
            self.together.end()
            assert step.launches is not common, "what the prompts' layers had in common takes memory"
            manager.end_prompts(launched)
            manager.counts.report()
            return out
        plan()
        launched = manager.launch_step()
        self._extend(*prompt, begun, count)
        out = self._attend(self.extend, [[x[:count] for x in layer] for layer in data])
        manager.end_prompts(launched)
        manager.counts.report()
        if not decoding:
            return out
        rest = self._decode(decoding, starts, [[x[count:] for x in layer] for layer in data])
        return [torch.cat(pair) for pair in zip(out, rest, strict=True)]

    def _plan_prompt(self, row: int, prompt: int, begun: int, count: int) -> None:
        ending = [row] if begun + count == prompt else []
        self.manager.plan_step([row], [count], [begun], prompts=[prompt], ending=ending)

    def _extend(self, row: int, prompt: int, begun: int, count: int) -> None:
        self.extend.plan(*(torch.tensor([x]) for x in (row, begun, count)), [begun], [count], prompts=[prompt])

    def _plan_decode(self, rows: list[int], starts: list[int]) -> None:
        self.decode.plan(torch.tensor(rows), torch.tensor(starts) + 1)

    def _decode(self, rows: list[int], starts: list[int], data: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        manager = self.manager
        manager.plan_step(rows, [1] * len(rows), starts)
        manager.launch_step()
        self._plan_decode(rows, starts)
        out = self._attend(self.decode, data)
        self.decode.end()
        manager.counts.report()
        return out

    def _attend(self, wrapper: Any, data: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        wrapper.begin()
        return [wrapper.run(layer, *tensors, Scaling(0.1)).clone() for layer, tensors in enumerate(data)]

    def follow(self, rows: list[int]) -> None:
        """Compress those that have reached their limit."""
        running = self.manager.running
        for row in rows:
            if running is not None and running.follow(row):
                assert running.compress(row, [])

    def check(self, rows: list[int]) -> None:
        check_bounds(self.manager)
        check_integrity(self.manager)
        assert not faults(self.manager, rows)

    def seen(self, row: int) -> tuple[np.ndarray, ...]:
        """Where a row's tokens lie, and what they score, whatever pages these are."""
        found = visible(self.manager.state, row)
        order = np.lexsort((found.position, found.head, found.layer, found.tier))
        kept = (found.tier, found.layer, found.head, found.position, found.own_slot, found.score)
        return tuple(x[order] for x in kept)


@pytest.mark.parametrize(
    ("kernels", "name"),
    [("reference", name) for name in POLICIES]
    + [pytest.param("triton", name, marks=pytest.mark.full) for name in ("diffkv", "snapkv", "zipage")],
)
def test_a_mixed_pass_is_two_passes(name: str, kernels: str) -> None:
    tiers, policy = POLICIES[name]
    pair = [Passes(tiers, policy, kernels, mixed=mixed) for mixed in (True, False)]
    decoding: list[int] = []
    mixed_passes = seed = 0
    for row, length in PROMPTS[kernels].items():
        while pair[0].manager.rows.length(row) < length:
            seed, mixed_passes = seed + 1, mixed_passes + bool(decoding)
            _both(pair, (row, length), decoding, seed)
        decoding.append(row)
        for _ in range(14 if kernels == "reference" else 1):
            seed += 1
            _both(pair, None, decoding, seed)
        if row == 2:  # one leaves while others run
            for passes in pair:
                passes.manager.release(decoding[0])
            del decoding[0]
    assert mixed_passes > 2
    if pair[0].manager.running is not None and kernels == "reference":
        assert pair[0].manager.running.compressions > 3
        assert pair[0].manager.running.compressions == pair[1].manager.running.compressions
    for passes in pair:
        for row in decoding:
            passes.manager.release(row)
        assert passes.manager.counts.free_bound() == passes.manager.geometry.num_pages


def _both(pair: list[Passes], prompt: tuple[int, int] | None, decoding: list[int], seed: int) -> None:
    outs = [passes.run(prompt, decoding, seed) for passes in pair]
    for mixed, apart in zip(*outs, strict=True):
        assert torch.equal(mixed, apart)
    rows = [*decoding] if prompt is None else [prompt[0], *decoding]
    for passes in pair:
        passes.follow(decoding)
        passes.check(rows)
    for row in rows:
        for mixed, apart in zip(*(passes.seen(row) for passes in pair), strict=True):
            assert np.array_equal(mixed, apart, equal_nan=mixed.dtype.kind == "f")


def test_rows_that_do_not_fit_leave_the_prompts_planned() -> None:
    passes = Passes(*POLICIES["diffkv"], "reference", mixed=True)
    manager = passes.manager
    passes.run((1, 20), [], 1)
    passes._plan_prompt(2, 30, 0, 20)
    planned = manager.counts.upcoming
    with pytest.raises(ValueError, match="holds 20 tokens"):
        manager.decode_beside_prompts([1], [19])
    taken, manager.space.free_blocks = manager.space.free_blocks, []
    with pytest.raises(TableFull):
        for _ in range(100):
            manager.space.append_all([1], [1])
    manager.space.free_blocks = taken
    assert manager.counts.upcoming is planned and planned is not None and not planned.decoding
    manager.decode_beside_prompts([1], [20])
    with pytest.raises(AssertionError, match="no pass over prompts"):
        manager.decode_beside_prompts([1], [21])


def test_bounds_that_do_not_wait_for_the_device() -> None:
    """Before its pass is planned in full, the snapshot that was taken for it lies behind the pass that runs."""
    passes = Passes(*POLICIES["diffkv"], "reference", mixed=True)
    manager, counts = passes.manager, passes.manager.counts
    passes.run((1, 20), [], 1)
    passes.run(None, [1], 2)
    passes._plan_prompt(2, 30, 0, 20)
    counts.waits = False
    bounds, left = counts.free_bound() - counts.headroom_bound(), len(counts._snapshots)
    manager.decode_beside_prompts([1], [21])
    counts.waits = True
    assert left == 1 and bounds <= counts.free_bound() - counts.headroom_bound()
    assert not counts._snapshots
