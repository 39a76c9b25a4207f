"""Chats of short turns: the prefix cache holds little more pages than their tokens need, and gives them back whole."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_diffkv.srt.tree import path_joining
from sglang_diffkv.srt.tree.path_joining import (
    LEAST_WASTE,
    MOST_PARTS,
    MOST_POSTPONED,
    PATHS_A_STEP,
    ROOM,
    ROOMY_WASTE,
    SHARE_A_STEP,
    WASTE,
)
from tests.tree.tree_world import World


class Ended:
    """A node where a request ended."""

    segment, parent = "one", None
    children: ClassVar[dict[int, object]] = {}


MOST_WASTE = 1.3
"""Pages that the prefix cache holds over those that its tokens need."""


def turn(world: World, history: list[int], new: int = 1, reply: int = 1) -> Any:
    """A quarter of a page: the chat's next turn: its request, which still runs. ``history`` grows by both."""
    history += world.tokens(new)
    req = world.prompt(list(history))
    for _ in range(reply):
        world.decode(req)
    history += [5] * reply
    return req


def end(world: World, req: Any) -> None:
    """The request ends, and the scheduler comes round."""
    world.leave(req)
    world.requests.scheduling_begins([])
    world.check()


@pytest.fixture(params=[True, False], ids=["exact", "compressed"])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Segments of their own for each turn would need 100 rows and as many pages. No pool counts as one with room."""
    monkeypatch.setattr(path_joining, "ROOM", 2)
    yield World(400, longest=300, exact=request.param, segments=40, share_min=4)


def test_short_turns_take_the_pages_of_their_tokens(world: World) -> None:
    history: list[int] = []
    for number in range(60):
        end(world, turn(world, history))
        report = world.tree.report()
        assert report["pages"] <= MOST_WASTE * report["pages_needed"] + 1, (number, report)
        assert len(world.segments()) <= 8
    assert len(history) == 120
    found = world.admit(list(history) + [7])
    assert found.prefix_len == len(history)
    world.attach(found)
    world.plan(found)
    world.launch(found)
    world.leave(found, insert=False)


def test_many_chats_in_turns_of_random_lengths(world: World) -> None:
    chats: list[list[int]] = [[] for _ in range(4)]
    source = random.Random(3)
    for _ in range(60):
        history = source.choice(chats)
        if len(history) < 90:
            end(world, turn(world, history, source.randrange(1, 9), source.randrange(1, 5)))
    world.manager.counts.settle()
    report = world.tree.report()
    assert report["pages"] == world.tree.ledger.tree_pages
    assert report["pages_over_needed"] <= MOST_WASTE, report


def test_replies_that_the_next_turn_leaves_out(world: World) -> None:
    """As where a chat's template drops what a model thought: each turn branches off before the reply of the last."""
    history: list[int] = []
    for number in range(60):
        req = turn(world, history)
        history[-1:] = []
        end(world, req)
        world.requests.scheduling_begins([])
        report = world.tree.report()
        assert report["pages"] <= MOST_WASTE * report["pages_needed"] + 2, (number, report)
    assert len(history) == 60
    found = world.admit([*history, 7])
    assert found.prefix_len == 60
    world.attach(found)
    world.plan(found)
    world.launch(found)
    world.leave(found, insert=False)


def test_a_reply_that_is_worth_a_page_is_kept() -> None:
    world = World(600, longest=400, exact=False, segments=40, share_min=4)
    history: list[int] = []
    for _ in range(12):
        said = list(history)
        end(world, turn(world, said, new=1, reply=12))
        history = said[:-12]
    assert len(world.tree.evictable_leaves) == 12, "no reply was given up"


def test_what_others_read_is_left(world: World) -> None:
    """Joining it would return nothing before they end; with the last of them it is joined."""
    history: list[int] = []
    for _ in range(3):
        end(world, turn(world, history))
    reader = world.prompt(list(history) + world.tokens(2))
    before = world.tree.joiner.joined
    one = turn(world, history)
    two = turn(world, history)
    end(world, one)
    end(world, two)
    locked = {x.segment for x in world.tree.nodes(reader.last_node)}
    assert locked <= world.manager.segments.cached
    end(world, reader)
    assert world.tree.joiner.joined > before
    assert world.tree.report()["pages_over_needed"] <= MOST_WASTE + 0.5  # two short ends branch off


