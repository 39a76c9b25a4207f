"""Consistency of the page manager's structures: run in tests after random operations, and on demand."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from sglang_diffkv.kernels.table import row_table
from sglang_diffkv.layout.state import TABLE_BLOCK
from sglang_diffkv.mem_pool.page_manager import PageManager


def check_integrity(manager: PageManager) -> None:
    """Raise AssertionError naming the first violated invariant of ring, tables, counts and blocks."""
    with manager.launching():
        pass
    if manager.state.pages.is_cuda:
        torch.cuda.synchronize()
    references = _check_rows(manager)
    _check_ring(manager, references)
    _check_blocks(manager)
    manager.high.check_integrity()
    manager.windows.check_integrity()
    if manager.saved is not None:
        manager.saved.check_integrity()
    if manager.transfer is not None:
        manager.transfer.check_integrity()
    if manager.running is not None:
        manager.running.check_integrity()


def check_bounds(manager: PageManager) -> None:
    """Raise AssertionError if the host believes in pages that are not free."""
    free, headroom = manager.counts.free_bound(), manager.counts.headroom_bound()
    assert free - headroom <= manager.device.free_pages() - manager.headroom(), (
        "the host believes in pages that are not free"
    )
    for segment in manager.segments.cached:
        known = segment.row not in manager.counts.uncounted
        held = manager.counts.ranks.held(segment.row, segment.pages)
        assert held == known * manager.device.pages_of(segment.row), "a segment miscounts its pages"


def check_settled(manager: PageManager) -> None:
    """Raise AssertionError if the host's counts are wrong once it has waited for all that it launched."""
    manager.counts.settle()
    assert not manager.counts.uncounted
    spare = manager.device.free_pages() - manager.counts.ranks.slack - manager.counts.free()
    assert spare == 0 or (spare > 0 and not manager.ranks.alone), "settled counts differ from the device's"
    check_bounds(manager)


def _check_ring(manager: PageManager, references: torch.Tensor) -> None:
    state = manager.state
    taken, put = state.counters.tolist()
    assert 0 <= put - taken <= state.num_pages, f"ring counters {taken}, {put} of {state.num_pages} pages"
    place = torch.arange(taken, put, device=state.device) % state.num_pages
    free = state.ring[place].long()
    assert free.unique().numel() == free.numel(), "a page is in the free list twice"
    assert torch.equal(state.refcount[: state.num_pages], references), "reference counts and tables disagree"
    in_ring = torch.zeros(state.num_pages, dtype=torch.bool, device=state.device)
    in_ring[free] = True
    assert torch.equal(in_ring, references == 0), "the free list is not the pages without references"


