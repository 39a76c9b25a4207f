"""Random operations on the page manager against a plain model; each one is followed by all checks."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from sglang_diffkv.mem_pool.integrity import check_integrity, check_settled
from sglang_diffkv.mem_pool.table_space import TableFull
from tests.checks import check_contents
from tests.helpers import PAIR, make_format, make_manager, visible
from tests.pages.model import Model, RowModel, SegmentModel, split
from tests.policies import diffkv_policy

LAYERS, HEADS = 1, 2
MOST_WINDOW = 26
ROWS, SEGMENTS, LONGEST = 6, 9, 150
ALPHAS = [(1.0, 0.7, 0.3, 0.0), (1.0, 0.8, 0.6, 0.4), (1e9, 2.0, 0.8, 0.5), (2.0, 1.7, 1.3, 1.0)]
"""Of as many tiers as there are, or two."""
MANY = [("BF16", "K8V4", "K4V2"), ("K8V8", "K8V4", "K4V4", "K4V2")]


class PageManagerMachine(RuleBasedStateMachine):
    """Admission in chunks, decoding, sharing, forking, eviction and abort in any order, in a small pool.

    A rule that has nothing to act on lets the requests progress instead.
    """

    loose_bounds = False

    @initialize(
        tiers=st.sampled_from([PAIR, PAIR, ("K8V4",), ("BF16", "K4V4"), ("K8V8", "K8V4"), *MANY]),
        page_tokens=st.sampled_from([4, 5]),
        pages=st.integers(24, 100),
        blocks=st.sampled_from([0, 0, 9, 14, 19]),
        window=st.sampled_from([1, 3, 6, 20]),
        sinks=st.sampled_from([0, 0, 2, 9]),
        horizon=st.sampled_from([0, 0, 5]),
        alphas=st.sampled_from(
            [(1.0, 0.7, 0.3, 0.0), (1.0, 0.8, 0.6, 0.4), (1e9, 2.0, 0.8, 0.5), (2.0, 1.7, 1.3, 1.0)]
        ),
        by_layer=st.booleans(),
        seal_from=st.sampled_from([None, 1, 12]),
        tailed=st.booleans(),
        position_bytes=st.sampled_from([2, 4]),
        seed=st.integers(0, 999),
    )
    def start(
        self, tiers, page_tokens, pages, blocks, window, sinks, horizon, alphas, by_layer, seal_from, tailed,
        position_bytes, seed,
    ):  # fmt: skip
        between = alphas[1 : max(len(tiers) - 1, 1)]
        if by_layer:  # none uses the second tier but the first layer
            between = tuple((x, *[alphas[0]] * (LAYERS - 1)) for x in between)
        rule = (alphas[0], alphas[-1], window, sinks, horizon)
        policy = diffkv_policy(*rule, alpha_between=between, pressure_window=max(window // 2, 1))
        manager = make_manager(
            make_format(tiers, page_tokens=page_tokens, position_bytes=position_bytes),
            policy=policy, layers=LAYERS, heads=HEADS, pages=pages, rows=ROWS + 1, segments=SEGMENTS,
            max_tokens=LONGEST, loose_bounds=self.loose_bounds, blocks=blocks, most_window=MOST_WINDOW,
        )  # fmt: skip
        manager.prompts.share_min_tokens, manager.prompts.tail = seal_from, window if tailed else 0
        if manager.pressure is not None:
            manager.pressure.least_growth = 1
        self.model = Model(manager, policy, seed)
        self.manager, self.state, self.session = manager, manager.state, self.model.session

    # Requests progress

    @rule(data=st.data())
    def progress(self, data):
        """The next pass of some requests, as a scheduler orders it: prefill before decode."""
        if self.model.prefilling():
            self.extend(data)
        elif self.model.decoding():
            self.decode(data, 1)
        else:
            self.admit(data, [7])

    @rule(data=st.data(), chunks=st.lists(st.integers(1, 21), min_size=1, max_size=3))
    def admit(self, data, chunks):
        if not self.model.free_rows():
            return self.release(data)
        row = data.draw(st.sampled_from(self.model.free_rows()))
        model = RowModel(np.zeros((LAYERS, HEADS, 0), np.int64))
        if own := data.draw(st.sampled_from([0, 0, 1, 7, MOST_WINDOW])):
            self.manager.windows.keep(row, own)
        ends, frozen = self.model.reachable(), self.model.freeze([])
        if ends and data.draw(st.sampled_from([True, True, False])):
            last = data.draw(st.sampled_from(ends))
            whole = self.model.path_to(last, data.draw(st.integers(last.lo + 1, last.hi)))
            parts = split(whole, [data.draw(st.integers(lo, hi)) for _, lo, hi in whole])
            try:
                self.session.attach(row, parts)
            except TableFull:
                event("table full in attach")
                self.model.check(frozen, [])
                return None
            tiers = [self.model.segments[s].tier[:, :, lo - s.lo : hi - s.lo] for s, lo, hi in parts]
            model = RowModel(np.concatenate(tiers, 2), path=parts)
            model.own_from = model.kept_from = model.shared = model.length
        room = LONGEST - model.length
        model.chunks = [n for i, n in enumerate(chunks) if sum(chunks[: i + 1]) <= room]
        self.model.rows[row] = model
        if not model.length:
            self.extend_rows([row])
        self.model.check(frozen, [row] if model.length else [])
        return None

    @rule(data=st.data())
    def extend(self, data):
        if not self.model.prefilling():
            return self.admit(data, [9, 5])
        rows = data.draw(st.lists(st.sampled_from(self.model.prefilling()), min_size=1, unique=True))
        return self.extend_rows(rows)

    def extend_rows(self, rows: list[int]) -> None:
        """Next chunk of each row, as far as pages are safe. A new row for which there is no room goes."""
        models, free, counts = self.model.rows, self.manager.device.free_pages(), {}
        for row in rows:
            need = self.model.pages_for(models[row].chunks[0])
            if need <= free:
                counts[row], free = models[row].chunks[0], free - need
        frozen = self.model.freeze(list(counts))
        try:
            if counts:
                self.session.extend(counts, check=False)
        except TableFull:
            event("table full in extend")
            counts = {}
        for row in rows:
            if not counts.get(row, models[row].length):
                del models[row]
                self.manager.windows.forget(row)
        for row in counts:
            model = models[row]
            model.grow(model.chunks.pop(0))
            if not model.chunks:
                model.end_prompt(visible(self.state, row), self.manager.windows.policy_of(row), self.model.tiers)
                seal_from = self.manager.prompts.share_min_tokens
                tail = self.manager.windows.window_of(row) if self.manager.prompts.tail else 0
                self.session.end_prompt(row)
                if seal_from is not None and model.length - model.shared >= seal_from:
                    model.own_from = model.length
                    frozen_to = self.manager.rows.frozen(row)
                    if tail and frozen_to != model.length:  # there were pages for it
                        event("a tail")
                        assert model.length - model.shared >= seal_from + tail and frozen_to == model.length - tail
                        model.own_from = frozen_to
        self.model.check(frozen, list(counts))

    @rule(data=st.data(), steps=st.integers(1, 8))
    def decode(self, data, steps):
        if not self.model.decoding():
            return self.extend(data)
        models = self.model.rows
        rows = data.draw(st.lists(st.sampled_from(self.model.decoding()), min_size=1, unique=True))
        for _ in range(min(steps, *(LONGEST - models[r].length for r in rows))):
            before, safe = self.manager.device.free_pages(), self.manager.headroom()
            if safe > before:
                return self.release(data)
            frozen = self.model.freeze(rows)
            try:
                found = self.session.decode(rows, check=False)
            except TableFull:
                event("table full in decode")
                return self.model.check(frozen, rows)
            for row in rows:
                models[row].grow(1)
                models[row].end_decode(visible(self.state, row), self.manager.windows.policy_of(row), self.model.tiers)
            self.session.end_decode(rows, found)
            assert before - self.manager.device.free_pages() <= safe
            self.model.check(frozen, rows)
        return None

    @rule(data=st.data())
    def relieve(self, data):
        """The pool is full: some requests are compressed once more."""
        pressure = self.manager.pressure
        if pressure is None or not self.model.decoding():
            return self.progress(data)
        rows = data.draw(st.lists(st.sampled_from(self.model.decoding()), min_size=1, unique=True))
        seen = {row: visible(self.state, row) for row in rows}
        frozen = self.model.freeze(rows)
        for row in pressure.relieve(rows):
            event("relieved")
            self.model.rows[row].end_prompt(seen[row], pressure.rule, self.model.tiers)
        return self.model.check(frozen, rows)

    # Ownership

    @rule(data=st.data(), kind=st.sampled_from(["frozen", "end", "part"]))
    def share(self, data, kind):
        """What joins the tree: a running prompt up to where it is frozen, or a request that ends."""
        if not self.model.sharing():
            return self.progress(data)
        row = data.draw(st.sampled_from(self.model.sharing()))
        model = self.model.rows[row]
        path, lo = model.path, model.kept_from
        others = [s for s in self.model.reachable() if lo < s.hi < model.length]
        if others and data.draw(st.booleans()):  # another request has put a part of it in the tree before
            other = data.draw(st.sampled_from(others))
            path, lo = self.model.path_to(other, other.hi), other.hi
        frozen_to = self.manager.rows.frozen(row) or 0
        hi = data.draw(st.integers(lo + 1, model.length)) if kind == "part" else model.length
        hi = frozen_to if kind == "frozen" and frozen_to > lo else hi
        frozen = self.model.freeze([])
        may = self.manager.prompts.can_publish(row)
        if not may and data.draw(st.booleans()):
            return self.evict(data)
        segment = self.session.share(row, lo, hi)
        assert (segment is not None) == may
        if segment is not None:
            model.own_from = model.own_from if hi == frozen_to else model.length
            complete = model.path is not None and lo == model.kept_from and hi == model.own_from
            model.path = [*model.path, (segment, lo, hi)] if complete else None
            model.kept_from, model.shared = model.own_from, hi
            self.model.segments[segment] = SegmentModel(model.tier[:, :, lo:hi].copy(), path)
            check_contents(self.manager, visible(self.state, segment.row), self.session.shared[segment], lo)
        return self.model.check(frozen, [row])

    @rule(data=st.data())
    def release(self, data):
        """A request finishes, is aborted or retracted, maybe between two chunks."""
        if not self.model.rows:
            return self.evict(data)
        row = data.draw(st.sampled_from(list(self.model.rows)))
        frozen = self.model.freeze([row])
        self.session.release(row)
        del self.model.rows[row]
        return self.model.check(frozen, [])

    @rule(data=st.data())
    def evict(self, data):
        if len(self.model.segments) < 2:
            return self.progress(data)
        segment = data.draw(st.sampled_from(list(self.model.segments)))
        frozen = self.model.freeze([])
        self.manager.segments.release(segment)
        del self.model.segments[segment]
        return self.model.check(frozen, list(self.model.rows))

    @rule(data=st.data())
    def trim(self, data):
        if not self.model.segments:
            return self.progress(data)
        segment = data.draw(st.sampled_from(list(self.model.segments)))
        hi = data.draw(st.integers(segment.lo, segment.hi))
        frozen = self.model.freeze([])
        self.manager.segments.trim(segment, hi)
        held = self.model.segments[segment]
        held.tier = held.tier[:, :, : hi - segment.lo]
        return self.model.check(frozen, list(self.model.rows))

    @rule(data=st.data())
    def clear(self, data):
        if len(self.model.rows) + len(self.model.segments) < 9:
            return self.progress(data)
        self.manager.clear()
        for row in list(self.model.rows):
            self.session.release(row)
        self.model.rows.clear()
        self.model.segments.clear()
        return self.model.check(self.model.freeze([]), [])

    def teardown(self):
        if hasattr(self, "manager"):
            self.manager.clear()
            check_settled(self.manager)
            check_integrity(self.manager)
            assert self.manager.device.free_pages() == self.manager.geometry.num_pages
            assert len(self.manager.space.free_blocks) == self.manager.space.num_blocks


class LooseBoundsMachine(PageManagerMachine):
    """The same where counts of entries never reach the host: its bounds must hold by themselves."""

    loose_bounds = True


SEARCH = settings(
    max_examples=settings.default.max_examples // 3,
    stateful_step_count=100,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
TestPageManager = PageManagerMachine.TestCase
TestPageManager.settings = SEARCH
TestLooseBounds = LooseBoundsMachine.TestCase
TestLooseBounds.settings = SEARCH
