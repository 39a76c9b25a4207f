"""Rows with windows of their own beside rows that have the policy's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sglang_diffkv.layout.page_format import EMPTY
from sglang_diffkv.layout.spans import retained_tokens
from sglang_diffkv.mem_pool.growth import Expected
from sglang_diffkv.mem_pool.integrity import check_integrity
from sglang_diffkv.mem_pool.ledger import PageLedger
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.mem_pool.pressure import LEAST_GROWTH
from sglang_diffkv.policies.base import Policy
from tests.dense import Session, tiers_of
from tests.helpers import check, make_format, make_manager, tier_map
from tests.policies import ONE, PAIR, WINDOWED, diffkv_policy, streaming_policy

MOST, STEPS = 64, 15
WINDOWS = {1: 21, 2: None, 3: 3}
LENGTHS = {1: 50, 2: 43, 3: 37}


def lived(manager: PageManager, share_min: int | None, windows: dict[int, int | None], *, checked: bool) -> Session:
    """Three prompts and replies, with these windows of their own; ``checked`` by the dense oracle in each step."""
    if share_min is not None:
        manager.prompts.freeze_from(share_min, manager.policy.window)
    session = Session(manager, spread=3.0)
    for row, window in windows.items():
        if window is not None:
            manager.windows.keep(row, window)
    session.extend(LENGTHS, check=checked)
    for row in LENGTHS:
        session.end_prompt(row)
    for _ in range(STEPS):
        session.step([*LENGTHS], check=checked)
    check(manager)
    return session


@pytest.mark.parametrize(("name", "share_min"), [*((name, None) for name in WINDOWED), ("window alone", 12)])
def test_each_row_is_as_under_a_policy_of_its_window(name: str, share_min: int | None) -> None:
    """A larger one, the usual one and a smaller one, in one batch; with tails that begin a page of their own, too."""
    tiers, policy = WINDOWED[name]
    mixed = make_manager(make_format(tiers), policy=policy, most_window=MOST)
    session = lived(mixed, share_min, WINDOWS, checked=True)
    for row, window in WINDOWS.items():
        own = policy if window is None else policy.with_window(window)
        alone = lived(make_manager(make_format(tiers), policy=own), share_min, {}, checked=False)
        assert np.array_equal(tiers_of(session, row), tiers_of(alone, row)), f"row {row}"
        assert mixed.rows.frozen(row) == alone.manager.rows.frozen(row)
    high = [int((tiers_of(session, row) == 0).sum()) / tiers_of(session, row).size for row in (1, 2, 3)]
    assert high[0] > high[1] > high[2]
    for row in WINDOWS:
        session.release(row)
    check(mixed)
    assert len(mixed.windows) == 0 and bool((mixed.state.row_window == EMPTY).all())


def test_a_row_has_the_policy_s_window_again_once_it_is_released() -> None:
    manager = make_manager(policy=diffkv_policy(1e9, 0.0, window=8), most_window=MOST)
    manager.windows.keep(1, 30)
    manager.windows.keep(1, 30)
    session = Session(manager)
    for window in (30, 8):
        session.extend({1: 45}, check=False)
        session.end_prompt(1)
        assert (tiers_of(session, 1)[..., :-window] == 1).all() and not tiers_of(session, 1)[..., -window:].any()
        session.release(1)
        check(manager)


def test_chunks_and_copies_go_by_it() -> None:
    """A prompt that is compacted between chunks, and one that a request copies from the prefix cache."""
    policy = diffkv_policy(1e9, 0.0, window=8)
    manager = make_manager(policy=policy, most_window=MOST)
    session = Session(manager)
    manager.windows.keep(1, 20)
    session.extend({1: 40, 2: 40})
    manager.prompts.end_chunk(1, 2)
    for row, window in ((1, 20), (2, 8)):
        assert (tiers_of(session, row)[..., :-window] == 1).all() and not tiers_of(session, row)[..., -window:].any()
    other = make_manager(policy=policy, most_window=MOST)
    copying = Session(other)
    other.windows.keep(1, 20)
    copying.extend({1: 40, 2: 40})
    for row, window in ((1, 20), (2, 8)):
        assert other.prompts.plan_copy(row, [], [], publish=False)
        other.prompts.end(row)
        found = tier_map(copying.state, row, 40)
        assert (found[..., :-window] == 1).all() and not found[..., -window:].any()
    check(other)


def test_layers_with_a_sliding_window_keep_theirs() -> None:
    """The policy's window is one of the layers that see all."""
    span = 6
    manager = make_manager(
        policy=diffkv_policy(1e9, 0.0, window=8), pages=900, most_window=MOST, attention_spans=(0, span)
    )
    session, kept = Session(manager), retained_tokens(span)
    manager.windows.keep(1, 30)
    session.extend({1: 90, 2: 90}, check=False, scores=False)
    for row, window in ((1, 30), (2, 8)):
        session.end_prompt(row)
        wide, narrow = tiers_of(session, row)
        assert (wide[:, :-window] == 1).all() and not wide[:, -window:].any()
        assert (narrow[:, :-kept] == len(manager.fmt.tiers)).all() and not narrow[:, -kept:].any()
    check(manager)


