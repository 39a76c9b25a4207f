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

All of this is said of codes whose bits divide 8. Others are stored in slices (``quantize/reference.py``), and a vector
is read as a tuple of chunks, of the same number of words each. An operand joins the bits of all slices and reads
``1024 + c``: none is shifted, and none is a whole byte. Their number is that of codes of the narrowest slice's width.
"""

import triton
import triton.language as tl

from sglang_diffkv.kernels.quantize.triton import chunks_of, grain_of, slice_of, slices_of

MAGIC = tl.constexpr(1024.0)


@triton.constexpr_function
def parts_of(bits):
    """Operands that the words of a vector give; the raw tier's elements are one."""
    return 1 if bits == 16 else 16 // grain_of(bits)


@triton.constexpr_function
def whole_plane(bits):
    """The plane whose operand is the whole byte, the last one; -1 where operands are joined from slices."""
    return 8 // bits - 1 if grain_of(bits) == bits else -1


@triton.constexpr_function
def operand_shift(bits, plane):
    """By how many bits the codes of an operand are shifted."""
    return plane * bits if grain_of(bits) == bits else 0


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


@triton.constexpr_function
def slice_place(bits, group, byte, number):
    """Where a slice has its bits of a group's codes, in one byte of words.

    Returns the chunk, the place of the lowest bit in a word, its place in the code, and a mask of the bits in the code.
    """
    width, low, first = slice_of(bits, number)
    each = width // grain_of(bits)
    return first + group % each, 8 * byte + group // each * width, low, ((1 << width) - 1) << low


@triton.constexpr_function
def join_asm(bits, group, byte, number):
    """Two words' bits of a slice, put into two numbers that have the bits of wider ones."""
    _, at, low, mask = slice_place(bits, group, byte, number)
    moved = f"shr.b32 t, $2, {at - low}" if at >= low else f"shl.b32 t, $2, {low - at}"
    return f"{{ .reg .b32 t; {moved}; lop3.b32 $0, t, {mask * 0x10001}, $1, 0xEA; }}"


@triton.jit
def load_words(ptr, mask, W: tl.constexpr, BITS: tl.constexpr):
    """The words of packed vectors, a tuple of chunks: ``ptr`` points to the first, of ``W`` words, and the others
    follow. 0 without ``mask``."""
    words = (tl.load(ptr, mask=mask, other=0),)
    for chunk in tl.static_range(1, chunks_of(BITS)):
        words = words + (tl.load(ptr + chunk * W, mask=mask, other=0),)  # type: ignore[assignment]
    return words


@triton.jit
def shifted_codes(words, BITS: tl.constexpr, PLANE: tl.constexpr, BYTE: tl.constexpr, ASM: tl.constexpr):
    """int16 words, a tuple as of ``load_words``, to fp16 ``1024 + c * 2^operand_shift``, or 1024 + the byte for the
    whole plane; of the shape of a chunk."""
    if grain_of(BITS) == BITS:
        if ASM:
            asm: tl.constexpr = spread_asm(BITS, PLANE, BYTE)
            return tl.inline_asm_elementwise(asm, "=r,r", [words[0]], dtype=tl.float16, is_pure=True, pack=2)
        mask: tl.constexpr = operand_mask(BITS, PLANE)
        return (((words[0] >> (8 * BYTE)) & mask) | 0x6400).to(tl.float16, bitcast=True)
    return joined_codes(words, BITS, PLANE, BYTE, ASM)


@triton.jit
def joined_codes(words, BITS: tl.constexpr, GROUP: tl.constexpr, BYTE: tl.constexpr, ASM: tl.constexpr):
    """``shifted_codes`` of codes that are stored in slices."""
    codes = tl.full(words[0].shape, 0x6400, tl.int16)
    for number in tl.static_range(slices_of(BITS)):
        codes = joined_slice(codes, words, BITS, GROUP, BYTE, number, ASM)
    return codes.to(tl.float16, bitcast=True)


@triton.jit
def joined_slice(
    codes, words, BITS: tl.constexpr, GROUP: tl.constexpr, BYTE: tl.constexpr, NUMBER: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """int16 ``codes`` with the bits that a slice has of them."""
    place: tl.constexpr = slice_place(BITS, GROUP, BYTE, NUMBER)
    word = words[place[0]]
    if ASM:
        asm: tl.constexpr = join_asm(BITS, GROUP, BYTE, NUMBER)
        return tl.inline_asm_elementwise(asm, "=r,r,r", [codes, word], dtype=tl.int16, is_pure=True, pack=2)
    if place[1] >= place[2]:
        return codes | ((word >> (place[1] - place[2])) & place[3])
    return codes | ((word << (place[2] - place[1])) & place[3])


@triton.jit
def plane_codes(words, BITS: tl.constexpr, PLANE: tl.constexpr, BYTE: tl.constexpr, ASM: tl.constexpr):
    """int16 words, a tuple as of ``load_words``, to the float32 codes of one plane and byte, of a chunk's shape."""
    LAST: tl.constexpr = whole_plane(BITS)
    code = shifted_codes(words, BITS, PLANE, BYTE, ASM).to(tl.float32) - MAGIC
    if PLANE == LAST:
        for plane in tl.static_range(LAST):
            code -= shifted_codes(words, BITS, plane, BYTE, ASM).to(tl.float32) - MAGIC
    return code * (1.0 / (1 << operand_shift(BITS, PLANE)))


@triton.jit
def query_operand(ptr, column, inside, scale, PART: tl.constexpr, BITS: tl.constexpr, W: tl.constexpr):
    """The fp16 operand that multiplies operand ``PART`` of keys of chunks of ``W`` words.

    ``ptr`` points at the first elements of the queries, ``column`` is the word; both broadcast to the shape of
    ``inside``. ``scale`` brings the query into fp16.
    """
    LAST: tl.constexpr = whole_plane(BITS)
    at = column * 2 + (PART // 2) * (W * 2) + PART % 2
    x = tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32) * (scale / (1 << operand_shift(BITS, PART // 2)))
    if PART // 2 < LAST:
        at += (LAST - PART // 2) * (W * 2)
        x -= tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32) * (scale / (1 << (LAST * BITS)))
    return x.to(tl.float16)


@triton.constexpr_function
def operand_weight(bits, part):
    """Weight of an operand's column sum in the sum of the whole query."""
    if part // 2 == whole_plane(bits):
        return 255 // ((1 << bits) - 1)
    return 1 << operand_shift(bits, part // 2)


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
