"""The growth estimate against what requests really take, and against itself."""

from __future__ import annotations

import random

import pytest

from sglang_diffkv.layout.spans import retained_tokens
from sglang_diffkv.mem_pool.growth import GROWTH_MARGIN, Expected
from sglang_diffkv.mem_pool.ledger import PageLedger
from sglang_diffkv.policies.base import Policy
from tests.dense import Session
from tests.helpers import make_format, make_manager
from tests.policies import ONE, PAIR, THREE, diffkv_policy


def taken(session: Session, row: int) -> float:
    manager = session.manager
    return manager.device.pages_of(row) * manager.fmt.high.tokens / manager.geometry.heads


def session_of(policy: Policy, tiers: tuple[str, ...] = PAIR, **given: object) -> tuple[Session, PageLedger]:
    manager = make_manager(make_format(tiers), policy=policy, pages=1400, **given)
    return Session(manager), PageLedger(manager, 2000)


def test_behind_a_compression_under_pressure_windows_fill_up_whole() -> None:
    """What leaves a window then is compressed already."""
    session, ledger = session_of(diffkv_policy(1e9, 0.0, window=96, pressure_window=8))
    session.extend({1: 500, 2: 500}, check=False)
    for row in (1, 2):
        session.end_prompt(row)
    for _ in range(100):
        session.step([1, 2], check=False)
    assert session.manager.pressure is not None and session.manager.pressure.relieve([1]) == [1]
    session.manager.counts.settle()
    before, page = taken(session, 1), session.manager.fmt.high.tokens
    expected = {more: ledger.growth_of(1, more) for more in (40, 88, 160)}
    assert expected[160] == pytest.approx(ledger.growth_of_all([Expected(1, 160)]))
    session.manager.counts.pages[[1, 2]] += 4 * session.manager.geometry.heads
    session.manager.counts.tick += 1
    inside, held = 8 + 96, taken(session, 1) + taken(session, 2) + 2 * (4 - 1) * page
    assert ledger.growth_estimate() == pytest.approx(GROWTH_MARGIN * (held - inside) / (1200 - inside)), "what is there"
    session.manager.counts.pages[[1, 2]] -= 4 * session.manager.geometry.heads
    for step in range(1, 161):
        session.step([1, 2], check=False)
        if step in expected:
            assert abs(expected[step] - (taken(session, 1) - before)) <= page + 0.1 * step, step


@pytest.mark.parametrize("tail", [0, 96])
def test_a_window_within_frozen_pages_fills_up_whole(tail: int) -> None:
    """Where a prompt joins the prefix cache as a whole, what leaves the window cannot go down."""
    session, ledger = session_of(diffkv_policy(1e9, 0.0, window=96))
    session.manager.prompts.freeze_from(64, tail)
    session.extend({1: 130 + 3 * tail, 2: 700}, check=False)
    for row in (1, 2):
        session.end_prompt(row)
    session.step([1, 2], check=False)
    session.manager.counts.settle()
    before, page = taken(session, 1), session.manager.fmt.high.tokens
    expected = {more: ledger.growth_of(1, more) for more in (60, 95, 160)}
    for step in range(1, 161):
        session.step([1, 2], check=False)
        if step in expected:
            assert abs(expected[step] - (taken(session, 1) - before)) <= page + 0.1 * step, step


@pytest.mark.parametrize(("window", "chunk"), [(96, 64), (64, 96), (96, 96)])
def test_a_chunk_comes_beside_the_window_of_those_before_it(window: int, chunk: int) -> None:
    session, ledger = session_of(diffkv_policy(1e9, 0.0, window=window))
    manager, most = session.manager, 0.0
    for last in (False,) * 5 + (True,):
        session.extend({1: chunk}, check=False)
        most = max(most, taken(session, 1))
        if not last:
            manager.prompts.end_chunk(1)
    session.end_prompt(1)
    manager.counts.settle()
    high, low = manager.fmt.layouts
    ledger._estimate = GROWTH_MARGIN * high.tokens / low.tokens
    ledger._estimated_at = (manager.counts.tick, manager.counts.counted_step)
    assert most <= ledger.compacting_tokens(6 * chunk, chunk) < 6 * chunk


def test_a_window_within_what_segments_hold_fills_up_whole() -> None:
    session, ledger = session_of(diffkv_policy(1e9, 0.0, window=96))
    session.extend({1: 700}, check=False)
    session.end_prompt(1)
    session.manager.counts.settle()
    price = ledger.growth_estimate()
    assert price < 1 and ledger.growth_of(1, 80) == pytest.approx(80 * price)
    session.manager.rows.share(1, 670)
    waiting = ledger.growth(700, 80, closed=670)  # of a request that would have the same
    for growth in (ledger.growth_of(1, 80), ledger.growth_of_all([Expected(1, 80)]), waiting):
        assert growth == pytest.approx(66 + 14 * price)


