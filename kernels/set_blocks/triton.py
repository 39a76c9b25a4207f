"""Table blocks of rows on the GPU: a few numbers are arguments of launches, so nothing is copied or allocated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

from sglang_diffkv.kernels.launch import Launch
from sglang_diffkv.kernels.set_blocks import reference

PAIRS = 8
"""Places that a launch writes to."""

NUMBERS = [f"{name}{number}" for number in range(PAIRS) for name in ("at", "block")]


@triton.jit(do_not_specialize=NUMBERS)
def set_blocks_kernel(
    row_blocks, at0, block0, at1, block1, at2, block2, at3, block3, at4, block4, at5, block5, at6, block6, at7, block7
):  # fmt: skip
    """Grid (1). Places may be the same where their blocks are."""
    tl.store(row_blocks + at0, block0)
    tl.store(row_blocks + at1, block1)
    tl.store(row_blocks + at2, block2)
    tl.store(row_blocks + at3, block3)
    tl.store(row_blocks + at4, block4)
    tl.store(row_blocks + at5, block5)
    tl.store(row_blocks + at6, block6)
    tl.store(row_blocks + at7, block7)


def prepare_set_blocks(row_blocks: torch.Tensor) -> Callable[[Sequence[int], Sequence[int]], None]:
    """``reference.set_blocks`` of one table: a launch for every ``PAIRS`` places, or for more than ``FEW`` a copy."""
    assert row_blocks.dtype == torch.int32 and row_blocks.is_contiguous()
    launch = Launch(set_blocks_kernel, (1,), (row_blocks, *[None] * len(NUMBERS)), {"num_warps": 1})

    def set_blocks(at: Sequence[int], blocks: Sequence[int]) -> None:
        if len(at) > reference.FEW:
            reference.set_blocks(row_blocks, at, blocks)
            return
        pairs = [*zip(at, blocks, strict=True)]
        for first in range(0, len(pairs), PAIRS):
            some = pairs[first : first + PAIRS]
            some += some[-1:] * (PAIRS - len(some))
            launch(**dict(zip(NUMBERS, (number for pair in some for number in pair), strict=True)))

    return set_blocks
