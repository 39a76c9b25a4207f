"""Device functions that turn packed codes into tensor-core operands.

Codes are handled as int16 words, two bytes each, so that they take the copy, shared-memory and matrix-load paths
of fp16. Put into the mantissa of the fp16 number 1024, the code ``c`` of plane ``p`` (bits ``[p b, (p + 1) b)`` of
its byte) reads ``1024 + c * 2^(p b)``, exactly, without an integer-to-float conversion, which runs at a
sixteenth of the rate. The caller takes the 1024 out of the products: for keys once per query head, for
values once per tile, with the sum of the weights as rounded.

The words of a vector give ``2 * 8 / b`` operands, numbered ``2 p + i`` for plane ``p`` and byte ``i`` of a word:
column ``j`` belongs to element ``p * bytes + 2 j + i`` of the vector. The operand of the last plane is the whole
byte, the sum of all planes: that saves the shift, and the products with the other planes are subtracted
once (:func:`query_operand`).
"""

import triton
import triton.language as tl

MAGIC = tl.constexpr(1024.0)


@triton.constexpr_function
def operand_mask(bits, plane):
    """Bits of a byte that an operand keeps."""
    return 0xFF if plane == 8 // bits - 1 else ((1 << bits) - 1) << (plane * bits)


@triton.constexpr_function
def spread_asm(bits, plane, byte):
    """Two words to two fp16: the magic exponent above the byte, then the mask of the plane."""
    mask = 0xFF if plane == 8 // bits - 1 else ((1 << bits) - 1) << (plane * bits)
    if byte == 0:
        return f"lop3.b32 $0, $1, {mask * 0x10001}, 0x64006400, 0xEA;"
    spread = "{ .reg .b32 t; mov.b32 t, 0x64006400; prmt.b32 "
    if mask == 0xFF:
        return spread + "$0, $1, t, 0x7351; }"
    return spread + f"t, $1, t, 0x7351; and.b32 $0, t, {(mask | 0x6400) * 0x10001}; }}"


@triton.jit
def shifted_codes(words, BITS: tl.constexpr, PLANE: tl.constexpr, BYTE: tl.constexpr, ASM: tl.constexpr):
    """int16 words to fp16 ``1024 + c * 2^(PLANE * BITS)``, or 1024 + the byte for the last plane, same shape."""
    if ASM:
        asm: tl.constexpr = spread_asm(BITS, PLANE, BYTE)
        return tl.inline_asm_elementwise(asm, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
    mask: tl.constexpr = operand_mask(BITS, PLANE)
    return (((words >> (8 * BYTE)) & mask) | 0x6400).to(tl.float16, bitcast=True)


@triton.jit
def plane_codes(words, BITS: tl.constexpr, PLANE: tl.constexpr, BYTE: tl.constexpr, ASM: tl.constexpr):
    """int16 words to the float32 codes of one plane and byte, same shape."""
    LAST: tl.constexpr = 8 // BITS - 1
    code = shifted_codes(words, BITS, PLANE, BYTE, ASM).to(tl.float32) - MAGIC
    if PLANE == LAST:
        for plane in tl.static_range(LAST):
            code -= shifted_codes(words, BITS, plane, BYTE, ASM).to(tl.float32) - MAGIC
    return code * (1.0 / (1 << (PLANE * BITS)))


@triton.jit
def query_operand(ptr, column, inside, scale, PART: tl.constexpr, BITS: tl.constexpr, W: tl.constexpr):
    """The fp16 operand that multiplies operand ``PART`` of keys of ``W`` words.

    ``ptr`` points at the first elements of the queries, ``column`` is the word; both broadcast to the shape of
    ``inside``. ``scale`` brings the query into fp16.
    """
    LAST: tl.constexpr = 8 // BITS - 1
    at = column * 2 + (PART // 2) * (W * 2) + PART % 2
    x = tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32) * (scale / (1 << (PART // 2 * BITS)))
    if PART // 2 < LAST:
        at += (LAST - PART // 2) * (W * 2)
        x -= tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32) * (scale / (1 << (LAST * BITS)))
    return x.to(tl.float16)


@triton.constexpr_function
def operand_weight(bits, part):
    """Weight of an operand's column sum in the sum of the whole query."""
    last = 8 // bits - 1
    return 255 // ((1 << bits) - 1) if part // 2 == last else 1 << (part // 2 * bits)


@triton.jit
def power_scale(largest):
    """A power of two that brings numbers up to ``largest`` to at most 1."""
    return tl.exp2(-tl.ceil(tl.log2(tl.maximum(largest.to(tl.float32), 1e-20))))


@triton.jit
def weight_exponent(scale):
    """What to add to logits, base 2, before their maximum is taken, so that ``exp2(logit - maximum) * scale`` is at
    most 2^15.1: fp16 holds that, and its normal range goes on down to 2^-14.

    ``scale`` float32, at least 0, of fp16 numbers. The result is log2 of it, up to .09 less, and less 15.
    """
    bits = tl.maximum(scale, 2.0**-24).to(tl.int32, bitcast=True)  # linear between powers of two
    return bits.to(tl.float32) * 2.0**-23 - (127.0 + 15.0)


@triton.jit
def meta_pair(word):
    """int32 words of (scale, zero point) to two fp32 tensors."""
    scale = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    zero = ((word >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, zero
