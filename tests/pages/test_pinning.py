"""Host memory is pinned by a thread that is ahead of what is taken, so that no pass waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from sglang_diffkv.mem_pool import pinning
from sglang_diffkv.mem_pool.pinning import Pinning

PAGE, PART = 64, 10


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def pages() -> torch.Tensor:
    return torch.empty(95, PAGE, dtype=torch.uint8)


def test_it_is_ahead_by_so_many_bytes_and_then_waits(monkeypatch: pytest.MonkeyPatch, pages: torch.Tensor) -> None:
    monkeypatch.setattr(pinning, "AHEAD_BYTES", 30 * PAGE)
    parts: list[int] = []
    found = Pinning(pages, PART, lambda memory: parts.append(len(memory)) or 0)
    assert not parts, "nothing may be pinned before anybody wants it: CUDA graphs may be captured"
    assert found.want(5) and found.ready >= 5
    eventually(lambda: found.ready == 40)
    time.sleep(0.02)
    assert parts == [PART] * 4, "the first part, and what holds the next 30 pages"
    assert found.want(95) and found.ready == 95
    assert parts == [PART] * 9 + [5], "the last part is shorter"
    found._thread.join(10)
    assert not found._thread.is_alive() and found.want(95)


def test_who_takes_more_waits_until_it_is_pinned(monkeypatch: pytest.MonkeyPatch, pages: torch.Tensor) -> None:
    monkeypatch.setattr(pinning, "AHEAD_BYTES", 0)
    going_on = threading.Event()

    def register(memory: torch.Tensor) -> int:
        assert memory.data_ptr() == pages[found.ready].data_ptr()
        return 0 if found.ready < PART or going_on.wait(10) else 1

    found = Pinning(pages, PART, register)
    assert found.want(PART)
    results: list[bool] = []
    waiting = threading.Thread(target=lambda: results.append(found.want(PART + 1)))
    waiting.start()
    time.sleep(0.02)
    assert not results and found.want(PART), "what is pinned is had at once"
    going_on.set()
    waiting.join(10)
    assert results == [True]


def test_requests_one_behind_the_other_wait_for_nothing(monkeypatch: pytest.MonkeyPatch, pages: torch.Tensor) -> None:
    monkeypatch.setattr(pinning, "QUIET_SECONDS", 60.0)
    parts: list[int] = []
    found = Pinning(pages, PART, lambda memory: parts.append(len(memory)) or 0)
    for _ in range(20):
        found.idle(True)
        time.sleep(0.002)
        found.idle(False)
    assert not parts, "the server was never quiet"
    monkeypatch.setattr(pinning, "QUIET_SECONDS", 0.02)
    time.sleep(0.05)
    assert not parts, "it is busy"
    found.idle(True)
    eventually(lambda: found.ready == 95)
    assert parts == [PART] * 9 + [5]


def test_a_busy_server_ends_what_its_rest_began(monkeypatch: pytest.MonkeyPatch, pages: torch.Tensor) -> None:
    monkeypatch.setattr(pinning, "QUIET_SECONDS", 0.0)
    parts: list[int] = []

    def register(memory: torch.Tensor) -> int:
        parts.append(len(memory))
        if len(parts) == 3:
            found.idle(False)
        return 0

    found = Pinning(pages, PART, register)
    found.idle(True)
    eventually(lambda: found.ready == 3 * PART)
    time.sleep(0.02)
    assert parts == [PART] * 3


def _raises(memory: torch.Tensor) -> int:
    raise RuntimeError("no driver")


@pytest.mark.parametrize(("register", "error"), [(lambda memory: 2, 2), (_raises, pinning.UNKNOWN)])
def test_what_the_system_does_not_let_be_pinned_is_no_wait_for_ever(
    register: Callable[[torch.Tensor], int], error: int, pages: torch.Tensor
) -> None:
    found = Pinning(pages, PART, register)
    assert not found.want(1) and found.error == error and found.ready == 0
    assert not found.want(50)


def test_a_thread_that_fails_elsewhere_is_no_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch, pages: torch.Tensor
) -> None:
    found = Pinning(pages, PART, lambda memory: 0)

    def advise(memory: torch.Tensor, advice: int) -> None:
        raise OSError("no such call")

    monkeypatch.setattr(pinning, "_advise", advise)
    assert not found.want(1) and found.error == pinning.UNKNOWN
