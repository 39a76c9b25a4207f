"""Random operations on the page manager against a plain model; each one is followed by all checks."""

from __future__ import annotations

import os

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from sglang_diffkv.mem_pool.integrity import check_integrity
from sglang_diffkv.mem_pool.page_manager import Segment
from sglang_diffkv.mem_pool.table_space import TableFull
from sglang_diffkv.policies.diffkv import DiffKVPolicy
from tests.checks import check_contents, check_row
from tests.dense import Session
from tests.helpers import PAIR, make_format, make_manager, table_of, tier_map, visible
from tests.model import Parts, RowModel, SegmentModel

LAYERS, HEADS = 1, 2
ROWS, SEGMENTS, LONGEST = 6, 5, 150
EXAMPLES = int(os.environ.get("DIFFKV_EXAMPLES", "25"))
"""Runs of 50 operations in each of the two settings; raise it for a long search."""


class PageManagerMachine(RuleBasedStateMachine):
    """Admission in chunks, decoding, sharing, forking, eviction and abort in any order, in a small pool."""

    loose_bounds = False

    @initialize(
        tiers=st.sampled_from([PAIR, PAIR, ("K8V4",), ("BF16", "K4V4"), ("K8V8", "K8V4")]),
        page_tokens=st.sampled_from([4, 5]),
        pages=st.integers(30, 150),
        window=st.sampled_from([1, 3, 6, 20]),
        alphas=st.sampled_from([(1.0, 0.0), (1.0, 0.4), (1e9, 0.5), (2.0, 1.0)]),
        seed=st.integers(0, 999),
    )
    def start(self, tiers, page_tokens, pages, window, alphas, seed):
        self.policy = DiffKVPolicy(*alphas, window)
        self.manager = make_manager(
            make_format(tiers, page_tokens=page_tokens),
            policy=self.policy, layers=LAYERS, heads=HEADS, pages=pages, rows=ROWS + 1, segments=SEGMENTS,
            max_tokens=LONGEST, loose_bounds=self.loose_bounds,
        )  # fmt: skip
        self.state, self.tiers = self.manager.state, len(tiers)
        self.session = Session(self.manager, group=2, spread=3.0, seed=seed)
        self.rows: dict[int, RowModel] = {}
        self.segments: dict[Segment, SegmentModel] = {}

    # What the model knows

    def reachable(self) -> list[Segment]:
        live = set(self.segments)
        return [s for s, m in self.segments.items() if s.hi > s.lo and m.is_reachable(live)]

    def prefilling(self) -> list[int]:
        return [row for row, model in self.rows.items() if model.chunks]

    def decoding(self) -> list[int]:
        return [row for row, m in self.rows.items() if not m.chunks and m.length < LONGEST]

    def pages_for(self, row: int, count: int) -> int:
        """Safe bound of the pages that an extend and the end of a prompt can take."""
        return LAYERS * HEADS * (-(-count // self.manager.fmt.high.tokens) + 2)

    def own_pages(self, rows: list[int]) -> set[int]:
        """Pages that these rows may write."""
        found: set[int] = set()
        for row in rows:
            for tier in range(self.tiers):
                page, _, _ = table_of(self.state, row, tier)
                entry = np.arange(page.shape[2])
                lo = self.state.own_entry[row, :, :, tier].numpy()[:, :, None]
                hi = self.state.entries[row, :, :, tier].numpy()[:, :, None]
                found.update(page[(entry >= lo) & (entry < hi)].tolist())
        return found

    def freeze(self, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages in use, other than those that ``rows`` may write, with their bytes."""
        held = self.state.refcount > 0
        held[list(self.own_pages(rows))] = False
        ids = held.nonzero().squeeze(1)
        return ids, self.state.pages[ids].clone()

    def check(self, frozen: tuple[torch.Tensor, torch.Tensor], touched: list[int]) -> None:
        """All invariants; ``frozen`` pages that are still in use hold the same bytes."""
        check_integrity(self.manager)
        ids, before = frozen
        still = self.state.refcount[ids] > 0
        assert torch.equal(self.state.pages[ids[still]], before[still]), "a page changed under its readers"
        assert self.manager.lengths == {row: m.length for row, m in self.rows.items()}
        assert self.manager.faults(list(range(ROWS + 1))) == []
        for row, model in self.rows.items():
            assert np.array_equal(tier_map(self.state, row, model.length), model.tier), f"row {row}"
            if row in touched:
                check_row(self.session, row)
        assert self.manager.segments == set(self.segments)
        for segment, held in self.segments.items():
            found = tier_map(self.state, segment.row, segment.hi)
            assert np.array_equal(found[:, :, segment.lo :], held.tier), segment
            assert (found[:, :, : segment.lo] == self.tiers).all(), segment
            assert segment.pages == self.manager.pages_of(segment.row)

    # Rules

    @precondition(lambda self: len(self.rows) < ROWS)
    @rule(data=st.data(), chunks=st.lists(st.integers(1, 21), min_size=1, max_size=3))
    def admit(self, data, chunks):
        row = data.draw(st.sampled_from([r for r in range(1, ROWS + 1) if r not in self.rows]))
        model = RowModel(np.zeros((LAYERS, HEADS, 0), np.int64))
        frozen = self.freeze([])
        ends = self.reachable()
        if ends and data.draw(st.booleans()):
            last = data.draw(st.sampled_from(ends))
            whole = [
                *(self.segments[last].path or []),
                (last, last.lo, data.draw(st.integers(last.lo + 1, last.hi))),
            ]
            parts = self.split(data, whole)
            try:
                self.session.attach(row, parts)
            except TableFull:
                assert self.loose_bounds, "counted bounds leave room"
                self.check(frozen, [])
                return
            tiers = [self.segments[s].tier[:, :, lo - s.lo : hi - s.lo] for s, lo, hi in parts]
            model = RowModel(np.concatenate(tiers, 2), path=parts)
            model.own_from = model.length
        room = LONGEST - model.length
        model.chunks = [n for i, n in enumerate(chunks) if sum(chunks[: i + 1]) <= room] or (
            [room] if room else []
        )
        if model.chunks or model.length:
            self.rows[row] = model
        if not model.length:
            self.extend_rows([row] if model.chunks else [], [])
        self.check(frozen, [row] if row in self.rows else [])

    def split(self, data, parts: Parts) -> Parts:
        """Cut parts in two where the data says so, as a tree does when its nodes split."""
        out: Parts = []
        for segment, lo, hi in parts:
            cut = data.draw(st.integers(lo, hi))
            out += [(segment, a, b) for a, b in ((lo, cut), (cut, hi)) if a < b]
        return out

    @precondition(lambda self: self.prefilling())
    @rule(data=st.data())
    def extend(self, data):
        rows = data.draw(st.lists(st.sampled_from(self.prefilling()), min_size=1, unique=True))
        self.extend_rows(rows, [r for r in rows if self.rows[r].length])

    def extend_rows(self, rows: list[int], keep: list[int]) -> None:
        """Next chunk of each row, as far as pages are safe; a row in ``rows`` only, not in ``keep``, may go."""
        free, counts = self.manager.free_pages(), {}
        for row in rows:
            need = self.pages_for(row, self.rows[row].chunks[0])
            if need <= free:
                counts[row], free = self.rows[row].chunks[0], free - need
            elif row not in keep:
                del self.rows[row]
        if not counts:
            return
        frozen = self.freeze(list(counts))
        self.session.extend(counts, check=False)
        for row in counts:
            model = self.rows[row]
            model.grow(model.chunks.pop(0))
            if not model.chunks:
                model.end_prompt(visible(self.state, row), self.policy, self.tiers)
                self.manager.end_prompt(row)
        self.check(frozen, list(counts))

    @precondition(lambda self: self.decoding())
    @rule(data=st.data(), steps=st.integers(1, 8))
    def decode(self, data, steps):
        rows = data.draw(st.lists(st.sampled_from(self.decoding()), min_size=1, unique=True))
        for _ in range(min(steps, *(LONGEST - self.rows[r].length for r in rows))):
            before = self.manager.free_pages()
            safe = self.manager.headroom()
            if safe > before:
                return
            frozen = self.freeze(rows)
            found = self.session.decode(rows, check=False)
            for row in rows:
                self.rows[row].grow(1)
                self.rows[row].end_decode(visible(self.state, row), self.policy, self.tiers)
            self.session.end_decode(rows, found)
            assert before - self.manager.free_pages() <= safe
            self.check(frozen, rows)

    @precondition(lambda self: any(m.length > m.own_from for m in self.rows.values()))
    @rule(data=st.data(), to_the_end=st.booleans())
    def share(self, data, to_the_end):
        row = data.draw(st.sampled_from([r for r, m in self.rows.items() if m.length > m.own_from]))
        model, lo = self.rows[row], self.rows[row].own_from
        path = model.path
        others = [s for s in self.reachable() if lo < s.hi < model.length]
        if others and data.draw(st.booleans()):  # another request has put a part of it in the tree before
            other = data.draw(st.sampled_from(others))
            path, lo = [*(self.segments[other].path or []), (other, other.lo, other.hi)], other.hi
        hi = model.length if to_the_end else data.draw(st.integers(lo + 1, model.length))
        frozen = self.freeze([])
        may, own_from = self.manager.can_share(row), model.own_from
        segment = self.session.share(row, lo, hi)
        assert (segment is not None) == may
        if segment is not None:
            complete = model.path is not None and lo == own_from and hi == model.length
            model.path = [*model.path, (segment, lo, hi)] if complete else None
            model.own_from = model.length
            self.segments[segment] = SegmentModel(model.tier[:, :, lo:hi].copy(), path)
        self.check(frozen, [row])
        if segment is not None:
            check_contents(self.manager, visible(self.state, segment.row), self.session.shared[segment], lo)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def release(self, data):
        """A request finishes, is aborted or retracted, maybe between two chunks."""
        row = data.draw(st.sampled_from(list(self.rows)))
        frozen = self.freeze([row])
        self.session.release(row)
        del self.rows[row]
        self.check(frozen, [])

    @precondition(lambda self: self.segments)
    @rule(data=st.data())
    def evict(self, data):
        segment = data.draw(st.sampled_from(list(self.segments)))
        frozen = self.freeze([])
        self.manager.release_segment(segment)
        del self.segments[segment]
        self.check(frozen, list(self.rows))

    @precondition(lambda self: self.segments)
    @rule(data=st.data())
    def trim(self, data):
        segment = data.draw(st.sampled_from(list(self.segments)))
        hi = data.draw(st.integers(segment.lo, segment.hi))
        frozen = self.freeze([])
        self.manager.trim_segment(segment, hi)
        held = self.segments[segment]
        held.tier = held.tier[:, :, : hi - segment.lo]
        self.check(frozen, list(self.rows))

    @precondition(lambda self: len(self.rows) + len(self.segments) > 8)
    @rule()
    def clear(self):
        self.manager.clear()
        for row in list(self.rows):
            self.session.release(row)
        self.rows.clear()
        self.segments.clear()
        self.check(self.freeze([]), [])

    def teardown(self):
        if hasattr(self, "manager"):
            self.manager.clear()
            check_integrity(self.manager)
            assert self.manager.free_pages() == self.manager.geometry.num_pages
            assert len(self.manager.space.free_blocks) == self.manager.space.num_blocks


class LooseBoundsMachine(PageManagerMachine):
    """The same without reading counts back, as on a GPU: the host's bounds must hold by themselves."""

    loose_bounds = True


SEARCH = settings(
    max_examples=EXAMPLES, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPageManager = PageManagerMachine.TestCase
TestPageManager.settings = SEARCH
TestLooseBounds = LooseBoundsMachine.TestCase
TestLooseBounds.settings = SEARCH
