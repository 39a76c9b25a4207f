"""Pinning of host memory in parts, by a thread that runs ahead of what is taken."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)

HUGE_PAGE, POPULATE_WRITE = 14, 23
"""Advice that Linux takes (``madvise``): large pages of the operating system, and all of them now. An older kernel
knows the second one not; then pinning itself brings the pages in, and takes longer."""

AHEAD_BYTES = 1 << 30
"""What is pinned before anybody takes it."""

QUIET_SECONDS = 0.5
"""For which a server has to have had nothing to do before memory is pinned by itself. A client whose requests come one
behind the other would else have each of them wait for a part."""

UNKNOWN = -1
"""Where there is no error of CUDA's, but an exception, which the log has."""

Register = Callable[[torch.Tensor], int]
"""Pins a tensor's bytes and no others: CUDA's error, 0 for none."""


class Pinning:
    """The parts of a block of host memory are pinned in order, each in some hundredths of a second, which no pass waits
    for as long as the thread is ahead of what is taken.

    The thread starts with the first ``want``: while CUDA graphs are captured, nothing may be pinned. While it pins,
    CUDA lets no kernel be launched, so it goes on by itself only where the server is ``idle`` for ``QUIET_SECONDS``.

    Args:
        pages: [count, page_bytes] uint8. part: pages that are pinned at once. register: what pins them; called in the
            thread.

    Attributes:
        ready: pages below are pinned. error: CUDA's, where the system lets no more be; 0 for none.
    """

    def __init__(self, pages: torch.Tensor, part: int, register: Register):
        self.ready = self.error = 0
        self._pages, self._part, self._register = pages, part, register
        self._ahead = max(AHEAD_BYTES // max(pages.shape[1], 1), 1)
        self._wanted = 0
        self._idle_since: float | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        _advise(pages, HUGE_PAGE)

    def want(self, end: int) -> bool:
        """Wait until the pages before ``end`` are pinned. False if the system does not let them be."""
        with self._changed:
            self._wanted = max(self._wanted, min(end + self._ahead, len(self._pages)))
            self._start()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.ready >= end or bool(self.error))
            return self.ready >= end

    def idle(self, idle: bool) -> None:
        """Whether the server has nothing to do. If that lasts, all of the memory is pinned, part by part."""
        if idle != (self._idle_since is not None) and self.ready < len(self._pages):
            with self._changed:
                self._idle_since = time.monotonic() if idle else None
                self._start()
                self._changed.notify_all()

    def _start(self) -> None:
        if self._thread is None:
            device = torch.cuda.current_device() if torch.cuda.is_available() else None
            self._thread = threading.Thread(target=self._run, args=(device,), name="diffkv-pinning", daemon=True)
            self._thread.start()

    def _run(self, device: int | None) -> None:
        """What the thread does. It is a thread of its own for one more reason: CUDA remembers a thread's last error,
        and PyTorch would take it for one of the next kernel."""
        try:
            self._pin_all(device)
        except Exception:
            logger.exception("DiffKV: no more host memory is pinned")
            with self._changed:  # whoever waits does not wait for ever
                self.error = UNKNOWN
                self._changed.notify_all()

    def _seconds_to_wait(self) -> float | None:
        """Before the next part is pinned; None: until something changes."""
        if self._wanted > self.ready:
            return 0
        if self._idle_since is None:
            return None
        return max(self._idle_since + QUIET_SECONDS - time.monotonic(), 0)

    def _pin_all(self, device: int | None) -> None:
        """A new thread is on the first GPU until it is told another."""
        if device is not None:
            torch.cuda.set_device(device)
        while not self.error and self.ready < len(self._pages):
            with self._changed:
                while (seconds := self._seconds_to_wait()) != 0:
                    self._changed.wait(seconds)
            upto = min((self.ready // self._part + 1) * self._part, len(self._pages))
            memory = self._pages[self.ready : upto]
            _advise(memory, POPULATE_WRITE)
            error = self._register(memory)
            with self._changed:
                self.error = error
                self.ready = self.ready if error else upto
                self._changed.notify_all()


def _advise(memory: torch.Tensor, advice: int) -> None:
    """``madvise`` of whole pages of the operating system. What it does not know is left as it is."""
    if memory.nbytes:
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes), ctypes.c_int(advice))
