"""States of evicted prefixes in host memory, and what a draft model has of them: random lives, and what each of a few
situations asks for."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, ReqToTokenPool

from sglang_diffkv.layout.ranks import Ranks
from sglang_diffkv.mem_pool.device import Arriving, Beside, PageDevice
from sglang_diffkv.mem_pool.saved_slots import SavedSlots, SlotStore
from sglang_diffkv.srt.tree.host_index import HostNode
from sglang_diffkv.srt.tree.host_tier import SELECTIVE, WRITE_BACK, WRITE_THROUGH, HostTier
from sglang_diffkv.srt.versions.states import state_buffers
from tests.tree.stand_in import Match, StandIn
from tests.tree.test_host_tier import (
    NotYet,
    PrefixesMachine,
    admitted,
    asking,
    evict_all,
    host_of,
    looked_at,
    served,
)
from tests.tree.test_kept_states import SLOTS, StatesMachine, StateWorld, kept
from tests.tree.test_prefix_cache import ROWS, TreeMachine, machine_settings, name_of
from tests.tree.test_ranks import HostRanksMachine, PrefixesOfRank
from tests.tree.tree_world import World

KV_SLOTS = 5000
"""Of a machine's draft model, at least as many as there are."""


def path_to(node: HostNode) -> array:
    """The tokens that made a state of the index."""
    tokens = array("q", node.tokens.tolist())
    while (node := node.parent) is not None:  # type: ignore[assignment]
        tokens = array("q", node.tokens.tolist()) + tokens
    return tokens


def stated(host: HostTier) -> dict[tuple[int, ...], SavedSlots]:
    """What the host has of states, by the tokens that made them."""
    return {tuple(path_to(x)): x.state for x in host.index.nodes() if x.state is not None}


def name_on_host(store: SlotStore, saved: SavedSlots) -> float:
    """What the state is the state of, as ``States`` names it."""
    ((first, _),) = saved.runs
    ((_, _), (_, temporal)) = store._numbers(store.host.pages[first : first + 1])
    found = temporal.unique()
    assert len(found) == 1
    return float(found)


class LateCopy:
    """A copy that a busy GPU makes some time later, and its event."""

    def __init__(self, launch: Callable[[], None], source: random.Random) -> None:
        self.launch: Callable[[], None] | None = launch
        self.source = source

    def query(self) -> bool:
        if self.launch is not None and self.source.random() < 0.5:
            self.run()
        return self.launch is None

    def run(self) -> None:
        if self.launch is not None:
            self.launch()
        self.launch = None


class Late:
    """A device whose copies beside the passes are late: they are there when their event has passed, or in time for what
    is launched behind them."""

    def __init__(self, device: PageDevice, rank: int) -> None:
        self.device, self.source = device, random.Random(rank)
        self.launching = device.launching

    def launch_beside(self, launch: Callable[[], None]) -> Beside[None]:
        return Beside(None, LateCopy(launch, self.source))  # type: ignore[arg-type]

    def join(self, beside: Any) -> None:
        beside.end.run()


