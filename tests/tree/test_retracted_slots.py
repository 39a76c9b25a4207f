"""Retracted requests with what is kept beside their pages: a state, or what a draft model stores; and with pages of the
prefix cache that have more than one token. Random lives, and what each of a few situations asks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis.stateful import initialize, invariant
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

from sglang_diffkv.mem_pool.saved_slots import SlotStore
from sglang_diffkv.srt.tree.host_tier import WRITE_BACK, WRITE_THROUGH
from sglang_diffkv.srt.versions.states import state_buffers
from tests.tree.stand_in import END, Match
from tests.tree.test_host_states import HostDraftsMachine, HostStatesMachine, NamedDrafts
from tests.tree.test_host_tier import HostMachine
from tests.tree.test_kept_states import StatesMachine, StateWorld
from tests.tree.test_prefix_cache import machine_settings, name_of
from tests.tree.test_ranks import RetractedOfRank, RetractedRanksMachine
from tests.tree.test_retracted import RetractedMachine, readmit, retract, retracted_of, run
from tests.tree.tree_world import World


class StatesRetractedMachine(StatesMachine, RetractedMachine):
    """Of a model with states. What is kept ends where the state stands, which under overlap scheduling is a token
    further than what the scheduler knows."""

    host_slots = 6

    @initialize()
    def choose_names(self) -> None:
        self.names = (None,)

    def make_pool(self) -> HybridReqToTokenPool:
        pool = super().make_pool()
        self.manager.keep_slots(state_buffers(pool), self.host_slots)
        return pool

    def kept_length(self, req: Any) -> int:
        return self.manager.rows.length(req.kv.req_pool_idx)

    def results(self, req: Any) -> None:
        """A pass over its prompt has results of another kind, and some token ends a request."""
        kept = self.retracted.of(req)
        of_prompt, token = self.random.random() < 0.2, self.random.choice([0, 1, 2, 2, END])
        awaited, req.is_retracted = kept is not None and kept.awaited, True
        with self.retracted.results_come([req], None if of_prompt else lambda: [token]):
            assert req.is_retracted or awaited
            if not req.is_retracted:
                req.output_ids.append(token)
                req.tokens.append(token)
        if awaited:
            assert (self.retracted.of(req) is None) == (of_prompt or token == END)
        kept = self.retracted.of(req)
        assert req.is_retracted and (kept is None or kept.known == len(req.tokens) - 1)

    @invariant()
    def states_on_the_host_are_those_of_requests(self) -> None:
        store = self.retracted.slots
        assert store is not None
        for kept in self.retracted.kept.values():
            assert name_kept(store, kept) == name_of(kept.req.tokens[: kept.known]), "a request gets another's state"
        self.manager.saved_slots.check_integrity()


def name_kept(store: SlotStore, kept: Any) -> float:
    """What the state that is kept of a request is the state of."""
    ((first, _),) = kept.slots.runs
    ((_, _), (_, temporal)) = store._numbers(store.host.pages[first : first + 1])
    return float(temporal.unique())


class FewStatesMachine(StatesRetractedMachine):
    """Host memory for one state."""

    host_slots = 1


class StatesBothMachine(HostStatesMachine, StatesRetractedMachine, HostMachine):
    """With evicted prefixes and their states in one memory, which is short."""

    host_pages, host_slots = 60, 4
    write_policy = WRITE_THROUGH

    def make_pool(self) -> HybridReqToTokenPool:
        pool = StatesMachine.make_pool(self)
        self.manager.keep_slots(state_buffers(pool), self.host_slots)
        return pool


class DraftsRetractedMachine(NamedDrafts, RetractedMachine):
    """Of a server with a draft model, which has a number of each token in its KV slot."""

    host_slots = 150


class DraftsBothMachine(HostDraftsMachine, HostMachine):
    """With evicted prefixes in one memory."""

    host_slots = 150


class PagedRetractedMachine(RetractedMachine):
    """Of a prefix cache that takes multiples of a few tokens only."""

    page_size = 5

    def kept_length(self, req: Any) -> int:
        return (len(req.tokens) - 1) // self.page_size * self.page_size


class StatesRetractedOfRank(StatesRetractedMachine, RetractedOfRank):
    """Those of one of several ranks."""

    host_slots = 2


class StatesRetractedRanksMachine(RetractedRanksMachine):
    """All ranks keep a state, or none."""

    kind = StatesRetractedOfRank


for machine in (
    StatesRetractedMachine, FewStatesMachine, StatesBothMachine, DraftsRetractedMachine, DraftsBothMachine,
    PagedRetractedMachine, StatesRetractedRanksMachine,
):  # fmt: skip
    machine.TestCase.settings = machine_settings(40)
TestStatesRetracted = StatesRetractedMachine.TestCase
TestFewStates = FewStatesMachine.TestCase
TestStatesBoth = StatesBothMachine.TestCase
TestDraftsRetracted = DraftsRetractedMachine.TestCase
TestDraftsBoth = DraftsBothMachine.TestCase
TestStatesRetractedRanks = StatesRetractedRanksMachine.TestCase
TestPagedRetracted = PagedRetractedMachine.TestCase


# A few situations


class KeptStateWorld(StateWorld):
    """A small pool with state slots, and room for so many states on the host."""

    def __init__(self, slots: int = 12, host_slots: int = 4, **more: Any) -> None:
        self.host_slots = host_slots
        super().__init__(slots, host_pages=400, **more)

    def made(self) -> None:
        self.manager.keep_slots(state_buffers(self.pool), self.host_slots)


def evict_all(world: World) -> None:
    world.tree.make_pages(world.manager.geometry.num_pages, partly=True)
    assert not world.manager.segments.cached


def retracted_now(world: World, *, ahead: bool = False, token: int | None = 7) -> Any:
    """A request that is retracted behind 69 tokens. ``ahead``: a pass that stores the last of them is on its way, and
    samples ``token``; None: it is another kind of pass."""
    req = world.prompt(world.tokens(60))
    for _ in range(9):
        world.decode(req)
    if not ahead:
        req.output_ids.append(7)
        req.tokens.append(7)
    retracted = retracted_of(world)
    retracted.keep(req)
    world.leave(req, insert=False)
    req.is_retracted = True
    with retracted.results_come([req], None if token is None else lambda: [token]):
        if not req.is_retracted:
            req.output_ids.append(token)
            req.tokens.append(token)
    return req


@pytest.mark.parametrize("ahead", [False, True])
def test_a_state_comes_back_with_its_row(ahead: bool) -> None:
    """Under overlap scheduling behind the token whose pass was on its way."""
    world = KeptStateWorld()
    req = retracted_now(world, ahead=ahead)
    retracted = retracted_of(world)
    report, store = retracted.report(), retracted.slots
    assert report["host_bytes"] == retracted.saved.pages_held * world.manager.fmt.page_bytes + store.slot_bytes
    evict_all(world)
    assert readmit(world, req) == 69 and world.places() == [69]
    assert readmit(world, req) == 69 and world.places() == [69], "restored twice"
    assert world.found(req.tokens) == 69, "others find it too"
    go_on(world, req)
    assert retracted.counts["restored"] == 1 and retracted.counts["tokens_restored"] == 69
    assert not store.held and retracted.report()["host_bytes"] == 0
    world.check()


def go_on(world: World, req: Any) -> None:
    """The pass of a retracted request, which has found its place."""
    with retracted_of(world).admitting(req):
        again = world.admit(list(req.tokens))
    req.__dict__ = {**again.__dict__}
    if again.kv is again:
        req.kv = req
    world.attach(req)
    world.plan(req)
    world.launch(req)


def test_a_state_comes_back_alone_where_the_tree_has_the_tokens() -> None:
    world = KeptStateWorld()
    req = retracted_now(world)
    evict_all(world)
    assert readmit(world, req) == 69
    held = set(world.manager.segments.cached)
    world.tree.states._make_room(12)
    assert world.places() == []
    assert readmit(world, req) == 69 and world.manager.segments.cached == held and world.places() == [69]
    go_on(world, req)


@pytest.mark.parametrize("token", [END, None])
def test_one_whose_next_token_is_its_last_is_computed_again(token: int | None) -> None:
    """Or unknown. Without the token the state stands a token too far."""
    world = KeptStateWorld()
    req = retracted_now(world, ahead=True, token=token)
    retracted = retracted_of(world)
    assert req.is_retracted and len(req.tokens) == 69 and not retracted.kept
    assert retracted.counts["recomputed"] == 1 and not world.manager.saved.host.used and not retracted.slots.held
    evict_all(world)
    assert readmit(world, req) == 0
    world.check()


def test_one_whose_result_never_comes_is_computed_again() -> None:
    world = KeptStateWorld()
    req = world.prompt(world.tokens(60))
    retracted = retracted_of(world)
    retracted.keep(req)
    world.leave(req, insert=False)
    assert retracted.of(req).awaited
    evict_all(world)
    assert readmit(world, req) == 0
    go_on(world, req)
    assert retracted.counts["recomputed"] == 1 and not retracted.slots.held


@pytest.mark.parametrize("extra", ["mamba_ping_pong_track_buffer", "return_hidden_states"])
def test_a_result_that_sglang_cannot_look_at_later_is_not_awaited(extra: str) -> None:
    world = KeptStateWorld()
    req = world.prompt(world.tokens(60))
    setattr(req.kv if extra.startswith("mamba") else req, extra, True)
    retracted_of(world).keep(req)
    assert not retracted_of(world).kept
    req.output_ids.append(7)
    req.tokens.append(7)
    retracted_of(world).keep(req)
    assert retracted_of(world).kept, "nothing is on its way"
    world.leave(req, insert=False)


def test_without_host_memory_for_its_state_a_request_is_computed_again() -> None:
    """Nor is memory kept for its pages."""
    world = KeptStateWorld(host_slots=1)
    first, second = retracted_now(world), retracted_now(world)
    retracted = retracted_of(world)
    assert (retracted.counts["kept"], retracted.counts["no_host_memory"]) == (1, 1)
    evict_all(world)
    assert readmit(world, second) == 0 and readmit(world, first) == 69
    world.check()


def test_one_that_is_not_kept_costs_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Prefixes stay in host memory where retracted requests have all that its state needs, and no page is copied."""
    world = KeptStateWorld(host_slots=1, write_policy=WRITE_BACK)
    retracted, index = retracted_of(world), world.tree.sources[1].index
    retracted_now(world)
    while world.manager.saved.host.free > 20:
        world.told(world.tokens(60))
        evict_all(world)
    tokens, free = index.tokens, world.manager.saved.host.free
    copies: list[Any] = []
    monkeypatch.setattr(world.manager.saved, "copy_out", lambda *given: copies.append(given))
    second = retracted_now(world)
    assert retracted.of(second) is None and retracted.counts["no_host_memory"] == 1 and not copies
    assert (index.tokens, world.manager.saved.host.free) == (tokens, free)
    assert "is full (1 states" in caplog.text, "another memory is said to be full"


