"""Random lives of prefixes over a pool, host memory and a store that fails: nothing is lost, and no row reads another
sequence's token."""

from __future__ import annotations

import tempfile
import time
from array import array

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from sglang_diffkv.mem_pool.segment_object import Origin
from sglang_diffkv.mem_pool.stored_segments import StoredSegments
from sglang_diffkv.srt.tree.disk_tier import TIMEOUT, DiskTier, Prefetch
from sglang_diffkv.srt.tree.host_tier import WRITE_BACK, WRITE_THROUGH
from tests.tree.faulty_folder import FaultyFolder
from tests.tree.stand_in import Match, StandIn
from tests.tree.test_host_tier import HostMachine, asking
from tests.tree.test_prefix_cache import ROWS, machine_settings
from tests.tree.test_retracted import ExactRetractedMachine


class StoreMachine(HostMachine):
    """A prefix cache's life over three tiers. Copies to the host arrive late, and the store fails."""

    host_pages = 120
    write_policy = WRITE_THROUGH
    seeds = 0

    def __init__(self) -> None:
        super().__init__()
        StoreMachine.seeds += 1
        self.folder = tempfile.TemporaryDirectory()
        self.store = FaultyFolder(self.folder.name, StoreMachine.seeds)
        manager = self.manager
        assert manager.saved_segments is not None
        origin = Origin.of(manager.geometry, manager.state.dtype, "m", "c")
        self.host.store_in(StoredSegments(manager.saved_segments, self.store, origin), Prefetch(TIMEOUT, 8, 0.1, 0.0))

    @property
    def disk(self) -> DiskTier:
        assert isinstance(self.host.disk, DiskTier)
        return self.host.disk

    def admit_tokens(self, tokens: array) -> None:
        """A new request, which waits for the store as long as it may."""
        rid, extra_key = self.named()
        if len(self.running) == ROWS:
            return
        req, end = asking(tokens), time.monotonic() + 20
        while True:
            self.requests.scheduling_begins([*self.waiting, *self.running, req])
            with self.host.admitting(req):
                match = Match(self.tree, tokens, extra_key=extra_key)
            if not self.host.waits_for(req):
                break
            match.unlock(self.tree)
            assert time.monotonic() < end, "it waits for ever"
        if self.admit_matched(StandIn(tokens, None, match, len(match), rid=rid), match):
            self.host.prefill_begins([req])

    @rule(seed=st.integers(0, 2), length=st.integers(30, 70), abort=st.booleans())
    def ask_and_leave(self, seed: int, length: int, abort: bool) -> None:
        """A request that is aborted while it waits, or that another one overtakes."""
        req, tokens = asking(self.prompt(seed, length)), self.prompt(seed, length)
        with self.host.admitting(req):
            Match(self.tree, tokens).unlock(self.tree)
        self.requests.scheduling_begins([*self.waiting, *self.running, *([] if abort else [req])])

    def prompt(self, seed: int, length: int) -> array:
        """Tokens of which other prompts have some."""
        return array("q", [(seed + at * at) % 3 for at in range(length)])

    @rule(seed=st.integers(0, 2), length=st.integers(40, 70), flush=st.booleans())
    def from_the_store(self, seed: int, length: int, flush: bool) -> None:
        """A prompt that was written is lost by pool and host, and asked again."""
        self.admit_tokens(self.prompt(seed, length))
        while any(r.prefilling for r in self.running):
            self.extend(49)
        if self.running and len(self.running) < ROWS:
            self._leave(self.running[-1], insert=True)
        self.written()
        self.tree.make_pages(self.manager.geometry.num_pages, partly=True)
        self.written()
        if flush and not self.running:
            self.flush()
        with self.host.retracting_all():
            pass
        self.admit_tokens(self.prompt(seed, 70))

    def written(self) -> None:
        """Wait a little until what is to be written is."""
        end = time.monotonic() + 0.2
        for _ in range(4):
            self.write()
        while self.disk.report()["waiting"] and time.monotonic() < end:
            self.write()

    @precondition(lambda self: not self.running)
    @rule()
    def flush(self) -> None:
        """What a store that hangs is still writing to is nobody else's yet."""
        self.empty()
        manager = self.manager
        assert manager.saved is not None and manager.saved_segments is not None
        coming = sum(count for runs in manager.saved_segments.incoming for _, count in runs)
        assert manager.saved.host.used == coming and not self.host.index.tokens and not self.host.old_weights.left

    @rule()
    def hang_or_answer(self) -> None:
        """The store answers nobody from now on, or again."""
        if self.store.answers.is_set() and self.random.random() < 0.3:
            self.store.answers.clear()
        else:
            self.store.answers.set()

    def teardown(self) -> None:
        self.store.answers.set()
        for req in list(self.running):
            self._leave(req, insert=False)
        self.waiting.clear()
        end = time.monotonic() + 20
        while self.disk.report()["fetching"] or self.disk._loadings or self.disk.report()["waiting"]:
            self.requests.scheduling_begins([])
            assert time.monotonic() < end, "something waits for ever"
        self.flush()
        assert not self.manager.saved.host.used, "host memory is lost"  # type: ignore[union-attr]
        self.folder.cleanup()
        super().teardown()


class ExactStoreMachine(StoreMachine, ExactRetractedMachine):
    write_policy = WRITE_BACK
    page_tokens = 16


for machine in (StoreMachine, ExactStoreMachine):
    usual = machine_settings(25)
    machine.TestCase.settings = settings(usual, max_examples=2 * usual.max_examples)
TestStore = StoreMachine.TestCase
TestExactStore = ExactStoreMachine.TestCase
