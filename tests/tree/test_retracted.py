"""Retracted requests whose pages go to the host: random lives, and what each of a few situations asks for."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from sglang_diffkv.mem_pool.page_format import Tier
from sglang_diffkv.srt.compat import prefix_len
from sglang_diffkv.srt.retracted import Retracted
from tests.tree.stand_in import Match, StandIn
from tests.tree.test_prefix_cache import ROWS, TreeMachine, machine_settings


class RetractedMachine(TreeMachine):
    """A prefix cache's life with requests that are retracted, wait, come back, or are aborted while they wait."""

    host_pages = 300

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Any] = []

    @property
    def retracted(self) -> Retracted:
        assert self.requests.retracted is not None
        return self.requests.retracted

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 7), overlap=st.booleans())
    def retract(self, which: int, overlap: bool) -> None:
        """With overlap scheduling the row has its last token already, else that is the one to be computed next."""
        req = self.running[which % len(self.running)]
        if not overlap and not req.prefilling:
            req.output_ids.append(self.random.randrange(3))
            req.tokens.append(req.output_ids[-1])
        before = self.retracted.of(req)
        self.retracted.keep(req)
        kept = self.retracted.of(req)
        assert kept is None or kept.saved.hi == len(req.tokens) - 1
        assert kept is before or not req.prefilling, "a part of a prompt is kept"
        self._leave(req, insert=False)
        self.waiting.append(req)

    @precondition(lambda self: self.waiting and len(self.running) < ROWS)
    @rule(which=st.integers(0, 7))
    def readmit(self, which: int) -> None:
        req = self.waiting[which % len(self.waiting)]
        before, kept = dict(self.retracted.counts), self.retracted.of(req)
        with self.retracted.admitting(req):
            match = Match(self.tree, req.tokens)
        if self.retracted.turn_away(req):
            assert self.running, "a request waits with nothing running"
            match.unlock(self.tree)
            return
        StandIn.__init__(req, req.tokens, None, match, len(match), rid=req.rid)
        if not self.admit_matched(req, match):
            return
        self.waiting.remove(req)
        self.extend(1 if len(match) == len(req.tokens) - 1 else 49)
        if kept is not None and not any(r.prefilling for r in self.running):
            assert self.retracted.of(req) is None, "what is kept of a running request takes host memory"
            found = "restored" if len(match) == kept.saved.hi else "recomputed"
            assert self.retracted.counts[found] == before[found] + 1

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 7))
    def abort(self, which: int) -> None:
        """Of a request that waits."""
        self.waiting.pop(which % len(self.waiting))
        self.retracted.sweep(self.waiting)

    @precondition(lambda self: not self.running)
    @rule()
    def flush(self) -> None:
        super().flush()
        assert not self.retracted.kept and not self.manager.saved.host.used

    @invariant()
    def what_is_kept_is_known(self) -> None:
        self.retracted.check_integrity()
        assert {id(x.req) for x in self.retracted.kept.values()} <= {id(req) for req in [*self.waiting, *self.running]}
        assert set(self.retracted.private) <= {req.kv.req_pool_idx for req in self.running}
        spaces = {x.key.extra_key for x in self.tree.root_node.children.values()} - {None}
        alone = [*(x.key for x in self.retracted.kept.values() if x.key), *self.retracted.private.values()]
        assert spaces <= {key.extra_key for key in alone}, "a node that nobody can find is left"
        if not self.exact:
            assert not spaces


class ExactRetractedMachine(RetractedMachine):
    exact = True


class SlidingRetractedMachine(RetractedMachine):
    reaches = (12, 0)
    tiers = (Tier(8, 4), Tier(4, 2))

    def check_stored(self, req: Any, times: Any) -> None:
        """A sliding layer holds its window."""
        assert (times[1] == 1).all() and (times[0] <= 1).all()
        assert (times[0, :, -12:] == 1).all(), "a token in the window is missing"


class FullHostMachine(RetractedMachine):
    """Host memory for a request or two."""

    host_pages = 40


RetractedMachine.TestCase.settings = ExactRetractedMachine.TestCase.settings = machine_settings(50)
SlidingRetractedMachine.TestCase.settings = FullHostMachine.TestCase.settings = machine_settings(40)
TestRetracted = RetractedMachine.TestCase
TestExactRetracted = ExactRetractedMachine.TestCase
TestSlidingRetracted = SlidingRetractedMachine.TestCase
TestFullHost = FullHostMachine.TestCase
