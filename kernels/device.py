"""What sizes depend on of a device."""

from __future__ import annotations

import torch

FEW = 8
"""Stands for the multiprocessors of a device that has none."""


def processors_of(device: torch.device) -> int:
    """Multiprocessors of a GPU; of the current GPU for a plan on the device "meta"."""
    if device.type not in ("cuda", "meta") or not torch.cuda.is_available():
        return FEW
    return torch.cuda.get_device_properties(device if device.type == "cuda" else None).multi_processor_count
