"""What sizes depend on of a device."""

from __future__ import annotations

from functools import cache

import torch
import triton

from sglang_diffkv.kernels.triton_table import INTERPRETED

FEW = 8
"""Stands for the multiprocessors of a device that has none."""


HOPPER_SHARED = 228 << 10
"""Bytes of shared memory of a multiprocessor of an H100 or H200."""


def processors_of(device: torch.device) -> int:
    """Multiprocessors of a GPU; of the current GPU for a plan on the device "meta"."""
    if device.type not in ("cuda", "meta") or not torch.cuda.is_available():
        return FEW
    return torch.cuda.get_device_properties(device if device.type == "cuda" else None).multi_processor_count


def shared_memory_of(device: torch.device) -> int:
    """Bytes of a multiprocessor's shared memory, as ``processors_of``; a Hopper GPU's for a device that has none."""
    if device.type not in ("cuda", "meta") or not torch.cuda.is_available():
        return HOPPER_SHARED
    properties = torch.cuda.get_device_properties(device if device.type == "cuda" else None)
    return int(properties.shared_memory_per_multiprocessor)


def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU, as ``processors_of``; (0, 0) for a device that has none."""
    if device.type not in ("cuda", "meta") or not torch.cuda.is_available():
        return 0, 0
    return torch.cuda.get_device_capability(device if device.type == "cuda" else None)


@cache
def launches_early() -> bool:
    """Whether a kernel may be launched while the one before it ends (programmatic dependent launch, Hopper on)."""
    return not INTERPRETED and triton.runtime.driver.active.get_current_target().arch >= 90