class HostStatesMachine(StatesMachine, PrefixesMachine):
    """Requests of a model with states, whose prefixes and states the tree loses and gets back."""

    host_slots = 12

    def __init__(self, ranks: Ranks | None = None) -> None:
        super().__init__(ranks)
        self.store.device = Late(self.manager.device, self.manager.ranks.rank)  # type: ignore[assignment]

    @property
    def store(self) -> SlotStore:
        assert self.manager.saved_slots is not None
        return self.manager.saved_slots

    def make_pool(self) -> HybridReqToTokenPool:
        pool = super().make_pool()
        self.manager.keep_slots(state_buffers(pool), self.host_slots)
        return pool

    def admit_tokens(self, tokens: array) -> None:
        rid, extra_key = self.named()
        if len(self.running) == ROWS:
            return
        req, before = asking(tokens), kept(self.tree)
        with self.host.admitting(req):
            match = Match(self.tree, tokens, extra_key=extra_key)
        places = [len(x) for x in kept(self.tree) if len(x) < len(tokens) and x == tuple(tokens[: len(x)])]
        assert len(match) == max(places, default=0), "a match does not end at the last state"
        if brought := getattr(req, "diffkv_from_host", 0):
            assert tuple(tokens[: len(match)]) not in before, "nothing came back"
            assert brought >= self.host.least
        self.admit_matched(StandIn(tokens, None, match, len(match), rid=rid), match)

    @rule(which=st.integers(0, 7), length=st.integers(30, 70), more=st.integers(0, 40), pages=st.booleans())
    def lose_and_go_on(self, which: int, length: int, more: int, pages: bool) -> None:
        """A prompt that was served, or its states alone, leaves the tree, and is gone on from."""
        self.read(which % 3, length, 0)
        if self.running and not self.running[-1].prefilling:
            self._leave(self.running[-1], insert=True)
        self.write()
        if pages:
            self.tree.make_pages(self.manager.geometry.num_pages, partly=True)
        else:
            self.tree.states._read = set()
            self.tree.states._make_room(SLOTS - len(self.running))
        for _ in range(3):
            self.write()
        if self.told:
            self.go_on(which, 0, more, 1)

    @invariant()
    def states_on_the_host_are_those_of_their_tokens(self) -> None:
        for tokens, saved in stated(self.host).items():
            assert not self.store.ready(saved) or name_on_host(self.store, saved) == name_of(array("q", tokens)), (
                "the host has another's state"
            )
        self.store.check_integrity()


class ThroughStatesMachine(HostStatesMachine):
    """Copied soon, into host memory for a few prefixes and states."""

    host_pages, host_slots = 60, 4
    write_policy = WRITE_THROUGH


class SelectiveStatesMachine(HostStatesMachine):
    write_policy = SELECTIVE


class StatesOfRank(HostStatesMachine, PrefixesOfRank):
    """Those of one of several ranks, with a few places on the host."""

    host_slots = 4
    write_policy = WRITE_THROUGH
    keeps_retracted = False


class StatesRanksMachine(HostRanksMachine):
    """Copies of states, too, arrive at other times on each rank."""

    kind = StatesOfRank

    def both(self, act: Callable[[Any], None]) -> None:
        def run(machine: Any) -> None:
            act(machine)
            machine.states_on_the_host_are_those_of_their_tokens()

        super().both(run)

    @rule(which=st.integers(0, 7), length=st.integers(30, 70), more=st.integers(0, 40), pages=st.booleans())
    def lose_and_go_on(self, which: int, length: int, more: int, pages: bool) -> None:
        self.each(lambda machine: machine.lose_and_go_on(which=which, length=length, more=more, pages=pages))


class NamedDrafts(TreeMachine):
    """Requests of a server with a draft model, which has a number of each token in its KV slot."""

    host_slots: int

    def make_pool(self) -> ReqToTokenPool:
        pool = super().make_pool()
        self.stored = torch.zeros(1, KV_SLOTS, 1, dtype=torch.int64)
        self.manager.keep_slots([self.stored], self.host_slots, by_token=True)
        return pool

    def _write(self, req: Any, start: int, end: int) -> None:
        super()._write(req, start, end)
        kv_slots = self.pool.req_to_token[req.kv.req_pool_idx, start:end].long()
        self.stored[0, kv_slots, 0] = torch.tensor([name_of(req.tokens[: at + 1]) for at in range(start, end)]).long()

    @invariant()
    def a_draft_model_finds_what_it_stored(self) -> None:
        for req in self.running:
            row = req.kv.req_pool_idx
            kv_slots = self.pool.req_to_token[row, : self.manager.rows.length(row)].long()
            expected = [int(name_of(req.tokens[: at + 1])) for at in range(len(kv_slots))]
            assert self.stored[0, kv_slots, 0].tolist() == expected, "a draft model reads another token's key"


class HostDraftsMachine(NamedDrafts, PrefixesMachine):
    """The same, whose prefixes the tree loses and gets back."""

    write_policy = WRITE_THROUGH
    host_slots = 150


class SmallDraftsMachine(HostDraftsMachine):
    """Pages in plenty, and places for the tokens of a few prompts."""

    host_slots = 40


