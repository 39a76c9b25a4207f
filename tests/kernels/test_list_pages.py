"""Lists of rows' pages: Triton and reference against plain loops over the page table."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_diffkv.kernels.list_pages import reference
from sglang_diffkv.kernels.list_pages import triton as list_pages_triton
from sglang_diffkv.layout.state import PageState
from tests.helpers import table_of
from tests.kernels.test_triton_counts import FORMATS, busy_manager
from tests.kernels.triton_helpers import DEVICE, add_prompt, make_format, make_manager

ROWS = [(1, 0, 83), (3, 5, 41), (6, 18, 59), (4, 0, 1), (15, 0, 300), (5, 30, 31), (8, 0, 61)]
"""Row, and the positions that count. Row 15 is empty, row 8 a segment."""


def listed(state: PageState, row: int, lo: int, hi: int) -> tuple[list[int], list[tuple[int, ...]]]:
    """Pages of a row and what is known of each, one by one."""
    pages: list[int] = []
    known: list[tuple[int, ...]] = []
    for tier, view in enumerate(state.tiers):
        positions = view.positions[:].cpu().numpy()
        page, low, high = table_of(state, row, tier)
        for head in range(state.num_layers * state.num_heads):
            at = divmod(head, state.num_heads)
            for entry in range(int(state.entries[(row, *at, tier)])):
                number, start, end = (int(x[(*at, entry)]) for x in (page, low, high))
                start, end = max(start, lo), min(end, hi)
                held = [x for x in positions[number].tolist() if start <= x < end]
                pages.append(number)
                found = (min(held), max(held)) if held else (reference.NO_POSITION, -1)
                known.append((tier, head, start, end, *found))
    return pages, known


@pytest.mark.parametrize("block", [4, 16])
@pytest.mark.parametrize("tiers", FORMATS)
def test_pages_come_by_tier_head_and_order(tiers, block, monkeypatch):
    monkeypatch.setattr(list_pages_triton, "ENTRIES", block)
    state = busy_manager(tiers).state
    expected = [listed(state, *row) for row in ROWS]
    counts = [len(pages) for pages, _ in expected]
    assert max(counts) > 16 and 0 in counts
    first = [0, *np.cumsum(counts).tolist()]
    asked = torch.tensor([*zip(*ROWS), first[:-1], counts], device=DEVICE)
    for op in (reference.list_pages, list_pages_triton.list_pages):
        pages, known = op(state, asked, first[-1])
        assert pages.tolist() == [page for found, _ in expected for page in found]
        assert known.T.tolist() == [[*x] for _, found in expected for x in found]


def test_a_row_with_fewer_or_more_pages_than_were_counted_touches_no_other():
    """A rank may have fewer, and a row whose ring was empty more."""
    state = busy_manager("K8V4 K4V2").state
    pages, known = listed(state, 1, 0, 83)
    count = len(pages)
    asked = torch.tensor([[1, 15, 1], [0, 0, 0], [83, 83, 83], [0, 7, 10], [7, 3, count + 4]], device=DEVICE)
    for op in (reference.list_pages, list_pages_triton.list_pages):
        got, about = op(state, asked, 14 + count)
        assert got.tolist() == [*pages[:7], 0, 0, 0, *pages, 0, 0, 0, 0]
        assert about.T[10 : 10 + count].tolist() == [[*x] for x in known]
        assert not about[:, 7:10].any() and not about[:, 10 + count :].any()


@pytest.mark.parametrize("position_bytes", [2, 4])
def test_heads_of_no_power_of_two_and_wide_positions(position_bytes):
    fmt = make_format("K8V4 K4V2", page_tokens=4, position_bytes=position_bytes)
    manager = make_manager(fmt, pages=900, layers=5, heads=3)
    add_prompt(manager, 2, 111, torch.Generator().manual_seed(3))
    pages, known = listed(manager.state, 2, 9, 100)
    asked = torch.tensor([[2], [9], [100], [0], [len(pages)]], device=DEVICE)
    for op in (reference.list_pages, list_pages_triton.list_pages):
        got, about = op(manager.state, asked, len(pages))
        assert got.tolist() == pages and about.T.tolist() == [[*x] for x in known]
