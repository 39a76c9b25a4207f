"""Builders that the page manager's tests share: small managers, poisoned memory, a reader of page tables."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from sglang_diffkv.layout.geometry import Geometry
from sglang_diffkv.layout.page_format import MOST_TIERS, PageFormat, Tier
from sglang_diffkv.layout.ranks import Ranks
from sglang_diffkv.layout.state import PageState
from sglang_diffkv.mem_pool.device import OpsOf
from sglang_diffkv.mem_pool.integrity import check_bounds, check_integrity
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.mem_pool.steps import LaunchedStep
from sglang_diffkv.policies.base import Policy
from tests.policies import diffkv_policy

PAIR = ("K8V4", "K4V2")
TURNED = (True, False)
"""What formats of tests call rotated: keys that go down choose the range of their codes, and values do not."""

POISONS = {"ones": -1, "nan": 0x7FFF}
"""Two-byte words for unused memory. All ones reads as NaN, and as position -1; 0x7FFF reads as NaN in
fp16, bf16 and fp32, and as a huge position that is nevertheless below the range limit of own pages."""


def make_format(
    tiers: tuple[str, ...] = PAIR,
    head_dim: int = 64,
    v_head_dim: int = 64,
    page_tokens: int = 8,
    scored: int = MOST_TIERS,
    position_bytes: int = 2,
) -> PageFormat:
    """A page format from tier names, for sequences as tests have them."""
    parsed = tuple(Tier.parse(t) for t in tiers)
    return PageFormat(head_dim, v_head_dim, parsed, page_tokens, scored, position_bytes, TURNED)


class LooseBoundsManager(PageManager):
    """A page manager whose table bounds never learn of counted entries: the worst case of their lag."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.space.tighten = lambda rows, entries, total: None  # type: ignore[method-assign]


@dataclass(frozen=True)
class ShortTableGeometry(Geometry):
    """Sizes with a page table of a given number of blocks."""

    blocks: int = 0

    @property
    def num_blocks(self) -> int:
        return self.blocks or super().num_blocks


def make_manager(
    fmt: PageFormat | None = None,
    *,
    policy: Policy | None = None,
    layers: int = 2,
    heads: int = 2,
    pages: int = 800,
    rows: int = 8,
    segments: int = 8,
    max_tokens: int = 600,
    dtype: torch.dtype = torch.bfloat16,
    poison: str = "nan",
    loose_bounds: bool = False,
    blocks: int = 0,
    make_ops: OpsOf | None = None,
    all_scores: bool = False,
    q_heads: int | None = None,
    high_rows: bool = False,
    most_window: int = 0,
    attention_spans: tuple[int, ...] = (),
    ranks: Ranks | None = None,
) -> PageManager:
    """A manager whose unused page memory holds ``POISONS[poison]``; ``blocks``, if given, limits its table. Pages have
    the scores that the policy reads, and no others without ``all_scores``."""
    fmt, policy = fmt or make_format(), policy or diffkv_policy(1.0, 0.1, window=8)
    fmt = replace(fmt, scored=MOST_TIERS if all_scores else policy.scored_tiers(len(fmt.tiers)))
    sizes = (fmt, layers, heads, pages, rows, segments, max_tokens)
    geometry = ShortTableGeometry(*sizes, attention_spans=attention_spans, blocks=blocks)
    kind = LooseBoundsManager if loose_bounds else PageManager
    manager = kind(
        geometry, policy, dtype=dtype, make_ops=make_ops, q_heads=q_heads, high_rows=high_rows,
        most_window=most_window, ranks=ranks,
    )  # fmt: skip
    manager.state.pages.view(torch.int16).fill_(POISONS[poison])
    return manager


@dataclass(frozen=True)
class Visible:
    """The tokens that one row can see: arrays with one element a token, layer and head."""

    tier: np.ndarray
    layer: np.ndarray
    head: np.ndarray
    position: np.ndarray
    page: np.ndarray
    slot: np.ndarray
    own: np.ndarray  # bool: the row may write the token's page
    own_slot: np.ndarray  # its slot number among the row's own slots
    score: np.ndarray

    def pick(self, mask: np.ndarray) -> Visible:
        """The tokens where ``mask``."""
        return Visible(*(array[mask] for array in vars(self).values()))

    def at(self, layer: int, head: int) -> Visible:
        """The tokens of one layer and KV head."""
        return self.pick((self.layer == layer) & (self.head == head))


