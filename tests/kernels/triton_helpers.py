"""States for the Triton tests: built by the reference ops, on the GPU where there is one, else interpreted."""

from __future__ import annotations

import copy
import os
from dataclasses import replace

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from sglang_diffkv.kernels.append.reference import append  # noqa: E402
from sglang_diffkv.kernels.table import max_entries, row_table  # noqa: E402
from sglang_diffkv.layout.geometry import Geometry  # noqa: E402
from sglang_diffkv.layout.page_format import MOST_TIERS, PageFormat, Tier  # noqa: E402
from sglang_diffkv.layout.state import PageState  # noqa: E402
from sglang_diffkv.mem_pool.device import OpsOf  # noqa: E402
from sglang_diffkv.mem_pool.page_manager import PageManager  # noqa: E402
from sglang_diffkv.policies.base import Policy  # noqa: E402
from sglang_diffkv.policies.diffkv import DiffKVPolicy  # noqa: E402
from tests.helpers import TURNED, begin_step  # noqa: E402
from tests.policies import diffkv_policy  # noqa: E402

BF16 = torch.bfloat16
THREE, FOUR = "BF16 K8V4 K4V2", "K8V8 K8V4 K4V4 K4V2"


def make_format(
    tiers: str, head_dim: int = 64, v_head_dim: int = 0, page_tokens: int = 8, scored: int = MOST_TIERS,
    position_bytes: int = 2,
) -> PageFormat:  # fmt: skip
    """``make_format("K8V4 K4V2")``, for sequences as tests have them."""
    parsed = tuple(Tier.parse(name) for name in tiers.split())
    return PageFormat(head_dim, v_head_dim or head_dim, parsed, page_tokens, scored, position_bytes, TURNED)


def with_between(policy: DiffKVPolicy, tiers: int) -> DiffKVPolicy:
    """The same thresholds with those that so many tiers have between them."""
    low, span = policy.alpha_low, policy.alpha_high - policy.alpha_low
    return replace(policy, alpha_between=tuple(low + share * span for share in (0.5, 0.2)[: max(tiers - 2, 0)]))


def make_manager(
    fmt: PageFormat, *, layers: int = 2, heads: int = 2, pages: int = 400, window: int = 8, dtype=BF16,
    policy: Policy | None = None, make_ops: OpsOf | None = None,
) -> PageManager:  # fmt: skip
    """An empty manager whose page memory is all NaN, and whose positions look like real ones. Pages have the scores
    that the policy reads, and no others."""
    rule = policy or with_between(diffkv_policy(1.0, 0.2, window), len(fmt.tiers))
    fmt = replace(fmt, scored=rule.scored_tiers(len(fmt.tiers)))
    geometry = Geometry(fmt, layers, heads, pages, num_rows=8, num_segments=8, max_tokens=400)
    manager = PageManager(geometry, rule, dtype=dtype, device=DEVICE, make_ops=make_ops)
    manager.state.pages.view(torch.int16).fill_(0x7FFF)
    return manager


def scaled(policy: DiffKVPolicy, state: PageState, generator: torch.Generator) -> DiffKVPolicy:
    """With a random factor of each head."""
    factors = torch.rand(state.num_layers, state.num_heads, generator=generator) * 3 + 0.2
    return replace(policy, head_scale=tuple(tuple(layer) for layer in factors.tolist()))


def vectors(state: PageState, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random keys [count, H, D] with an offset per vector, and values [count, H, Dv]."""
    heads, fmt = state.num_heads, state.fmt
    key = torch.randn(count, heads, fmt.head_dim, generator=generator) + torch.randn(
        count, heads, 1, generator=generator
    )
    value = torch.randn(count, heads, fmt.v_head_dim, generator=generator)
    return key.to(DEVICE, state.dtype), value.to(DEVICE, state.dtype)


def add_prompt(manager: PageManager, row: int, count: int, generator: torch.Generator, *, compact: bool = True) -> None:
    """Append ``count`` random tokens to a row with random scores, then sort them into tiers."""
    state, start = manager.state, manager.rows.length(row)
    if not count:
        return
    begin_step(manager, [row], [count], [start])
    index = torch.arange(count, device=DEVICE)
    rows = torch.full((count,), row, device=DEVICE)
    for layer in range(state.num_layers):
        append(state, layer, *vectors(state, count, generator), rows, index, start + index)
    view = state.tiers[0]
    if view.scores is not None:
        position, fresh = view.positions[:], torch.zeros_like(view.scores, dtype=torch.bool)
        fresh[held_pages(state, rows[:1], 0)] = True
        fresh &= (position >= start) & (position < start + count)
        noise = torch.rand(view.scores.shape, generator=generator).to(DEVICE) * 2.0
        view.scores[fresh] = (noise**2 / (position + 1).float())[fresh]
    if compact:
        manager.prompts.end(row)


def held_pages(state: PageState, rows: torch.Tensor, tier: int) -> torch.Tensor:
    """Ids of the pages in the rows' tables, [n] int64."""
    page, _, hi = row_table(state, rows, tier, max_entries(state, rows, tier))
    return page[hi > 0].unique()


def clone_state(state: PageState) -> PageState:
    """A deep copy that shares nothing."""
    twin = copy.copy(state)
    for name, value in vars(state).items():
        if isinstance(value, torch.Tensor):
            setattr(twin, name, value.clone())
    twin.__dict__.pop("tiers", None)
    return twin


def close(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error of the whole tensor; NaN never passes a comparison."""
    got, expected = got.double(), expected.double()
    return float((got - expected).norm() / expected.norm().clamp(min=1e-9))
