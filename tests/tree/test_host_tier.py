"""Evicted prefixes in host memory: random lives, and what each of a few situations asks for."""

from __future__ import annotations

import copy
import random
import threading
import time
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_diffkv.layout.geometry import Segment
from sglang_diffkv.layout.page_format import Tier
from sglang_diffkv.layout.ranks import Ranks
from sglang_diffkv.mem_pool import host_pages, pinning, saved_segments
from sglang_diffkv.mem_pool.growth import Expected
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.mem_pool.saved_rows import Needed
from sglang_diffkv.mem_pool.saved_segments import SavedSegment
from sglang_diffkv.policies.uniform import UniformPolicy
from sglang_diffkv.srt.tree import host_tier
from sglang_diffkv.srt.tree.host_index import Part
from sglang_diffkv.srt.tree.host_tier import GATHERED_FOR, SELECTIVE, WRITE_BACK, WRITE_THROUGH, HostTier
from sglang_diffkv.srt.tree.private_space import HighSpace, WindowSpace
from tests.helpers import Seen, seen_by, until
from tests.late import arrive_late
from tests.policies import diffkv_policy
from tests.tree.listener import host_tier_of
from tests.tree.stand_in import Fields, Match, StandIn
from tests.tree.test_prefix_cache import ROWS, WINDOW, TreeMachine, machine_settings
from tests.tree.test_retracted import (
    ExactRetractedMachine,
    RetractedMachine,
    SlidingRetractedMachine,
    readmit,
    retract,
    retracted_of,
)
from tests.tree.tree_world import World


def watch(manager: PageManager, looks: Callable[[], bool] = lambda: True) -> None:
    """What comes back is what was saved, byte for byte. ``looks``: whether to look at bytes, which waits for them."""
    saved, segments = manager.saved_segments, manager.segments
    assert saved is not None
    save, restore = saved.save_all, saved.restore
    known: dict[SavedSegment, tuple[Seen, Segment]] = {}

    def saving(chosen: list[Segment], *more: Any) -> list[SavedSegment | None]:
        seen = [(seen_by(manager, x.row, x.lo), SimpleNamespace(**vars(x))) for x in chosen]
        found = save(chosen, *more)
        known.update({x: of for x, of in zip(found, seen, strict=True) if x is not None})  # type: ignore[misc]
        return found

    def restoring(parts: list[Part], needed: list[Needed], *more: Any) -> list[Segment] | None:
        assert all(
            takes.pages >= found.pages_from(lo, hi) for takes, (found, lo, hi) in zip(needed, parts, strict=True)
        )
        back = restore(parts, needed, *more)
        for segment, (found, lo, hi) in zip(back or (), parts, strict=bool(back)):
            assert (segment.lo, segment.hi) == (lo, hi) and segment in segments.cached
            if found in known:
                seen, was = known[found]
                if looks():
                    wanted = {at: x for at, x in seen.items() if lo <= at[3] < hi}
                    assert seen_by(manager, segment.row) == wanted
                assert segment.end == was.end and segment.as_computed == was.as_computed
        return back

    saved.save_all, saved.restore = saving, restoring  # type: ignore[method-assign]


def asking(tokens: Any, new_tokens: int = 20) -> Fields:
    """What admission reads of a request that has no row yet."""
    return Fields(
        full_untruncated_fill_ids=tokens, sampling_params=SimpleNamespace(max_new_tokens=new_tokens), output_ids=[]
    )


class Sometimes:
    """A device's event that has passed or not, at random."""

    def __init__(self, source: random.Random) -> None:
        self.source, self.passed = source, False

    def query(self) -> bool:
        self.passed = self.passed or self.source.random() < 0.8
        return self.passed


