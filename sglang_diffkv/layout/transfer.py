"""Numbers between host and device without either waiting for the other, in order on the current stream."""

from __future__ import annotations

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
