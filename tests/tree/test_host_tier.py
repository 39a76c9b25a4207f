"""Evicted prefixes in host memory: random lives, and what each of a few situations asks for."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from sglang_diffkv.layout.geometry import Segment
from sglang_diffkv.layout.page_format import Tier
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.mem_pool.saved_segments import SavedSegment
from sglang_diffkv.policies.uniform import UniformPolicy
from sglang_diffkv.srt.tree.host_tier import SELECTIVE, WRITE_BACK, WRITE_THROUGH, HostTier
from tests.helpers import visible
from tests.tree.stand_in import Fields, Match, StandIn
from tests.tree.test_prefix_cache import ROWS, machine_settings
from tests.tree.test_retracted import ExactRetractedMachine, RetractedMachine, SlidingRetractedMachine

Seen = dict[tuple[int, int, int, int], tuple[bytes, int]]
"""Tier, layer, head and position -> the page's bytes and the token's slot in it."""


def seen_by(manager: PageManager, row: int, lo: int = 0) -> Seen:
    """What a row shows at position ``lo`` or behind."""
    found, pages = visible(manager.state, row), manager.state.pages.cpu().numpy()
    columns = (found.tier, found.layer, found.head, found.position, found.page, found.slot)
    return {tuple(x[:4]): (pages[x[4]].tobytes(), x[5]) for x in np.stack(columns, 1).tolist() if x[3] >= lo}


def watch(manager: PageManager) -> None:
    """What comes back is what was saved, byte for byte."""
    saved, segments = manager.saved_segments, manager.segments
    assert saved is not None
    save, restore = saved.save, saved.restore
    known: dict[SavedSegment, tuple[Seen, Segment]] = {}

    def saving(segment: Segment) -> SavedSegment | None:
        seen = seen_by(manager, segment.row, segment.lo)
        if (found := save(segment)) is not None:
            known[found] = (seen, SimpleNamespace(**vars(segment)))  # type: ignore[assignment]
        return found

    def restoring(found: SavedSegment, lo: int, hi: int) -> Segment | None:
        segment = restore(found, lo, hi)
        if segment is not None:
            seen, was = known[found]
            assert seen_by(manager, segment.row) == {at: x for at, x in seen.items() if lo <= at[3] < hi}
            assert (segment.lo, segment.hi, segment.end) == (lo, hi, was.end)
            assert segment.as_computed == was.as_computed and segment in segments.cached
        return segment

    saved.save, saved.restore = saving, restoring  # type: ignore[method-assign]


def asking(tokens: Any, new_tokens: int = 20) -> Fields:
    """What admission reads of a request that has no row yet."""
    return Fields(
        full_untruncated_fill_ids=tokens, sampling_params=SimpleNamespace(max_new_tokens=new_tokens), output_ids=[]
    )


class HostMachine(RetractedMachine):
    """A prefix cache's life, whose evicted prefixes are brought back, with requests that are retracted between."""

    host_pages = 300
    write_policy = WRITE_BACK

    def __init__(self) -> None:
        super().__init__()
        watch(self.manager)

    @property
    def host(self) -> HostTier:
        assert isinstance(self.requests.host, HostTier)
        return self.requests.host

    def admit_tokens(self, tokens: array) -> None:
        rid, extra_key = self.named()
        if len(self.running) == ROWS:
            return
        req, held = asking(tokens), {segment.row for segment in self.manager.segments.cached}
        before = self.host.counts["tokens_restored"]
        with self.host.admitting(req):
            match = Match(self.tree, tokens, extra_key=extra_key)
        brought = self.host.counts["tokens_restored"] - before
        assert brought == getattr(req, "diffkv_from_host", 0)
        assert not brought or {segment.row for segment in self.manager.segments.cached} != held
        self.admit_matched(StandIn(tokens, None, match, len(match), rid=rid), match)

    def _leave(self, req: Any, *, insert: bool) -> None:
        super()._leave(req, insert=insert)
        self.retracted.sweep([*self.waiting, *self.running])  # as before the next pass

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
        self.read(seed, 70, tail)

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

    @precondition(lambda self: not self.running)
    @rule()
    def flush(self) -> None:
        self.tree.reset()
        self.pool.clear()
        self.allocator.clear()
        assert not self.host.index.tokens and not self.manager.saved.host.used and not self.host.outdated

    @invariant()
    def host_and_index_agree(self) -> None:
        self.host.check_integrity()
        report = self.host.report()
        assert report["host_bytes"] + self.retracted.report()["host_bytes"] <= report["host_bytes_most"]


class ThroughMachine(HostMachine):
    """Copied soon, into host memory for a few segments."""

    host_pages = 60
    write_policy = WRITE_THROUGH


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


HostMachine.TestCase.settings = ThroughMachine.TestCase.settings = machine_settings(40)
ExactHostMachine.TestCase.settings = SlidingHostMachine.TestCase.settings = machine_settings(40)
LosslessHostMachine.TestCase.settings = machine_settings(30)
TestHost = HostMachine.TestCase
TestThrough = ThroughMachine.TestCase
TestExactHost = ExactHostMachine.TestCase
TestSlidingHost = SlidingHostMachine.TestCase
TestLosslessHost = LosslessHostMachine.TestCase
