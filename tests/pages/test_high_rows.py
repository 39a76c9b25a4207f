"""Rows that keep all tokens in the high tier beside rows that the policy compresses."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_diffkv.layout.spans import retained_tokens
from sglang_diffkv.mem_pool.growth import Expected
from sglang_diffkv.mem_pool.integrity import check_integrity
from sglang_diffkv.mem_pool.ledger import PageLedger
from sglang_diffkv.mem_pool.pressure import LEAST_GROWTH
from sglang_diffkv.policies.base import Policy
from sglang_diffkv.policies.budget import Budget
from tests.dense import Session, tiers_of
from tests.helpers import check, make_format, make_manager
from tests.policies import ONE, WINDOWED, diffkv_policy, h2o_policy, snapkv_policy, zipage_policy

STEPS = 12
POLICIES: dict[str, tuple[tuple[str, ...], Policy]] = {
    **WINDOWED,
    "a budget": (ONE, h2o_policy(Budget(20), window=8)),
    "cut once": (ONE, snapkv_policy(Budget(20), window=8, pool=1)),
}


@pytest.mark.parametrize(("name", "share_min"), [*((name, None) for name in POLICIES), ("window alone", 20)])
def test_a_row_keeps_all_beside_one_that_does_not(name: str, share_min: int | None) -> None:
    """In its prompt and while it generates; the dense oracle checks attention in each step. Its row is like any other
    once it is released."""
    tiers, policy = POLICIES[name]
    manager = make_manager(make_format(tiers), policy=policy, high_rows=True)
    manager.prompts.share_min_tokens = share_min
    session = Session(manager, spread=3.0)
    manager.high.keep(1)
    session.extend({1: 40, 2: 40})
    for row in (1, 2):
        session.end_prompt(row)
    assert manager.prompts.outcomes == {"compressed": 1, "as computed": 1}
    for _ in range(STEPS):
        session.step([1, 2])
    check(manager)
    assert not tiers_of(session, 1).any()
    assert tiers_of(session, 2)[:, :, :-8].any(), "the other row is not compressed"
    alone = make_manager(make_format(tiers), policy=policy)
    other = Session(alone, spread=3.0)
    alone.prompts.share_min_tokens = share_min
    other.extend({1: 40, 2: 40}, check=False)
    for row in (1, 2):
        other.end_prompt(row)
    for _ in range(STEPS):
        other.step([1, 2], check=False)
    assert np.array_equal(tiers_of(other, 2), tiers_of(session, 2)), "the other row is compressed as ever"
    session.release(1)
    check(manager)
    assert len(manager.high) == 0
    session.extend({1: 40}, check=False)
    session.end_prompt(1)
    assert tiers_of(session, 1).any()


def test_pressure_passes_it_by() -> None:
    policy = diffkv_policy(50.0, 0.0, window=40, pressure_window=8)
    manager = make_manager(policy=policy, pages=900, high_rows=True)
    session = Session(manager)
    manager.high.keep(1)
    session.extend({1: 30, 2: 30})
    for row in (1, 2):
        session.end_prompt(row)
    for _ in range(8 + LEAST_GROWTH):
        session.step([1, 2], check=False)
    assert manager.pressure is not None and manager.pressure.relieve([1, 2]) == [2]
    assert not tiers_of(session, 1).any()
    check(manager)


def test_chunks_are_not_compacted() -> None:
    manager = make_manager(policy=diffkv_policy(50.0, 0.0, window=8), high_rows=True)
    session = Session(manager)
    manager.high.keep(1)
    session.extend({1: 40, 2: 40})
    manager.prompts.end_chunk(1, 2)
    assert not tiers_of(session, 1).any() and tiers_of(session, 2).any()
    assert manager.rows.as_computed(1) and not manager.rows.as_computed(2)


def test_what_leaves_a_sliding_window_goes_all_the_same() -> None:
    """Of the layer that sees all, everything stays; of the other one what it can see."""
    span = 6
    policy = diffkv_policy(1e9, 0.0, window=8)
    manager = make_manager(policy=policy, pages=900, high_rows=True, attention_spans=(0, span))
    session, kept = Session(manager), retained_tokens(span)
    manager.high.keep(1)
    session.extend({1: 90, 2: 90}, check=False, scores=False)
    for row in (1, 2):
        session.end_prompt(row)
    wide, narrow = tiers_of(session, 1)
    assert not wide.any() and (narrow[:, :-kept] == len(manager.fmt.tiers)).all() and not narrow[:, -kept:].any()
    wide, narrow = tiers_of(session, 2)
    assert (wide[:, :-8] == 1).all() and (narrow[:, :-kept] == len(manager.fmt.tiers)).all()
    check(manager)


def test_what_it_takes_counts_as_such() -> None:
    """The growth estimate is that of the others, and its own growth all there is."""
    manager = make_manager(policy=diffkv_policy(50.0, 0.0, window=8), pages=1200, high_rows=True)
    session, ledger = Session(manager), PageLedger(manager, 2000)
    manager.high.keep(1)
    session.extend({1: 300}, check=False)
    session.end_prompt(1)
    session.step([1], check=False)
    manager.counts.settle()
    assert ledger.growth_estimate() == 1.0, "nothing is known of the others"
    session.extend({2: 300, 3: 300}, check=False)
    for row in (2, 3):
        session.end_prompt(row)
    session.step([1, 2, 3], check=False)
    manager.counts.settle()
    price = ledger.growth_estimate()
    assert price < 0.7
    assert ledger.growth_of(1, 100) == ledger.whole_growth(300, 100) == 100 > ledger.growth_of(2, 100)
    expected = [Expected(1, 100.0), Expected(2, 50.0), Expected(3, 50.0)]
    assert ledger.growth_of_all(expected) == pytest.approx(sum(ledger.growth_of(*x) for x in expected))


def test_where_no_row_may_keep_all() -> None:
    """Where it was not asked for, where nothing is compressed, and where requests hold budgets."""
    assert not make_manager(policy=POLICIES["window alone"][1]).high.allowed
    zipage = make_manager(make_format(ONE), policy=zipage_policy(60, 40, window=8), high_rows=True, max_tokens=200)
    assert not zipage.high.allowed
    with pytest.raises(AssertionError, match="compresses every request"):
        zipage.high.keep(1)


def test_a_broken_mark_is_found() -> None:
    manager = make_manager(policy=POLICIES["window alone"][1], high_rows=True)
    manager.high.keep(3)
    check_integrity(manager)
    manager.state.row_sign[2] = -1
    with pytest.raises(AssertionError, match="on the device"):
        check_integrity(manager)