def test_tokens_that_sliding_layers_hold_are_those_that_tell() -> None:
    """Behind the window, one of two layers holds nothing."""
    session, ledger = session_of(diffkv_policy(1e9, 0.0, window=64), attention_spans=(0, 20))
    session.extend({1: 900}, check=False, scores=False)
    session.end_prompt(1)
    session.manager.counts.settle()
    inside, behind = (64 + retained_tokens(20)) / 2, (900 - 64) / 2
    page = session.manager.fmt.high.tokens
    session.manager.counts.pages[1] += 2 * session.manager.geometry.heads
    expected = GROWTH_MARGIN * (taken(session, 1) + (2 - 1) * page - inside) / behind
    assert ledger.growth_estimate() == 1.0, "too few tokens: nothing is known yet"
    assert ledger.growth_of(1, 100) == pytest.approx(50 * expected) and expected < 0.8


def test_part_filled_pages_do_not_grow() -> None:
    """A row has one of each tier, and two where the first tokens' pages are closed to it."""
    session, ledger = session_of(diffkv_policy(1e9, 0.0, window=96))
    session.extend({1: 700, 2: 700}, check=False)
    for row in (1, 2):
        session.end_prompt(row)
    manager, page = session.manager, session.manager.fmt.high.tokens
    manager.counts.settle()
    manager.rows.share(2, 500)
    manager.counts.pages[[1, 2]] += 4 * manager.geometry.heads
    alone, behind = (taken(session, row) + (4 - parts) * page - 96 for row, parts in ((1, 1), (2, 2)))
    assert ledger.growth_estimate() == pytest.approx(GROWTH_MARGIN * (alone + behind) / (2 * 604))
    for row, found in ((1, alone), (2, behind)):
        expected = Expected(row, 100.0)
        assert ledger.growth_of(*expected) == pytest.approx(100 * GROWTH_MARGIN * found / 604)
        assert ledger.growth_of_all([expected]) == pytest.approx(ledger.growth_of(*expected))


@pytest.mark.parametrize("length", [200, 60])
def test_what_is_certain_to_come_is_reserved_without_what_pressure_gives_back(length: int) -> None:
    """A request that is compressed under pressure at its end holds as much as was reserved for it."""
    session, ledger = session_of(diffkv_policy(1e9, 0.0, window=96, pressure_window=8))
    session.extend({1: length, 2: 700}, check=False)
    for row in (1, 2):
        session.end_prompt(row)
    session.step([1, 2], check=False)
    session.manager.counts.settle()
    more, before, page = 220, taken(session, 1), session.manager.fmt.high.tokens
    usual, certain = (ledger.growth_of(1, more, known) for known in (False, True))
    assert ledger.growth(length + 1, more, certain=True) == pytest.approx(certain, rel=0.1)
    assert certain == pytest.approx(ledger.growth_of_all([Expected(1, more, certain=True)]))
    price = ledger.growth_estimate()
    assert usual - certain == pytest.approx((96 - 8) * (1 - price), abs=0.1 * more)
    assert ledger.growth_of(1, 10, certain=True) == 0.0 if length == 200 else ledger.growth_of(1, 10) > 0
    for _ in range(more):
        session.step([1, 2], check=False)
    session.manager.counts.settle()
    assert abs(taken(session, 1) - before - usual) <= page + 0.1 * more
    assert session.manager.pressure is not None and session.manager.pressure.relieve([1]) == [1]
    session.manager.counts.settle()
    assert abs(taken(session, 1) - before - certain) <= 2 * page + 0.1 * more


def test_what_sliding_layers_have_dropped_of_a_window_is_not_given_back() -> None:
    """One of two layers holds the newest tokens alone: of them, those in the smaller window stay."""
    policy = diffkv_policy(1e9, 0.0, window=96, pressure_window=8)
    session, ledger = session_of(policy, attention_spans=(0, 20))
    session.extend({1: 400, 2: 900}, check=False, scores=False)
    for row in (1, 2):
        session.end_prompt(row)
    session.manager.counts.settle()
    ledger._estimate = 0.5
    ledger._estimated_at = (session.manager.counts.tick, session.manager.counts.counted_step)
    given_back = (96 - 8 + retained_tokens(20) - 8) / 2
    usual, certain = (ledger.growth(400, 300, certain=known) for known in (False, True))
    assert usual - certain == pytest.approx(given_back * 0.5)


