"""Attach, release and trim in Triton against their references, with pages shared between rows."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from sglang_diffkv.kernels.attach import reference as attach_reference
from sglang_diffkv.kernels.attach import triton as attach_module
from sglang_diffkv.kernels.attach.triton import PARTS, attach, freeze, prepare_attach, prepare_attach_rows, prepare_seal
from sglang_diffkv.kernels.release import reference as release_reference
from sglang_diffkv.kernels.release.triton import release, trim
from sglang_diffkv.kernels.table import max_entries, put_entries, row_table, table_index
from sglang_diffkv.kernels.transfer_pages import reference as transfer_pages_reference
from sglang_diffkv.kernels.transfer_pages.triton import transfer_pages
from sglang_diffkv.kernels.triton_ring import Spans
from sglang_diffkv.ops.triton import TritonOps
from tests.kernels.triton_helpers import DEVICE, add_prompt, clone_state, make_format, make_manager

TENSORS = ("entries", "kept_entry", "own_entry", "own_tokens", "hole", "fault", "refcount", "counters")


def assert_same(state, twin):
    """Equal page for page, the ring's order too."""
    for name in TENSORS:
        assert torch.equal(getattr(state, name), getattr(twin, name)), name
    rows = torch.arange(state.entries.shape[0], device=DEVICE)
    for tier in range(len(state.tiers)):
        width = max_entries(twin, rows, tier)
        for got, expected in zip(row_table(state, rows, tier, width), row_table(twin, rows, tier, width), strict=True):
            assert torch.equal(got, expected)
    taken, put = state.counters.tolist()
    place = torch.arange(taken, put, device=DEVICE) % state.num_pages
    assert torch.equal(state.ring[place], twin.ring[place])


@pytest.mark.parametrize(("tiers", "position_bytes"), [("K8V4 K4V2", 2), ("K8V4 K4V2", 4), ("K8V4", 2)])
def test_rows_share_and_return_pages(tiers, position_bytes):
    manager = make_manager(
        make_format(tiers, page_tokens=4, position_bytes=position_bytes), pages=170, layers=2, heads=2
    )
    state, generator = manager.state, torch.Generator().manual_seed(5)
    state.counters += 151  # the ring wraps
    add_prompt(manager, 1, 83, generator)
    add_prompt(manager, 2, 21, generator)
    twin = clone_state(state)
    spans = Spans.create(state, 1)
    for target in (9, 10, 3):
        blocks = [b for b in state.row_blocks[1].tolist() if b]
        manager.space.extend(target, manager.space.bound(1))
        manager.space.flush()
        twin.row_blocks.copy_(state.row_blocks)
        assert blocks
    for op, ref in ((attach, attach_reference.attach),):
        for one, run in ((state, op), (twin, ref)):
            run(one, 9, 1, 0, 50, kept_only=True)
            run(one, 10, 1, 50, 83)
            freeze(one, 1)
            run(one, 3, 9, 0, 37)
    assert_same(state, twin)
    for row, end in ((9, 20), (10, 50)):
        trim(state, row, end, spans)
        release_reference.trim(twin, row, end)
        assert_same(state, twin)
    for row in (1, 3, 2, 9, 10):
        release(state, row, spans)
        release_reference.release(twin, row)
        assert_same(state, twin)
    assert not state.refcount.any()


@pytest.mark.parametrize("kept_only", [False, True])
@pytest.mark.parametrize("count", [1, 2, PARTS, PARTS + 1, 2 * PARTS + 1])
@pytest.mark.parametrize("tiers", ["K8V4", "K8V4 K4V2"])
def test_parts_are_attached_in_order(tiers, count, kept_only):
    """Of two rows by turns, with parts that hold nothing among them."""
    manager = make_manager(make_format(tiers, page_tokens=4), pages=500, layers=3, heads=2)
    state, generator = manager.state, torch.Generator().manual_seed(count)
    add_prompt(manager, 1, 83, generator)
    add_prompt(manager, 2, 90, generator)
    if kept_only:
        state.kept_entry[1] = 1
    manager.space.extend(3, tuple(40 for _ in state.tiers))
    manager.space.flush()
    twin = clone_state(state)
    ends = [0, *(torch.randperm(80, generator=generator)[: count - 1] + 1).sort().values.tolist(), 83]
    parts = [(1 + number % 2, lo, lo if number == 3 else hi) for number, (lo, hi) in enumerate(pairwise(ends))]
    prepare_attach(state, kept_only=kept_only)(3, parts)
    for part in parts:
        attach_reference.attach(twin, 3, *part, kept_only=kept_only)
    assert_same(state, twin)
    assert state.entries[3].any()


