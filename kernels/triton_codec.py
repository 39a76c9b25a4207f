"""Device functions that turn packed codes into tensor-core operands.

Codes are handled as int16 words, two bytes each, so that they take the copy, shared-memory and matrix-load paths
of fp16. Put into the mantissa of the fp16 number 1024, the code ``c`` of plane ``p`` (bits ``[p b, (p + 1) b)`` of
its byte) reads ``1024 + c * 2^(p b)``, exactly, without an integer-to-float conversion, which runs at a
sixteenth of the rate. Keys keep the 1024, which the caller subtracts once per query head; values lose it by
one exact subtraction, because their sum runs over many tokens.

The words of a vector give ``2 * 8 / b`` operands: for byte ``i`` and plane ``p``, column ``j`` is element
``p * bytes + 2 j + i`` of the vector.
"""

import triton
import triton.language as tl

MAGIC = tl.constexpr(1024.0)


@triton.constexpr_function
def plane_mask(bits, plane):
    return ((1 << bits) - 1) << (plane * bits)


@triton.constexpr_function
def spread_asm(bits, plane, byte, exact):
    """Two words to two fp16: bring the byte down, put the magic exponent above it, mask the plane."""
    mask = ((1 << bits) - 1) << (plane * bits)
    target = "t" if exact else "$0"
    if byte == 0:
        body = f"lop3.b32 {target}, $1, {mask * 0x10001}, 0x64006400, 0xEA;"
    elif bits == 8:
        body = f"prmt.b32 {target}, $1, 0x64646464, 0x4341;"
    else:
        body = f"prmt.b32 t, $1, 0x64646464, 0x4341; and.b32 {target}, t, {(mask | 0x6400) * 0x10001};"
    if exact:
        body += "mov.b32 base, 0x64006400; sub.rn.f16x2 $0, t, base;"
    return "{ .reg .b32 t, base;" + body + "}"


@triton.jit
def shifted_codes(words, BITS: tl.constexpr, PLANE: tl.constexpr, BYTE: tl.constexpr, ASM: tl.constexpr):
    """int16 words to fp16 ``1024 + c * 2^(PLANE * BITS)``, same shape."""
    if ASM:
        asm: tl.constexpr = spread_asm(BITS, PLANE, BYTE, False)
        return tl.inline_asm_elementwise(asm, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
    mask: tl.constexpr = plane_mask(BITS, PLANE)
    return (((words >> (8 * BYTE)) & mask) | 0x6400).to(tl.float16, bitcast=True)


@triton.jit
def exact_codes(words, BITS: tl.constexpr, PLANE: tl.constexpr, BYTE: tl.constexpr, ASM: tl.constexpr):
    """int16 words to fp16 ``c * 2^(PLANE * BITS)``, same shape."""
    if ASM:
        asm: tl.constexpr = spread_asm(BITS, PLANE, BYTE, True)
        return tl.inline_asm_elementwise(asm, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
    mask: tl.constexpr = plane_mask(BITS, PLANE)
    return ((words >> (8 * BYTE)) & mask).to(tl.float16)


@triton.jit
def meta_pair(word):
    """int32 words of (scale, zero point) to two fp32 tensors."""
    scale = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    zero = ((word >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, zero
