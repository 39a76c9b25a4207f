"""Numbers between host and device without either waiting for the other, in order on the current stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def to_device(numbers: Any, device: torch.device) -> torch.Tensor:
    """Integers as int64 on ``device``."""
    host = torch.as_tensor(numbers, dtype=torch.int64)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def to_host(values: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """``values`` on the host, and the event after which they stand there; None if they do already."""
    if not values.is_cuda:
        return values, None
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event


class FixedNumbers:
    """Integers at a fixed place on the device, for what a CUDA graph reads.

    Args:
        shape: of them. device: where they are.
    """

    AHEAD = 4
    """Times that numbers may be set before the device has the first."""

    def __init__(self, *shape: int, device: torch.device):
        self.there = torch.zeros(shape, dtype=torch.int64, device=device)
        on_gpu = self.there.is_cuda
        self._here = [torch.zeros(shape, dtype=torch.int64, pin_memory=on_gpu) for _ in range(self.AHEAD)]
        self._copied: list[torch.cuda.Event | None] = [None] * self.AHEAD
        self._next = 0

    def set(self, numbers: Sequence[Sequence[int]]) -> None:
        """Rows of integers, for what is launched next on the current stream; the rest is 0."""
        at, self._next = self._next, (self._next + 1) % self.AHEAD
        here, copied = self._here[at], self._copied[at]
        if copied is not None:
            copied.synchronize()
        here.zero_()
        for row, given in zip(here, numbers, strict=True):
            row[: len(given)] = torch.as_tensor(given, dtype=torch.int64)
        self.there.copy_(here, non_blocking=True)
        if self.there.is_cuda:
            copied = self._copied[at] = copied or torch.cuda.Event()
            copied.record()