for machine in (
    HostStatesMachine, ThroughStatesMachine, SelectiveStatesMachine, StatesRanksMachine, HostDraftsMachine,
    SmallDraftsMachine,
):  # fmt: skip
    machine.TestCase.settings = machine_settings(40)
TestHostStates = HostStatesMachine.TestCase
TestThroughStates = ThroughStatesMachine.TestCase
TestSelectiveStates = SelectiveStatesMachine.TestCase
TestStatesRanks = StatesRanksMachine.TestCase
TestHostDrafts = HostDraftsMachine.TestCase
TestSmallDrafts = SmallDraftsMachine.TestCase


class HostStateWorld(StateWorld):
    """A small pool with so many state slots, and as many on the host."""

    def __init__(self, slots: int, host_slots: int, policy: str = WRITE_BACK, **more: Any) -> None:
        self.host_slots = host_slots
        super().__init__(slots, host_pages=400, write_policy=policy, **more)
        self.requests.scheduling_begins([])

    def made(self) -> None:
        self.manager.keep_slots(state_buffers(self.pool), self.host_slots)


def test_a_prefix_comes_back_with_the_state_behind_it() -> None:
    world = HostStateWorld(8, 8)
    prompt = world.tokens(60)
    req = world.told(prompt, steps=9)
    evict_all(world)
    assert world.places() == [] and world.tree.states.report()["free"] == 8
    assert sorted(map(len, stated(host_of(world)))) == [60, 69]
    assert looked_at(world, [*req.tokens, 1]) == 0, "brought back to look at the queue"
    assert admitted(world, [*prompt, 1, 2]) == 60, "a match ends where the host has a state"
    assert admitted(world, [*req.tokens, 1]) == 60, "the end is too short to be worth it"
    assert host_of(world).counts["tokens_restored"] == 60 and world.places() == [60]
    go_on = world.prompt([*prompt, *world.tokens(30)])
    assert go_on.prefix_len == 90, "a request goes on from what came back"
    world.leave(go_on)


def test_a_state_comes_back_alone_where_the_tree_has_its_prefix() -> None:
    world = HostStateWorld(8, 8)
    prompt = world.tokens(60)
    world.told(prompt)
    world.tree.states._make_room(8)
    assert world.places() == [] and host_of(world).index.tokens == 0 and len(stated(host_of(world))) == 1
    held, req = set(world.manager.segments.cached), asking([*prompt, 1])
    assert admitted(world, [*prompt, 1], req) == 60 and req.diffkv_from_host == 60
    assert world.manager.segments.cached == held and world.places() == [60]
    report = host_of(world).report()
    assert report["bytes_in"] == world.manager.saved_slots.slot_bytes
    assert admitted(world, [*prompt, 1]) == 60 and host_of(world).report()["bytes_in"] == report["bytes_in"]


def test_a_state_inside_a_node_comes_back_alone() -> None:
    """The node is split there."""
    world = HostStateWorld(8, 8)
    prompt = world.tokens(60)
    first = world.told(prompt)
    longer = world.told([*first.tokens, *world.tokens(40)])
    world.tree.states._make_room(8)
    evict_all(world)
    assert admitted(world, [*longer.tokens, 1]) == 100
    world.tree.states._make_room(8)
    assert admitted(world, [*prompt, 1]) == 60 and world.places() == [60]


@pytest.mark.parametrize("policy", [WRITE_BACK, WRITE_THROUGH, SELECTIVE])
def test_the_policy_says_when_a_state_is_copied(policy: str) -> None:
    world = HostStateWorld(8, 8, policy)
    prompt = world.tokens(60)
    world.told(prompt)
    world.manager.counts.settle()
    for expected in ({WRITE_THROUGH: 1}, {WRITE_THROUGH: 2, SELECTIVE: 1}):
        for _ in range(3):
            world.requests.scheduling_begins([])
        assert len(stated(host_of(world))) == expected.get(policy, 0)
        world.told([*prompt, *world.tokens(30)])
        world.manager.counts.settle()


