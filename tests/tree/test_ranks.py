"""Ranks of a tensor-parallel server decide alike, whatever their heads hold, and never count on pages they lack.

Two ranks live in two threads of this process. Each has a tree, a ledger and pages of its own; they see the same
requests and give their tokens other scores.
"""

from __future__ import annotations

import shutil
import threading
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from sglang_diffkv.layout.ranks import RankError
from sglang_diffkv.mem_pool import segment_object
from sglang_diffkv.mem_pool.counts import RankCounts
from sglang_diffkv.mem_pool.integrity import decision_digest
from sglang_diffkv.mem_pool.object_folder import ObjectFolder
from sglang_diffkv.mem_pool.segment_object import Origin
from sglang_diffkv.mem_pool.stored_segments import StoredSegments
from sglang_diffkv.srt.tree.disk_tier import TIMEOUT, WAIT_COMPLETE, Prefetch
from sglang_diffkv.srt.tree.host_tier import WRITE_BACK, WRITE_THROUGH
from tests.policies import xkv_policy
from tests.ranks import Pair
from tests.tree.stand_in import Match
from tests.tree.test_host_tier import PrefixesMachine, asking
from tests.tree.test_prefix_cache import CAPACITY, ROWS, WINDOW, ExactTreeMachine, TreeMachine, machine_settings
from tests.tree.test_pruning_methods import PruningMachine
from tests.tree.test_pruning_methods import machine as machine_of
from tests.tree.test_retracted import RetractedMachine


def test_the_worst_rank_counts() -> None:
    """Rows 1 and 9: a request, and a segment that counts from now on, with 5 pages on one rank and 3 on the other."""
    given = [
        [[2, 10, 7, 0, 1, 4], [0, 5, 0, 0, 2, 2], [100, 140, 0, 0, 0, 0]],
        [[3, 11, 9, 1, 2, 1], [0, 3, 0, 0, 1, 3], [90, 131, 0, 0, 0, 0]],
    ]
    pair = Pair(RankCounts)

    def worst(counts: RankCounts) -> list[list[int]]:
        rank = counts.ranks.rank
        slack = (4, 1)[rank]
        return counts.worst(np.array(given[rank]), np.array([1, 9]), np.array([False, True]), slack).tolist()

    results = pair.each(worst)
    free = min(40 - 4 - (5 - 5), 41 - 1 - (5 - 3))
    assert results[0] == [[3, 11, 7, 1, 2, 4], [0, 5, 0, 0, 2, 3], [0, free, 0, 0, 0, 0]]
    assert results[1] == results[0]


def test_ranks_that_differ_are_an_error() -> None:
    pair = Pair(lambda ranks: ranks)
    pair.each(lambda ranks: ranks.require_equal("heads", [3, -4]))
    with pytest.raises(RankError, match="ranks differ in heads"):
        pair.each(lambda ranks: ranks.require_equal("heads", [3, ranks.rank]))
    with pytest.raises(RankError, match="different rows"):
        Pair(RankCounts).each(
            lambda counts: counts.worst(
                np.zeros((2, 6), dtype=np.int64), np.array([counts.ranks.rank]), np.array([False]), 0
            )
        )


class RanksMachine(RuleBasedStateMachine):
    """``TreeMachine`` on two ranks; after each rule, its invariants on both, and equal decisions."""

    kind = TreeMachine

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair(self.kind)

    @property
    def running(self) -> list[Any]:
        return self.pair.members[0].running

    def both(self, act: Callable[[TreeMachine], None]) -> None:
        def run(machine: TreeMachine) -> int:
            machine.manager.counts.meet()
            act(machine)
            machine.manager.counts.meet()
            machine.structures_are_consistent()
            machine.every_row_reads_its_own_tokens()
            machine.exact_segments_hold_every_token_high()
            return decision_digest(machine.requests.ledger, machine.requests.digest())

        digests = self.pair.each(run)
        assert digests[0] == digests[1], "ranks decide on different numbers"

    @rule(seed=st.integers(0, 5), length=st.integers(1, 70), tail=st.integers(0, 3))
    def admit(self, seed: int, length: int, tail: int) -> None:
        self.both(lambda machine: machine.admit(seed=seed, length=length, tail=tail))

    @precondition(lambda self: any(r.prefilling for r in self.running))
    @rule(chunk=st.integers(1, 50))
    def extend(self, chunk: int) -> None:
        self.both(lambda machine: machine.extend(chunk=chunk))

    @precondition(lambda self: any(not r.prefilling for r in self.running))
    @rule(steps=st.integers(1, 12))
    def decode(self, steps: int) -> None:
        self.both(lambda machine: machine.decode(steps=steps))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 7), insert=st.booleans())
    def leave(self, which: int, insert: bool) -> None:
        self.both(lambda machine: machine.leave(which=which, insert=insert))

    @rule(tokens=st.integers(1, 120))
    def evict(self, tokens: int) -> None:
        self.both(lambda machine: machine.evict(tokens=tokens))

    @precondition(lambda self: not self.running)
    @rule()
    def flush(self) -> None:
        self.both(lambda machine: machine.flush())

    @rule()
    def settle(self) -> None:
        self.both(lambda machine: machine.settle())


