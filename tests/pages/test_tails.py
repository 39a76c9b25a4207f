"""The end of a frozen prompt that stays its request's own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sglang_diffkv.mem_pool.integrity import check_integrity, check_settled
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.mem_pool.table_space import TableFull
from sglang_diffkv.ops.decisions import tail_tokens
from sglang_diffkv.policies.snapkv import SnapKVPolicyConfig
from sglang_diffkv.policies.uniform import UniformPolicy
from sglang_diffkv.policies.zipage import ZipagePolicyConfig
from tests.checks import check_contents, check_row
from tests.dense import Session
from tests.helpers import make_format, make_manager, tier_map, visible
from tests.policies import diffkv_policy

WINDOW = 9


def begun(tokens: int, *, tail: bool = True, alphas: tuple[float, float] = (1e9, 0.0), pages: int = 600) -> Session:
    """A prompt of row 1 that has ended, and was frozen if it has at least 16 tokens."""
    policy = diffkv_policy(*alphas, WINDOW, sinks=2)
    manager = make_manager(make_format(page_tokens=4), policy=policy, pages=pages)
    manager.prompts.share_min_tokens, manager.prompts.tail = 16, WINDOW if tail else 0
    session = Session(manager, spread=2.0)
    session.extend({1: tokens})
    session.end_prompt(1)
    return session


@pytest.mark.parametrize("alphas", [(1e9, 0.0), (1.0, 0.0), (1.5, 0.4)])
def test_it_goes_down_as_others_follow(alphas: tuple[float, float]) -> None:
    """The frozen part stays as it is; the oracle checks attention and scores in every step."""
    session = begun(41, alphas=alphas)
    state, manager = session.state, session.manager
    assert manager.rows.frozen(1) == 41 - WINDOW and (tier_map(state, 1, 41)[..., -WINDOW:] == 0).all()
    frozen = tier_map(state, 1, 41)[..., : 41 - WINDOW]
    first = session.share(1, 0, 41 - WINDOW)
    assert first is not None
    for _ in range(2 * WINDOW):
        session.step([1])
        check_integrity(manager)
    check_row(session, 1)
    now = tier_map(state, 1, 41 + 2 * WINDOW)
    assert np.array_equal(now[..., : 41 - WINDOW], frozen) and (now[..., -WINDOW:] == 0).all()
    if alphas[0] > 1e6:
        assert (now[..., 41 - WINDOW : -WINDOW] == 1).all()
    second = session.share(1, 41 - WINDOW, 41 + 2 * WINDOW)
    assert second is not None and not session.manager.segments.fragmented
    session.release(1)
    for segment, lo in ((first, 0), (second, 41 - WINDOW)):
        check_contents(manager, visible(state, segment.row), session.shared[segment], lo)
    session.attach(2, [(first, 0, 41 - WINDOW), (second, 41 - WINDOW, 50)])
    session.extend({2: 3})
    check_row(session, 2)
    check_integrity(manager)
    session.release(2)
    for segment in (first, second):
        manager.segments.release(segment)
    manager.counts.settle()
    check_settled(manager)


def test_a_request_holds_fewer_pages() -> None:
    """Once its reply is as long as the window: the frozen tail would have stayed in the high tier."""
    held = {}
    for tail in (False, True):
        session = begun(41, tail=tail)
        assert session.manager.rows.frozen(1) == (41 - WINDOW if tail else 41)
        for _ in range(WINDOW + 3):
            session.step([1])
        held[tail] = session.manager.device.pages_of(1)
    assert held[True] < held[False]


def test_a_prompt_that_would_leave_too_little_is_sealed_whole() -> None:
    for tokens in (15, 16 + WINDOW - 1, 16 + WINDOW):
        frozen = {15: None, 24: 24, 25: 16}[tokens]
        assert begun(tokens).manager.rows.frozen(1) == frozen


@pytest.mark.parametrize("short", ["pages", "table"])
def test_without_room_it_is_sealed_whole(short: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = diffkv_policy(1e9, 0.0, WINDOW)
    manager = make_manager(make_format(page_tokens=4), policy=policy, pages=600)
    manager.prompts.share_min_tokens, manager.prompts.tail = 16, WINDOW
    session = Session(manager, spread=2.0)
    session.extend({1: 41})
    if short == "pages":
        lent = 2 * manager.geometry.heads
        monkeypatch.setattr(manager.counts, "free", lambda: manager.counts.headroom() + lent - 1)
    else:

        def full(row: int, attached: object) -> None:
            raise TableFull(row, "no block is left")

        monkeypatch.setattr(manager.space, "extend", full)
    session.end_prompt(1)
    monkeypatch.undo()
    assert manager.rows.frozen(1) == 41 and not session.state.own_tokens[1].any()
    session.step([1])
    check_integrity(manager)


def test_only_what_goes_down_step_by_step_has_one() -> None:
    state = make_manager().state
    zipage = ZipagePolicyConfig(name="zipage", max_blocks=3).build()
    assert tail_tokens(state, diffkv_policy(1.0, 0.0, 7)) == 7
    assert [tail_tokens(state, policy) for policy in (UniformPolicy(), zipage)] == [0, 0]
    assert tail_tokens(state, SnapKVPolicyConfig(budget=64, window=5).build()) == 0
    sliding = PageManager(replace(make_manager().geometry, attention_spans=(6, 0)), diffkv_policy(1.0, 0.0, 256))
    assert tail_tokens(sliding.state, diffkv_policy(1.0, 0.0, 7)) == 0