def test_the_least_recently_used_state_leaves_a_full_host_first() -> None:
    world = HostStateWorld(12, 2)
    prompts = [world.tokens(60) for _ in range(3)]
    for prompt in prompts:
        world.told(prompt)
        world.tree.states._make_room(12)
        if prompt is prompts[1]:
            assert admitted(world, [*prompts[0], 1]) == 60
            world.tree.states._make_room(12)
    assert set(stated(host_of(world))) == {tuple(prompts[0]), tuple(prompts[2])}
    assert [admitted(world, [*x, 1]) for x in prompts] == [60, 0, 60]


def test_what_admitted_requests_go_on_from_does_not_make_room() -> None:
    """They have matched and locked it, and have no slot of their own yet."""
    world = HostStateWorld(2, 4)
    prompts = [world.tokens(60) for _ in range(2)]
    for prompt in prompts:
        world.told(prompt)
    evict_all(world)
    assert [admitted(world, [*x, 1]) for x in prompts] == [60, 60]
    locked = [Match(world.tree, array("q", [*x, 1])) for x in prompts]
    assert world.tree.states.take_slot() is None and len(world.places()) == 2
    for match in locked:
        match.unlock(world.tree)
    slot = world.tree.states.take_slot()
    assert slot is not None and len(world.places()) == 1
    world.tree.states.give_slot(slot)
    world.check()


def test_without_a_slot_nothing_comes_back() -> None:
    world = HostStateWorld(3, 4)
    prompt = world.tokens(60)
    world.told(prompt)
    evict_all(world)
    running = [world.prompt(world.tokens(30)) for _ in range(3)]
    held = set(world.manager.segments.cached)
    assert admitted(world, [*prompt, 1]) == 0 and host_of(world).counts["no_room"] == 1
    assert world.manager.segments.cached == held
    for req in running:
        world.leave(req, insert=False)
    assert admitted(world, [*prompt, 1]) == 60


def test_a_state_on_its_way_is_not_brought_back_and_may_be_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    world, event = HostStateWorld(8, 2), NotYet()
    store, device = world.manager.saved_slots, world.manager.device
    launch, joined = device.launch_beside, []
    monkeypatch.setattr(device, "launch_beside", lambda what: type(launch(what))(None, event))
    monkeypatch.setattr(device, "join", joined.append)
    prompts = [world.tokens(60) for _ in range(3)]
    world.told(prompts[0])
    world.tree.states._make_room(8)
    assert len(joined) == 1, "its slot is given back before it is copied"
    assert admitted(world, [*prompts[0], 1]) == 0 and not world.places()
    event.passed = True
    assert admitted(world, [*prompts[0], 1]) == 60
    event = NotYet()
    for prompt in prompts[1:]:
        world.told(prompt)
    world.tree.states._make_room(8)
    assert len(store.held) == 2 and len(joined) == 3
    world.tree.reset()
    assert len(joined) == 5, "host memory is given back before it is written"
    assert not store.held and not store.host.used


def test_nothing_of_other_weights_comes_back() -> None:
    world, prompt = HostStateWorld(8, 8), [*range(60)]
    world.told(prompt)
    world.tree.states._make_room(8)
    world.told(world.tokens(60))
    world.requests.weights_change()
    assert not stated(host_of(world)) and not world.manager.saved_slots.host.used
    world.tree.states._make_room(8)
    assert not stated(host_of(world)) and admitted(world, [*prompt, 1]) == 0


class DraftWorld(World):
    """A small pool beside a draft model's, with places on the host for so many tokens."""

    def __init__(self, places: int, **more: Any) -> None:
        self.places = places
        super().__init__(exact=False, host_pages=400, **{"capacity": 900, "write_policy": WRITE_BACK, **more})

    def made(self) -> None:
        self.keys = torch.zeros(1, KV_SLOTS, 2)
        self.manager.keep_slots([self.keys], self.places, by_token=True)