def test_pressure_leaves_windows_that_were_asked_for() -> None:
    policy = diffkv_policy(50.0, 0.0, window=40, pressure_window=8)
    manager = make_manager(policy=policy, pages=900, most_window=MOST)
    session = Session(manager)
    manager.windows.keep(1, 60)
    manager.windows.keep(3, 7)
    session.extend({1: 30, 2: 30, 3: 30})
    for row in (1, 2, 3):
        session.end_prompt(row)
    for _ in range(8 + LEAST_GROWTH):
        session.step([1, 2, 3], check=False)
    assert manager.pressure is not None and manager.pressure.relieve([1, 2, 3]) == [2]
    check(manager)


def test_what_it_takes_counts_as_such() -> None:
    """The growth estimate is that of the others. A row counts whole until its own window is full."""
    manager = make_manager(policy=diffkv_policy(50.0, 0.0, window=8), pages=1200, most_window=MOST)
    session, ledger = Session(manager), PageLedger(manager, 2000)
    manager.windows.keep(1, 60)
    manager.windows.keep(4, 4)
    session.extend({1: 40, 2: 300, 3: 300, 4: 100}, check=False)
    for row in (1, 2, 3, 4):
        session.end_prompt(row)
    session.step([1, 2, 3, 4], check=False)
    manager.counts.settle()
    price = ledger.growth_estimate()
    assert price < 0.7
    assert ledger.growth_of(1, 100) == pytest.approx(60 - 41 + 81 * price)
    assert ledger.growth_of(1, 10) == 10 and ledger.growth_of(4, 100) == pytest.approx(100 * price)
    expected = [Expected(1, 100.0), Expected(2, 50.0), Expected(4, 50.0)]
    assert ledger.growth_of_all(expected) == pytest.approx(sum(ledger.growth_of(*x) for x in expected))


def test_a_prompt_s_tail_may_take_a_page_more_once_a_window_ends_within_one() -> None:
    manager = make_manager(policy=diffkv_policy(50.0, 0.0, window=8), most_window=MOST)
    manager.prompts.freeze_from(12, 8)
    ledger, heads = PageLedger(manager, 2000), manager.geometry.heads
    before = ledger.prompt_pages(100)
    manager.windows.expect(16)
    assert ledger.prompt_pages(100) == before
    manager.windows.expect(17)
    assert ledger.prompt_pages(100) == before + heads


@pytest.mark.parametrize(
    ("policy", "most"),
    [(WINDOWED["window alone"][1], 0), (streaming_policy(8, 2), MOST), (diffkv_policy(1e9, 0.0, 8), MOST)],
)
def test_where_rows_may_have_one(policy: Policy, most: int) -> None:
    """Kernels are told of rows' windows there, and nowhere else."""
    manager = make_manager(make_format(ONE if policy.least_window is None else PAIR), policy=policy, most_window=most)
    allowed = most > 0 and policy.least_window is not None
    assert manager.windows.allowed == allowed == (manager.ops.search_rule["row_windows"] is not None)
    if not allowed:
        with pytest.raises(AssertionError, match="no row may have a window"):
            manager.windows.keep(1, 9)


def test_the_least_window_has_room_for_what_observes() -> None:
    policy = replace(diffkv_policy(1.0, 0.1, 8), observe_every=4, generated_every=6)
    assert policy.least_window == 6 and policy.with_window(6).window == 6
    windows = make_manager(policy=policy, most_window=MOST).windows
    for window in (5, MOST + 1):
        with pytest.raises(AssertionError, match=f"no row may have a window of {window}"):
            windows.keep(1, window)


def test_a_broken_mark_is_found() -> None:
    manager = make_manager(policy=WINDOWED["window alone"][1], most_window=MOST)
    manager.windows.keep(3, 20)
    check_integrity(manager)
    manager.state.row_window[2] = 20
    with pytest.raises(AssertionError, match="on the device"):
        check_integrity(manager)