class PrefixesMachine(TreeMachine):
    """A prefix cache's life, whose evicted prefixes are brought back, once their copies have arrived."""

    host_pages = 300
    write_policy = WRITE_BACK

    def __init__(self, ranks: Ranks | None = None) -> None:
        super().__init__(*([] if ranks is None else [ranks]))
        self.waiting: list[Any] = []
        arrivals = random.Random(self.manager.ranks.rank)
        watch(self.manager, lambda: arrivals.random() < 0.5)
        arrive_late(self.manager.device)
        saved = self.manager.saved_segments
        assert saved is not None
        save = saved.save_all

        def saving(chosen: list[Segment], *more: Any) -> list[SavedSegment | None]:
            together = Sometimes(arrivals)  # on a GPU
            for x in (found := save(chosen, *more)):
                if x is not None:
                    saved._copying[x].event = together
            return found

        saved.save_all = saving  # type: ignore[method-assign]

    @property
    def host(self) -> HostTier:
        host = host_tier_of(self.tree)
        assert host is not None
        return host

    def admit_tokens(self, tokens: array) -> None:
        rid, extra_key = self.named()
        if len(self.running) == ROWS:
            return
        req, held = asking(tokens), set(self.manager.segments.cached)
        before = self.host.counts["tokens_restored"]
        with self.host.admitting(req):
            match = Match(self.tree, tokens, extra_key=extra_key)
        brought = self.host.counts["tokens_restored"] - before
        assert brought == getattr(req, "diffkv_from_host", 0)
        assert not brought or self.manager.segments.cached - held, "nothing came back"
        self.admit_matched(StandIn(tokens, None, match, len(match), rid=rid), match)

    @rule()
    def write(self) -> None:
        """SGLang is about to choose the next pass."""
        self.requests.scheduling_begins([*self.waiting, *self.running])

    @rule(seed=st.integers(0, 2), length=st.integers(30, 70), tail=st.integers(0, 3), part=st.booleans())
    def come_back(self, seed: int, length: int, tail: int, part: bool) -> None:
        """A prompt that was served is evicted, wholly or its end, and asked again."""
        self.read(seed, length, tail)
        if self.running and not self.running[-1].prefilling and len(self.running) < ROWS:
            self._leave(self.running[-1], insert=True)
        self.write()
        self.tree.make_pages(self.manager.geometry.num_pages // (3 if part else 1), partly=True)
        self.write()
        self.read(seed, 70, tail)

    @rule(seed=st.integers(0, 2), length=st.integers(5, 70), tail=st.integers(0, 3), gone=st.booleans())
    def ask(self, seed: int, length: int, tail: int, gone: bool) -> None:
        """A prompt comes back, wholly or a part, for a request that is not admitted then. Nothing waits in between."""
        if gone:
            self.tree.make_pages(self.manager.geometry.num_pages, partly=True)
        if self.manager.ranks.alone:
            self.manager.counts.settle()
        source = random.Random(seed)
        tokens = array("q", [source.randrange(3) for _ in range(length)] + [tail] * tail + [9])
        with self.host.admitting(asking(tokens)):
            match = Match(self.tree, tokens, extra_key=self.named()[1])
        match.unlock(self.tree)
        with self.manager.launching():
            pass  # invariants look at bytes, which are on their way

    @rule(pause=st.booleans())
    def drop(self, pause: bool) -> None:
        """A change of weights, or a pause that retracts all."""
        if self.random.random() < 0.8:
            return
        if pause:
            with self.host.retracting_all():
                pass
        else:
            self.requests.weights_change()
        assert not self.host.index.tokens and not self.manager.saved_segments.held
        assert self.manager.saved.host.used == self.manager.saved.pages_held

    @invariant()
    def host_and_index_agree(self) -> None:
        self.host.check_integrity()
        self.manager.saved.check_integrity()


class HostMachine(PrefixesMachine, RetractedMachine):
    """The same, with requests that are retracted between."""

    def _leave(self, req: Any, *, insert: bool) -> None:
        super()._leave(req, insert=insert)
        self.retracted.sweep([*self.waiting, *self.running])  # as before the next pass

    @precondition(lambda self: not self.running)
    @rule()
    def flush(self) -> None:
        self.empty()
        assert not self.host.index.tokens and not self.manager.saved.host.used and not self.host.old_weights.left

    @invariant()
    def one_memory_holds_both(self) -> None:
        report = self.host.report()
        assert report["host_bytes"] + self.retracted.report()["host_bytes"] <= report["host_bytes_most"]


class ThroughMachine(HostMachine):
    """Copied soon, into host memory for a few segments."""

    host_pages = 60
    write_policy = WRITE_THROUGH


class TurnsHostMachine(ThroughMachine):
    """Where earlier turns are compressed: the host's copies of them are replaced."""

    policy = diffkv_policy(1.0, 0.0, WINDOW, turn_window=2)


class ExactHostMachine(HostMachine, ExactRetractedMachine):
    write_policy = WRITE_THROUGH
    page_tokens = 16


class SlidingHostMachine(HostMachine, SlidingRetractedMachine):
    write_policy = SELECTIVE


class LosslessHostMachine(HostMachine):
    """Pages of 32 tokens in one tier."""

    tiers = (Tier(8, 4),)
    policy = UniformPolicy()
    page_tokens = 32


MACHINES = (HostMachine, ThroughMachine, TurnsHostMachine, ExactHostMachine, SlidingHostMachine, LosslessHostMachine)
for machine in MACHINES:
    usual = machine_settings(40)
    machine.TestCase.settings = settings(usual, max_examples=2 * usual.max_examples)
TestHost = HostMachine.TestCase
TestThrough = ThroughMachine.TestCase
TestTurnsHost = TurnsHostMachine.TestCase
TestExactHost = ExactHostMachine.TestCase
TestSlidingHost = SlidingHostMachine.TestCase
TestLosslessHost = LosslessHostMachine.TestCase


# A few situations


def host_of(world: World) -> HostTier:
    host = host_tier_of(world.tree)
    assert host is not None
    return host


def served(world: World, tokens: list[int], **named: Any) -> None:
    """A request has come and gone."""
    world.leave(world.prompt(list(tokens), **named))


def evict_all(world: World) -> None:
    world.tree.make_pages(world.manager.geometry.num_pages, partly=True)
    assert not world.manager.segments.cached
    world.requests.check_integrity()


def admitted(world: World, tokens: list[int], req: Any = None, extra_key: Any = None) -> int:
    """Tokens of a prompt that the request which is about to be admitted finds."""
    req = req or asking(tokens)
    with host_of(world).admitting(req):
        match = Match(world.tree, array("q", tokens), extra_key=extra_key)
    match.unlock(world.tree)
    world.check()
    world.requests.check_integrity()
    return len(match)


def looked_at(world: World, tokens: list[int]) -> int:
    """Tokens that a request finds when the queue is put in order."""
    match = Match(world.tree, array("q", tokens))
    match.unlock(world.tree)
    return len(match)


@pytest.fixture(params=[False, True], ids=["compressed", "exact"])
def world(request: pytest.FixtureRequest) -> World:
    world = World(300, exact=request.param, host_pages=200, write_policy=WRITE_BACK)
    watch(world.manager)
    return world


def test_a_prefix_comes_back_once_and_for_who_is_admitted(world: World) -> None:
    tokens = world.tokens(60)
    served(world, tokens)
    evict_all(world)
    assert looked_at(world, [*tokens, 1]) == 0, "brought back to look at the queue"
    req = asking(tokens)
    assert admitted(world, [*tokens, 1], req) == 60 and req.diffkv_from_host == 60
    free = world.manager.device.free_pages()
    assert admitted(world, [*tokens, 2]) == looked_at(world, [*tokens, 2]) == 60, "another found less"
    assert world.manager.device.free_pages() == free, "it came back twice"
    report = host_of(world).report()
    assert (report["hits"], report["tokens_restored"]) == (1, 60) and report["bytes_in"] == report["bytes_out"]
    evict_all(world)
    assert host_of(world).report()["bytes_out"] == report["bytes_out"], "it was copied twice"
    assert admitted(world, tokens[:40]) == 39, "a match ends inside what was saved"
    world.listener.check()


def test_pages_of_what_comes_back_are_known_to_the_host(world: World) -> None:
    """The device would read all that has just been asked for to count them. Of a part it is not known what is in it."""
    counts, count = world.manager.counts, host_of(world).saved.count
    uncounted: list[int] = []

    def counting(parts: list[Part], *more: Any) -> None:
        assert len(counts.uncounted) == len(parts) and not counts.settled
        count(parts, *more)
        uncounted.append(len(counts.uncounted))
        assert counts.settled and counts.free() == world.manager.device.free_pages()

    host_of(world).saved.count = counting  # type: ignore[method-assign]
    tokens = world.tokens(60)
    served(world, tokens)
    for asked, left in ((60, 0), (40, 1), (60, 0)):
        evict_all(world)
        assert admitted(world, [*tokens[:asked], 1]) == asked and uncounted.pop() == left
        assert counts.free_bound() == counts.free() and not world.manager.rows
        assert not uncounted and len(counts.uncounted) == left, "nothing runs, and the device was asked"


@pytest.mark.parametrize("policy", [WRITE_BACK, WRITE_THROUGH, SELECTIVE])
def test_the_policy_says_when_a_prefix_is_copied(policy: str) -> None:
    world = World(600, exact=False, host_pages=400, write_policy=policy)
    once, twice = world.tokens(60), world.tokens(60)
    for tokens in (once, twice, [*twice, 1]):
        req = world.prompt(list(tokens))
        world.requests.scheduling_begins([])
        assert policy == WRITE_BACK or host_of(world).index.tokens in (0, 60, 120), "copied while it is read"
        world.leave(req)
        world.requests.scheduling_begins([])
    assert host_of(world).index.tokens // 60 == {WRITE_BACK: 0, WRITE_THROUGH: 2, SELECTIVE: 1}[policy]
    out = host_of(world).report()["bytes_out"]
    evict_all(world)
    assert (host_of(world).report()["bytes_out"] == out) == (policy != WRITE_BACK)
    assert admitted(world, [*twice, 2]) >= 60
    assert admitted(world, [*once, 2]) == (0 if policy == SELECTIVE else 60)


def test_what_is_not_copied_in_time_is_copied_at_eviction() -> None:
    world = World(300, exact=False, host_pages=200, write_policy=WRITE_THROUGH)
    tokens = world.tokens(60)
    served(world, tokens)
    evict_all(world)
    assert admitted(world, tokens) == 59


def test_the_end_of_a_path_comes_back_behind_what_the_tree_kept() -> None:
    world = World(900, exact=False, host_pages=400, write_policy=WRITE_BACK)
    prompt = world.tokens(60)
    first = world.prompt([*prompt, *world.tokens(1 + world.manager.prompts.tail)])
    served(world, [*prompt, *world.tokens(70)])
    longer = host_of(world)
    world.tree.make_pages(world.manager.geometry.num_pages, partly=True)
    assert longer.index.tokens == 70
    tokens = list(next(iter(longer.index.nodes())).tokens)
    assert tokens == prompt, "a gap for what the tree has"
    end = [int(x) for node in longer.index.nodes() if node.saved for x in node.tokens]
    assert admitted(world, [*prompt, *end, 1]) == 130 and longer.counts["tokens_restored"] == 70
    world.leave(first)


def test_few_tokens_are_computed(world: World) -> None:
    """Fewer than ``share_min_tokens``, of which a prompt would not be shared either."""
    tokens = world.tokens(60)
    served(world, tokens)
    evict_all(world)
    assert admitted(world, tokens[:24]) == 0 and admitted(world, tokens[:25]) == 24


def test_without_room_it_is_computed(world: World) -> None:
    """Nothing that runs gives way, and nothing is evicted in vain."""
    tokens = world.tokens(90)
    served(world, tokens)
    evict_all(world)
    others = [world.prompt(world.tokens(100)) for _ in range(2)]
    host, req = host_of(world), asking(tokens, 250)
    host.expect(lambda: [Expected(x.kv.req_pool_idx, 60.0) for x in others])
    held = len(world.manager.segments.cached)
    assert admitted(world, tokens, req) == admitted(world, tokens, req) == 0
    assert host.counts["no_room"] == 1 and len(world.manager.segments.cached) == held
    for other in others:
        world.leave(other, insert=False)
    host.expect(lambda: [])
    assert admitted(world, tokens, req) == 89


@pytest.mark.parametrize("mark", ["diffkv_started_over", "diffkv_without_host"])
def test_what_does_not_fit_as_it_was_is_computed(mark: str, world: World) -> None:
    tokens, req = world.tokens(60), asking(world.tokens(1))
    served(world, tokens)
    evict_all(world)
    if mark == "diffkv_without_host":
        host_of(world).does_not_fit_alone(req)
    else:
        req.diffkv_started_over = True
    assert admitted(world, tokens, req) == 0 and admitted(world, tokens) == 59


def test_namespaces_are_kept_apart(world: World) -> None:
    tokens = world.tokens(60)
    served(world, tokens, extra_key="one")
    evict_all(world)
    assert admitted(world, tokens) == admitted(world, tokens, extra_key="another") == 0
    assert admitted(world, tokens, extra_key="one") == 59


@pytest.mark.parametrize("space", [HighSpace("a"), WindowSpace(None, 40)], ids=repr)
def test_prefixes_of_requests_with_a_tier_or_a_window_come_back_for_such_ones(space: Any) -> None:
    world = World(600, exact=False, host_pages=400, write_policy=WRITE_BACK, high_rows=True, most_window=40)
    watch(world.manager)
    tokens = world.tokens(90)
    served(world, tokens, extra_key=space)
    evict_all(world)
    assert host_of(world).index.tokens == 90
    others = (None, "a", HighSpace("b"), HighSpace(None), WindowSpace(None, 41), WindowSpace("a", 40))
    assert [admitted(world, tokens, extra_key=other) for other in others] == [0] * len(others)
    assert admitted(world, tokens, extra_key=copy.copy(space)) == 89
    world.listener.check()


def test_nothing_private_goes_to_the_host() -> None:
    world = World(400, exact=True, host_pages=400, write_policy=WRITE_BACK)
    req = world.prompt(world.tokens(80))
    retract(world, req)
    evict_all(world)
    held = host_of(world).report()
    assert readmit(world, req) == 80 and world.manager.segments.cached
    world.tree.make_pages(world.manager.geometry.num_pages, partly=True)
    assert not world.manager.segments.cached and host_of(world).report() == held


def test_retracted_requests_come_first() -> None:
    world = World(400, exact=False, host_pages=16, write_policy=WRITE_BACK)
    for _ in range(4):
        served(world, world.tokens(60))
        evict_all(world)
    host = host_of(world)
    assert host.counts["tokens_evicted"] and world.manager.saved.host.free < 9
    before = host.index.tokens
    req = world.prompt(world.tokens(110))
    retract(world, req)
    assert retracted_of(world).counts == {**retracted_of(world).counts, "kept": 1, "no_host_memory": 0}
    assert host.index.tokens < before
    held = retracted_of(world).report()["host_bytes"]
    for _ in range(4):
        served(world, world.tokens(100))
        evict_all(world)
    assert retracted_of(world).report()["host_bytes"] == held > 0, "a prefix took a request's memory"
    assert readmit(world, req) == 110


def test_the_least_recently_used_leaves_a_full_host_first() -> None:
    world = World(400, exact=False, host_pages=16, write_policy=WRITE_BACK)
    prompts = [world.tokens(60) for _ in range(3)]
    for tokens in prompts:
        served(world, tokens)
    evict_all(world)
    assert admitted(world, prompts[0]) == 59  # used again
    served(world, world.tokens(60))
    evict_all(world)
    assert admitted(world, prompts[0]) == 59 and admitted(world, prompts[1]) == 0
    assert host_of(world).counts["tokens_evicted"] > 0


def test_nothing_of_other_weights_comes_back(world: World) -> None:
    host, tokens = host_of(world), world.tokens(60)
    served(world, tokens)
    evict_all(world)
    served(world, world.tokens(60))
    world.requests.weights_change()
    assert host.old_weights.left and not host.index.tokens and not world.manager.saved.host.used
    evict_all(world)
    assert not host.index.tokens and admitted(world, tokens) == 0
    world.tree.reset()
    served(world, tokens)
    evict_all(world)
    assert admitted(world, tokens) == 59, "nothing is kept after a flush"
    with host.retracting_all():
        pass
    evict_all(world)
    with host.retracting_all():
        world.tree.make_pages(world.manager.geometry.num_pages, partly=True)
    assert admitted(world, tokens) == 0, "it outlives a pause that retracts"


class NotYet:
    """A device's event."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


def test_a_copy_that_is_on_its_way_is_not_brought_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are the ones behind it. It may be dropped before it has arrived."""
    event = NotYet()
    monkeypatch.setattr(saved_segments, "to_host", lambda values: (values, event))
    prompts, events = [world.tokens(60) for _ in range(3)], []
    for tokens in prompts:
        served(world, tokens)
        evict_all(world)
        events.append(event)
        event = NotYet()
    assert [admitted(world, tokens) for tokens in prompts] == [0, 0, 0]
    events[1].passed = True
    assert admitted(world, prompts[1]) == 0
    events[0].passed = True
    assert [admitted(world, tokens) for tokens in prompts] == [59, 59, 0]
    world.tree.reset()
    assert not world.manager.saved.host.used and not host_of(world).saved.held


def test_host_memory_is_pinned_as_it_fills(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    pinned: list[int] = []

    def register(memory: torch.Tensor) -> int:
        assert memory.data_ptr() % host_pages.ALIGNED == 0
        pinned.append(len(memory))
        return 2 if len(pinned) == 3 else 0

    monkeypatch.setattr(host_pages, "_register", register)
    monkeypatch.setattr(host_pages, "PART_BYTES", 10 * 88)
    monkeypatch.setattr(pinning, "AHEAD_BYTES", 0)
    host = host_pages.HostPages(2000, 88, pinned=True, in_parts=True)
    assert host.part * 88 % host_pages.ALIGNED == 0 and not pinned
    part, first = host.part, host.take(20)
    assert pinned == [part] and host.end_of_part(19) == part
    second = host.take(part)
    assert pinned == [part, part]
    assert host.take(part) is None and host.count == 2 * part, "handed out what is not pinned"
    assert "lets no more be" in caplog.text and host.free == part - 20
    host.give([*first, *second])
    host.check_integrity([])
    assert len(host.take(2 * part)) == 1 and host.take(1) is None


def test_host_memory_is_pinned_ahead_while_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not while something does: CUDA launches no kernel meanwhile."""
    pinned, goes_on = list[int](), threading.Semaphore(0)

    def register(memory: torch.Tensor) -> int:
        assert goes_on.acquire(timeout=20)
        pinned.append(len(memory))
        return 0

    monkeypatch.setattr(host_pages, "_register", register)
    monkeypatch.setattr(host_pages, "PART_BYTES", 10 * 88)
    monkeypatch.setattr(pinning, "AHEAD_BYTES", 0)
    world = World(300, exact=False, host_pages=20, write_policy=WRITE_THROUGH)
    host = world.manager.saved.host = host_of(world).host = host_pages.HostPages(2000, 88, pinned=True, in_parts=True)
    world.requests.scheduling_begins([asking([1])])  # somebody waits
    assert host._pinning is not None and host._pinning._thread is None
    world.requests.scheduling_begins([])
    goes_on.release()
    until(lambda: len(pinned) == 1)
    req = world.prompt(world.tokens(60))
    world.requests.scheduling_begins([])
    goes_on.release()  # the part that was begun
    until(lambda: host._pinning.ready == 2 * host.part)
    goes_on.release()
    time.sleep(0.05)
    assert len(pinned) == 2, "it pins while a request runs"
    world.leave(req, insert=False)
    world.requests.scheduling_begins([])
    goes_on.release(100)
    until(lambda: sum(pinned) == 2000)
    assert host.take(2000) == [(0, 2000)]


def test_ranks_have_as_much_pinned_memory_as_the_one_with_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the start: a rank that found later that it has less would decide otherwise than the others."""
    pinned: list[int] = []
    monkeypatch.setattr(host_pages, "_register", lambda memory: pinned.append(len(memory)) or 0)
    monkeypatch.setattr(host_pages, "PART_BYTES", 10 * 88)
    host = host_pages.HostPages(2000, 88, pinned=True, in_parts=True)
    host.pin_now(lambda pages: pages - 300)
    assert sum(pinned) == 2000 and host.count == host.free == 1700
    host.check_integrity([])
    assert host.take(1701) is None and host.take(1700) == [(0, 1700)] and sum(pinned) == 2000


@pytest.mark.parametrize("at_once", [None, 3])
def test_copies_stop_at_the_ends_of_parts_and_of_the_staging_buffer(at_once: int | None, world: World) -> None:
    """As on a GPU, where memory that is pinned apart is copied apart."""
    saved = host_of(world).saved
    saved.host.part = 4
    if at_once:
        saved._staging = saved.rows._staging = torch.empty(at_once, world.manager.fmt.page_bytes, dtype=torch.uint8)
    prompts = [world.tokens(60) for _ in range(3)]
    for tokens in prompts:
        served(world, tokens)
        evict_all(world)
    assert [admitted(world, tokens) for tokens in prompts] == [59, 59, 59]


class Launches(TorchDispatchMode):
    """Counts what would be a GPU's kernels and copies: all operations but views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def launches_of(turns: int) -> tuple[int, int]:
    """What it takes to copy a sequence of so many prompts to the host, and back."""
    world = World(3000, longest=1000, exact=False, host_pages=900, write_policy=WRITE_THROUGH)
    tokens, _ = world.tokens(40), world.prompt(world.tokens(30))
    for _ in range(turns):
        tokens = [*tokens, *world.tokens(40)]
        served(world, tokens)
    world.manager.counts.settle()
    saved = host_of(world).saved
    with Launches() as out:
        for _ in range(GATHERED_FOR):
            world.requests.scheduling_begins([])
    assert len(saved.held) == 2 * turns, "a prompt, and its end"
    world.tree.make_pages(world.manager.geometry.num_pages, partly=True)
    held, restore, back = len(world.manager.segments.cached), saved.restore, Launches()

    def counted(parts: list[Part], needed: list[Needed], *more: Any) -> list[Segment] | None:
        with back:
            return restore(parts, needed, *more)

    saved.restore = counted  # type: ignore[method-assign]
    assert admitted(world, [*tokens, 1]) == len(tokens)
    assert len(world.manager.segments.cached) - held == 2 * turns, "parts come back as segments of their own"
    return out.count, back.count


def test_many_parts_are_copied_with_few_launches_more_than_one() -> None:
    (out, back), (out_of_8, back_of_8) = launches_of(1), launches_of(4)
    assert out_of_8 - out <= 18 and back_of_8 - back <= 18, "three launches more for each part, of its bytes"


def test_what_is_to_be_copied_waits_for_others_while_requests_run() -> None:
    """Then all of it is copied, as at once where nothing runs."""
    world = World(3000, longest=1000, exact=False, host_pages=900, write_policy=WRITE_THROUGH)
    other, held = world.prompt(world.tokens(30)), host_of(world).saved.held
    for _ in range(2):
        served(world, world.tokens(60))
        world.manager.counts.settle()
        before = len(held)
        for _ in range(GATHERED_FOR - 1):
            world.requests.scheduling_begins([])
        assert len(held) == before
        world.requests.scheduling_begins([])
        assert len(held) == before + 2, "a prompt, and its end"
    world.leave(other)
    world.requests.scheduling_begins([])
    assert not host_of(world)._unwritten and len(held) > 4


def test_large_segments_are_listed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device lists so many pages at once, and at least those of one."""
    monkeypatch.setattr(host_tier, "LISTED_AT_ONCE", 1)
    world = World(900, exact=False, host_pages=400, write_policy=WRITE_THROUGH)
    prompts, other = [world.tokens(60) for _ in range(2)], world.prompt(world.tokens(30))
    for tokens in prompts:
        served(world, tokens)
    world.manager.counts.settle()
    for _ in range(GATHERED_FOR - 1):
        world.requests.scheduling_begins([])
    held = []
    for _ in range(5):
        world.requests.scheduling_begins([])
        held.append(len(host_of(world).saved.held))
    assert held == [1, 2, 3, 4, 4], "prompts and their ends"
    world.leave(other)


@pytest.mark.parametrize("retracts", [False, True], ids=["", "beside a retracted request"])
def test_of_more_than_the_host_holds_together_the_newest_are_kept(retracts: bool) -> None:
    """They come one after the other while everything waits to be copied."""
    world = World(3000, exact=False, host_pages=44 if retracts else 22, write_policy=WRITE_THROUGH)
    if retracts:
        retract(world, world.prompt(world.tokens(110)))
    world.requests.scheduling_begins(retracted_of(world).kept)
    prompts = [world.tokens(120) for _ in range(8)]
    for tokens in prompts:
        served(world, tokens)
    world.manager.counts.settle()
    host = host_of(world)
    while host._unwritten:
        left = len(host._unwritten)
        world.requests.scheduling_begins(retracted_of(world).kept)
        assert len(host._unwritten) < left, "something waits for ever"
    assert host.counts["no_host_memory"] == 0 and host.counts["tokens_evicted"] > 0
    evict_all(world)
    assert admitted(world, prompts[-1]) == 119 and admitted(world, prompts[0]) == 0


def test_without_room_for_all_parts_the_first_ones_come_back() -> None:
    world = World(900, exact=False, host_pages=400, write_policy=WRITE_BACK, segments=4)
    watch(world.manager)
    first, second = world.tokens(80), world.tokens(80)
    served(world, first)
    served(world, [*first, *second])
    evict_all(world)
    assert [node.end for node in sorted(host_of(world).index.nodes(), key=lambda x: x.end)] == [72, 80, 152, 160]
    other = world.prompt(world.tokens(40))  # its segment leaves rows for three
    assert admitted(world, [*first, *second, 1]) == 152
    assert (host_of(world).counts["hits"], host_of(world).counts["tokens_restored"]) == (1, 152)
    world.leave(other, insert=False)
    assert admitted(world, [*first, *second, 1]) == 152, "a few tokens are computed"


def test_a_prefix_may_go_twice_through_a_copy_whatever_was_asked_before() -> None:
    """The host had the middle already when the whole was copied, of a segment that turns of a chat were joined to."""
    world = World(900, exact=False, host_pages=400, write_policy=WRITE_BACK)
    host, tokens, space = host_of(world), world.tokens(200), (None, None)
    watch(world.manager)
    host.leaving = lambda nodes: None  # type: ignore[method-assign]

    def copied(start: int, end: int) -> None:
        world.manager.counts.settle()
        (segment,) = (x for x in world.manager.segments.cached if (x.lo, x.hi) == (start, end))
        saved = host.saved.save(segment)
        assert saved is not None
        host.index.insert(space, np.array(tokens[:end]), saved, used=0.0, priority=0)

    for length in (40, 80):
        served(world, tokens[:length])
    copied(40, 72)
    evict_all(world)
    served(world, tokens)
    copied(0, 192)
    evict_all(world)
    assert [part[1:] for part in host.index.parts(space, np.array(tokens), 0)] == [(0, 40), (40, 72), (72, 192)]
    for length in range(190, 90, -10):
        assert admitted(world, [*tokens[:length], -1]) == length
        evict_all(world)


class Unasked(TorchDispatchMode):
    """Inside, an operation raises that would have a host wait for its GPU: it needs the result's size or value."""

    WAITS = ("aten::nonzero", "aten::_local_scalar_dense", "aten::masked_select", "aten::_unique2", "aten::equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func._schema.name not in self.WAITS, f"the host waits: {func._schema.name}"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("exact", [False, True])
def test_no_copy_asks_the_device_for_a_number(exact: bool) -> None:
    world = World(300, exact=exact, host_pages=200, write_policy=WRITE_BACK)
    saved, manager = host_of(world).saved, world.manager
    world.prompt(world.tokens(60))
    manager.counts.settle()
    segment = max(manager.segments.cached, key=lambda x: x.pages)
    with Unasked():
        kept = saved.save(segment)
        saved.finish()
        assert kept is not None
        parts = [(kept, segment.lo, segment.hi - 3)]
        assert saved.restore(parts, saved.needed(parts)) is not None
    with pytest.raises(AssertionError, match="the host waits"), Unasked():
        manager.state.entries.nonzero()