def test_without_a_slot_for_its_state_a_request_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as others run. With nothing running it is computed again."""
    world = KeptStateWorld(slots=3)
    retracted, req = retracted_of(world), retracted_now(world)
    evict_all(world)
    others = [world.prompt(world.tokens(20)) for _ in range(3)]
    assert readmit(world, req) == 0 and retracted.waits_for_room(req) is not None
    world.leave(others.pop(), insert=False)
    assert readmit(world, req) == 69 and retracted.waits_for_room(req) is None
    evict_all(world)
    for other in others:
        world.leave(other, insert=False)
    monkeypatch.setattr(world.tree.states, "take_slot", lambda: None)
    assert readmit(world, req) == 0 and not retracted.kept
    assert retracted.counts["recomputed"] == 1 and not retracted.slots.held
    world.check()


def full(*given: Any) -> None:
    raise torch.OutOfMemoryError("none")


def test_without_room_for_its_pages_no_state_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    world = KeptStateWorld()
    monkeypatch.setattr(world.manager.saved, "_take", lambda pages: None)
    retracted_now(world)
    retracted = retracted_of(world)
    assert retracted.counts["no_host_memory"] == 1 and not retracted.slots.host.used and not retracted.saved.held


@pytest.mark.parametrize("drafts", [False, True], ids=["states", "drafts"])
def test_a_copy_without_device_memory_loses_nothing(drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the host: the request is computed again. Back: it waits, and what was taken for it is given back."""
    world = KeptDraftWorld(200) if drafts else KeptStateWorld()
    retracted, store = retracted_of(world), retracted_of(world).slots
    with monkeypatch.context() as patched:
        patched.setattr(store, "copy_out", full)
        retracted_now(world)
    assert retracted.counts["no_host_memory"] == 1 and not retracted.kept
    assert not retracted.saved.held and not world.manager.saved.host.used and not store.host.used
    req, other = retracted_now(world), world.prompt(world.tokens(20))
    evict_all(world)
    held, free = set(world.manager.segments.cached), world.allocator.available_size()
    with monkeypatch.context() as patched:
        patched.setattr(store, "restore", full)
        assert readmit(world, req) == 0 and retracted.waits_for_room(req) is not None
    assert (set(world.manager.segments.cached), world.allocator.available_size()) == (held, free)
    assert readmit(world, req) == 69 and retracted.waits_for_room(req) is None
    world.leave(other, insert=False)
    world.check()


