"""Running requests that are compressed once more, since the pool is full: what they hold, counts and pages."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_diffkv.config import load_config
from sglang_diffkv.layout.page_format import PageFormat, Tier
from sglang_diffkv.mem_pool.integrity import check_bounds
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.mem_pool.pressure import LEAST_GROWTH, Pressure
from tests.dense import Session
from tests.helpers import check, make_manager, tier_map
from tests.policies import diffkv_policy

WINDOW, SMALLER = 40, 8


def pressure_of(manager: PageManager) -> Pressure:
    assert manager.pressure is not None
    return manager.pressure


@pytest.mark.parametrize("alpha_high", [50.0, 1.0])
@pytest.mark.parametrize("frozen", [None, 20])
def test_what_is_theirs_alone_goes_down(alpha_high: float, frozen: int | None) -> None:
    """All that the smaller window does not hold is judged again; what is shared stays, and attention is that over what
    is stored, as the dense oracle checks in every step."""
    policy = diffkv_policy(alpha_high, 0.0, window=WINDOW, sinks=2, pressure_window=SMALLER)
    manager = make_manager(policy=policy, pages=900)
    manager.prompts.share_min_tokens = frozen
    session = Session(manager, spread=2.0)
    session.extend({1: 30, 2: 50})
    for row in (1, 2):
        session.end_prompt(row)
    segments = [session.share(row, 0, manager.rows.length(row)) for row in (1, 2)] if frozen else []
    for _ in range(SMALLER + LEAST_GROWTH - 1):
        session.step([1, 2])
    pressure = pressure_of(manager)
    grown = [] if frozen else [1, 2]
    assert pressure.relieve([1, 2, 5]) == grown, "too little has grown since their prompts"
    session.step([1, 2])
    length = {row: manager.rows.length(row) for row in (1, 2)}
    before = {row: tier_map(manager.state, row, length[row]) for row in (1, 2)}
    held = manager.device.free_pages()
    if not grown:
        assert pressure.relieve([1, 2]) == [1, 2]
        assert manager.device.free_pages() > held
    check(manager)
    for row in (1, 2):
        after, first = tier_map(manager.state, row, length[row]), manager.rows.shared(row)
        assert (after >= before[row]).all() and (after[:, :, -SMALLER:] == 0).all()
        if segments:
            assert np.array_equal(after[:, :, :first], before[row][:, :, :first])
        if alpha_high > 1:
            assert (after[:, :, max(first, 2) : -SMALLER - 1] == 1).all()
    assert pressure.relieve([1, 2]) == [] and pressure.compressions == 2
    for _ in range(WINDOW + 9):
        session.step([1, 2])
        check_bounds(manager)
    newest = tier_map(manager.state, 1, manager.rows.length(1))[:, :, -WINDOW:]
    assert (newest == 0).all(), "new tokens have the whole window again"
    for row in (1, 2):
        session.release(row)
    check(manager)
    assert not pressure._done_at


def test_a_full_pool_makes_room_row_by_row() -> None:
    """With pages to lend to one row at a time the first ones make room for the others."""
    policy = diffkv_policy(50.0, 0.0, window=WINDOW, pressure_window=SMALLER)
    manager = make_manager(policy=policy, pages=400)
    session = Session(manager)
    rows = [1, 2, 3]
    session.extend(dict.fromkeys(rows, 20))
    for row in rows:
        session.end_prompt(row)
    for _ in range(80):
        session.step(rows, check=False)
    pressure = pressure_of(manager)
    asked: list[int] = []
    fitting = pressure._fitting

    def lending() -> int:
        manager.counts.settle()
        asked.append(max(min(fitting(), 1 if len(asked) < 2 else 9), 0))
        return asked[-1]

    pressure._fitting = lending  # type: ignore[method-assign]
    assert pressure.relieve(rows) == rows and asked[:2] == [1, 1]
    check(manager)


def test_without_pages_to_lend_nothing_changes() -> None:
    policy = diffkv_policy(50.0, 0.0, window=WINDOW, pressure_window=SMALLER)
    manager = make_manager(policy=policy, pages=400)
    session = Session(manager)
    session.extend({1: 20})
    session.end_prompt(1)
    for _ in range(90):
        session.step([1], check=False)
    pressure = pressure_of(manager)
    pressure._fitting = lambda: 0  # type: ignore[method-assign]
    before = tier_map(manager.state, 1, 110)
    assert pressure.relieve([1]) == []
    assert np.array_equal(before, tier_map(manager.state, 1, 110))
    check(manager)


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ("{}", 64),
        ('{"policy": {"name": "diffkv", "pressure_window": 100}}', 100),
        ('{"policy": {"name": "diffkv", "pressure_window": null}}', None),
        ('{"policy": {"name": "diffkv", "window": 64}}', None),
        ('{"policy": {"name": "diffkv", "alpha_high": 0}}', None),
        ('{"policy": {"name": "leankv", "mass_high": 0.1}}', None),
    ],
)
def test_where_it_is_done(config: str, window: int | None) -> None:
    rule = load_config(config).build_policy().under_pressure
    assert (None if rule is None else rule.window) == window
    assert rule is None or rule.under_pressure is None


def test_not_in_one_tier() -> None:
    fmt = PageFormat(64, 64, (Tier.parse("K8V4"),), page_tokens=8)
    assert make_manager(fmt, policy=diffkv_policy(1.0, 0.0, 256, pressure_window=8)).pressure is None
