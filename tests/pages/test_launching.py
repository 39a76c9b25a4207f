"""Which stream is current while kernels are launched."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch

from sglang_diffkv.kernels.parts import FROM_START
from sglang_diffkv.layout.geometry import Segment
from sglang_diffkv.mem_pool.device import LAYER_GROUPS, Arriving, layer_groups
from tests.kernels.triton_helpers import make_format, make_manager


class Stream:
    """Stands for a stream of PyTorch's."""

    device_index = 0

    def __init__(self) -> None:
        self.waited_for: list[Any] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other)

    def wait_event(self, event: Any) -> None:
        self.waited_for.append(event)


@pytest.mark.parametrize("fails", [False, True])
def test_kernels_go_to_the_forward_stream_and_wait_where_they_need_memory(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """The scheduler's stream is current again behind them, should they fail too; inside each other they set none."""
    device = make_manager(make_format("BF16", 64, page_tokens=8)).device
    schedulers, forward = Stream(), Stream()
    current, sets = [schedulers], []

    def set_stream(stream: Stream) -> None:
        sets.append(stream)
        current[0] = stream

    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: current[0])
    monkeypatch.setattr(torch.cuda, "set_stream", set_stream)
    device.stream = forward  # type: ignore[assignment]

    def launch(*, allocates: bool) -> None:
        with device.launching(allocates=allocates):
            assert current == [forward]
            with device.launching():
                assert current == [forward]
            assert not fails, "no memory"

    for allocates in (False, True):
        with pytest.raises(AssertionError, match="no memory") if fails else nullcontext():
            launch(allocates=allocates)
        assert current == [schedulers] and forward.waited_for == [schedulers] * allocates
    assert sets == [forward, schedulers] * 2

    def flush() -> None:
        raise MemoryError

    monkeypatch.setattr(device.space, "flush", flush)
    with pytest.raises(MemoryError), device.launching():
        pass
    assert current == [schedulers]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_several_paths_to_attach_need_memory(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """For the numbers of all of them: so they wait for the scheduler's stream, whatever is launched behind them."""
    device = make_manager(make_format("BF16", 64, page_tokens=8)).device
    schedulers, forward, attached = Stream(), Stream(), []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: schedulers)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(device.ops, "attach_paths", attached.append)
    device.stream = forward  # type: ignore[assignment]
    device._attaching = paths = [(1 + number, [(7, 0, 8)]) for number in range(count)]
    with device.launching(allocates=False):
        assert attached == [paths] * (count > 0) and not device._attaching
    assert forward.waited_for == [schedulers] * (count > 1)


def test_bytes_on_their_way_are_waited_for_once_and_not_by_what_reads_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was launched to bring them is kept until then: it reads memory of the passes' stream."""
    device = make_manager(make_format("BF16", 64, page_tokens=8)).device
    schedulers, forward = Stream(), Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *index: forward)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    device.stream = forward  # type: ignore[assignment]
    device.bring([(0, lambda: "read")])
    (there,) = device._arriving
    assert there == Arriving(["read"], [(0, None)]), "a CPU copies at once"
    first, second = "first copy", "second copy"
    device._arriving = [of_copies(first), there, of_copies(second)]
    with device.launching(reads_pages=False):
        assert not forward.waited_for and len(device._arriving) == 3
    with device.launching(allocates=False):
        assert forward.waited_for == [first, second] and not device._arriving
    device.flush()
    assert forward.waited_for == [first, second] and not schedulers.waited_for


def of_copies(*ends: Any, rows: Sequence[int] = (), unread: bool = False) -> Arriving:
    """Bytes on their way, one layer's behind the other's."""
    return Arriving(["bytes"], [*enumerate(ends)], frozenset(rows), unread)


@pytest.mark.parametrize("unread", [False, True])
@pytest.mark.parametrize("cut", [0, 3])
@pytest.mark.parametrize("row", [9, 10])
def test_what_attaches_reads_pages(monkeypatch: pytest.MonkeyPatch, row: int, cut: int, unread: bool) -> None:
    """A count that comes first behind gathered paths attaches them. That looks for tokens in pages, unless each range
    of the row that has them is known to begin with one, and is attached from its start."""
    device = make_manager(make_format("BF16", 64, page_tokens=8)).device
    forward, done = Stream(), list[Any]()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *index: forward)
    monkeypatch.setattr(device.ops, "attach_paths", lambda paths: done.append((paths, [*forward.waited_for])))
    device._arriving = [of_copies("other"), of_copies("copy", rows=[10, 11], unread=unread)]
    with device.attaching_together():
        device.attach(1, [(Segment(row, 0, 8), cut, 8)])
        with device.launching(reads_pages=False):
            pass
    arrives = row == 10
    first = FROM_START if arrives and unread and not cut else cut
    waits = arrives and first != FROM_START
    assert done == [([(1, [(row, first, 8)])], ["other", "copy"] if waits else [])]
    assert len(device._arriving) == (0 if waits else 2)
    with device.launching():
        assert forward.waited_for == ["other", "copy"] and not device._arriving
    device.attach(2, [(Segment(row, 0, 8), 0, 8)])
    assert done[-1][0] == [(2, [(row, 0, 8)])], "its bytes are there"


def test_a_pass_waits_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is launched in the middle of it, and reads pages, waits for the rest."""
    device = make_manager(make_format("BF16", 64, page_tokens=8), layers=4).device
    forward = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *index: forward)
    for interrupted in (False, True):
        forward.waited_for.clear()
        device._arriving = [of_copies("a0", "a1", None, "a3"), of_copies("b0"), of_copies("c0", "c1")]
        device.flush(by_layer=True)
        assert forward.waited_for == ["a0", "b0", "c0"] and len(device._arriving) == 2
        device.reach(0)
        assert len(forward.waited_for) == 3
        device.reach(2)
        assert forward.waited_for[3:] == ["a1", "c1"] and len(device._arriving) == 1
        if interrupted:
            device.flush()
        device.reach(3)
        assert forward.waited_for[5:] == ["a3"] and not device._arriving


@pytest.mark.parametrize("layers", range(1, 40))
def test_groups_of_layers(layers: int) -> None:
    groups = layer_groups(layers)
    sizes = [end - first for first, end in pairwise([*groups, layers])]
    assert groups[0] == 0 and len(groups) == min(layers, LAYER_GROUPS) and max(sizes) - min(sizes) <= 1


def test_bytes_that_come_next_hold_up_no_count_behind_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are copied one behind the other, on one stream."""
    device = make_manager(make_format("BF16", 64, page_tokens=8)).device
    forward = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *index: forward)
    device._arriving = [of_copies("copy")]
    device.bring([(0, lambda: "second")])
    with device.launching(reads_pages=False):
        assert not forward.waited_for and [x.kept for x in device._arriving] == [["bytes"], ["second"]]
    with device.launching():
        assert forward.waited_for == ["copy"] and not device._arriving


def test_what_comes_while_rows_attach_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bringing it attaches them first, behind what came before if they look into that."""
    device = make_manager(make_format("BF16", 64, page_tokens=8)).device
    forward = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *index: forward)
    monkeypatch.setattr(device.ops, "attach_paths", lambda paths: None)
    device._arriving = [of_copies("copy", rows=[7])]
    with device.attaching_together():
        device.attach(1, [(Segment(7, 0, 8), 0, 8)])
        device.bring([(0, lambda: "second"), (1, lambda: "third")])
    assert forward.waited_for == ["copy"] and [x.kept for x in device._arriving] == [["second", "third"]]