def test_what_pressure_does_not_compress_is_reserved() -> None:
    """A request that ends before it has grown enough for that, since it began or since it was compressed so."""
    session, ledger = session_of(diffkv_policy(1e9, 0.0, window=96, pressure_window=8))
    session.extend({1: 20, 2: 700}, check=False)
    for row in (1, 2):
        session.end_prompt(row)
    session.step([1, 2], check=False)
    session.manager.counts.settle()
    pressure = session.manager.pressure
    assert pressure is not None and ledger.growth_estimate() < 1
    least = pressure.rule.window + pressure.least_growth

    def given_back(row: int, more: int) -> list[bool]:
        certain, usual = Expected(row, more, certain=True), Expected(row, more)
        one = ledger.growth_of(*certain) < ledger.growth_of(*usual)
        return [one, ledger.growth_of_all([certain]) < ledger.growth_of_all([usual])]

    for more, given in ((least - 22, False), (least - 21, True)):
        assert given_back(1, more) == [given] * 2
        assert bool(ledger.growth(21, more, certain=True) < ledger.growth(21, more)) == given
    assert pressure.relieve([2]) == [2]
    session.manager.counts.settle()
    assert given_back(2, least - 1) == [False] * 2 and given_back(2, least) == [True] * 2


def test_a_window_of_its_own_is_not_given_back() -> None:
    """Pressure leaves it, so all that comes is reserved."""
    policy = diffkv_policy(1e9, 0.0, window=96, pressure_window=8)
    session, ledger = session_of(policy, rows=4, most_window=96)
    session.manager.windows.keep(1, 40)
    session.extend({1: 300, 2: 700}, check=False)
    for row in (1, 2):
        session.end_prompt(row)
    session.manager.counts.settle()
    for row, given in ((1, False), (2, True)):
        certain, usual = Expected(row, 200, certain=True), Expected(row, 200)
        assert bool(ledger.growth_of(*certain) < ledger.growth_of(*usual)) == given
        assert bool(ledger.growth_of_all([certain]) < ledger.growth_of_all([usual])) == given


RULES: dict[str, tuple[Policy, tuple[str, ...], dict[str, object]]] = {
    "window alone": (diffkv_policy(1e9, 0.0, window=24, pressure_window=8), PAIR, {}),
    "sliding": (diffkv_policy(1e9, 0.0, window=24), PAIR, {"attention_spans": (0, 20)}),
    "pruning": (diffkv_policy(2.0, 0.9, window=8, sinks=2), PAIR, {}),
    "scores": (diffkv_policy(1.0, 0.0, window=24, sinks=4), PAIR, {}),
    "one tier": (diffkv_policy(1.0, 1.0, window=8), ONE, {}),
    "three tiers": (diffkv_policy(2.0, 0.0, window=8, alpha_between=(1.0,)), THREE, {}),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", RULES)
def test_what_all_take_is_what_each_takes_whatever_they_are(name: str, seed: int) -> None:
    """Rows in and past their prompts, high ones, own windows, frozen ones, compressed ones, and no row."""
    policy, tiers, given = RULES[name]
    session, ledger = session_of(policy, tiers, rows=12, high_rows=True, most_window=64, **given)
    manager, drawn, ledger._estimate = session.manager, random.Random(seed), 0.6
    manager.prompts.freeze_from(30, drawn.choice((0, policy.window)))
    sliding = "attention_spans" in given
    manager.high.keep(1)
    if not sliding:
        manager.high.keep(9)
    manager.windows.keep(2, 60)
    manager.windows.keep(3, 5)
    lengths = {row: drawn.choice((3, 20, 60, 290, 330)) for row in range(1, 8)}
    session.extend(lengths, check=False, scores=not sliding)
    past = [row for row in lengths if row != 5]
    for row in past:
        session.end_prompt(row)
    for _ in range(3):
        session.step(past, check=False)
    if manager.pressure is not None:
        manager.pressure.relieve(past)
    if drawn.random() < 0.5:
        manager.counts.settle()
    tokens = lambda: drawn.choice((0.0, 0.5, 7.0, 90.0))  # noqa: E731
    wanted = [Expected(row, tokens(), drawn.random() < 0.5) for row in (*lengths, 8, 9, None)]
    for expected in (wanted, wanted[:1], wanted[-3:], []):
        found, each = ledger.growth_of_all(expected), [ledger.growth_of(*x) for x in expected]
        assert found == pytest.approx(sum(each))
        assert all(0 <= found <= x.tokens for found, x in zip(each, expected, strict=True))