class ExactRanksMachine(RanksMachine):
    kind = ExactTreeMachine


class XKVMachine(PruningMachine):
    """Layers share a size, so ranks exchange the importance of their heads."""

    policy = xkv_policy(WINDOW, 3, min_retention=0.6)


class ExactXKVMachine(XKVMachine):
    exact = True


class XKVRanksMachine(RanksMachine):
    kind = XKVMachine


class ExactXKVRanksMachine(RanksMachine):
    kind = ExactXKVMachine


class ZipageRanksMachine(RanksMachine):
    """Budgets, judged beside the passes."""

    kind = machine_of("zipage beside", False)


class PrefixesOfRank(PrefixesMachine):
    """Evicted prefixes of one of several ranks, in host memory for a few."""

    host_pages = 100
    write_policy = WRITE_THROUGH
    keeps_retracted = False


class ExactPrefixesOfRank(PrefixesOfRank):
    exact = True
    write_policy = WRITE_BACK


class HostRanksMachine(RanksMachine):
    """Copies to host memory arrive at other times on each rank."""

    kind = PrefixesOfRank

    def each(self, act: Callable[[PrefixesOfRank], None]) -> None:
        def run(machine: TreeMachine) -> None:
            assert isinstance(machine, PrefixesOfRank)
            act(machine)
            machine.host_and_index_agree()

        self.both(run)

    @rule()
    def write(self) -> None:
        self.each(lambda machine: machine.write())

    @rule(seed=st.integers(0, 2), length=st.integers(30, 70), tail=st.integers(0, 3), part=st.booleans())
    def come_back(self, seed: int, length: int, tail: int, part: bool) -> None:
        self.each(lambda machine: machine.come_back(seed=seed, length=length, tail=tail, part=part))

    @rule()
    def pause(self) -> None:
        self.each(lambda machine: machine.drop(pause=True))


class ExactHostRanksMachine(HostRanksMachine):
    kind = ExactPrefixesOfRank


class RetractedOfRank(RetractedMachine):
    """Host memory for a few requests of one of several ranks."""

    host_pages = 80


class ExactRetractedOfRank(RetractedOfRank):
    exact = True


class RetractedRanksMachine(RanksMachine):
    """Requests that are retracted have other numbers of pages on each rank, and come back on all of them or none."""

    kind = RetractedOfRank

    def each(self, act: Callable[[RetractedOfRank], None]) -> None:
        def run(machine: TreeMachine) -> None:
            assert isinstance(machine, RetractedOfRank)
            act(machine)
            machine.what_is_kept_is_known()

        self.both(run)

    @property
    def waiting(self) -> list[Any]:
        return self.pair.members[0].waiting

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 7), overlap=st.booleans())
    def retract(self, which: int, overlap: bool) -> None:
        self.each(lambda machine: machine.retract(which=which, overlap=overlap))

    @precondition(lambda self: self.waiting and len(self.running) < ROWS)
    @rule(which=st.integers(0, 7))
    def readmit(self, which: int) -> None:
        self.each(lambda machine: machine.readmit(which=which))

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 7))
    def abort(self, which: int) -> None:
        self.each(lambda machine: machine.abort(which=which))


class ExactRetractedRanksMachine(RetractedRanksMachine):
    kind = ExactRetractedOfRank