def table_of(state: PageState, row: int, tier: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pages and position ranges of all entry places of a row, each [L, H, width], read column by column."""
    blocks = state.row_blocks[row].cpu().numpy()
    tables = []
    for source in (state.page_table, state.range_lo, state.range_hi):
        wide = source.cpu().numpy()[blocks].transpose(1, 2, 0, 3)  # [L, H, max_blocks, TABLE_BLOCK]
        wide = wide.reshape(*wide.shape[:2], -1)
        if source.dtype == torch.int16:
            wide = wide.view(np.uint16).astype(np.int32)
        half = wide.shape[2] // 2
        tables.append((wide, wide[:, :, ::-1], wide[:, :, :half][:, :, ::-1], wide[:, :, half:])[tier])
    return tables[0], tables[1], tables[2]


def visible(state: PageState, row: int) -> Visible:
    """What the device state says that ``row`` sees, worked out apart from the ops' own table addressing."""
    parts = []
    for tier, view in enumerate(state.tiers):
        page, lo, hi = table_of(state, row, tier)
        entry = np.arange(page.shape[2])
        used = entry < state.entries[row, :, :, tier].cpu().numpy()[:, :, None]
        layer, head, entry = used.nonzero()
        page, lo, hi = (x[layer, head, entry] for x in (page, lo, hi))
        position = view.positions[:].cpu().numpy()[page]  # [entries, tokens]
        first = state.own_entry[row, :, :, tier].cpu().numpy()[layer, head]
        index, slot = ((position >= lo[:, None]) & (position < hi[:, None])).nonzero()
        parts.append(
            (
                np.full(len(index), tier),
                layer[index],
                head[index],
                position[index, slot],
                page[index],
                slot,
                (entry >= first)[index],
                (entry - first)[index] * view.layout.tokens + slot,
                view.scores_of(torch.from_numpy(page[index]).long(), torch.from_numpy(slot)).cpu().numpy(),
            )
        )
    return Visible(*(np.concatenate(column) for column in zip(*parts)))


Seen = dict[tuple[int, int, int, int], tuple[bytes, int]]
"""Tier, layer, head and position -> the page's bytes and the token's slot in it."""


def seen_by(manager: PageManager, row: int, lo: int = 0) -> Seen:
    """What a row shows at position ``lo`` or behind."""
    with manager.launching():  # behind bytes that are on their way
        found, pages = visible(manager.state, row), manager.state.pages.cpu().numpy()
    columns = (found.tier, found.layer, found.head, found.position, found.page, found.slot)
    return {tuple(x[:4]): (pages[x[4]].tobytes(), x[5]) for x in np.stack(columns, 1).tolist() if x[3] >= lo}


def own_pages(state: PageState, row: int) -> set[int]:
    """Pages that a row may write."""
    found: set[int] = set()
    for tier in range(len(state.tiers)):
        page, _, _ = table_of(state, row, tier)
        entry = np.arange(page.shape[2])
        first = state.own_entry[row, :, :, tier].cpu().numpy()[:, :, None]
        end = state.entries[row, :, :, tier].cpu().numpy()[:, :, None]
        found.update(page[(entry >= first) & (entry < end)].tolist())
    return found


def check(manager: PageManager) -> None:
    """Raise AssertionError unless all structures agree, once the host has counted all that it launched."""
    manager.counts.settle()
    check_integrity(manager)
    check_bounds(manager)


def tier_map(state: PageState, row: int, length: int) -> np.ndarray:
    """Tier of every (layer, head, position) of a row; the number of tiers for a token that is gone."""
    tiers = len(state.tiers)
    out = np.full((state.num_layers, state.num_heads, length), tiers)
    seen = visible(state, row)
    out[seen.layer, seen.head, seen.position] = seen.tier
    return out


def begin_step(manager: PageManager, rows: list[int], new_tokens: list[int], start: list[int]) -> LaunchedStep:
    """A step that is planned, launched, and takes its slots at once."""
    manager.plan_step(rows, new_tokens, start)
    step = manager.launch_step()
    assert step is not None
    with manager.launching():
        most = max(new_tokens, default=0)
        manager.ops.reserve(manager.to_device(rows), manager.to_device(new_tokens), most)
    return step


def end_decode(manager: PageManager, rows: torch.Tensor, seq_lens: torch.Tensor, scores: Any) -> None:
    """Generation-phase compaction after a decode step over rows [B]; ``scores`` as ``new_scores`` gives them."""
    if scores is not None:
        manager.ops.compact_step(rows, seq_lens, scores)


def faults(manager: PageManager, rows: list[int]) -> list[int]:
    """Those of ``rows`` that found the ring empty and lost tokens."""
    with manager.launching():
        flags = manager.state.fault[manager.to_device(rows)].tolist()
    return [row for row, flag in zip(rows, flags, strict=True) if flag]


def new_scores(manager: PageManager, batch: int) -> Any:
    """Buffers for a decode step's searches; None if the policy never asks."""
    return manager.ops.new_found(batch) if manager.policy.searches_steps else None


def page_bytes(state: PageState, pages: list[int]) -> bytes:
    """The raw bytes of some pages."""
    return state.pages[pages].numpy().tobytes()


def until(true: Callable[[], bool]) -> None:
    """Wait for what threads bring about."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, "it never comes to that"
        time.sleep(0.002)