@pytest.mark.cover(1)
@pytest.mark.parametrize("tiers", ["K8V4", "K8V4 K4V2", "K8V4 K4V4 K4V2"])
def test_rows_are_attached_to_together(tiers):
    """Rows with many parts, with one, with none that holds anything, and with none at all; one has entries already."""
    manager = make_manager(make_format(tiers, page_tokens=4), pages=1600, layers=3, heads=2)
    state, generator = manager.state, torch.Generator().manual_seed(3)
    add_prompt(manager, 1, 83, generator)
    add_prompt(manager, 2, 90, generator)
    attach_rows = prepare_attach_rows(state)
    targets = (9, 3, 10, 4, 5)
    for target in targets:
        manager.space.extend(target, tuple(60 if target == 9 else 24 for _ in state.tiers))
    manager.space.flush()
    attach_reference.attach(state, 10, 2, 0, 11)
    state.own_tokens[[9, 10]] = 3  # as of who had the row before
    twin = clone_state(state)
    many = [(1 + number % 2, 3 * number, 3 * number + 5) for number in range(27)]
    for paths in (
        [(9, many), (3, [(2, 0, 90)]), (10, [(1, 11, 30), (2, 30, 30), (1, 30, 83)])],
        [(4, [(2, 200, 300)]), (5, [])],
        [(9, [(1, 7, 9)])],
    ):
        attach_rows(paths)
        for target, parts in paths:
            for part in parts:
                attach_reference.attach(twin, target, *part)
        assert_same(state, twin)
    assert state.entries[9].any() and not state.entries[4].any()
    for wrong in ([(3, [(9, 0, 4)]), (9, [(1, 0, 4)])], [(3, [(1, 0, 4)]), (3, [(1, 4, 8)])]):
        with pytest.raises(AssertionError):
            attach_rows(wrong)


@pytest.mark.parametrize(("tiers", "position_bytes"), [("K8V4", 2), ("K8V4 K4V2", 2), ("K8V4 K4V4 K4V2", 4)])
def test_rows_attach_to_pages_that_are_not_there_yet(tiers: str, position_bytes: int) -> None:
    """Of a row each of whose ranges begins with a token, as if they were, but for who cuts its front."""
    fmt = make_format(tiers, page_tokens=4, position_bytes=position_bytes)
    manager = make_manager(fmt, pages=600, layers=3, heads=2)
    state, generator = manager.state, torch.Generator().manual_seed(7)
    add_prompt(manager, 1, 83, generator)
    add_prompt(manager, 2, 90, generator)
    rows = torch.tensor([1], device=DEVICE)
    for tier, view in enumerate(state.tiers):
        width = max_entries(state, rows, tier)
        page, lo, hi = row_table(state, rows, tier, width)
        at = view.positions[page]
        inside = (at >= lo.unsqueeze(-1)) & (at < hi.unsqueeze(-1))
        first = torch.where(inside, at, 1 << 15).amin(-1)
        used = torch.arange(width, device=DEVICE) < state.entries[rows, ..., tier].unsqueeze(3)
        entries = torch.arange(width, device=DEVICE).expand(page.shape)
        where = table_index(state, rows, tier, entries)[used]
        put_entries(state, where, page[used], first[used], hi[used])
    for target in (3, 4, 5, 9, 10):
        manager.space.extend(target, tuple(24 for _ in state.tiers))
    manager.space.flush()
    twin, plain = clone_state(state), clone_state(state)
    ends = (0, 1, 37, 83, 200)
    there = state.pages.clone()
    state.pages.fill_(0xAB)
    twin.pages.fill_(0xAB)
    attach_again, attach_rows = prepare_attach(state, kept_only=False), prepare_attach_rows(state)
    for target, hi in zip((3, 4, 5, 9, 10), ends, strict=True):
        parts = [(1, attach_reference.FROM_START, hi)]
        attach_again(target, parts) if target < 9 else attach_rows([(target, parts)])
        attach_reference.attach(twin, target, *parts[0])
        attach_reference.attach(plain, target, 1, 0, hi)
    assert_same(state, twin)
    assert_same(state, plain)
    state.pages.copy_(there)
    assert state.entries[4].any() and not state.entries[3].any() and torch.equal(state.entries[9], state.entries[1])


