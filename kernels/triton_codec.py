"""Device functions that turn packed codes into tensor-core operands.

Codes are handled as int16 words, two bytes each, so that they take the copy, shared-memory and matrix-load paths
of fp16. Put into the mantissa of the fp16 number 1024, the code ``c`` of plane ``p`` (bits ``[p b, (p + 1) b)`` of
its byte) reads ``1024 + c * 2^(p b)``, exactly, without an integer-to-float conversion, which runs at a
sixteenth of the rate. The caller takes the 1024 out of the products: for keys once per query head, for
values once per tile, with the sum of the weights as rounded.

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
def spread_asm(bits, plane, byte):
    """Two words to two fp16: bring the byte down, put the magic exponent above it, mask the plane."""
    if bits == 8 and byte == 1:
        return "{ .reg .b32 t; mov.b32 t, 0x64006400; prmt.b32 $0, $1, t, 0x7351; }"
    mask = (((1 << bits) - 1) << (plane * bits)) * 0x10001
    if byte == 0:
        return f"lop3.b32 $0, $1, {mask}, 0x64006400, 0xEA;"
    return f"{{ .reg .b32 t; shr.u32 t, $1, 8; lop3.b32 $0, t, {mask}, 0x64006400, 0xEA; }}"


@triton.jit
def shifted_codes(words, BITS: tl.constexpr, PLANE: tl.constexpr, BYTE: tl.constexpr, ASM: tl.constexpr):
    """int16 words to fp16 ``1024 + c * 2^(PLANE * BITS)``, same shape."""
    if ASM:
        asm: tl.constexpr = spread_asm(BITS, PLANE, BYTE)
        return tl.inline_asm_elementwise(asm, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
    mask: tl.constexpr = plane_mask(BITS, PLANE)
    return (((words >> (8 * BYTE)) & mask) | 0x6400).to(tl.float16, bitcast=True)


@triton.jit
def meta_pair(word):
    """int32 words of (scale, zero point) to two fp32 tensors."""
    scale = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    zero = ((word >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, zero
