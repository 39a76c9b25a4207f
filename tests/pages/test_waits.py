"""Nothing that is launched between passes makes the host wait for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from sglang_diffkv.layout.geometry import Segment
from sglang_diffkv.mem_pool import saved_rows
from sglang_diffkv.mem_pool.device import layer_groups
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.mem_pool.saved_rows import SavedRows
from sglang_diffkv.mem_pool.saved_segments import SavedSegment, SavedSegments
from sglang_diffkv.mem_pool.steps import PlannedStep
from sglang_diffkv.ops.triton import TritonOps
from sglang_diffkv.policies.base import Policy
from tests.helpers import seen_by
from tests.kernels.triton_helpers import DEVICE, add_prompt, make_format, make_manager
from tests.pages.test_judged_beside import OTHER, TIERS_SCORED, decode, policy, running_of
from tests.pages.test_judged_beside import manager_of as judging
from tests.policies import diffkv_policy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE != "cuda", reason="a CPU waits for nothing")]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Inside, whatever waits for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def manager_of(policy: Policy, tiers: str, pages: int = 2400) -> PageManager:
    make_ops = partial(TritonOps, policy=policy, q_heads=2, max_tokens=400)
    return make_manager(make_format(tiers, page_tokens=4), pages=pages, policy=policy, make_ops=make_ops)


@pytest.mark.parametrize("tail", [0, 6])
@pytest.mark.parametrize("rows", [(1,), (1, 2)])
def test_the_end_of_prompts(rows: tuple[int, ...], tail: int) -> None:
    """Twice: kernels are compiled the first time."""
    manager = manager_of(diffkv_policy(1.0, 0.0, window=6), "K8V4 K4V2")
    manager.prompts.share_min_tokens, manager.prompts.tail = 16, tail
    generator = torch.Generator().manual_seed(1)
    for again in (False, True):
        for row in rows:
            add_prompt(manager, row, 47, generator, compact=False)
            manager.rows.of(row).in_prompt = True
        with no_waiting() if again else nullcontext():
            numbers = ([47] * len(rows), [0] * len(rows))
            manager.counts.watch_faults(PlannedStep(manager.counts.steps, list(rows), *numbers, pages=0))
            manager.prompts.end(*rows)
            segments = [manager.prompts.publish(row, 0, 47 - tail) for row in rows]
            for row in rows:
                manager.release(row)
        for segment in segments:
            assert segment is not None
            manager.segments.release(segment)


@pytest.mark.parametrize("tiers", ["BF16", "K8V4", "K8V4 K4V2"])
def test_running_requests_are_compressed(tiers: str) -> None:
    """The second one; of the first the kernels are compiled."""
    manager = judging(tiers, policy(asynchronous=False), "triton")
    running = running_of(manager)
    decode(manager, [*TIERS_SCORED, OTHER])
    assert [running.follow(row) for row in (*TIERS_SCORED, OTHER)] == [True, True, False]
    assert running.compress(TIERS_SCORED[0], [])
    with no_waiting():
        assert running.compress(TIERS_SCORED[1], [])


def test_segments_go_to_the_host_and_back() -> None:
    """The second one; of the first the kernels are compiled, and host memory is pinned."""
    manager = manager_of(diffkv_policy(1.0, 0.0, window=6), "K8V4 K4V2")
    parts = (manager.device, manager.rows, manager.counts, manager.segments)
    saved = SavedSegments(manager.device, SavedRows(*parts, 400, in_parts=True))
    generator = torch.Generator().manual_seed(1)
    for again in (False, True):
        add_prompt(manager, 1, 47, generator, compact=False)
        manager.rows.of(1).in_prompt = True
        manager.prompts.end(1)
        segment = manager.prompts.publish(1, 0, 47)
        assert segment is not None
        manager.counts.settle()
        before = seen_by(manager, segment.row)
        with no_waiting() if again else nullcontext():
            kept = saved.save(segment)
            manager.release(1)
            manager.segments.release(segment)
        torch.cuda.synchronize()
        saved.finish()
        assert kept is not None and saved.ready(kept)
        with no_waiting() if again else nullcontext():
            back = brought_back(saved, kept)
        assert back is not None and seen_by(manager, back.row) == before
        manager.segments.release(back)
        saved.drop_all()


def brought_back(saved: SavedSegments, kept: SavedSegment) -> Segment | None:
    """A saved segment of 47 tokens as a segment again."""
    parts = [(kept, 0, 47)]
    back = saved.restore(parts, saved.needed(parts))
    return None if back is None else back[0]


def published(manager: PageManager, seed: int) -> Segment:
    """The segment of a prompt of row 1, counted."""
    add_prompt(manager, 1, 47, torch.Generator().manual_seed(seed), compact=False)
    manager.rows.of(1).in_prompt = True
    manager.prompts.end(1)
    segment = manager.prompts.publish(1, 0, 47)
    assert segment is not None
    manager.counts.settle()
    return segment


LATE = 200_000_000
"""Cycles of a GPU: about a tenth of a second."""


def test_no_page_is_used_again_before_it_is_copied() -> None:
    """Copies to the host run late, and so does what brings pages back. Meanwhile prompts take all pages of the device,
    and the next copy the same pages of the host."""
    manager = manager_of(diffkv_policy(1.0, 0.0, window=6), "K8V4 K4V2", pages=130)
    parts = (manager.device, manager.rows, manager.counts, manager.segments)
    saved = SavedSegments(manager.device, SavedRows(*parts, 70, in_parts=True))
    copy_out = saved.rows.copy_out

    def late(*args: Any) -> None:
        torch.cuda._sleep(LATE)
        copy_out(*args)

    saved.rows.copy_out = late  # type: ignore[method-assign]
    for seed in range(0, 40, 10):
        segment = published(manager, seed)
        before = seen_by(manager, segment.row)
        kept = saved.save(segment)
        manager.release(1)
        manager.segments.release(segment)
        for other in range(1, 4):  # the ring has been round by then
            segment = published(manager, seed + other)
            manager.release(1)
            manager.segments.release(segment)
        torch.cuda.synchronize()
        assert kept is not None and saved.finish() == [kept]
        torch.cuda._sleep(LATE)
        back = brought_back(saved, kept)
        assert back is not None
        saved.drop(kept)
        other_segment = published(manager, seed + 5)
        expected = seen_by(manager, other_segment.row)
        again = saved.save(other_segment)  # to the host pages that are just being read
        assert again is not None and seen_by(manager, back.row) == before
        manager.release(1)
        for gone in (back, other_segment):
            manager.segments.release(gone)
        torch.cuda.synchronize()
        saved.finish()
        back = brought_back(saved, again)
        assert back is not None and seen_by(manager, back.row) == expected
        manager.segments.release(back)
        saved.drop_all()


def test_a_pass_begins_before_bytes_of_later_layers_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_rows, "LEAST_BY_LAYER", 0)
    manager = manager_of(diffkv_policy(1.0, 0.0, window=6), "K8V4 K4V2")
    layers = manager.geometry.num_layers
    assert len(layer_groups(layers)) > 1
    parts = (manager.device, manager.rows, manager.counts, manager.segments)
    saved = SavedSegments(manager.device, SavedRows(*parts, 400, in_parts=True))
    copy_in = saved.rows._copy_in

    def late(*args: Any) -> Any:
        torch.cuda._sleep(LATE)
        return copy_in(*args)

    saved.rows._copy_in = late  # type: ignore[method-assign]
    for seed in range(2):  # kernels are compiled, and memory is pinned, the first time
        segment = published(manager, seed)
        before = seen_by(manager, segment.row)
        kept = saved.save(segment)
        manager.release(1)
        manager.segments.release(segment)
        torch.cuda.synchronize()
        assert kept is not None and saved.finish() == [kept]
        back = brought_back(saved, kept)
        assert back is not None
        manager.attach_prefix(2, [(back, 0, 47)])
        manager.device.flush(by_layer=True)
        begins, ends = torch.cuda.Event(), torch.cuda.Event()
        begins.record()
        manager.device.reach(layers - 1)
        ends.record()
        assert not manager.device._arriving
        begins.synchronize()
        assert seed == 0 or not ends.query(), "it has waited for bytes of all layers"
        assert seen_by(manager, back.row) == seen_by(manager, 2) == before
        manager.release(2)
        manager.segments.release(back)
        saved.drop_all()


def test_bytes_that_come_back_late_hold_up_what_reads_them_and_no_count() -> None:
    """The host knows what a whole segment takes: it settles while the bytes are on their way."""
    manager = manager_of(diffkv_policy(1.0, 0.0, window=6), "K8V4 K4V2")
    parts = (manager.device, manager.rows, manager.counts, manager.segments)
    saved = SavedSegments(manager.device, SavedRows(*parts, 400, in_parts=True))
    copy_in = saved.rows._copy_in

    def late(*args: Any) -> Any:
        torch.cuda._sleep(LATE)
        return copy_in(*args)

    saved.rows._copy_in = late  # type: ignore[method-assign]
    for seed in range(2):  # kernels are compiled, and memory is pinned, the first time
        segment = published(manager, seed)
        before = seen_by(manager, segment.row)
        kept = saved.save(segment)
        manager.release(1)
        manager.segments.release(segment)
        torch.cuda.synchronize()
        assert kept is not None and saved.finish() == [kept]
        whole = [(kept, 0, 47)]
        needed = saved.needed(whole)
        back = saved.restore(whole, needed)
        assert back is not None
        saved.count(whole, needed, back)
        manager.counts.settle()
        (arriving,) = manager.device._arriving
        ((_, end),) = arriving.ends
        assert end is not None
        assert seed == 0 or not end.query(), "the host has waited for the bytes"
        assert seen_by(manager, back[0].row) == before and not manager.device._arriving
        manager.segments.release(back[0])
        saved.drop_all()
