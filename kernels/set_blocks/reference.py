"""Table blocks of rows, from the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_diffkv.layout.transfer import to_device

FEW = 32
"""Places that a GPU takes as arguments of launches, without memory of their own."""


def set_blocks(row_blocks: torch.Tensor, at: Sequence[int], blocks: Sequence[int]) -> None:
    """Write ``blocks`` to the different flat places ``at`` of ``row_blocks`` [R, max_blocks] int32, on the current
    stream. Neither host nor device waits for the other."""
    places, values = to_device([at, blocks], row_blocks.device)
    row_blocks.view(-1)[places] = values.int()
