"""The assembly that joins codes from slices, which the interpreter of other tests does not run."""

from __future__ import annotations

import re

import pytest
import torch

from sglang_diffkv.kernels.quantize.reference import grain, pack, planes, slices
from sglang_diffkv.kernels.triton_codec import join_asm, slice_place

CODE = re.compile(r"\{ \.reg \.b32 t; (shr|shl)\.b32 t, \$2, (\d+); lop3\.b32 \$0, t, (\d+), \$1, 0xEA; \}")


def run(asm: str, codes: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """What the assembly makes of two codes and two words, each pair in an integer of 32 bits."""
    found = CODE.fullmatch(asm)
    assert found, asm
    left, by, mask = found[1] == "shl", int(found[2]), int(found[3])
    moved = (words << by) & 0xFFFFFFFF if left else words >> by
    return (moved & mask) | codes  # 0xEA: (a & b) | c


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_the_assembly_joins_the_slices_of_codes(bits: int) -> None:
    packed = pack(torch.randint(0, 2**bits, (96,), dtype=torch.uint8), bits)
    pairs = packed.view(bits // grain(bits), -1, 4).long()  # chunk, two words, their bytes
    words = (pairs << torch.arange(0, 32, 8)).sum(2)
    for group, expected in enumerate(planes(packed, bits)):
        for byte in range(2):
            codes = torch.full_like(words[0], 0x64006400)
            for number in range(len(slices(bits))):
                chunk = slice_place(bits, group, byte, number)[0]
                codes = run(join_asm(bits, group, byte, number), codes, words[chunk])
            both = torch.stack([codes & 0xFFFF, codes >> 16], 1).flatten().short().view(torch.float16)
            assert torch.equal(both, 1024 + expected[byte::2].half())