RetractedRanksMachine.TestCase.settings = ExactRetractedRanksMachine.TestCase.settings = machine_settings(40)
TestRetractedRanks = RetractedRanksMachine.TestCase
TestExactRetractedRanks = ExactRetractedRanksMachine.TestCase
RanksMachine.TestCase.settings = ExactRanksMachine.TestCase.settings = machine_settings(50)
XKVRanksMachine.TestCase.settings = ExactXKVRanksMachine.TestCase.settings = machine_settings(30)
ZipageRanksMachine.TestCase.settings = machine_settings(30)
TestRanks = RanksMachine.TestCase
TestExactRanks = ExactRanksMachine.TestCase
HostRanksMachine.TestCase.settings = ExactHostRanksMachine.TestCase.settings = machine_settings(40)
TestHostRanks = HostRanksMachine.TestCase
TestExactHostRanks = ExactHostRanksMachine.TestCase
TestXKVRanks = XKVRanksMachine.TestCase
TestExactXKVRanks = ExactXKVRanksMachine.TestCase
TestZipageRanks = ZipageRanksMachine.TestCase


AnyMachine = TypeVar("AnyMachine", bound=RanksMachine)


def with_request(machine: AnyMachine) -> AnyMachine:
    """The machine, with a request that runs. It has more pages on one rank than on the other."""
    machine.admit(seed=1, length=70, tail=0)
    machine.extend(chunk=49)
    machine.extend(chunk=49)
    machine.decode(steps=12)
    return machine


def test_a_retracted_request_comes_back_on_all_ranks() -> None:
    """Each brings back its own pages, and sets aside as many of the host's as the other."""
    machine = with_request(RetractedRanksMachine())
    machine.retract(which=0, overlap=False)
    held = [next(iter(member.manager.saved.held)) for member in machine.pair.members]
    assert len(held[0].tier) != len(held[1].tier), "ranks hold as many pages"
    assert held[0].host_pages == held[1].host_pages == max(len(x.tier) for x in held)
    machine.each(lambda member: member.tree.make_pages(member.manager.geometry.num_pages, partly=True))
    assert not any(x.manager.segments.cached for x in machine.pair.members)
    machine.readmit(which=0)
    for member in machine.pair.members:
        assert member.retracted.counts["restored"] == 1 and not member.manager.saved.host.used
    machine.decode(steps=3)
    machine.leave(which=0, insert=False)


