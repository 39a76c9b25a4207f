"""So many layers at a time: what stays, where it lies and what it scores is what it is where all layers are compressed
together, in the memory of so many layers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.kernels.append.reference import append
from sglang_diffkv.kernels.table import max_entries, row_table
from sglang_diffkv.layout.geometry import Geometry, Path
from sglang_diffkv.layout.state import PageState
from sglang_diffkv.mem_pool.device import OpsOf
from sglang_diffkv.mem_pool.integrity import check_integrity
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.mem_pool.running import RunningCompression
from sglang_diffkv.ops import ReferenceOps
from sglang_diffkv.ops.decisions import Decisions
from sglang_diffkv.ops.triton import WHOLE_HEADS, TritonOps
from sglang_diffkv.policies.base import Redundancy
from sglang_diffkv.policies.zipage import ZipagePolicy, ZipagePolicyConfig
from tests.helpers import begin_step, visible
from tests.kernels.triton_helpers import DEVICE, add_prompt, clone_state, make_format, make_manager, vectors
from tests.pages.test_footprint import plan_of
from tests.policies import zipage_policy

LAYERS, KEEP, LIMIT, WINDOW, ROW, TARGET = 5, 16, 24, 4, 2, 5
STRIDES = (1, 2, 3, 5, 9)


def policy(stride: int | None, tiers: str, **changes: Any) -> ZipagePolicy:
    """Of small budgets."""
    high = 8 if len(tiers.split()) > 1 else None
    usual = zipage_policy(KEEP, LIMIT, WINDOW, high, pool=3, redundancy=Redundancy(0.5, 0.1, 2.0, 8))
    return replace(usual, layer_stride=stride, **changes)


def ops_of(chosen: ZipagePolicy, kernels: str, heads: int) -> OpsOf:
    triton = partial(TritonOps, policy=chosen, q_heads=heads, max_tokens=400)
    return triton if kernels == "triton" else partial(ReferenceOps, policy=chosen)


def manager_of(
    tiers: str, chosen: ZipagePolicy, kernels: str = "reference", layers: int = LAYERS, heads: int = 2
) -> PageManager:
    make_ops = ops_of(chosen, kernels, heads)
    fmt = make_format(tiers, page_tokens=4)
    manager = make_manager(fmt, layers=layers, heads=heads, pages=1000, policy=chosen, make_ops=make_ops)
    running, generator = running_of(manager), torch.Generator().manual_seed(1)
    running.cache.queries.copy_(torch.randn(running.cache.queries.shape[1:], generator=generator))
    return manager


def running_of(manager: PageManager) -> RunningCompression:
    assert manager.running is not None
    return manager.running


def held(state: PageState, row: int) -> list[tuple[Any, ...]]:
    """What a row holds, wherever it lies: places, scores, keys and values."""
    seen, found = visible(state, row), []
    codes = [[x.view(torch.uint8) for x in fields] for fields in zip(*((x.keys, x.values) for x in state.tiers))]
    columns = (seen.tier, seen.layer, seen.head, seen.position, seen.own_slot, seen.score, seen.page, seen.slot)
    for *token, page, slot in zip(*(x.tolist() for x in columns), strict=True):
        found.append((*token, *(bytes(x[token[0]][page, slot].flatten().cpu()) for x in codes)))
    return sorted(found)


def same(one: list[tuple[Any, ...]], other: list[tuple[Any, ...]]) -> bool:
    """Whether rows hold the same: scores up to what sums over other shapes round otherwise."""
    if len(one) != len(other):
        return False
    return all(
        x[:5] == y[:5] and x[6:] == y[6:] and x[5] == pytest.approx(y[5], rel=1e-5, abs=1e-9)
        for x, y in zip(one, other, strict=True)
    )


def all_same(found: list[list[Any]]) -> bool:
    """The same of what ``compressed`` gave twice."""
    one, other = found
    return one[-2:] == other[-2:] and len(one) == len(other) and all(map(same, one[:-2], other[:-2]))


def compressed(manager: PageManager, prefix: int, own: int, rounds: int, *, frozen: bool = False) -> list[Any]:
    """What rows hold: a prompt that is longer than what is kept, one behind a prefix of it, and this one after each of
    so many compressions; and pages that are free then."""
    running, generator = running_of(manager), torch.Generator().manual_seed(2)
    path: Path = []
    add_prompt(manager, 1, 45, generator)
    found = [held(manager.state, 1)]
    if prefix:
        segment = manager.segments.share(1, 0, 45)
        assert segment is not None
        path = [(segment, 0, prefix)]
        manager.attach_prefix(ROW, path)
    add_prompt(manager, ROW, own, generator)
    found.append(held(manager.state, ROW))
    running.began(ROW)
    if frozen:
        manager.device.freeze({ROW: 0})
        manager.rows.freeze(ROW)
    rows = torch.tensor([ROW], device=DEVICE)
    while running.compressions < rounds:
        length = manager.rows.length(ROW)
        begin_step(manager, [ROW], [1], [length])
        position = torch.full((1,), length, device=DEVICE)
        for layer in range(manager.state.num_layers):
            append(manager.state, layer, *vectors(manager.state, 1, generator), rows, torch.zeros_like(rows), position)
        manager.counts.settle()
        if running.follow(ROW) and running.compress(ROW, path):
            found.append(held(manager.state, ROW))
            path = [] if not manager.rows.shared(ROW) else path
            manager.counts.settle()
            running.check_integrity()
            check_integrity(manager)
    return [*found, manager.device.free_pages(), int(manager.state.fault.max())]


@pytest.mark.parametrize("stride", STRIDES)
def test_a_group_is_its_layers(stride):
    manager = manager_of("K8V4 K4V2", policy(None, "K8V4 K4V2"))
    add_prompt(manager, 1, 45, torch.Generator().manual_seed(2))
    state, rows, covered = manager.state, torch.tensor([1], device=DEVICE), 0
    for at, group in state.groups(stride):
        assert group is state or group.num_layers == at.stop - at.start <= stride
        assert group.row_layers == state.row_layers == LAYERS
        assert group.entries.data_ptr() == state.entries[:, at].data_ptr() and group.pages is state.pages
        for tier in range(2):
            width = max_entries(state, rows, tier)
            for part, whole in zip(row_table(group, rows, tier, width), row_table(state, rows, tier, width)):
                assert torch.equal(part, whole[:, at])
        covered += group.num_layers
    assert covered == LAYERS


@pytest.mark.cover(1)
@pytest.mark.parametrize(
    ("tiers", "prefix", "frozen"),
    [("BF16", 0, False), ("BF16", 0, True), ("BF16", 13, False), ("K8V4 K4V2", 0, False), ("K8V4 K4V2", 13, False)],
)
@pytest.mark.parametrize("stride", STRIDES)
def test_what_stays_is_what_stays_of_all_layers_together(tiers, prefix, frozen, stride):
    """A prompt's end, the first compression and two more, with what others hold for the row and without."""
    found = [
        compressed(manager_of(tiers, policy(x, tiers)), prefix, 9, 3, frozen=frozen) for x in (None, stride)
    ]  # fmt: skip
    assert all_same(found)
    assert len(found[0][2]) == LAYERS * 2 * KEEP, "a row was not compressed"


