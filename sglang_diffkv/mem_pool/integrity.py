"""Consistency of the page manager's structures: run in tests after random operations, and on demand."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from sglang_diffkv.kernels.table import row_table
from sglang_diffkv.layout.state import TABLE_BLOCK
from sglang_diffkv.mem_pool.page_manager import PageManager

SLOTS_AT_ONCE = 1 << 18
"""Slots of pages that are looked at together."""


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
    for part in (manager.saved_slots, manager.transfer):
        if part is not None:
            part.check_integrity()
    if manager.running is not None:
        manager.running.check_integrity()


def check_bounds(manager: PageManager) -> None:
    """Raise AssertionError if the host believes in pages that are not free, or wrongly that it knows how many are."""
    if manager.counts.settled and manager.counts.upcoming is None:
        _check_free(manager)
    free, headroom = manager.counts.free_bound(), manager.counts.headroom_bound()
    assert free - headroom <= manager.device.free_pages() - manager.headroom(), (
        "the host believes in pages that are not free"
    )
    known = [segment for segment in manager.segments.cached if segment.row not in manager.counts.uncounted]
    for segment in manager.segments.cached:
        held = manager.counts.ranks.held(segment.row, segment.pages)
        pages = manager.device.pages_of(segment.row) if segment in known or segment.pages else 0
        assert held == pages, "a segment miscounts its pages"
    measured = manager.device.measure([(segment.row, segment.lo, segment.hi) for segment in known])
    for segment, tokens in zip(known, measured[..., :-1].sum((1, 2)).tolist(), strict=True):
        least = all(here <= most for here, most in zip(tokens, segment.held, strict=True))  # on the rank with most
        assert least and (tuple(tokens) == segment.held or not manager.ranks.alone), "a segment miscounts its tokens"


def check_settled(manager: PageManager) -> None:
    """Raise AssertionError if the host's counts are wrong once it has waited for all that it launched."""
    manager.counts.settle()
    assert manager.counts.settled and not manager.counts.uncounted
    check_bounds(manager)


def _check_free(manager: PageManager) -> None:
    spare = manager.device.free_pages() - manager.counts.ranks.slack - manager.counts.free()
    assert spare == 0 or (spare > 0 and not manager.ranks.alone), "settled counts differ from the device's"


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
    """References to each page, [pages] int32, of tables that are sound."""
    state, space = manager.state, manager.space
    references = torch.zeros(state.num_pages + 1, dtype=torch.int32, device=state.device)
    owned_rows = {*manager.rows, *(s.row for s in manager.held_segments)}
    live, idle = sorted(owned_rows), [r for r in range(state.entries.shape[0]) if r not in owned_rows]
    assert not state.entries[idle].any(), "a row without owner has entries"
    owned: list[torch.Tensor] = []
    stored: list[torch.Tensor] = []
    bounds = [space.bound(row) for row in live]
    for tier in range(len(state.tiers)):
        widths = state.entries[live, :, :, tier].flatten(1).amax(1).tolist() if live else []
        for row, width, bound in zip(live, widths, bounds, strict=True):
            assert width <= bound[tier], f"row {row} tier {tier}: {width} entries, bound {bound[tier]}"
            assert bound[tier] <= len(space.blocks[row][tier]) * TABLE_BLOCK, f"row {row}: no block for an entry"
        for rows in _together(live, widths, state.num_layers * state.num_heads * state.tiers[tier].layout.tokens):
            _check_tier(manager, tier, torch.tensor(rows, device=state.device), references, owned, stored)
    _check_owners(owned)
    _check_positions(manager, stored)
    return references[: state.num_pages]


def _together(rows: Sequence[int], widths: Sequence[int], slots: int) -> Iterator[list[int]]:
    """Rows in groups, those of about as many entries together: so that few slots are looked at that no row has.
    ``slots``: of an entry of all heads."""
    found: list[int] = []
    for width, row in sorted(zip(widths, rows, strict=True)):
        if found and (len(found) + 1) * width * slots > SLOTS_AT_ONCE:
            yield found
            found = []
        found.append(row)
    if found:
        yield found


def _require(rows: torch.Tensor, sound: torch.Tensor, text: str) -> None:
    """Raise AssertionError, with the first of ``rows``, [R], for which not all of ``sound``, [R, ...], is true."""
    bad = rows[~sound.flatten(1).all(1)]
    assert not bad.numel(), f"row {int(bad[0])}: {text}"


