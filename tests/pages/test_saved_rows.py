"""Rows in host memory: what is saved comes back as it was, whatever happens meanwhile, and no page is lost."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import rule

from sglang_diffkv.kernels.decode_attention.reference import decode_attention
from sglang_diffkv.layout.geometry import Segment
from sglang_diffkv.mem_pool import saved_rows
from sglang_diffkv.mem_pool.device import layer_groups
from sglang_diffkv.mem_pool.host_pages import HostPages, Run
from sglang_diffkv.mem_pool.integrity import check_integrity, check_settled
from sglang_diffkv.mem_pool.page_copies import staging_pages
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.mem_pool.saved_rows import Chosen, SavedRow, SavedRows
from tests.checks import check_contents
from tests.dense import Dense, Session
from tests.helpers import PAIR, Visible, make_format, make_manager, table_of, visible
from tests.late import SPOILT, arrive_late
from tests.pages.model import RowModel, SegmentModel
from tests.pages.test_page_manager import SEARCH, PageManagerMachine
from tests.policies import diffkv_policy


@given(seed=st.integers(0, 9999), count=st.integers(0, 40))
def test_host_pages_are_never_lost_nor_held_twice(seed: int, count: int) -> None:
    source, host, held = random.Random(seed), HostPages(count, 16, pinned=False), list[list[Run]]()
    for _ in range(60):
        if held and source.random() < 0.5:
            host.give(held.pop(source.randrange(len(held))))
        else:
            wanted, free = source.randrange(12), host.free
            runs = host.take(wanted)
            assert (runs is None) == (wanted > free)
            if runs is not None:
                assert sum(length for _, length in runs) == wanted
                held.append(runs)
        host.check_integrity(run for runs in held for run in runs)
        assert host.used + host.free == count
    if held and any(held):
        with pytest.raises(AssertionError, match="host page"):
            host.check_integrity([])


def with_host(manager: PageManager, count: int) -> SavedRows:
    """Give a manager host memory."""
    manager.saved = SavedRows(manager.device, manager.rows, manager.counts, manager.segments, count)
    return manager.saved


class SavedRowsMachine(PageManagerMachine):
    """The page manager's life, with rows that are saved at any time and restored from any position on."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[SavedRow, RowModel, Dense]] = []

    @rule(data=st.data(), leaves=st.booleans())
    def save(self, data, leaves):
        rows = [row for row in self.model.rows if not self.manager.rows.in_prompt(row)]
        if not rows:
            return self.progress(data)
        saved = self.manager.saved
        if saved is None:
            saved = with_host(self.manager, 60)
            arrive_late(self.manager.device)
        row = data.draw(st.sampled_from(rows))
        model, free = self.model.rows[row], saved.host.free
        hi = data.draw(st.integers(max(model.length - 2, 1), model.length))
        frozen = self.model.freeze([])
        found = saved.save(row, hi)
        if found is None:
            assert free < self.manager.device.pages_of(row)
        else:
            assert saved.host.free == free - found.pages_from(0)
            self.kept.append((found, RowModel(model.tier[:, :, :hi].copy()), self.session.dense[row].cut(0, hi)))
        if leaves:
            self.session.release(row)
            del self.model.rows[row]
        return self.model.check(frozen, [])

    @rule(data=st.data(), whole=st.booleans())
    def restore(self, data, whole):
        if not self.kept:
            return self.save(data, True)
        saved, model, dense = data.draw(st.sampled_from(self.kept))
        lo = 0 if whole else data.draw(st.integers(0, saved.hi - 1))
        pages, free = saved.pages_from(lo), self.manager.device.free_pages()
        if pages > free - self.manager.headroom():
            return self.release(data)
        frozen = self.model.freeze([])
        segment = self.manager.saved.restore(saved, lo)
        if segment is not None:
            assert self.manager.device.free_pages() == free - pages
            self.session.shared[segment] = dense.cut(lo, saved.hi)
            self.model.segments[segment] = SegmentModel(model.tier[:, :, lo:].copy(), None if lo else [])
            check_contents(self.manager, visible(self.state, segment.row), self.session.shared[segment], lo)
        return self.model.check(frozen, list(self.model.rows))

    @rule(data=st.data())
    def drop(self, data):
        if not self.kept:
            return self.progress(data)
        saved, _, _ = self.kept.pop(data.draw(st.integers(0, len(self.kept) - 1)))
        self.manager.saved.drop(saved)
        return self.model.check(self.model.freeze([]), [])

    def teardown(self):
        for saved, _, _ in self.kept:
            self.manager.saved.drop(saved)
        assert self.manager.saved is None or not self.manager.saved.host.used
        super().teardown()


TestSavedRows = SavedRowsMachine.TestCase
TestSavedRows.settings = SEARCH


