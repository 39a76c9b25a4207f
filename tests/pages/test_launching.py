"""Which stream is current while kernels are launched."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from sglang_diffkv.mem_pool.device import Beside
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
    device.bring(lambda: "read")
    (there,) = device._arriving
    assert there == Beside("read", None), "a CPU copies at once"
    first, second = "first copy", "second copy"
    device._arriving = [Beside("first", first), there, Beside("second", second)]  # type: ignore[arg-type]
    with device.launching(reads_pages=False):
        assert not forward.waited_for and len(device._arriving) == 3
    with device.launching(allocates=False):
        assert forward.waited_for == [first, second] and not device._arriving
    device.flush()
    assert forward.waited_for == [first, second] and not schedulers.waited_for


def test_what_attaches_reads_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A count that comes first behind gathered paths attaches them, which looks for tokens in their pages."""
    device = make_manager(make_format("BF16", 64, page_tokens=8)).device
    forward, done = Stream(), list[Any]()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *index: forward)
    monkeypatch.setattr(device.ops, "attach_paths", lambda paths: done.append([*forward.waited_for]))
    device._arriving = [Beside("bytes", "copy")]  # type: ignore[arg-type]
    device._attaching = [(1, [(7, 0, 8)])]
    with device.launching(reads_pages=False):
        assert done == [["copy"]]


def test_bytes_that_come_next_hold_up_no_count_behind_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are copied one behind the other, on one stream."""
    device = make_manager(make_format("BF16", 64, page_tokens=8)).device
    forward = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *index: forward)
    device._arriving = [Beside("first", "copy")]  # type: ignore[arg-type]
    device.bring(lambda: "second")
    with device.launching(reads_pages=False):
        assert not forward.waited_for and [x.result for x in device._arriving] == ["first", "second"]
    with device.launching():
        assert forward.waited_for == ["copy"] and not device._arriving


def test_what_comes_while_rows_attach_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bringing it attaches them first, behind what came before."""
    device = make_manager(make_format("BF16", 64, page_tokens=8)).device
    forward = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *index: forward)
    monkeypatch.setattr(device.ops, "attach_paths", lambda paths: None)
    device._arriving = [Beside("first", "copy")]  # type: ignore[arg-type]
    device._attaching = [(1, [(7, 0, 8)])]
    device.bring(lambda: "second")
    assert forward.waited_for == ["copy"] and [x.result for x in device._arriving] == ["second"]