def _check_tier(
    manager: PageManager,
    tier: int,
    rows: torch.Tensor,
    references: torch.Tensor,
    owned: list[torch.Tensor],
    stored: list[torch.Tensor],
) -> None:
    """Check the entries and tokens of a tier of ``rows``, [R] int64.

    Args:
        references: [pages + 1] int32, to which those of the rows are added. owned: gets pages that rows write, with
            their rows, [2, n]. stored: gets rows of tokens, with head and position of each as one number, [2, n].
    """
    state, view = manager.state, manager.state.tiers[tier]
    counts, own_from, kept_from, own_tokens = (
        x[rows, :, :, tier] for x in (state.entries, state.own_entry, state.kept_entry, state.own_tokens)
    )
    _require(rows, own_from <= counts, "own region outside entries")
    _require(rows, (kept_from <= own_from) & (kept_from >= 0), "a shared page is own")
    tokens, width = view.layout.tokens, int(counts.max())
    _require(rows, -(-own_tokens // tokens) == counts - own_from, "own pages and tokens disagree")
    if not width:
        return
    page, lo, hi = row_table(state, rows, tier, width)
    entry = torch.arange(width, device=state.device)
    used = entry < counts.unsqueeze(3)
    _require(rows, ~used | (page >= 0) & (page < state.num_pages), "page id out of range")
    ids = page[used]
    references.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
    own = used & (entry >= own_from.unsqueeze(3))
    _require(rows, ~own | (state.refcount[page] == 1), "a writable page is shared")
    owner = rows.view(-1, 1, 1, 1).expand(page.shape)
    owned.append(torch.stack([page[own], owner[own]]))
    position = view.positions[page]
    slot = entry.unsqueeze(1) * tokens + torch.arange(tokens, device=state.device)
    slot = slot - (own_from * tokens).view(*own_from.shape, 1, 1)
    inside = own.unsqueeze(4) & (slot < own_tokens.view(*own_from.shape, 1, 1))
    empty = inside & (position < 0)
    if tier == 0:
        hole = state.hole[rows].view(*own_from.shape, 1, 1)
        _require(rows, empty == (inside & (slot == hole)), "empty slot that is no hole")
    else:
        _require(rows, ~empty, f"empty slot of tier {tier}")
    _require(rows, ~(own.unsqueeze(4) & ~inside & (position >= 0)), "token past the end")
    valid = used.unsqueeze(4) & (position >= lo.unsqueeze(4)) & (position < hi.unsqueeze(4))
    head = torch.arange(state.num_layers * state.num_heads, device=state.device)
    place = head.view(1, state.num_layers, state.num_heads, 1, 1) << 32 | position.long()
    stored.append(torch.stack([owner.unsqueeze(4).expand(valid.shape)[valid], place[valid]]))


def _check_owners(owned: Sequence[torch.Tensor]) -> None:
    """Raise AssertionError if two rows write a page."""
    pages, rows = torch.cat([torch.empty(2, 0, dtype=torch.int64), *(x.cpu() for x in owned)], 1)
    pages, order = pages.sort()
    two = (pages[1:] == pages[:-1]) & (rows[order][1:] != rows[order][:-1])
    assert not two.any(), f"page {int(pages[1:][two][0])} is written by two rows"


def _check_positions(manager: PageManager, stored: Sequence[torch.Tensor]) -> None:
    """Raise AssertionError for a position that a head of a row has twice, or that is past the row's length."""
    rows, places = torch.cat([torch.empty(2, 0, dtype=torch.int64), *(x.cpu() for x in stored)], 1)
    keys = (rows << 48 | places).sort().values
    twice = keys[1:] == keys[:-1]
    assert not twice.any(), f"row {int(keys[1:][twice][0]) >> 48}: a position is stored twice"
    latest = torch.full((manager.state.entries.shape[0],), -1)
    latest.scatter_reduce_(0, rows, places & 0xFFFFFFFF, "amax")
    for row, last in enumerate(latest.tolist()):
        assert row not in manager.rows or last < max(manager.rows.most(row), 0), (
            f"row {row}: a position past its length"
        )


def _check_blocks(manager: PageManager) -> None:
    space = manager.space
    held = [b for sides in space.blocks for side in sides for b in side]
    everything = sorted(held + space.free_blocks)
    assert everything == list(range(1, space.num_blocks + 1)), "table blocks are lost or held twice"
    assert space.held.tolist() == [[*map(len, sides)] for sides in space.blocks], "table blocks miscounted"
    table = space.state.row_blocks.tolist()
    for row, of_tiers in enumerate(space.blocks):
        for column, expected in enumerate(_row_blocks(of_tiers, space.max_blocks)):
            left = not expected and row * space.max_blocks + column in space.let_go
            assert table[row][column] == expected or left, f"row {row}: its blocks on the device are not the host's"


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