def test_rows_are_attached_to_one_by_one_where_no_memory_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the scheduler would meet the error again when it gives up these rows, and end."""
    manager = make_manager(make_format("K8V4 K4V2", page_tokens=4), pages=200, layers=2, heads=2)
    manager.device.ops = ops = TritonOps(manager.state, manager.policy, 2, 256)
    add_prompt(manager, 1, 33, torch.Generator().manual_seed(3))
    monkeypatch.setattr(attach_module, "to_device", no_memory)
    for target in (3, 4):
        manager.space.extend(target, (12, 12))
    manager.space.flush()
    twin = clone_state(manager.state)
    parts = [(1, 0, 9), (1, 9, 20), (1, 20, 21), (1, 21, 22), (1, 22, 33)]
    ops.attach_paths([(3, parts), (4, parts[:1])])
    for target, some in ((3, parts), (4, parts[:1])):
        for part in some:
            attach_reference.attach(twin, target, *part)
    assert_same(manager.state, twin)
    assert manager.state.entries[3].any() and manager.state.entries[4].any()


def no_memory(*given: object) -> None:
    raise torch.OutOfMemoryError("none")


@pytest.mark.parametrize("tiers", ["K8V4", "K8V4 K4V2", "K8V4 K4V4 K4V2"])
@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (3, 5), (31, 7)])
def test_a_sealed_row_is_as_one_that_is_frozen_and_kept(tiers, layers, heads):
    manager = make_manager(make_format(tiers, page_tokens=4), layers=layers, heads=heads)
    state, generator = manager.state, torch.Generator().manual_seed(5)
    for counts in (state.entries, state.kept_entry, state.own_entry, state.own_tokens, state.hole):
        counts.copy_(torch.randint(0, 1000, counts.shape, generator=generator, dtype=counts.dtype))
    twin = clone_state(state)
    seal, last = prepare_seal(state), state.entries.shape[0] - 1
    for row in (0, 3, last):
        seal(row)
        attach_reference.seal(twin, row)
        for name in TENSORS:
            assert torch.equal(getattr(state, name), getattr(twin, name)), name
    assert torch.equal(state.kept_entry[3], state.entries[3]) and not state.own_tokens[3].any()


@pytest.mark.parametrize("shared", [0, 5, 29, 290])
@pytest.mark.parametrize(("tiers", "position_bytes"), [("K8V4 K4V2", 2), ("K8V4", 4)])
def test_a_row_hands_over_what_it_may_not_write(tiers, position_bytes, shared):
    """Pages of segments and frozen ones go, in order, with their ranges and the references that they had; what the row
    may write comes first then, and grows on."""
    manager = make_manager(
        make_format(tiers, page_tokens=4, position_bytes=position_bytes), pages=1800, layers=2, heads=2
    )
    state, generator, spans = manager.state, torch.Generator().manual_seed(5), Spans.create(manager.state, 1)
    add_prompt(manager, 3, 300, generator)
    if shared:
        manager.space.extend(1, manager.space.bound(3))
        manager.space.flush()
        attach(state, 1, 3, 0, shared)
        manager.rows.grow(1, shared, in_prompt=False)
    add_prompt(manager, 1, shared + 150, generator, compact=False)
    manager.space.extend(9, manager.space.bound(1))
    manager.space.flush()
    twin = clone_state(state)
    before = row_table(state, torch.tensor([1], device=DEVICE), 0, max_entries(state, torch.tensor([1]), 0))
    own, entries = state.own_entry[1].clone(), state.entries[1].clone()
    for run, one in ((transfer_pages, state), (transfer_pages_reference.transfer_pages, twin)):
        run(one, 1, 9)
    assert_same(state, twin)
    assert torch.equal(state.entries[9], own) and torch.equal(state.entries[1], entries - own)
    assert not state.own_entry[1].any() and (shared > 0) == bool(own.any())
    for row, last in ((9, own), (1, entries)):
        found = row_table(state, torch.tensor([row], device=DEVICE), 0, max_entries(state, torch.tensor([row]), 0))
        for got, expected in zip(found, before, strict=True):
            for layer in range(2):
                for head in range(2):
                    begin = 0 if row == 9 else int(own[layer, head, 0])
                    end = int(last[layer, head, 0])
                    assert torch.equal(got[0, layer, head, : end - begin], expected[0, layer, head, begin:end])
    release(state, 9, spans)
    release_reference.release(twin, 9)
    assert_same(state, twin)
