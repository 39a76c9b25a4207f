"""Prefixes that requests ask to keep: random lives, and what each rule is for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from sglang_diffkv.errors import UnsupportedError
from sglang_diffkv.layout.ranks import Ranks
from sglang_diffkv.srt.startup.validation import check_server_args
from sglang_diffkv.srt.tree import kept_prefixes
from sglang_diffkv.srt.tree.kept_prefixes import KeptPrefixes
from sglang_diffkv.srt.versions import compat
from tests.servers.test_server_flags import _args
from tests.tree.test_fidelity import asked, fidelity_of
from tests.tree.test_prefix_cache import TreeMachine, machine_settings
from tests.tree.test_session_refs import left, make_room, refs_of
from tests.tree.tree_world import World


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(kept_prefixes, "time", found)
    return found


def kept_of(tree: Any) -> KeptPrefixes:
    assert isinstance(tree.kept, KeptPrefixes)
    return tree.kept


class KeepMachine(TreeMachine):
    """Requests that keep what they leave, and others, with sessions between."""

    keeps = sessions = True

    def admit_matched(self, req: Any, match: Any) -> bool:
        req.session_id = self.random.choice(["a", None])
        if req.session_id is not None:
            req.session_generation = self.tree.ensure_session_generation(req.session_id)
        req.diffkv_keep = self.random.choice([0, 5, 5000])
        return super().admit_matched(req, match)

    @rule(past=st.booleans())
    def time_passes(self, past: bool) -> None:
        if past:
            for keep in list(kept_of(self.tree).kept):
                object.__setattr__(keep, "until", keep.until - 2500)
        self.requests.scheduling_begins(self.running)
        assert not past or all(keep.tokens for keep in kept_of(self.tree).kept)

    @invariant()
    def keeps_what_it_says(self) -> None:
        kept_of(self.tree).check_integrity()


KeepMachine.TestCase.settings = machine_settings(50)
TestKeep = KeepMachine.TestCase


def told(world: World, tokens: list[int], keep: int = 0, **named: Any) -> list[int]:
    """A request that has ended."""
    req = world.prompt(list(tokens), **named)
    req.diffkv_keep = keep
    world.leave(req)
    return tokens


@pytest.fixture
def world(clock: Clock) -> World:
    return World(2000, keeps=True)


def test_what_is_kept_goes_last_until_its_time_is_over(world: World, clock: Clock) -> None:
    kept = told(world, world.tokens(100), 60)
    other = told(world, world.tokens(100))
    make_room(world, 80)
    assert left(world) == {kept[0], other[0]} and len(world.leaf(kept).key) == 100 > len(world.leaf(other).key)
    make_room(world, 50)
    assert left(world) == {kept[0]} and len(world.leaf(kept).key) < 100, "it is no lock: running requests come first"
    newer = told(world, world.tokens(100))
    clock.now += 59
    world.requests.scheduling_begins([])
    assert kept_of(world.tree).counts["over"] == 0
    clock.now += 2
    world.requests.scheduling_begins([])
    assert kept_of(world.tree).counts["over"] == 1 and not list(refs_of(world.tree).names())
    make_room(world, 50)
    assert len(world.leaf(newer).key) == 100, "it keeps its place for ever"


def test_all_that_is_kept_has_half_of_the_pool_at_most(world: World, clock: Clock) -> None:
    """However many ask, and for how long."""
    prompts = [told(world, [1000 + number, *world.tokens(249)], 86_400) for number in range(6)]
    report = kept_of(world.tree).report()["kept"]
    assert report == {
        "granted": 4, "no_room": 2, "over": 0, "prefixes": 4, "tokens": 1000, "tokens_most": 1000,
    }  # fmt: skip
    granted, others = prompts[:4], {prompt[0] for prompt in prompts[4:]}
    while left(world) & others:
        assert [len(world.leaf(prompt).key) for prompt in granted] == [250] * 4, "what was not granted is kept"
        make_room(world, 50)
    clock.now += 86_401
    world.requests.scheduling_begins([])
    told(world, world.tokens(250), 1)
    assert kept_of(world.tree).counts["granted"] == 5 and len(kept_of(world.tree).kept) == 1
    world.tree.reset()
    assert not kept_of(world.tree).kept


def test_the_next_turn_of_a_chat_takes_the_place_of_the_last(world: World) -> None:
    tokens = world.tokens(60)
    for _ in range(8):
        tokens = told(world, [*tokens, *world.tokens(30)], 60)
    kept = kept_of(world.tree)
    assert kept.tokens == len(tokens) and len(kept.kept) == 1 and kept.counts["no_room"] == 0
    told(world, [*tokens[:200], *world.tokens(50)], 60)
    assert len(kept.kept) == 2, "another branch is another prefix"


def test_who_asks_for_less_or_finds_no_room_ends_no_other_time(world: World, clock: Clock) -> None:
    """A prompt that others begin with stays kept, whatever they ask for."""
    stem, kept = told(world, world.tokens(60), 3600), kept_of(world.tree)
    chat = told(world, [*stem, *world.tokens(30)], 5)
    chat = told(world, [*chat, *world.tokens(30)], 5)
    assert [x.tokens for x in kept.kept] == [60, 120], "a chat's next turn takes the place of the last"
    clock.now += 6
    world.requests.scheduling_begins([])
    assert [x.tokens for x in kept.kept] == [60]
    others = [told(world, world.tokens(250), 5) for _ in range(3)]
    told(world, [*stem, *world.tokens(230)], 3600)
    assert kept.counts["no_room"] == 1 and len(kept.kept) == 1 + len(others) and kept.tokens == 60 + 750
    told(world, [*stem, *world.tokens(90)], 3600)
    assert kept.counts["no_room"] == 1 and kept.tokens == 750 + 150


def test_what_was_evicted_all_the_same_is_kept_no_longer(world: World) -> None:
    told(world, world.tokens(100), 60)
    make_room(world, 2000)
    world.requests.scheduling_begins([])
    assert not kept_of(world.tree).kept and not left(world)


def test_ranks_agree_on_whose_time_is_over(world: World, clock: Clock) -> None:
    """Their clocks differ."""
    kept = kept_of(world.tree)
    told(world, world.tokens(100), 60)
    told(world, world.tokens(100), 60)
    kept.ranks = Ranks(2, 0, lambda mine: np.maximum(mine, [0, 1]))
    world.requests.scheduling_begins([])
    assert len(kept.kept) == 1 and kept.counts["over"] == 1


def test_without_the_option_nothing_is_kept() -> None:
    world = World(2000)
    told(world, world.tokens(100), 60)
    assert "kept" not in world.tree.report() and not hasattr(world.tree.root_node, "session_refs")
    assert "kept" in World(2000, keeps=True).tree.report()


def test_a_server_bounds_the_time() -> None:
    world = World(400)
    keep = asked({"diffkv": {"keep": 300}})
    assert 'keeps nothing for requests ("keep_seconds": 0): drop the field' in fidelity_of(world).take(keep)
    fidelity = fidelity_of(world, keep_seconds=299)
    problem = fidelity.take(keep)
    assert problem.startswith(
        "DiffKV: custom_params.diffkv.keep is 300, and this server keeps prefixes for 299 seconds"
    )
    assert compat.keep_seconds(keep) == 0
    assert fidelity_of(world, keep_seconds=300).take(keep) == "" and compat.keep_seconds(keep) == 300
    for wrong in (0, -1, "60", 1.5, True, 86_401):
        assert "allowed is a whole number from 1 to 86,400" in fidelity.take(asked({"diffkv": {"keep": wrong}}))
    with pytest.raises(UnsupportedError, match='"keep_seconds" with --disable-radix-cache'):
        check_server_args(_args(disable_radix_cache=True), fidelity_config(300))
    check_server_args(_args(disable_radix_cache=True), fidelity_config(0))


def fidelity_config(seconds: int) -> Any:
    from sglang_diffkv.config import DiffKVConfig

    return DiffKVConfig(keep_seconds=seconds)