@pytest.mark.parametrize("step", ["copy_out", "restore"])
def test_a_rank_without_memory_for_a_state_keeps_all_from_going_on(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = StatesRetractedRanksMachine()
    for seed in range(2):
        machine.admit(seed=seed, length=60, tail=0)
        while any(req.prefilling for req in machine.running):
            machine.extend(chunk=49)
    stores = [member.retracted.slots for member in machine.pair.members]
    if step == "copy_out":
        monkeypatch.setattr(stores[1], step, full)
    machine.retract(which=0, overlap=False)
    counts = [member.retracted.counts for member in machine.pair.members]
    if step == "copy_out":
        assert all(x["no_host_memory"] == 1 for x in counts) and not any(store.host.used for store in stores)
        return
    assert all(x["kept"] == 1 for x in counts)
    machine.each(lambda member: member.tree.make_pages(member.manager.geometry.num_pages, partly=True))
    with monkeypatch.context() as patched:
        patched.setattr(stores[1], step, full)
        machine.readmit(which=0)
    assert all(len(member.waiting) == 1 for member in machine.pair.members)
    machine.readmit(which=0)
    assert all(x["restored"] == 1 for x in counts)


@pytest.mark.parametrize("how", ["aborted", "flushed", "weights"])
def test_nothing_stays_of_one_that_does_not_come_back(how: str) -> None:
    world = KeptStateWorld()
    retracted_now(world)
    retracted = retracted_of(world)
    assert retracted.slots.held and retracted.slots.host.used == 1
    if how == "aborted":
        retracted.sweep([])
    elif how == "flushed":
        world.tree.reset()
    else:
        retracted.weights_change()
    assert not retracted.slots.held and not retracted.slots.host.used and retracted.counts["dropped"] == 1


def test_states_of_prefixes_make_room_for_those_of_requests() -> None:
    world = KeptStateWorld(host_slots=2, write_policy=WRITE_BACK)
    for _ in range(2):
        world.told(world.tokens(60))
    world.tree.states._make_room(12)
    assert world.manager.saved_slots.host.free == 0 and len(world.manager.saved_slots.held) == 2
    req = retracted_now(world)
    assert len(world.manager.saved_slots.held) == 1 and len(retracted_of(world).slots.held) == 1
    evict_all(world)
    assert readmit(world, req) == 69
    world.tree.reset()
    assert not world.manager.saved_slots.host.used


class KeptDraftWorld(World):
    """A small pool beside a draft model's, with places on the host for so many tokens."""

    def __init__(self, places: int) -> None:
        self.places = places
        super().__init__(900, exact=False, host_pages=400)

    def made(self) -> None:
        self.keys = torch.zeros(1, 2000, 2)
        self.manager.keep_slots([self.keys], self.places, by_token=True)


@pytest.mark.parametrize("places", [80, 60])
def test_a_draft_model_finds_what_it_has_stored(places: int) -> None:
    """In other KV slots. Without host memory for it the request is computed again."""
    world = KeptDraftWorld(places)
    req = world.prompt(world.tokens(60))
    for _ in range(9):
        world.decode(req)
    world.keys[0, world.pool.req_to_token[req.kv.req_pool_idx, :69].long()] = torch.arange(69.0).view(-1, 1)
    retract(world, req)
    blocker = world.allocator.alloc(11)
    evict_all(world)
    world.keys.zero_()
    assert readmit(world, req) == (69 if places == 80 else 0)
    counts = retracted_of(world).counts
    assert (counts["kept"], counts["no_host_memory"]) == ((1, 0) if places == 80 else (0, 1))
    if places == 80:
        match = Match(world.tree, req.tokens)
        assert world.keys[0, match.kv_slots.long(), 1].tolist() == list(range(69))
        match.unlock(world.tree)
        assert retracted_of(world).report()["host_bytes"] > 69 * world.manager.saved_slots.slot_bytes
    world.allocator.free(blocker)
    world.tree.reset()
    assert not world.manager.saved_slots.host.used


@pytest.mark.parametrize("page_size", [8, 16])
def test_what_is_behind_the_last_page_is_computed_again(page_size: int) -> None:
    world = World(900, exact=False, host_pages=200, page_size=page_size)
    req = world.prompt(world.tokens(60))
    for _ in range(15):
        world.decode(req)
    retract(world, req)
    evict_all(world)
    assert readmit(world, req) == 75 // page_size * page_size
    run(world, req)
    assert retracted_of(world).counts["restored"] == 1 and world.manager.rows.length(req.kv.req_pool_idx) == 76
    world.leave(req)


def test_one_shorter_than_a_page_is_not_kept() -> None:
    world = World(900, exact=False, host_pages=200, page_size=64)
    retract(world, world.prompt(world.tokens(60)))
    assert not retracted_of(world).kept and not retracted_of(world).counts["kept"]