@pytest.mark.parametrize("places", [200, 100])
def test_a_draft_model_finds_its_keys_in_new_slots(places: int) -> None:
    """Of the part that comes back. Where it has places for fewer tokens, prefixes make room for one another."""
    world = DraftWorld(places)
    store, prompts = world.manager.saved_slots, [world.tokens(80) for _ in range(2)]
    for number, tokens in enumerate(prompts):
        served(world, tokens)
        match = Match(world.tree, array("q", [*tokens, 1]))
        world.keys[0, match.kv_slots.long()] = torch.tensor([[number + 1.0, at] for at in range(80)])
        match.unlock(world.tree)
        evict_all(world)
    assert store.host.used == (160 if places == 200 else 80) and host_of(world).counts["no_host_memory"] == 0
    report = host_of(world).report()
    assert report["host_bytes"] > store.bytes_held > 0 and report["bytes_out"] > 160 * store.slot_bytes
    world.keys.zero_()
    blocker = world.allocator.alloc(7)
    asked = [*prompts[1][:50], *world.tokens(20)]
    assert admitted(world, asked) == 50
    world.allocator.free(blocker)
    match = Match(world.tree, array("q", asked))
    assert world.keys[0, match.kv_slots.long(), 0].eq(2).all()
    assert world.keys[0, match.kv_slots.long(), 1].tolist() == list(range(50))
    match.unlock(world.tree)
    assert admitted(world, prompts[0]) == (79 if places == 200 else 0)
    world.tree.reset()
    assert not store.host.used


def test_a_prefix_that_a_draft_model_has_no_place_for_is_not_kept() -> None:
    world = DraftWorld(30)
    served(world, world.tokens(80))
    evict_all(world)
    host = host_of(world)
    assert host.counts["no_host_memory"] == 1 and host.index.tokens == 8, "what has a place is forgotten for it"
    assert admitted(world, world.tokens(80)) == 0
    world.requests.check_integrity()


def test_of_more_than_a_draft_model_has_places_for_the_newest_are_kept() -> None:
    world = DraftWorld(200, capacity=3000, write_policy=WRITE_THROUGH)
    prompts = [world.tokens(80) for _ in range(6)]
    for tokens in prompts:
        served(world, tokens)
    world.manager.counts.settle()
    while host_of(world)._unwritten:
        world.requests.scheduling_begins([])
    assert host_of(world).counts["no_host_memory"] == 0
    evict_all(world)
    assert [admitted(world, x) for x in (prompts[0], prompts[-1])] == [0, 79]


@pytest.mark.parametrize("staged", [0, 3])
def test_slots_of_any_shape_come_back_as_they_were(staged: int) -> None:
    """Through parts of host memory that are pinned apart, and a staging buffer, as on a GPU. Some buffers are not in
    order, as states of convolutions on a CPU; some are empty."""
    device, taken = HostStateWorld(4, 4).manager.device, torch.tensor([7, 2, 9, 4, 5])
    buffers = [
        torch.randn(3, 11, 5, 2).transpose(2, 3),
        torch.randint(-9, 9, (1, 11, 3), dtype=torch.int8),
        torch.empty(2, 11, 0),
        torch.randn(2, 11, 4, dtype=torch.float64).bfloat16(),
    ]
    store = SlotStore(device, buffers, 7, HostStateWorld(4, 4).manager.ranks)
    store.host.part = 2
    if staged:
        store._out, store._in = (torch.zeros(staged, store.slot_bytes, dtype=torch.uint8) for _ in range(2))
    before = [buffer[:, taken].clone() for buffer in buffers]
    holes = [store.host.take(1) for _ in range(3)]
    store.host.give(holes[1])
    saved = store.save(taken)
    assert saved is not None and saved.count == 5 and len(saved.runs) == 2 and store.save(taken[:1]) is None
    for buffer in buffers:
        buffer.zero_()
    places = torch.tensor([1, 3, 8])
    device._arriving = [Arriving([], [(0, None)])]
    store.restore(saved, places, start=1)
    assert device._arriving, "they have waited for bytes of pages"
    for buffer, was in zip(buffers, before, strict=True):
        assert torch.equal(buffer[:, places], was[:, 1:4]) and not buffer[:, [0, 2, 4, 5, 6, 7, 9, 10]].any()
    with pytest.raises(AssertionError, match="fewer pages"):
        store.restore(saved, places, start=3)
