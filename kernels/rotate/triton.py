"""Hadamard rotation of a step's queries and keys in one launch, as ``reference.py``.

The product with a matrix of ones and minus ones runs on the tensor cores in TF32, which holds a bf16 or fp16 number
exactly, and accumulates in float32; the normalisation follows. The matrix is made from its indices and never read;
one of more than ``CHUNK`` columns consists of that many, with signs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

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


@triton.jit(do_not_specialize=["tiles", "count", "key_count"])
def rotate_kernel(
    q, key, q_out, key_out, q_stride, q_head, key_stride, key_head, tiles, count, key_count, norm,
    Q_HEADS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, B: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of queries, then of keys; B / C). Strides are in elements, counts in blocks of B elements."""
    tile = tl.program_id(0)
    if tile < tiles:
        vector = tile * R + tl.arange(0, R)
        turn_vectors(q, q_out, q_stride, q_head, Q_HEADS, count, vector, norm, D, B, C, PRECISION)
    else:
        vector = (tile - tiles) * R + tl.arange(0, R)
        turn_vectors(key, key_out, key_stride, key_head, HEADS, key_count, vector, norm, D, B, C, PRECISION)


def rotate(q: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """New, contiguous tensors; see ``reference.rotate``.

    Args:
        q: [tokens, Hq, head_dim]. key: [tokens, H, head_dim]. The last dimension is contiguous.
    """
    tokens, q_heads, dim = q.shape
    heads = key.shape[1]
    assert key.shape == (tokens, heads, dim) and q.dtype == key.dtype and q.device == key.device
    assert q.stride(2) == key.stride(2) == 1
    outs = (q.new_empty(q.shape), key.new_empty(key.shape))
    size = block_size(dim)
    chunk = min(size, CHUNK)
    count, key_count = (tokens * n * (dim // size) for n in (q_heads, heads))
    tiles = triton.cdiv(count, VECTORS)
    if tokens:
        rotate_kernel[(tiles + triton.cdiv(key_count, VECTORS), size // chunk)](
            q, key, *outs, q.stride(0), q.stride(1), key.stride(0), key.stride(1), tiles, count, key_count,
            size**-0.5, Q_HEADS=q_heads, HEADS=heads, D=dim, B=size, C=chunk, R=VECTORS,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=4,
        )  # fmt: skip
    return outs
