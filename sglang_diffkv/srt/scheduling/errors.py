"""Errors that end more than the request that meets them."""

from __future__ import annotations

import torch

FATAL: tuple[type[Exception], ...] = tuple(
    x for x in (getattr(torch, "AcceleratorError", None), getattr(torch.cuda, "CudaError", None)) if x is not None
)
"""Errors after which the device is of no more use."""