@pytest.mark.cover(1)
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize(("tiers", "prefix"), [("BF16", 0), ("BF16", 13), ("K8V4 K4V2", 13)])
def test_triton_keeps_the_same_with_a_stride(tiers, prefix, stride):
    """In memory that is of so many layers; with one head, whose numbers begin at no aligned place."""
    found = []
    for x in (None, stride):
        manager = manager_of(tiers, policy(x, tiers), "triton", layers=4, heads=1)
        memory = manager.ops.decisions.memory
        assert memory is not None and memory.shape[1] == -(-(x or 4) * 400 // 64) * 64
        found.append(compressed(manager, prefix, 9, 1))
    assert all_same(found)


@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize("tiers", ["BF16", "K8V4 K4V2"])
def test_copies_of_prompts_are_the_same(tiers, kernels):
    """Of parts of rows, some of whose tokens were judged by others."""
    chosen, length = policy(None, tiers, redundancy=None), 41
    manager = manager_of(tiers, chosen, kernels, layers=3, heads=1)
    generator = torch.Generator().manual_seed(3)
    add_prompt(manager, 1, 30, generator, compact=False)
    segment = manager.segments.share(1, 0, 30)
    assert segment is not None
    manager.attach_prefix(ROW, [(segment, 0, 25)])
    add_prompt(manager, ROW, length - 25, generator, compact=False)
    manager.space.extend(TARGET, (30,) * len(manager.fmt.tiers))
    manager.space.flush()
    known = torch.rand(3, 1, 25, generator=generator).to(DEVICE)
    known[..., ::3] = float("nan")
    parts = [(segment.row, 3, 25), (ROW, 25, length)]
    for scored in (None, known) if kernels == "reference" else (known,):
        found = []
        for stride in (None, 2):
            here = clone_state(manager.state)
            rule = replace(chosen, layer_stride=stride)
            ops_of(chosen, kernels, 1)(here).copy_compact(TARGET, parts, length, rule, scored)
            found.append(held(here, TARGET))
        assert same(*found) and len(found[0]) == 3 * KEEP


@settings(deadline=None)
@example(layers=2, stride=1, tiers="K8V4 K4V2", prefix=1, own=9, redundant=False)  # scores differ in their last bit
@given(
    layers=st.integers(1, 5), stride=st.integers(1, 6), tiers=st.sampled_from(["BF16", "K8V4", "K8V4 K4V2"]),
    prefix=st.integers(0, 40), own=st.integers(1, 30), redundant=st.booleans(),
)  # fmt: skip
def test_any_stride_of_any_layers(layers, stride, tiers, prefix, own, redundant):
    changes: dict[str, Any] = {} if redundant else {"redundancy": None, "pool": 1}
    found = [
        compressed(manager_of(tiers, policy(x, tiers, **changes), layers=layers), prefix, own, 1)
        for x in (None, stride)
    ]  # fmt: skip
    assert all_same(found)


def test_memory_is_of_so_many_layers():
    """Llama-3.1-8B's shape at its longest: 403 MB, or 101 MB by 8 layers, which the pool gets."""
    fmt = make_format("BF16", position_bytes=4)
    geometry = Geometry(fmt, 32, 8, 1000, num_rows=8, num_segments=8, max_tokens=131072)
    state = PageState.of(geometry, device="meta")
    for stride, layers in ((None, 32), (8, 8), (5, 5), (99, 32)):
        decisions = Decisions.of(WHOLE_HEADS, state, policy(stride, "BF16"), geometry.max_tokens)
        assert decisions.nbytes() == 12 * layers * 8 * geometry.max_tokens
    plans, text = {}, '{"tiers": ["BF16"], "policy": {"name": "zipage", "max_blocks": 9, "layer_stride": %s}}'
    for stride in ("null", "8"):
        plan = plan_of(text % stride, layers=32, kv_heads=8, q_heads=32, dim=128)
        capacity = plan.capacity_in(8 << 30, lambda tokens: 65, 131072)
        found = plan.footprint(plan.geometry(20000, 65, 131072), 20000)
        plans[stride] = capacity, found.total
    spared = 12 * 24 * 8 * 131072
    assert plans["null"][1] - plans["8"][1] == spared
    token = 32 * 8 * plan.fmt.page_bytes / plan.fmt.high.tokens
    assert 0.9 * spared < (plans["8"][0] - plans["null"][0]) * token <= spared


def test_what_is_configured():
    assert ZipagePolicyConfig(max_blocks=4).build().layer_stride is None
    assert ZipagePolicyConfig(max_blocks=4, layer_stride=8).build().layer_stride == 8
    for fields in ({"layer_stride": 0}, {"layer_stride": 8, "asynchronous": True}):
        with pytest.raises(ValidationError, match="layer_stride"):
            policy_of = {"name": "zipage", "max_blocks": 4, **fields}
            DiffKVConfig.model_validate({"tiers": ["BF16"], "policy": policy_of})
