"""Hadamard rotation of up to three tensors of a step in one launch, as ``reference.py``.

The product with a matrix of ones and minus ones runs on the tensor cores in TF32, which holds a bf16 or fp16 number
exactly, and accumulates in float32; the normalisation follows. The matrix is made from its indices and never read;
one of more than ``CHUNK`` columns consists of that many, with signs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from sglang_diffkv.kernels.launch import Launch
from sglang_diffkv.kernels.rotate.reference import block_size

VECTORS = 16
"""Vectors of a program, the least that the tensor cores take."""
CHUNK = 64
"""Elements of a vector that a program reads and writes at a time."""


@triton.jit
def signs(row, column):
    """Sylvester's signs ``(-1)^popcount(row & column)`` as float32, for indices below 256."""
    bits = row & column
    bits ^= bits >> 4
    bits ^= bits >> 2
    bits ^= bits >> 1
    return (1 - 2 * (bits & 1)).to(tl.float32)


@triton.jit
def block_signs(row, column, ROWS: tl.constexpr, B: tl.constexpr):
    """Sylvester's matrix for each block of ``B`` elements, 0 between blocks: float32 [rows, columns], of less than
    ``ROWS`` different rows if there are several blocks."""
    matrix = signs(row[:, None] % B, column[None, :] % B)
    if B < ROWS:
        matrix = tl.where(row[:, None] // B == column[None, :] // B, matrix, 0.0)
    return matrix


@triton.jit
def times_signs(x, matrix, dot_type: tl.constexpr):
    """The product of ``x``, whose numbers ``dot_type`` holds exactly, with a matrix of signs, in float32."""
    precision: tl.constexpr = "ieee" if dot_type == tl.float32 else "tf32"
    return tl.dot(x.to(dot_type), matrix.to(dot_type), input_precision=precision)


@triton.jit
def turn_vectors(
    x_ptr, out_ptr, stride, head_stride, heads, count, vector, norm,
    D: tl.constexpr, B: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Blocks ``vector`` [R] of ``count``, and of them the output columns of the program's second index."""
    PARTS: tl.constexpr = D // B
    live = vector < count
    head = vector // PARTS
    source = x_ptr + (head // heads).to(tl.int64) * stride + head % heads * head_stride + vector % PARTS * B
    element = tl.arange(0, C)
    matrix = signs(element[:, None], element[None, :])
    total = tl.zeros([vector.shape[0], C], tl.float32)
    for chunk in tl.static_range(0, B // C):
        x = tl.load(source[:, None] + chunk * C + element[None, :], mask=live[:, None], other=0.0).to(tl.float32)
        total = tl.dot(x * signs(tl.program_id(1), chunk), matrix, total, input_precision=PRECISION)
    target = out_ptr + vector[:, None].to(tl.int64) * B + tl.program_id(1) * C + element[None, :]
    tl.store(target, (total * norm).to(out_ptr.dtype.element_ty), mask=live[:, None])


@triton.jit(do_not_specialize=["tiles", "two_tiles", "count", "two_count", "three_count"])
def rotate_kernel(
    one, two, three, one_out, two_out, three_out, one_stride, one_head, two_stride, two_head, three_stride, three_head,
    tiles, two_tiles, count, two_count, three_count, norm,
    HEADS: tl.constexpr, TWO_HEADS: tl.constexpr, THREE_HEADS: tl.constexpr,
    D: tl.constexpr, B: tl.constexpr, C: tl.constexpr, R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of the first tensor, then of the second and the third; B / C). Strides are in elements, counts in
    blocks of B elements; a tensor that there is not has no tiles."""
    tile = tl.program_id(0)
    row = tl.arange(0, R)
    if tile < tiles:
        vector = tile * R + row
        turn_vectors(one, one_out, one_stride, one_head, HEADS, count, vector, norm, D, B, C, PRECISION)
    elif tile < tiles + two_tiles:
        vector = (tile - tiles) * R + row
        turn_vectors(two, two_out, two_stride, two_head, TWO_HEADS, two_count, vector, norm, D, B, C, PRECISION)
    else:
        vector = (tile - tiles - two_tiles) * R + row
        turn_vectors(
            three, three_out, three_stride, three_head, THREE_HEADS, three_count, vector, norm, D, B, C, PRECISION
        )


def rotate(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """New, contiguous tensors; see ``reference.rotate``.

    Args:
        tensors: one to three of [tokens, heads, dim], alike but for their heads. The last dimension is contiguous.
    """
    return prepare_rotate(*tensors)(*tensors)


def prepare_rotate(*tensors: torch.Tensor) -> Callable[..., tuple[torch.Tensor, ...]]:
    """What tensors of the same form have in common. Arguments as of ``rotate``."""
    first = tensors[0]
    assert 1 <= len(tensors) <= 3
    tokens, _, dim = first.shape
    for x in tensors:
        assert (x.shape[0], x.shape[2]) == (tokens, dim) and x.dtype == first.dtype and x.device == first.device
        assert x.stride(2) == 1
    if not tokens:
        return lambda *tensors: tuple(x.new_empty(x.shape) for x in tensors)
    spare = [first] * (3 - len(tensors))
    size = block_size(dim)
    chunk = min(size, CHUNK)
    heads = [x.shape[1] for x in (*tensors, *spare)]
    counts = [tokens * x.shape[1] * (dim // size) for x in tensors] + [0] * len(spare)
    tiles = [triton.cdiv(count, VECTORS) for count in counts]
    strides = [n for x in (*tensors, *spare) for n in (x.stride(0), x.stride(1))]
    launch = Launch(
        rotate_kernel,
        (sum(tiles), size // chunk),
        (*[None] * 6, *strides, tiles[0], tiles[1], *counts, size**-0.5),
        {
            "HEADS": heads[0], "TWO_HEADS": heads[1], "THREE_HEADS": heads[2], "D": dim, "B": size, "C": chunk,
            "R": VECTORS, "PRECISION": "ieee" if first.dtype == torch.float32 else "tf32", "num_warps": 4,
        },
    )  # fmt: skip

    def rotate_again(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outs = tuple(x.new_empty(x.shape) for x in tensors)
        spare = [tensors[0]] * (3 - len(tensors))
        one, two, three = (*tensors, *spare)
        one_out, two_out, three_out = (*outs, *spare)
        launch(one=one, two=two, three=three, one_out=one_out, two_out=two_out, three_out=three_out)
        return outs

    return rotate_again
