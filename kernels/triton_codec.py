"""Device functions that turn packed codes into tensor-core operands and vectors into packed codes.

A code ``c`` of plane ``p`` sits in bits ``[p * b, (p + 1) * b)`` of its byte. Put into the mantissa of the fp16
number 1024 it reads ``1024 + c * 2^(p b)``, exactly, without an integer-to-float conversion (those
run at a sixteenth of the rate). Keys keep the 1024, which the caller subtracts once per query head; values lose
it by one exact subtraction, because their sum runs over many tokens.
"""

import triton
import triton.language as tl

MAGIC = tl.constexpr(1024.0)

@triton.constexpr_function
def plane_mask(bits, plane):
    return ((1 << bits) - 1) << (plane * bits)


@triton.constexpr_function
def masked_asm(bits, plane):
    """Four bytes to four fp16: spread over two registers with the magic exponent above, then mask the plane."""
    mask = (0x6400 | (((1 << bits) - 1) << (plane * bits))) * 0x10001
    return (
        "{ .reg .b32 lo, hi;"
        "prmt.b32 lo, $2, 0x64646464, 0x4140;"
        "prmt.b32 hi, $2, 0x64646464, 0x4342;"
        f"and.b32 $0, lo, {mask};"
        f"and.b32 $1, hi, {mask}; }}"
    )


@triton.constexpr_function
def exact_asm(bits, plane):
    """As :func:`masked_asm`, then subtract the 1024."""
    mask = (0x6400 | (((1 << bits) - 1) << (plane * bits))) * 0x10001
    return (
        "{ .reg .b32 lo, hi, base;"
        "mov.b32 base, 0x64006400;"
        "prmt.b32 lo, $2, 0x64646464, 0x4140;"
        "prmt.b32 hi, $2, 0x64646464, 0x4342;"
        f"and.b32 lo, lo, {mask};"
        f"and.b32 hi, hi, {mask};"
        "sub.rn.f16x2 $0, lo, base;"
        "sub.rn.f16x2 $1, hi, base; }"
    )

@triton.jit
def shifted_plane(codes, BITS: tl.constexpr, PLANE: tl.constexpr, ASM: tl.constexpr):
    """uint8 codes to fp16 ``1024 + c * 2^(PLANE * BITS)``, same shape."""
    if ASM:
        asm: tl.constexpr = masked_asm(BITS, PLANE)
        return tl.inline_asm_elementwise(asm, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
    mask: tl.constexpr = plane_mask(BITS, PLANE)
    return ((codes & mask).to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)


@triton.jit
def exact_plane(codes, BITS: tl.constexpr, PLANE: tl.constexpr, ASM: tl.constexpr):
    """uint8 codes to fp16 ``c * 2^(PLANE * BITS)``, same shape."""
    if ASM:
        asm: tl.constexpr = exact_asm(BITS, PLANE)
        return tl.inline_asm_elementwise(asm, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
    mask: tl.constexpr = plane_mask(BITS, PLANE)
    return (codes & mask).to(tl.float16)


@triton.jit
def meta_pair(word):
    """int32 words of (scale, zero point) to two fp32 tensors."""
    scale = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    zero = ((word >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, zero
