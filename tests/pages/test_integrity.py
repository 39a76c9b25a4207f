"""``check_integrity`` says what is wrong, whatever is: without that no test that calls it could fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sglang_diffkv.kernels.table import in_line, table_index
from sglang_diffkv.mem_pool.integrity import check_integrity
from sglang_diffkv.mem_pool.page_manager import PageManager
from tests.kernels.triton_helpers import add_prompt, make_format, make_manager

FIRST, SECOND, IDLE = 1, 2, 5
LENGTHS = {FIRST: 45, SECOND: 9}
"""Of rows of two tiers, one with many times the entries of the other."""


@pytest.fixture
def manager() -> PageManager:
    manager = make_manager(make_format("K8V4 K4V2", page_tokens=4))
    for row, count in LENGTHS.items():
        add_prompt(manager, row, count, torch.Generator().manual_seed(row))
    check_integrity(manager)
    return manager


def _at(manager: PageManager, row: int, entry: int = 0, tier: int = 0) -> torch.Tensor:
    """Flat index of an entry of the row's last head."""
    state = manager.state
    wanted = torch.full((1, state.num_layers, state.num_heads, 1), entry)
    return table_index(state, torch.tensor([row]), tier, wanted)[0, -1, -1]


def _page(manager: PageManager, row: int, entry: int = 0, tier: int = 0) -> int:
    return int(in_line(manager.state.page_table)[_at(manager, row, entry, tier)])


def _last(manager: PageManager, row: int, tier: int = 0) -> int:
    """The last entry of the row's last head."""
    return int(manager.state.entries[row, -1, -1, tier]) - 1


def _place(manager: PageManager, row: int, page: int) -> None:
    in_line(manager.state.page_table)[_at(manager, row)] = page


def _position(manager: PageManager, row: int, entry: int, slot: int, position: int, tier: int = 0) -> None:
    manager.state.tiers[tier].positions[_page(manager, row, entry, tier), slot] = position


def _first_position(manager: PageManager, row: int) -> int:
    return int(manager.state.tiers[0].positions[_page(manager, row), 0])


def _add(values: torch.Tensor, where: tuple[int, ...], count: int) -> None:
    values[where] += count


def _tokens_past_the_end(manager: PageManager) -> None:
    """A slot that no own token has."""
    row = next(x for x in LENGTHS if int(manager.state.own_tokens[x, -1, -1, 0]) % 4)
    _position(manager, row, _last(manager, row), 3, 1)


HEAD = (-1, -1, 0)
DAMAGE: dict[str, Callable[[PageManager], object]] = {
    "a row without owner has entries": lambda m: _add(m.state.entries, (IDLE, *HEAD), 1),
    "row 2 tier 0: .* entries, bound": lambda m: _add(m.state.entries, (SECOND, *HEAD), 20),
    "row 1: own region outside entries": lambda m: _add(m.state.own_entry, (FIRST, *HEAD), 99),
    "row 1: a shared page is own": lambda m: _add(m.state.kept_entry, (FIRST, *HEAD), 1),
    "row 1: own pages and tokens disagree": lambda m: _add(m.state.own_tokens, (FIRST, *HEAD), 4),
    "row 2: page id out of range": lambda m: _place(m, SECOND, m.state.num_pages + 1),
    "row 2: a writable page is shared": lambda m: _add(m.state.refcount, (_page(m, SECOND),), 1),
    "is written by two rows": lambda m: _place(m, SECOND, _page(m, FIRST)),
    "row 1: empty slot that is no hole": lambda m: _position(m, FIRST, 0, 0, -1),
    "row 1: empty slot of tier 1": lambda m: _position(m, FIRST, 0, 0, -1, tier=1),
    "token past the end": _tokens_past_the_end,
    "row 2: a position is stored twice": lambda m: _position(m, SECOND, 0, 1, _first_position(m, SECOND)),
    "row 2: a position past its length": lambda m: _position(m, SECOND, 0, 0, LENGTHS[SECOND] + 1),
    "reference counts and tables disagree": lambda m: _add(m.state.refcount, (int(m.state.ring[-1]),), 1),
    "ring counters": lambda m: _add(m.state.counters, (1,), 1000),
    "table blocks are lost or held twice": lambda m: m.space.free_blocks.pop(),
}


@pytest.mark.parametrize("said", DAMAGE)
def test_what_is_wrong_is_said(said: str, manager: PageManager) -> None:
    DAMAGE[said](manager)
    with pytest.raises(AssertionError, match=said):
        check_integrity(manager)


def test_rows_are_looked_at_together_or_one_by_one(manager: PageManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_diffkv.mem_pool.integrity.SLOTS_AT_ONCE", 1)
    check_integrity(manager)
    DAMAGE["row 2: a position is stored twice"](manager)
    with pytest.raises(AssertionError, match="row 2: a position is stored twice"):
        check_integrity(manager)
