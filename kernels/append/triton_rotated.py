"""Append for keys and values that are stored rotated, or less a vector of their head: rotated, quantised and written in
one launch, which rotates a decode step's queries too.

Rotations are products with a matrix of ones and minus ones, made from its indices, on the tensor cores: a bf16 or fp16
number times a sign is exact, and sums are float32. A block of more than ``CHUNK`` elements is several products, added
with signs (Sylvester's matrix of twice the size is made of four of them).
"""

import triton
import triton.language as tl

from sglang_diffkv.kernels.quantize.triton import chunk_bytes, grain_of, store_groups
from sglang_diffkv.kernels.rotate.triton import block_signs, times_signs
from sglang_diffkv.kernels.triton_table import ceil_div, padded, reserved_slots
from sglang_diffkv.kernels.triton_tokens import store_numbers

CHUNK = tl.constexpr(64)


@triton.constexpr_function
def dot_side(dim, block):
    """Elements of one product: a chunk of a block, or all blocks where they are smaller."""
    return CHUNK.value if block >= CHUNK.value else padded(dim)


@triton.constexpr_function
def elements_of(dim, bits):
    """Places of a vector that is laid out by groups, each padded to a power of two."""
    return padded(dim) if bits == 16 else 8 // grain_of(bits) * padded(chunk_bytes(dim, bits))


@triton.jit
def placed_elements(DIM: tl.constexpr, BITS: tl.constexpr):
    """Elements that stand at the places of a vector laid out by groups, and whether there is one: [places] each."""
    PLACES: tl.constexpr = elements_of(DIM, BITS)
    place = tl.arange(0, PLACES)
    if BITS == 16:
        return place, place < DIM
    W: tl.constexpr = chunk_bytes(DIM, BITS)
    WP: tl.constexpr = padded(W)
    return place // WP * W + place % WP, place % WP < W


