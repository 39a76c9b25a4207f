"""What a manager holds, by measuring every row each time: slow, and the oracle of ``UsageMeter``."""

from __future__ import annotations

import torch

from sglang_diffkv.kernels.count_owners.reference import OWNERS
from sglang_diffkv.kernels.table import max_entries, row_table
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.mem_pool.usage import Reading


def live_parts(manager: PageManager) -> list[tuple[int, int, int]]:
    """Row, first position and position after the last of each request's tokens that no segment holds, and of each
    segment."""
    parts = [(row, manager.rows.shared(row), length) for row, length in manager.rows.lengths().items()]
    return parts + [(segment.row, segment.lo, segment.hi) for segment in manager.held_segments]


def held_by_head(manager: PageManager) -> list[list[list[int]]]:
    """Tokens of each tier and pages of each (layer, head): [L][H][T + 1]."""
    with manager.launching():
        columns = manager.to_device(live_parts(manager) or torch.empty(0, 3)).unbind(1)
        return manager.ops.measure(*(x.contiguous() for x in columns)).sum(0).tolist()


def pages_of(manager: PageManager, rows: list[int]) -> set[int]:
    """Pages that rows refer to."""
    pages: set[int] = set()
    for row in rows:
        for tier in range(len(manager.state.fmt.tiers)):
            index = torch.tensor([row], device=manager.state.device)
            page, _, hi = row_table(manager.state, index, tier, max_entries(manager.state, index, tier))
            pages.update(page[hi > 0].tolist())
    return pages


def page_owners(manager: PageManager) -> dict[str, int]:
    """Pages of each owner."""
    requests = pages_of(manager, [*manager.rows])
    cache = pages_of(manager, [segment.row for segment in manager.held_segments])
    counts = (len(requests - cache), len(requests & cache), len(cache - requests), manager.device.free_pages())
    return dict(zip(OWNERS, counts, strict=True))


def check_reading(manager: PageManager, reading: Reading) -> None:
    """Raise AssertionError if a reading of now is not what measuring every row gives."""
    assert reading.by_head == held_by_head(manager), "running totals are not what the rows hold"
    assert reading.owners == page_owners(manager), "pages are ascribed to the wrong owner"
    assert reading.live.tokens == sum(hi - lo for _, lo, hi in live_parts(manager))
    assert reading.live.requests == len(manager.rows)
    assert reading.free_pages == manager.device.free_pages()