def _check_rows(manager: PageManager) -> torch.Tensor:
    state = manager.state
    references = torch.zeros(state.num_pages + 1, dtype=torch.int32, device=state.device)
    live = {*manager.rows, *(s.row for s in manager.held_segments)}
    idle = [r for r in range(state.entries.shape[0]) if r not in live]
    assert not state.entries[idle].any(), "a row without owner has entries"
    owner: dict[int, int] = {}
    for row in sorted(live):
        seen: list[torch.Tensor] = []  # (layer, head) and position of each token
        rows = torch.tensor([row], device=state.device)
        for tier, view in enumerate(state.tiers):
            counts = state.entries[row, :, :, tier]
            own_from = state.own_entry[row, :, :, tier]
            kept_from = state.kept_entry[row, :, :, tier]
            assert (own_from <= counts).all(), f"row {row}: own region outside entries"
            assert (kept_from <= own_from).all() and (kept_from >= 0).all(), f"row {row}: a shared page is own"
            bound = manager.space.bound(row)[tier]
            assert int(counts.max()) <= bound, f"row {row} tier {tier}: {int(counts.max())} entries, bound {bound}"
            assert bound <= len(manager.space.blocks[row][tier]) * TABLE_BLOCK, f"row {row}: no block for an entry"
            width = int(counts.max())
            if not width:
                assert not state.own_tokens[row, :, :, tier].any(), f"row {row}: own tokens without pages"
                continue
            page, lo, hi = (x[0] for x in row_table(state, rows, tier, width))
            entry = torch.arange(width, device=state.device)
            used = entry < counts.unsqueeze(2)
            ids = page[used]
            assert ((ids >= 0) & (ids < state.num_pages)).all(), f"row {row}: page id out of range"
            references.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
            own = used & (entry >= own_from.unsqueeze(2))
            for page_id in page[own].tolist():
                assert owner.setdefault(page_id, row) == row, f"page {page_id} is written by two rows"
            assert (state.refcount[page[own]] == 1).all(), f"row {row}: a writable page is shared"
            tokens = view.layout.tokens
            own_tokens = state.own_tokens[row, :, :, tier]
            assert torch.equal(-(-own_tokens // tokens), counts - own_from), f"row {row}: own pages and tokens disagree"
            position = view.positions[page]
            slot = (entry.unsqueeze(1) * tokens + torch.arange(tokens, device=state.device)).expand(position.shape)
            slot = slot - (own_from * tokens).unsqueeze(2).unsqueeze(3)
            inside = own.unsqueeze(3) & (slot < own_tokens.unsqueeze(2).unsqueeze(3))
            empty = inside & (position < 0)
            if tier == 0:
                hole = state.hole[row].unsqueeze(2).unsqueeze(3)
                assert torch.equal(empty, inside & (slot == hole)), f"row {row}: empty slot that is no hole"
            else:
                assert not empty.any(), f"row {row}: empty slot of tier {tier}"
            assert not (own.unsqueeze(3) & ~inside & (position >= 0)).any(), f"row {row}: token past the end"
            valid = used.unsqueeze(3) & (position >= lo.unsqueeze(3)) & (position < hi.unsqueeze(3))
            flat = valid.flatten(2)
            head = torch.arange(state.num_layers * state.num_heads, device=state.device)
            head = head.view(state.num_layers, state.num_heads, 1).expand(flat.shape)
            seen.append(head[flat] << 32 | position.flatten(2)[flat].long())
        if seen:
            stored = torch.cat(seen)
            assert stored.unique().numel() == stored.numel(), f"row {row}: a position is stored twice"
            if row in manager.rows and stored.numel():
                latest = int((stored & 0xFFFFFFFF).max())
                assert latest < manager.rows.most(row), f"row {row}: a position past its length"
    return references[: state.num_pages]


def _check_blocks(manager: PageManager) -> None:
    space = manager.space
    held = [b for sides in space.blocks for side in sides for b in side]
    everything = sorted(held + space.free_blocks)
    assert everything == list(range(1, space.num_blocks + 1)), "table blocks are lost or held twice"
    assert space.held.tolist() == [[*map(len, sides)] for sides in space.blocks], "table blocks miscounted"
    table = space.state.row_blocks.tolist()
    for row, of_tiers in enumerate(space.blocks):
        expected = _row_blocks(of_tiers, space.max_blocks)
        assert table[row] == expected, f"row {row}: its blocks on the device are not the host's"


def _row_blocks(of_tiers: Sequence[list[int]], width: int) -> list[int]:
    """A row's blocks, of each tier, as its bidirectional tables have them: tiers 0 and 1 in one table, or tiers 0 and 2
    in the first half and 3 and 1 in the second."""
    tiers = [*of_tiers, *[[]] * (4 - len(of_tiers))]
    if len(of_tiers) <= 2:
        tables = [(tiers[0], tiers[1])]
    else:
        tables = [(tiers[0], tiers[2]), (tiers[3], tiers[1])]
    found = []
    for left, right in tables:
        found += [*left, *[0] * (width // len(tables) - len(left) - len(right)), *right[::-1]]
    return found


def decision_digest(ledger: Any, more: Sequence[Any] = ()) -> int:
    """A number of all that schedulers decide on, which has to be equal on all ranks: what the ``ledger`` and its
    page manager hold, and ``more``."""
    manager = ledger.manager
    counts, space = manager.counts, manager.space
    parts = (
        manager.rows.digest(), manager.high.digest(), manager.windows.digest(),
        manager.running.digest() if manager.running is not None else [],
        sorted((s.row, s.lo, s.hi, s.pages) for s in manager.segments.cached),
        counts.free(), counts.demand.tolist(), counts.private.tolist(), counts.pages.tolist(), sorted(counts.faulted),
        space.free_blocks, space.base.tolist(), space.total.tolist(), space.counted.tolist(),
        ledger.tree_pages, ledger.evictable_pages, [*ledger.promised.values()], ledger.refused,
        ledger.available(), ledger.kv_slots_free(),
        manager.prompts.plans.keys(), manager.prompts.pending.keys(), more,
    )  # fmt: skip
    return zlib.crc32(repr(parts).encode())