@triton.jit
def side_by_side(left, right):
    """[R, N] and [R, N] to [R, 2 N]."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), [left.shape[0], 2 * left.shape[1]])


@triton.jit
def product_of(x_ptr, live, first, place, matrix, DIM: tl.constexpr, dot_type: tl.constexpr):
    """Elements ``first + place`` of vectors [R] times ``matrix``, float32."""
    at = first + place
    x = tl.load(x_ptr[:, None] + at[None, :], mask=live[:, None] & (at < DIM)[None, :], other=0.0)
    return times_signs(x, matrix, dot_type)


@triton.jit
def turned_vectors(
    x_ptr, live, element, exists, DIM: tl.constexpr, B: tl.constexpr, NORM: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """Vectors [R] of ``DIM`` contiguous elements, rotated in blocks of ``B``: elements ``element`` [E], float32 [R, E].
    Where a block has more elements than a product, ``element`` counts up from 0."""
    C: tl.constexpr = dot_side(DIM, B)
    CHUNKS: tl.constexpr = ceil_div(DIM, C)
    given: tl.constexpr = x_ptr.dtype.element_ty
    dot_type: tl.constexpr = given if ASM or given == tl.float16 else tl.float32  # not bf16 when interpreted
    row = tl.arange(0, C)
    column = row if CHUNKS > 1 else element
    matrix = block_signs(row, column, C, B)
    if B < C:
        matrix = tl.where(exists[None, :], matrix, 0.0)
    matrix = matrix.to(dot_type)
    total = product_of(x_ptr, live, 0, row, matrix, DIM, dot_type)
    tl.static_assert(CHUNKS == 1 or CHUNKS == 2 or CHUNKS == 4)
    if CHUNKS > 1:
        second = product_of(x_ptr, live, C, row, matrix, DIM, dot_type)
        near, apart = total + second, total - second
        total = side_by_side(near, apart)
        if CHUNKS == 4:
            third = product_of(x_ptr, live, 2 * C, row, matrix, DIM, dot_type)
            fourth = product_of(x_ptr, live, 3 * C, row, matrix, DIM, dot_type)
            far, far_apart = third + fourth, third - fourth
            total = side_by_side(
                side_by_side(near + far, apart + far_apart), side_by_side(near - far, apart - far_apart)
            )
    return total * NORM


@triton.jit
def store_rotated(
    x_ptr, means, head, page_ptr, slot, keep,
    DIM: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr, META: tl.constexpr, TURN: tl.constexpr,
    B: tl.constexpr, NORM: tl.constexpr, LESS_MEANS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Vectors [R] of one field: rotated if ``TURN``, less their head's of ``means`` [H, DIM], quantised and written; 16
    bits are only rounded. ``head``, ``page_ptr``, ``slot``, ``keep``: [R]."""
    element, exists = placed_elements(DIM, BITS)
    inside = keep[:, None] & exists[None, :]
    if TURN:
        x = turned_vectors(x_ptr, keep, element, exists, DIM, B, NORM, ASM)
    else:
        x = tl.load(x_ptr[:, None] + element[None, :], mask=inside, other=0.0).to(tl.float32)
    if LESS_MEANS:
        x -= tl.load(means + head[:, None] * DIM + element[None, :], mask=inside, other=0.0)
    if BITS == 16:
        target = (page_ptr + OFFSET).to(tl.pointer_type(x_ptr.dtype.element_ty))
        at = target[:, None] + slot[:, None] * DIM + element[None, :]
        tl.store(at, x.to(x_ptr.dtype.element_ty), mask=inside)
    else:
        by_groups = tl.reshape(x, [x.shape[0], 8 // grain_of(BITS), padded(chunk_bytes(DIM, BITS))])
        store_groups(page_ptr, slot, by_groups, keep, DIM, BITS, OFFSET, META)


@triton.jit(
    do_not_specialize=["layer", "tiles", "query_vectors", "query_heads"],
    do_not_specialize_on_alignment=["rows", "offset", "position"],
)
def rotated_append_kernel(
    query, query_out, query_stride, query_head, query_heads, query_vectors, tiles,
    key, value, key_stride, key_head, value_stride, value_head, means, pages, page_table, row_blocks, own_entry,
    write_slot, rows, offset, position, num_valid, layer,
    KB: tl.constexpr, VB: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr, KMETA: tl.constexpr,
    VALUES: tl.constexpr, VMETA: tl.constexpr, SCORES: tl.constexpr, POSITIONS: tl.constexpr,
    TIERS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr,
    L: tl.constexpr, H: tl.constexpr, R: tl.constexpr, TURN_KEYS: tl.constexpr, TURN_VALUES: tl.constexpr,
    B: tl.constexpr, BV: tl.constexpr, NORM: tl.constexpr, NORM_V: tl.constexpr, LESS_MEANS: tl.constexpr,
    ASM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (2 * tiles + tiles of the queries): ``R`` vectors, (token, head) pairs, of keys or values in turn, then of
    the ``query_vectors`` queries. Strides are in elements. ``EARLY``: as for ``append_kernel``."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    if TURN_KEYS:  # noqa: SIM102 (else nothing of this is compiled)
        if program >= 2 * tiles:
            vector = (program - 2 * tiles) * R + tl.arange(0, R)
            live = vector < query_vectors
            element, exists = placed_elements(D, 16)
            head = vector % query_heads
            x_ptr = query + (vector // query_heads).to(tl.int64) * query_stride + head * query_head
            x = turned_vectors(x_ptr, live, element, exists, D, B, NORM, ASM)
            target = query_out + vector.to(tl.int64)[:, None] * D + element[None, :]
            tl.store(target, x.to(query_out.dtype.element_ty), mask=live[:, None] & exists[None, :])
            return
    vector = program // 2 * R + tl.arange(0, R)
    token, head = vector // H, vector % H
    if H == 1:
        head = tl.minimum(vector, 0)  # a 0 that Triton does not know of: with a constant it cannot lay out the pointers
    page_ptr, slot, keep = reserved_slots(
        token, head, rows, offset, num_valid, write_slot, own_entry, row_blocks, page_table, pages, layer,
        TIERS, TOKENS, PAGE_BYTES, MAX_BLOCKS, L, H,
    )  # fmt: skip
    wide = token.to(tl.int64)
    if program % 2 == 0:
        store_rotated(
            key + wide * key_stride + head * key_head, means, head, page_ptr, slot, keep,
            D, KB, KEYS, KMETA, TURN_KEYS, B, NORM, LESS_MEANS, ASM,
        )  # fmt: skip
        at = tl.load(position + token, mask=keep, other=0).to(tl.int32)
        store_numbers(page_ptr, slot, keep, tl.zeros([R], tl.int32), at, SCORES, POSITIONS)
    else:
        store_rotated(
            value + wide * value_stride + head * value_head, None, head, page_ptr, slot, keep,
            DV, VB, VALUES, VMETA, TURN_VALUES, BV, NORM_V, False, ASM,
        )  # fmt: skip