@pytest.mark.parametrize(
    ("tiers", "position_bytes"), [(PAIR, 2), (("BF16",), 4), (("K8V8", "K8V4", "K4V4", "K4V2"), 2)], ids=str
)
@pytest.mark.parametrize("at_once", [None, 7])
@pytest.mark.parametrize("beyond", [0, 1])
def test_attention_over_what_was_restored_is_that_of_the_row(
    tiers: tuple[str, ...], position_bytes: int, at_once: int | None, beyond: int
) -> None:
    """A shared prefix that ends in the middle of a page, a prompt of its own and a reply; ``beyond``: newest tokens
    that do not count. Another request has the pages meanwhile."""
    between = (1.0, 0.8)[: max(len(tiers) - 2, 0)]
    policy = diffkv_policy(1.2, 0.3, 8, alpha_between=between)
    manager = make_manager(make_format(tiers, position_bytes=position_bytes), policy=policy, pages=300)
    saved, session = with_host(manager, 200), Session(manager)
    if at_once:
        saved._staging = torch.empty(at_once, manager.fmt.page_bytes, dtype=torch.uint8)
    session.extend({1: 29}, check=False)
    session.end_prompt(1)
    first = session.share(1, 0, 21)
    assert first is not None
    session.attach(2, [(first, 0, 21)])
    session.extend({2: 17}, check=False)
    session.end_prompt(2)
    for step in range(90):
        session.step([2], check=False)
        if step > 30 and (len(tiers) == 1 or (manager.state.hole[2] >= 0).any()):
            break
    else:
        raise AssertionError("no hole is saved")
    length = manager.rows.length(2)
    hi, q = length - beyond, session.query(1)
    kept, before = saved.save(2, hi), visible(manager.state, 2)
    assert kept is not None and kept.end == length and saved.host.used == kept.pages_from(0)

    def attention(row: int) -> list[torch.Tensor]:
        at = torch.tensor([row]), torch.tensor([hi])
        return [decode_attention(manager.state, layer, q, *at, 0.1)[0] for layer in range(2)]

    expected = attention(2)
    session.release(2)
    session.extend({3: 120}, check=False)
    session.release(3)
    segment = saved.restore(kept, 21)
    assert segment is not None
    saved.drop(kept)
    manager.attach_prefix(4, [(first, 0, 21), (segment, 21, hi)])
    if not beyond:
        assert all(torch.equal(*pair) for pair in zip(attention(4), expected))
    found, old = visible(manager.state, 4), before.pick(before.position < hi)
    for name in ("tier", "layer", "head", "position", "score"):
        pair = [getattr(x, name)[np.lexsort((x.position, x.head, x.layer))] for x in (old, found)]
        assert np.array_equal(*pair, equal_nan=True), name
    assert not found.own.any()
    check_integrity(manager)
    manager.release(4)
    manager.segments.release_all()
    manager.release(1)
    check_settled(manager)
    assert manager.device.free_pages() == manager.geometry.num_pages


def test_a_row_that_lost_tokens_is_not_saved() -> None:
    manager = make_manager(pages=60)
    saved, session = with_host(manager, 100), Session(manager)
    session.extend({1: 20}, check=False)
    session.end_prompt(1)
    manager.state.fault[1] = 1
    assert saved.save(1, 19) is None and not saved.host.used
    manager.state.fault[1] = 0
    assert saved.save(1, 19) is not None


def prompt_on_the_host() -> tuple[PageManager, SavedRows, SavedRow]:
    """A prompt of 20 tokens that has left the device; 19 are kept."""
    manager = make_manager(pages=60)
    saved, session = with_host(manager, 100), Session(manager)
    session.extend({1: 20}, check=False)
    session.end_prompt(1)
    kept = saved.save(1, 19)
    session.release(1)
    assert kept is not None
    return manager, saved, kept


