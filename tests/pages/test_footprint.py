"""Where the bytes go: the plan is what the objects hold, and the pages get nearly all of it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_diffkv.config import DiffKVConfig, load_config
from sglang_diffkv.layout.ranks import Ranks
from sglang_diffkv.mem_pool.footprint import PAGES, Footprint
from sglang_diffkv.mem_pool.ledger import PageLedger
from sglang_diffkv.mem_pool.page_copies import staging_pages
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.mem_pool.usage import UsageMeter
from sglang_diffkv.plan import MemoryPlan
from sglang_diffkv.srt.scheduling.allocator import DiffKVAllocator
from sglang_diffkv.srt.scheduling.lifecycle import RequestLifecycle
from sglang_diffkv.srt.startup import build
from tests.kernels.triton_helpers import DEVICE

GIB = 1 << 30
XKV = '{"policy": {"name": "xkv", "keep": 0.3, "high": 0.5, "pool": 1}}'
CONFIGS = [
    "{}",
    '{"prefix_fidelity": "exact"}',
    '{"tiers": ["K8V4"]}',
    '{"policy": {"name": "diffkv", "alpha_low": 0.1}}',
    '{"policy": {"name": "diffkv", "head_scale": [[1, 2], [0.5, 1]]}}',
    '{"tiers": ["K8V4"], "policy": {"name": "snapkv", "fraction": 0.5}}',
    '{"tiers": ["BF16"], "policy": {"name": "h2o", "budget": 100}}',
    '{"tiers": ["K8V4"], "policy": {"name": "pyramidkv", "budget": 100}}',
    XKV,
    '{"tiers": ["BF16"], "policy": {"name": "xkv", "layer_fractions": [0.2, 0.3]}}',
]


def storages(thing: Any, seen: dict[int, int]) -> int:
    """Bytes of all tensors that can be reached from an object's attributes, each memory once."""
    if isinstance(thing, torch.Tensor):
        seen[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    elif isinstance(thing, (list, tuple, dict)):
        for x in thing.values() if isinstance(thing, dict) else thing:
            storages(x, seen)
    elif hasattr(thing, "__dict__") and type(thing).__module__.startswith("sglang_diffkv"):
        storages(vars(thing), seen)
    return sum(seen.values())


def plan_of(
    text: str, *, layers: int = 2, kv_heads: int = 2, q_heads: int = 4, dim: int = 64, longest: int = 131072
) -> MemoryPlan:
    config: DiffKVConfig = load_config(text)
    return MemoryPlan(config, config.page_format(dim, dim, longest), layers, kv_heads, q_heads, gpu=True)


SLIDING = [(CONFIGS[0], 1, (5, 0)), ('{"tiers": ["BF16"]}', 1, (5, 0))]


@pytest.mark.parametrize(
    ("text", "ranks", "attention_spans"), [*((text, 1, ()) for text in CONFIGS), (XKV, 2, ()), *SLIDING]
)
def test_the_plan_is_what_the_objects_hold(text: str, ranks: int, attention_spans: tuple[int, ...]) -> None:
    from sglang_diffkv.ops.gpu import build_ops

    plan = replace(plan_of(text), ranks=ranks, attention_spans=attention_spans)
    capacity = 3000
    geometry = plan.geometry(capacity, num_rows=9, max_tokens=1000)
    policy = plan.policy()
    manager = PageManager(
        geometry,
        policy,
        device=DEVICE,
        ranks=Ranks(ranks),
        make_ops=lambda state: build_ops(state, policy, geometry, plan.q_heads, "triton"),
    )
    allocator = DiffKVAllocator(
        RequestLifecycle(PageLedger(manager, capacity)),
        dtype=torch.bfloat16, device=DEVICE, kvcache=SimpleNamespace(), need_sort=False,
    )  # fmt: skip
    exact = plan.config.prefix_fidelity == "exact"
    ops = manager.ops
    found = Footprint.of(manager.state, geometry, ops, kv_slots=allocator.ledger.kv_slots, exact=exact)
    held = sum(found.held.values())
    counts = [manager.segments.counts_of.counts, UsageMeter(manager).ended_counts]
    assert held == storages([manager.state, ops, allocator.free_pages, counts], {})
    planned = MemoryPlan.footprint(replace_prefill(plan), geometry, capacity)
    assert planned == found
    assert found.held[PAGES] == (geometry.num_pages + 1) * geometry.fmt.page_bytes
    assert ("scores of exact prefixes" in found.at_most) == exact
    alone = replace_prefill(replace(plan, ranks=1)).footprint(geometry, capacity).held
    more = found.held.get("decisions", 0) - alone.get("decisions", 0)
    assert more == (ranks - 1) * 2 * 4 * plan.num_layers * 1000


def test_a_draft_model_s_cache_is_planned_before_pages() -> None:
    plan = replace_prefill(plan_of("{}"))
    beside = replace(plan, draft_bytes=100)
    most, rest = (x.capacity_in(GIB // 8, lambda tokens: 9, 1000) for x in (plan, beside))
    assert 0 < rest < most
    held = beside.footprint(beside.geometry(rest, 9, 1000), rest).held
    slots = held["KV slots"] // 8
    assert slots == 2 * rest and held["KV cache of the draft model"] == 100 * (slots + 1)


@pytest.mark.parametrize(("asked", "gib"), [(None, 0.25), (0.5, 0.5), (0, 0)])
def test_host_memory_is_told_apart(asked: float | None, gib: float) -> None:
    """It is in no sum of the device's; a buffer on the way to it is."""
    plan = replace_prefill(plan_of("{}" if asked is None else f'{{"host_gib": {asked}}}'))
    geometry = plan.geometry(3000, 9, 1000)
    alone, beside = (x.footprint(geometry, 3000) for x in (plan, replace(plan, keeps_retracted=True)))
    page = geometry.fmt.page_bytes
    assert not alone.host and beside.host.get("retracted requests", 0) == int(gib * GIB) // page * page
    staged = staging_pages(geometry.fmt, geometry.num_pages) * page if gib else 0
    assert beside.total - alone.total == staged == beside.held.get("staging of retracted requests", 0)
    assert ("MiB" in beside.describe().splitlines()[-1] and "host" in beside.describe().splitlines()[-1]) == bool(gib)
    pool = replace(geometry, num_pages=10 * GIB // page), replace(geometry, num_pages=40 * GIB // page)
    if asked is None:
        sizes = [replace(plan, keeps_retracted=True).host_pages(x) * page / GIB for x in pool]
        assert sizes == pytest.approx([2.5, 4.0], abs=1e-3)


def replace_prefill(plan: MemoryPlan) -> MemoryPlan:
    config = plan.config.model_copy(update={"prefill": "triton"})
    return replace(plan, config=config)


@pytest.fixture(params=["fa3"])
def hopper(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Sizes for a Hopper GPU of 132 multiprocessors with NVRTC and FlashInfer, which has these kernels for it: ``fa3``,
    or by a parameter ``fa2``."""
    from sglang_diffkv.kernels.decode_attention import cuda, triton_workspace
    from sglang_diffkv.ops import ragged

    for module in (triton_workspace, ragged):
        monkeypatch.setattr(module, "processors_of", lambda device: 132)
    monkeypatch.setattr(ragged.RaggedPrefill, "obstacle", staticmethod(lambda *model: ""))
    monkeypatch.setattr(cuda, "missing", lambda: None)
    monkeypatch.setattr(ragged, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(ragged, "flashinfer_choice", lambda *model: request.param)
    return str(request.param)


@pytest.mark.parametrize("hopper", ["fa2", "fa3"], indirect=True)
def test_flashinfer_has_memory_of_its_own_beside_decode_steps(hopper: str) -> None:
    """Where passes are mixed, decode steps keep theirs meanwhile. Only ``fa2`` splits, and has results to put
    somewhere."""
    results = {"fa2": 76 << 20, "fa3": 9 << 20}[hopper]
    plan = plan_of("{}", layers=32, kv_heads=8, q_heads=32, dim=128)
    geometry = plan.geometry(50_000, 129, 8192)
    apart, mixed = (x.footprint(geometry, 50_000) for x in (plan, replace(plan, mixed_chunks=True)))
    assert "FlashInfer's plans and results" not in apart.held or not apart.held["FlashInfer's plans and results"]
    assert mixed.held["FlashInfer's plans and results"] == results
    assert apart.held["decode scratch"] == max(mixed.held["decode scratch"], results)
    assert mixed.total - apart.total <= results  # decode steps alone may need less than the two in turn
    triton = replace_prefill(replace(plan, mixed_chunks=True)).footprint(geometry, 50_000)
    assert not triton.held.get("FlashInfer's plans and results")


@pytest.mark.parametrize("gib", [8, 40])
@pytest.mark.parametrize("context", [8192, 32768, 131072])
@pytest.mark.parametrize("text", CONFIGS[:2])
def test_llama_spends_less_than_three_percent_outside_the_pages(hopper: str, gib: int, context: int, text: str) -> None:
    plan = plan_of(text, layers=32, kv_heads=8, q_heads=32, dim=128, longest=context + 4)
    capacity = plan.capacity_in(gib * GIB, lambda tokens: 129, context + 4)
    found = plan.footprint(plan.geometry(capacity, 129, context + 4), capacity)
    assert found.share_outside < 0.03
    assert gib * GIB - 2 * plan.token_bytes * plan.fmt.high.tokens < found.total <= gib * GIB


@pytest.mark.parametrize("text", [CONFIGS[0], '{"policy": {"name": "diffkv", "alpha_high": 1e9, "window": 188}}'])
def test_2048_requests_leave_98_percent_of_a_small_pool_to_pages(hopper: str, text: str) -> None:
    plan = plan_of(text, layers=32, kv_heads=8, q_heads=32, dim=128, longest=8196)
    capacity = plan.capacity_in(8 * GIB, lambda tokens: 2049, 8196)
    assert plan.footprint(plan.geometry(capacity, 2049, 8196), capacity).share_outside <= 0.02


@pytest.mark.parametrize(
    ("capability", "backend"), [((0, 0), "fa2"), ((8, 9), "fa2"), ((9, 0), "fa3"), ((10, 0), "fa2")]
)
def test_which_of_flashinfers_kernels(
    capability: tuple[int, int], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashInfer is asked on Hopper alone, about the GPU at hand where a plan is made."""
    from sglang_diffkv.ops import ragged

    monkeypatch.setattr(ragged, "capability_of", lambda device: capability)
    monkeypatch.setattr(ragged, "flashinfer_choice", lambda *model: "fa3")
    assert ragged.backend_of(128, 128, torch.bfloat16, torch.device("meta")) == backend


def test_a_pool_without_room_is_empty() -> None:
    assert plan_of("{}").capacity_in(1000, lambda tokens: 9, 1000) == 0
    assert plan_of("{}").capacity_in(-5, lambda tokens: 9, 1000) == 0


def test_the_table_names_every_use() -> None:
    found = Footprint({PAGES: 97 << 20, "page table": 2 << 20}, {"scores": 1 << 20})
    assert found.share_outside == pytest.approx(0.03)
    text = found.describe(128 << 20)
    assert text.startswith("DiffKV memory, of 128.0 MiB; outside the pages: 3.00%")
    assert "scores, at most" in text and "left of the budget" in text and "28.00 MiB" in text
    assert "left" not in found.describe() and "97.00%" in found.describe()
    assert found.report()["total"] == 100 << 20


def test_a_budget_in_bytes_holds_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SGLang's configurator makes of its bytes."""
    plan = plan_of("{}")
    monkeypatch.setattr(build, "_budget", None)
    monkeypatch.setattr(build, "check_model", lambda configurator: None)
    monkeypatch.setattr(MemoryPlan, "of", classmethod(lambda cls, *args: plan))
    kvc = SimpleNamespace(
        model_config=SimpleNamespace(context_len=1000), resolve_max_num_reqs=lambda tokens: 8,
        layer_info=SimpleNamespace(num_effective_layers=2, start_layer=0), model=torch.nn.Module(),
        server_args=SimpleNamespace(speculative_algorithm=None, disable_radix_cache=False, tp_size=1),
        mambaish_config=None,
    )  # fmt: skip
    budget = 32 << 20
    capacity = build.PoolConfigurator(kvc).calculate_pool_sizes(budget, 1).max_total_num_tokens
    plan = replace(plan, keeps_retracted=True)
    assert plan.footprint(plan.geometry(capacity, 9, 1004), capacity).total <= budget
    assert plan.footprint(plan.geometry(capacity + 32, 9, 1004), capacity + 32).total > budget
    assert build._budget == (budget, capacity)