def test_copies_are_bounded_by_what_they_return(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    segments, copied = world.manager.segments, [0.0, 0.0]
    join = segments.join

    def counting(parts: Any, settling: Any) -> Any:
        needed = segments.needed_pages(segments.held(parts))
        copied[0] += needed
        copied[1] += sum(segment.pages for segment, _, _ in parts) - needed
        return join(parts, settling)

    monkeypatch.setattr(segments, "join", counting)
    history: list[int] = []
    for _ in range(40):
        end(world, turn(world, history))
    assert copied[0] > 0
    assert copied[0] * (WASTE - 1) <= copied[1]


def test_a_long_start_is_not_copied_for_short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(800, longest=500, exact=False, segments=40, share_min=4)
    history = world.tokens(250)
    end(world, turn(world, history))
    longest = []
    join = world.manager.segments.join
    monkeypatch.setattr(
        world.manager.segments, "join", lambda parts, _: (longest.append(parts[-1][2] - parts[0][1]), join(parts))[1]
    )
    for _ in range(25):
        end(world, turn(world, history))
    assert longest and max(longest) < 100
    report = world.tree.report()
    assert report["pages_over_needed"] <= MOST_WASTE, report


def test_a_joined_chat_is_evicted_without_a_wait_for_each_turn(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    history: list[int] = []
    for _ in range(20):
        end(world, turn(world, history))
    running = world.prompt(world.tokens(20))  # where nothing runs, nobody minds waiting
    counts, waits = world.manager.counts, []
    counts.settle()
    settle = counts.settle
    monkeypatch.setattr(counts, "settle", lambda: (waits.append(1), settle())[1])
    world.tree.evict(EvictParams(num_tokens=world.tree.ledger.capacity))
    assert sum(x.hi - x.lo for x in world.segments()) <= 20
    assert len(waits) <= 3, "one for each turn would stop a running server at each"
    world.leave(running, insert=False)


def test_evicting_a_part_keeps_the_start_of_the_chat(world: World) -> None:
    history: list[int] = []
    for _ in range(50):
        end(world, turn(world, history))
    world.manager.counts.settle()
    world.tree.evict(EvictParams(num_tokens=24))
    world.check()
    found = world.admit(list(history))
    assert 20 <= found.prefix_len < 99
    world.attach(found)
    world.plan(found)
    world.launch(found)
    world.leave(found, insert=False)


def test_no_more_is_evicted_than_joining_returns() -> None:
    """In a full pool others lose at most what the chat gives back."""
    world = World(300, longest=280, exact=False, segments=40, share_min=4)
    others = [world.tokens(40) for _ in range(5)]
    for tokens in others:
        end(world, world.prompt(list(tokens)))
    history: list[int] = []
    for _ in range(12):
        end(world, turn(world, history))
        world.manager.counts.settle()
        before = world.allocator.ledger.available()
        world.requests.scheduling_begins([])
        world.manager.counts.settle()
        assert world.allocator.ledger.available() >= before


def test_newest_turns_of_sliding_models_stay_ends_of_matches() -> None:
    """A sliding layer holds the end of each segment, so a prompt that is asked again is found there."""
    world = World(600, longest=400, exact=False, segments=60, share_min=4, attention_spans=(6,))
    history: list[int] = []
    for _ in range(20):
        asked = list(history) + world.tokens(6)
        req = world.prompt(list(asked))
        for _ in range(3):
            world.decode(req)
        history = asked + [5] * 3
        end(world, req)
    assert world.tree.joiner.joined
    again = world.admit(asked)
    assert again.prefix_len >= len(asked) - 8
    _run(world, again)


def _run(world: World, req: Any) -> None:
    """The request that was admitted runs to its end."""
    world.attach(req)
    world.plan(req)
    world.launch(req)
    world.leave(req, insert=False)


def test_siblings_in_sliding_models_are_found_as_before() -> None:
    """Where a path branches off, and behind the first prompt, a match ends as it did before the other chat's turns."""
    world = World(900, longest=400, exact=False, segments=90, share_min=4, attention_spans=(20,))
    system = world.tokens(60)
    first = list(system)
    end(world, world.prompt(list(first)))
    for _ in range(4):
        end(world, turn(world, first, new=6, reply=3))
    second = list(first)
    end(world, turn(world, second, new=6, reply=3))
    found = world.admit([*second, 7])
    assert found.prefix_len == len(second)
    _run(world, found)
    for _ in range(15):
        end(world, turn(world, first, new=6, reply=3))
    assert world.tree.joiner.joined
    for tokens in (second, system):
        found = world.admit([*tokens, 7])
        assert found.prefix_len == len(tokens)
        _run(world, found)


@pytest.mark.parametrize("slots", [False, True], ids=["pages", "KV slots"])
def test_of_a_joined_chat_no_more_is_evicted_than_is_needed(world: World, slots: bool) -> None:
    """Also where its pages are not counted yet."""
    history: list[int] = []
    for _ in range(50):
        end(world, turn(world, history))
    node = world.admit(list(history))
    _run(world, node)
    ledger = world.tree.ledger
    if slots:
        world.tree.make_kv_slots(ledger.uncommitted_kv_slots() + 1)
    else:
        for segment in world.segments():
            world.tree.uncount(segment)
            segment.pages = 0
            world.manager.counts.count_later(segment)
        world.tree.evict(EvictParams(num_tokens=1))
    assert sum(x.hi - x.lo for x in world.segments()) >= 60
    world.check()


def test_long_paths_are_looked_at_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many segments that waste nothing, each run is judged in a few operations."""
    world = World(3000, longest=2900, exact=False, segments=80, share_min=4)
    history: list[int] = []
    for _ in range(70):
        end(world, turn(world, history, new=24, reply=16))
    scored = []
    gain = world.tree.joiner._gain
    monkeypatch.setattr(world.tree.joiner, "_gain", lambda *args, **kw: (scored.append(1), gain(*args, **kw))[1])
    end(world, turn(world, history, new=24, reply=16))
    assert len(scored) < 3 * MOST_PARTS * MOST_PARTS / 2


def test_few_paths_are_joined_at_a_time_and_none_waits_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests end in each step, the paths that wait are bounded by them."""
    joiner = World(400, exact=False).tree.joiner
    looked: list[Any] = []
    monkeypatch.setattr(joiner, "_tidy", lambda node: looked.append(node) or True)
    ended = [Ended() for _ in range(12 * 60)]
    for step in range(60):
        for node in ended[12 * step : 12 * step + 12]:
            joiner.look_at(node)
        joiner.scheduling_begins()
        assert len(joiner.ended) <= 12 * SHARE_A_STEP
    assert PATHS_A_STEP * 60 < len(looked) < len(ended), "some waited"
    while joiner.ended:
        joiner.scheduling_begins()
    assert looked == ended, "first come, first served"


def test_a_pool_with_room_joins_fewer_times() -> None:
    """A path wastes a few more pages of each head there, and fewer once the pool is full."""
    world = World(2000, longest=300, exact=False, segments=100, share_min=4)
    history: list[int] = []
    wasted = []
    for _ in range(40):
        end(world, turn(world, history))
        report = world.tree.report()
        wasted.append((report["pages"] - report["pages_needed"]) / world.manager.geometry.heads)
    few = world.tree.joiner.joined
    assert LEAST_WASTE + 1 < max(wasted) <= max(ROOMY_WASTE, (WASTE - 1) * len(history) / 4) + 2
    assert 0 < few < 20
    ledger = world.allocator.ledger
    ledger.promise("other", int(ledger.available() * (1 - ROOM / 2)))
    for _ in range(4):
        end(world, turn(world, history))
    report = world.tree.report()
    assert report["pages"] <= MOST_WASTE * report["pages_needed"] + 1
    ledger.forget("other")
    world.check()


def chats_that_were_spared() -> World:
    """Six chats that have ended, in a pool with room."""
    world = World(3000, longest=300, exact=False, segments=200, share_min=4)
    for _ in range(6):
        history: list[int] = []
        for _ in range(7):
            end(world, turn(world, history, new=2))
    return world


def check_spared_once_full(world: World) -> None:
    """What the chats waste is given back, a few of them before each step, once the pool has no room any more."""
    report = world.tree.report()
    assert report["pages"] > 1.5 * report["pages_needed"]
    ledger = world.allocator.ledger
    ledger.promise("other", int(ledger.available() * (1 - ROOM / 2)))
    for _ in range(12):
        world.requests.scheduling_begins([])
        world.manager.counts.settle()
    report = world.tree.report()
    assert report["pages"] <= MOST_WASTE * report["pages_needed"] + 6 and not world.tree.joiner._spared
    ledger.forget("other")
    world.check()


def test_paths_that_were_spared_are_looked_at_once_the_pool_is_full() -> None:
    """Those of chats that do not go on too."""
    check_spared_once_full(chats_that_were_spared())


def test_of_spared_paths_what_is_left_is_looked_at() -> None:
    """Each stands there once, and where its end was evicted, what is before that is joined."""
    world = chats_that_were_spared()
    spared = world.tree.joiner._spared
    assert len(spared) == 6 and not any(node.children for node in spared)
    for node in list(spared):
        world.tree.evict_nodes([node])
    world.manager.counts.settle()
    check_spared_once_full(world)


def test_spared_paths_that_are_gone_take_no_step() -> None:
    world = World(3000, longest=300, exact=False, segments=200, share_min=4)
    for _ in range(6):
        end(world, turn(world, []))
    world.tree.evict(EvictParams(num_tokens=world.tree.ledger.capacity))
    world.manager.counts.settle()
    ledger, joiner = world.allocator.ledger, world.tree.joiner
    assert len(joiner._spared) == 6
    ledger.promise("other", int(ledger.available() * (1 - ROOM / 2)))
    world.requests.scheduling_begins([])
    assert not joiner._spared and not joiner.ended
    ledger.forget("other")


def test_few_paths_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_joining, "MOST_SPARED", 5)
    world = World(3000, longest=300, exact=False, segments=200, share_min=4)
    for _ in range(8):
        end(world, turn(world, []))
    assert len(world.tree.joiner._spared) == 5
    world.tree.reset()
    assert not world.tree.joiner._spared


def test_paths_wait_while_a_request_waits_to_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where the pool is full, nor where many have come together."""
    joiner = World(400, exact=False).tree.joiner
    looked: list[Any] = []
    monkeypatch.setattr(joiner, "_tidy", lambda node: looked.append(node) or True)
    joiner.look_at(Ended())
    for _ in range(3):
        joiner.queue_seen([Mock()])
        joiner.scheduling_begins()
    assert not looked and len(joiner.ended) == 1
    joiner.queue_seen([])
    joiner.scheduling_begins()
    assert len(looked) == 1 and not joiner.ended
    for _ in range(MOST_POSTPONED):
        joiner.look_at(Ended())
    joiner.queue_seen([Mock()])
    joiner.scheduling_begins()
    assert len(joiner.ended) < MOST_POSTPONED and len(looked) > 1
    monkeypatch.setattr(path_joining, "ROOM", 2)
    before = len(looked)
    joiner.scheduling_begins()
    assert len(joiner.ended) + len({*looked}) == MOST_POSTPONED + 1 and len(looked) > before


@pytest.mark.parametrize("queued", [False, True])
def test_a_pool_without_rows_for_segments_has_no_room(queued: bool) -> None:
    """Pages are left there, but small segments would take the rows of others, which would be evicted for them."""
    world = World(4000, longest=300, exact=False, segments=125, share_min=4)  # as many as for a server of that size
    chats: list[list[int]] = [[] for _ in range(40)]
    for history in chats:
        for _ in range(10):
            world.leave(turn(world, history, new=2))
            world.requests.scheduling_begins([Mock()] if queued else [])
    world.manager.counts.settle()
    assert world.manager.counts.free() > world.manager.geometry.num_pages / 2
    assert [world.admit([*history, 7]).prefix_len for history in chats[::6]] == [30] * 7


@pytest.mark.parametrize("what", ["pages", "table blocks"])
def test_a_pool_has_room_where_a_part_of_it_is_free(what: str) -> None:
    world = World(400, exact=False)
    ledger, joiner, geometry = world.allocator.ledger, world.tree.joiner, world.manager.geometry
    pages = what == "pages"
    every = geometry.num_pages if pages else world.manager.space.num_blocks
    for taken, roomy in ((int(every * (1 - ROOM)) - 1, True), (int(every * (1 - ROOM)) + 1, False)):
        ledger.set_aside("other", taken if pages else 0, 0 if pages else taken)
        assert joiner._is_roomy() is roomy
