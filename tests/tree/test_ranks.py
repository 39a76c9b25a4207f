"""Ranks of a tensor-parallel server decide alike, whatever their heads hold, and never count on pages they lack.

Two ranks live in two threads of this process. Each has a tree, a ledger and pages of its own; they see the same
requests and give their tokens other scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from sglang_diffkv.layout.ranks import RankError
from sglang_diffkv.mem_pool.counts import RankCounts
from sglang_diffkv.mem_pool.integrity import decision_digest
from tests.policies import xkv_policy
from tests.ranks import Pair
from tests.tree.test_prefix_cache import CAPACITY, WINDOW, ExactTreeMachine, TreeMachine, machine_settings
from tests.tree.test_pruning_methods import PruningMachine
from tests.tree.test_pruning_methods import machine as machine_of


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


RanksMachine.TestCase.settings = ExactRanksMachine.TestCase.settings = machine_settings(50)
XKVRanksMachine.TestCase.settings = ExactXKVRanksMachine.TestCase.settings = machine_settings(30)
ZipageRanksMachine.TestCase.settings = machine_settings(30)
TestRanks = RanksMachine.TestCase
TestExactRanks = ExactRanksMachine.TestCase
TestXKVRanks = XKVRanksMachine.TestCase
TestExactXKVRanks = ExactXKVRanksMachine.TestCase
TestZipageRanks = ZipageRanksMachine.TestCase


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
