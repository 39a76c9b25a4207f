"""``reference.py`` on the GPU: one launch for the three tensors of a layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_diffkv.kernels.to_e4m3 import reference
from sglang_diffkv.kernels.triton_table import padded

VECTORS = 16
"""That a program converts."""
LARGEST = tl.constexpr(reference.LARGEST)


@triton.jit
def convert(x, token_stride, head_stride, out, vectors, first, heads, DIM: tl.constexpr, R: tl.constexpr):
    """Vectors ``first`` to ``first + R`` of x [tokens, heads, DIM], of which there are ``vectors``."""
    vector = first + tl.arange(0, R)
    d = tl.arange(0, padded(DIM))
    inside = (vector < vectors)[:, None] & (d < DIM)[None, :]
    at = (vector // heads).to(tl.int64) * token_stride + vector % heads * head_stride
    number = tl.load(x + at[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
    number = tl.clamp(number, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    place = vector.to(tl.int64)[:, None] * DIM + d[None, :]
    tl.store(out + place, number.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["queries", "keys", "q_heads", "heads"])
def to_e4m3_kernel(
    q, q_token, q_head, key, key_token, key_head, value, value_token, value_head, q_out, key_out, value_out,
    queries, keys, q_heads, heads, D: tl.constexpr, DV: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Grid (programs of the queries, then of the keys, then of the values). ``queries``, ``keys``: numbers of vectors.
    Strides are in elements. No constant is a number of heads: some attend apart from others."""
    program = tl.program_id(0)
    of_queries, of_keys = tl.cdiv(queries, R), tl.cdiv(keys, R)
    if program < of_queries:
        convert(q, q_token, q_head, q_out, queries, program * R, q_heads, D, R)
    elif program < of_queries + of_keys:
        convert(key, key_token, key_head, key_out, keys, (program - of_queries) * R, heads, D, R)
    else:
        first = (program - of_queries - of_keys) * R
        convert(value, value_token, value_head, value_out, keys, first, heads, DV, R)


def to_e4m3(q: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``reference.to_e4m3``.

    Args:
        q: [tokens, Hq, head_dim]. key: [keys, H, head_dim]. value: [keys, H, v_head_dim]. The last dimension is
            contiguous.
    """
    assert key.shape[:2] == value.shape[:2] and q.shape[2] == key.shape[2]
    assert q.stride(2) == key.stride(2) == value.stride(2) == 1
    q_out, key_out, value_out = (torch.empty(x.shape, dtype=reference.E4M3, device=x.device) for x in (q, key, value))
    queries, keys = q.shape[0] * q.shape[1], key.shape[0] * key.shape[1]
    grid = triton.cdiv(queries, VECTORS) + 2 * triton.cdiv(keys, VECTORS)
    to_e4m3_kernel[(grid,)](
        q, *q.stride()[:2], key, *key.stride()[:2], value, *value.stride()[:2], q_out, key_out, value_out,
        queries, keys, q.shape[1], key.shape[1], D=q.shape[2], DV=value.shape[2], R=VECTORS, num_warps=4,
    )  # fmt: skip
    return q_out, key_out, value_out