@pytest.mark.parametrize("step", ["extremes", "copy_out"])
def test_a_rank_without_memory_keeps_all_from_keeping_it(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = with_request(RetractedRanksMachine())
    saved = machine.pair.members[1].manager.saved

    def none(*given: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(saved, step, none)
    machine.retract(which=0, overlap=False)
    for member in machine.pair.members:
        assert member.retracted.counts["no_host_memory"] == 1 and not member.retracted.kept
        assert not member.manager.saved.host.used
    machine.readmit(which=0)


def test_a_prefix_is_there_once_all_ranks_have_it() -> None:
    """Ranks hold other numbers of pages of it, and set aside as many of the host's."""
    machine = with_request(HostRanksMachine())
    machine.leave(which=0, insert=True)
    members = machine.pair.members
    arrived = [SimpleNamespace(passed=False, query=lambda rank=rank: arrived[rank].passed) for rank in range(2)]

    def saved(member: Any) -> list[Any]:
        kept = member.manager.saved_segments
        for copying in kept._copying.values():
            copying.event = arrived[member.manager.ranks.rank]
        return sorted(kept.held, key=lambda x: x.start)

    machine.each(lambda member: member.tree.make_pages(member.manager.geometry.num_pages, partly=True))
    assert not any(x.manager.segments.cached for x in members)
    ours = machine.pair.each(saved)
    assert [x.host_pages for x in ours[0]] == [x.host_pages for x in ours[1]]

    def found(member: Any) -> int:
        before = member.host.counts["tokens_restored"]
        member.write()
        member.read(seed=1, length=70, tail=0)
        member._leave(member.running[-1], insert=False)
        return int(member.host.counts["tokens_restored"] - before)

    for passed, tokens in ((0, 0), (1, 70)):
        arrived[passed].passed = True
        assert machine.pair.each(found) == [tokens] * 2
        machine.each(lambda member: member.tree.make_pages(member.manager.geometry.num_pages, partly=True))
    held = [sum(len(x.tier) for x in found) for found in ours]
    assert held[0] != held[1], "ranks hold as many pages"
    machine.each(lambda member: member.structures_are_consistent())


def test_a_part_that_comes_back_is_counted_by_all_ranks_together() -> None:
    """Each has other pages of it, so what one knows says nothing of the rank where it takes most."""
    machine = with_request(HostRanksMachine())
    machine.leave(which=0, insert=True)
    members = machine.pair.members
    machine.each(lambda member: member.tree.make_pages(member.manager.geometry.num_pages, partly=True))
    while not all(x.manager.saved_segments.ready(saved) for x in members for saved in x.manager.saved_segments.held):
        machine.write()

    def ask(member: Any) -> None:
        assert member.manager.counts.settled
        member.ask(seed=1, length=50, tail=0, gone=False)
        (segment,) = member.manager.segments.cached
        assert segment.hi == 50 and not segment.pages and not member.manager.counts.settled

    machine.each(ask)
    (ours, theirs) = [(x, *x.manager.segments.cached) for x in members]
    assert ours[1].pages == theirs[1].pages > 0 and ours[1].held == theirs[1].held
    pages = [member.manager.device.pages_of(segment.row) for member, segment in (ours, theirs)]
    assert pages[0] != pages[1], "ranks hold as many pages"
    machine.each(lambda member: member.tree.make_pages(member.manager.geometry.num_pages, partly=True))
    assert {member.manager.counts.free() for member in members} == {members[0].manager.geometry.num_pages}


def with_store(folder: Path, prefetch: Prefetch) -> HostRanksMachine:
    """Ranks that write what they copy to a folder, and find it there."""
    machine = HostRanksMachine()

    def add(member: Any) -> None:
        manager = member.manager
        origin = Origin.of(manager.geometry, manager.state.dtype, "m", "c", manager.ranks)
        member.host.store_in(StoredSegments(manager.saved_segments, ObjectFolder(folder), origin), prefetch)

    machine.each(add)
    return machine


def found_by(member: Any, prompt: Any) -> int:
    """Tokens of a prompt that a request finds which waits for the store as long as it may."""
    req = asking(prompt)
    while True:
        member.manager.counts.meet()
        member.requests.scheduling_begins([req])
        with member.host.admitting(req):
            match = Match(member.tree, prompt)
        match.unlock(member.tree)
        if not member.host.waits_for(req):
            member.host.prefill_begins([req])
            return len(match)


PATIENT = Prefetch(WAIT_COMPLETE, threshold=8)


def write(machine: HostRanksMachine, prompt: Any) -> None:
    """A prompt and its reply go to the store, as two objects of each rank."""

    def serve(member: Any) -> None:
        member.admit_tokens(prompt[:])
        member.extend(49)
        member.extend(49)
        member.decode(12)
        member._leave(member.running[-1], insert=True)
        while member.manager.ranks.largest(np.array([member.host.report_of_store()["written"] < 2]))[0]:
            member.write()

    machine.each(serve)


@pytest.mark.parametrize("damage", ["none", "gone", "page", "slow"])
def test_ranks_find_in_a_store_what_all_of_them_find(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a part of its own there, of other pages. The second rank's is damaged."""
    prompt = array("q", [*range(70), 9])
    write(with_store(tmp_path, PATIENT), prompt)
    parts: dict[int, list[Path]] = {0: [], 1: []}
    for path in sorted(tmp_path.rglob("*.segment")):
        header = segment_object.decode(path.read_bytes())[0].header
        assert header["ranks"] == 2
        parts[header["rank"]].append(path)
    assert [len(x) for x in parts.values()] == [2, 2]
    sizes = [sum(path.stat().st_size for path in of_rank) for of_rank in parts.values()]
    assert sizes[0] != sizes[1], "ranks hold as many pages"
    go = threading.Event()
    for path in parts[1]:
        if damage == "gone":
            path.unlink()
        elif damage == "page":
            data = bytearray(path.read_bytes())
            data[-300] ^= 1
            path.write_bytes(data)
    second = with_store(tmp_path, PATIENT if damage != "slow" else Prefetch(TIMEOUT, 8, 0.3, 0.0))
    if damage == "slow":
        stored = second.pair.members[1].host.disk.stored
        fill = stored._fill
        monkeypatch.setattr(stored, "_fill", lambda *args: go.wait(20) and fill(*args))
    longer = array("q", [*prompt, 1])
    expected = 63 if damage == "none" else 0  # the reply goes another way
    assert second.pair.each(lambda member: found_by(member, longer)) == [expected] * 2
    second.each(lambda member: member.admit_tokens(longer[:]))
    second.extend(chunk=49)
    late = [member.host.disk.counts["late"] for member in second.pair.members]
    assert late == [int(damage == "slow")] * 2
    go.set()
    if damage == "slow":
        until = array("q", [*longer, 2])

        def find_late(member: Any) -> int:
            while member.manager.ranks.largest(np.array([member.host.report_of_store()["fetching"]]))[0]:
                member.write()
            return found_by(member, until)

        assert second.pair.each(find_late) == [63] * 2, "what came late is lost"


def test_ranks_take_the_same_of_objects_that_part_at_one_position(tmp_path: Path) -> None:
    """Two prompts of one length begin alike. Each rank lists them in an order of its own."""
    one, two, third = (array("q", [*range(40), *range(first, first + 30), 9]) for first in (500, 600, 700))
    for prompt in (one, two):  # neither finds the other
        folder = tmp_path / ("one" if prompt is one else "store")
        folder.mkdir()
        write(with_store(folder, PATIENT), prompt)
    shutil.copytree(tmp_path / "one", tmp_path / "store", dirs_exist_ok=True)
    machine = with_store(tmp_path / "store", PATIENT)
    for member in machine.pair.members:
        stored, sign = member.host.disk.stored, 1 if member.manager.ranks.rank else -1

        def ordered(key: str, stored: Any = stored, sign: int = sign, names: Any = stored.folder.names) -> list[str]:
            def last_token(name: str) -> int:
                data = Path(stored.folder._file(key, name)).read_bytes()
                return sign * int(segment_object.decode(data)[0].tokens[-1])

            return sorted(names(key), key=last_token)

        stored.folder.names = ordered

    def index(member: Any) -> list[tuple[int, list[int]]]:
        return sorted((node.start, node.tokens.tolist()) for node in member.host.index.nodes())

    assert machine.pair.each(lambda member: found_by(member, third)) == [40, 40]
    assert len({str(x) for x in machine.pair.each(index)}) == 1, "ranks hold the tokens of different prompts"
    machine.each(lambda member: member.tree.make_pages(member.manager.geometry.num_pages, partly=True))
    assert len(set(machine.pair.each(lambda member: found_by(member, one)))) == 1
    assert len({str(x) for x in machine.pair.each(index)}) == 1


def test_a_fault_on_one_rank_ends_the_request_on_all() -> None:
    machine = RanksMachine()
    machine.admit(seed=1, length=40, tail=0)
    machine.extend(chunk=50)
    machine.decode(steps=1)
    row = machine.running[0].kv.req_pool_idx
    machine.pair.members[1].manager.state.fault[row] = 1

    def faulted(member: TreeMachine) -> bool:
        member.manager.counts.clear()
        member.manager.counts.tick += 1
        member.manager.counts.settle()
        return row in member.manager.counts.faulted

    assert machine.pair.each(faulted) == [True, True]


def test_a_page_lost_on_one_rank_shows_on_all() -> None:
    machine = RanksMachine()
    machine.admit(seed=1, length=70, tail=0)
    machine.extend(chunk=50)
    machine.extend(chunk=50)
    machine.decode(steps=12)
    machine.leave(which=0, insert=True)
    held = machine.pair.each(lambda m: sum(m.manager.device.pages_of(s.row) for s in m.manager.segments.cached))
    slack = machine.pair.each(lambda m: m.manager.counts.ranks.slack)
    assert held[0] != held[1] and held[0] + slack[0] == held[1] + slack[1]

    def settled(member: TreeMachine) -> tuple[int, int]:
        member.manager.counts.tick += 1
        member.manager.counts.meet()
        ledger = member.allocator.ledger
        return ledger.uncached(), sum((ledger.available(), ledger.evictable(), ledger.protected()))

    assert machine.pair.each(settled) == [(0, CAPACITY)] * 2
    machine.pair.members[1].manager.state.counters[0] += 40  # more than the spare pages
    assert all(uncached > 0 and total < CAPACITY for uncached, total in machine.pair.each(settled))