@pytest.mark.parametrize("calls", range(4))
def test_without_memory_to_list_its_pages_nothing_is_restored(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler goes on: the request is computed again."""
    manager, saved, kept = prompt_on_the_host()
    rows, blocks = manager.segments.rows_free, len(manager.space.free_blocks)
    to_device, left = manager.device.to_device, iter(range(calls))

    def no_memory(numbers: object) -> torch.Tensor:
        if next(left, None) is None:
            raise torch.OutOfMemoryError
        return to_device(numbers)

    with monkeypatch.context() as patch:
        patch.setattr(manager.device, "to_device", no_memory)
        assert saved.restore(kept, 0) is None
    assert (manager.segments.rows_free, len(manager.space.free_blocks)) == (rows, blocks)
    check_integrity(manager)
    check_settled(manager)
    assert saved.restore(kept, 0) is not None
    check_integrity(manager)


def test_the_staging_buffer_is_small() -> None:
    fmt = make_format()
    assert staging_pages(fmt, 10) == 1
    assert staging_pages(fmt, 6400) == 100
    assert staging_pages(fmt, 1 << 30) * fmt.page_bytes <= 16 << 20


@pytest.mark.parametrize("layers", [1, 2, 5, 9])
@pytest.mark.parametrize(("lo", "hi"), [(0, 61), (0, 40), (21, 61), (30, 55)])
def test_bytes_of_later_layers_come_later(layers: int, lo: int, hi: int) -> None:
    """Rows attach to the pages before any byte is there. A pass finds those of a layer once it reaches it."""
    manager = make_manager(make_format(PAIR), layers=layers, pages=120 * layers)
    saved, session = with_host(manager, 200 * layers), Session(manager)
    before = parted(session)
    kept = saved.save(2, 61)
    assert kept is not None
    session.release(2)
    arrive_late(manager.device)
    part = Segment(0, lo, hi, first=lo, end=61)
    segments = saved.restore_all([(kept, part)], saved.needed([(kept, lo, hi)]))
    assert segments is not None
    (segment,), (arriving,) = segments, manager.device._arriving
    assert arriving.unread or lo, "each range begins with a token, unless it is cut"
    groups = layer_groups(layers)
    assert [layer for layer, _ in arriving.ends] == groups
    if not lo:
        with manager.device.attaching_together():
            manager.attach_prefix(4, [(segment, 0, hi)])
    manager.device.flush(by_layer=True)
    for layer in range(layers):
        manager.device.reach(layer)
        end = next((first for first in groups if first > layer), layers)
        for row in (segment.row, *([] if lo else [4])):
            found, wanted = visible(manager.state, row), before.pick((before.position >= lo) & (before.position < hi))
            for at in (layer, end - 1):
                assert same_tokens(manager, found.pick(found.layer == at), wanted.pick(wanted.layer == at))
        later = manager.state.pages[table_pages(manager, segment.row, range(end, layers))]
        assert (later == SPOILT).all(), "more has come than the pass reads"
    assert not manager.device._arriving
    check_integrity(manager)


def parted(session: Session) -> Visible:
    """A row whose tokens, 61, lie in pages of both tiers, shared ones before its own; what it shows."""
    session.extend({1: 29}, check=False)
    session.end_prompt(1)
    first = session.share(1, 0, 21)
    assert first is not None
    session.attach(2, [(first, 0, 21)])
    session.extend({2: 40}, check=False)
    session.end_prompt(2)
    found = visible(session.manager.state, 2)
    assert {*found.tier.tolist()} == {0, 1}
    return found


def same_tokens(manager: PageManager, found: Visible, wanted: Visible) -> bool:
    """Whether the same tokens are in the same tiers, by what pages say."""
    names = ("tier", "layer", "head", "position", "score")
    pairs = zip(*([getattr(x, n)[np.lexsort((x.position, x.head, x.layer))] for n in names] for x in (found, wanted)))
    return all(np.array_equal(*pair, equal_nan=True) for pair in pairs)


def table_pages(manager: PageManager, row: int, layers: range) -> list[int]:
    """Pages of a row in some layers."""
    state, found = manager.state, []
    for tier in range(len(state.tiers)):
        page, _, _ = table_of(state, row, tier)
        used = np.arange(page.shape[2]) < state.entries[row, :, :, tier].numpy()[:, :, None]
        found += page[layers.start : layers.stop][used[layers.start : layers.stop]].tolist()
    return found


def test_pages_of_groups_of_layers_are_all_pages_once() -> None:
    source = random.Random(3)
    for _ in range(60):
        layers, heads, tiers = source.randint(1, 9), source.randint(1, 3), source.randint(1, 4)
        count = source.randrange(40)
        numbers = sorted((source.randrange(tiers), source.randrange(layers * heads)) for _ in range(count))
        tier, head = (np.array([x[k] for x in numbers], dtype=np.int32) for k in (0, 1))
        known = [np.zeros_like(tier)] * 4
        row = SavedRow(1, 1, [(0, len(numbers))], tier, head, *known)
        groups = layer_groups(layers)
        found = Chosen.of(row, 0, 1).by_layer(groups, heads)
        seen = [number for ranges in found for first, end in ranges for number in range(first, end)]
        assert sorted(seen) == list(range(len(numbers))) and len(found) == len(groups)
        for ranges, first_layer, end_layer in zip(found, groups, [*groups[1:], layers], strict=True):
            assert len(ranges) <= tiers
            for first, end in ranges:
                assert all(first_layer * heads <= x < end_layer * heads for x in head[first:end])


def test_few_bytes_come_back_together(monkeypatch: pytest.MonkeyPatch) -> None:
    for most, groups in ((1 << 40, 1), (0, 2)):
        manager, saved, kept = prompt_on_the_host()
        monkeypatch.setattr(saved_rows, "LEAST_BY_LAYER", most)
        assert saved.restore(kept, 0) is not None
        (arriving,) = manager.device._arriving
        assert len(arriving.ends) == groups


def test_what_comes_back_holds_up_nothing_for_what_came_before() -> None:
    """Its rows and tables say nothing of bytes. A count of what is in the pages waits for those of both."""
    manager, saved, kept = prompt_on_the_host()
    for brought in (1, 2):
        assert saved.restore(kept, 0) is not None and len(manager.device._arriving) == brought
    manager.counts.settle()
    assert not manager.device._arriving
    check_integrity(manager)
