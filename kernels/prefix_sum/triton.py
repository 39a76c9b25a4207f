"""Exclusive prefix sum on the GPU, and the spans of the ring that follow from it; one launch of one program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_diffkv.kernels.launch import Launch

SUMMANDS = 1024
"""Numbers of an iteration. Heads are counted by the program, so a step has few more."""
TAKEN, PUT = tl.constexpr(0), tl.constexpr(1)
"""Places of the ring's counters: pages ever taken from it, pages ever put into it."""
NEITHER = tl.constexpr(-1)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["demand"])
def prefix_sum_kernel(demand, out, counters, count, COUNTER: tl.constexpr, N: tl.constexpr):
    """Grid (1). Sums begin at the ring's ``COUNTER``, which then advances: by the sum, but never past what it holds.

    demand [count] int32, out [count + 1] int64: last the end of all.
    """
    first = tl.zeros([], tl.int64)
    if COUNTER != NEITHER:
        first = tl.load(counters + COUNTER)
    end = first
    for begin in range(0, count, N):
        at = begin + tl.arange(0, N)
        summand = tl.load(demand + at, mask=at < count, other=0).to(tl.int64)
        tl.store(out + at, end + tl.cumsum(summand, 0) - summand, mask=at < count)
        end += tl.sum(summand, 0)
    tl.store(out + count, end)
    tl.debug_barrier()  # every thread has read the counter
    if COUNTER == TAKEN:
        tl.store(counters + TAKEN, tl.minimum(end, tl.load(counters + PUT)))
    if COUNTER == PUT:
        tl.store(counters + PUT, end)


def _prepare(demand: torch.Tensor, out: torch.Tensor, counters: torch.Tensor, counter: tl.constexpr) -> Launch:
    assert demand.ndim == 1 and demand.dtype == torch.int32 and demand.is_contiguous()
    assert out.ndim == 1 and out.dtype == torch.int64 and out.is_contiguous() and out.shape[0] > demand.shape[0]
    assert counters.dtype == torch.int64 and demand.device == out.device == counters.device
    args = (demand, out, counters, demand.shape[0])
    return Launch(prefix_sum_kernel, (1,), args, {"COUNTER": counter, "N": SUMMANDS, "num_warps": 4})


def exclusive_prefix_sum(demand: torch.Tensor, out: torch.Tensor) -> None:
    """``reference.exclusive_prefix_sum`` of [N] int32 demands. ``out``: [N + 1] int64 or more, offsets and total."""
    _prepare(demand, out, out, NEITHER)()


def take_spans(counters: torch.Tensor, demand: torch.Tensor, out: torch.Tensor) -> None:
    """Take ``demand`` pages each from the ring, as many as it has.

    Args:
        counters: [2] int64, the ring's.
        demand: [N] int32. out: [at least N + 1] int64, the first place of each span, counted like ``counters[0]``; a
            place at ``counters[1]`` or past it holds no page.
    """
    prepare_take_spans(counters, demand, out)()


def prepare_take_spans(counters: torch.Tensor, demand: torch.Tensor, out: torch.Tensor) -> Launch:
    """``take_spans`` of what these tensors hold by then."""
    return _prepare(demand, out, counters, TAKEN)


def return_spans(counters: torch.Tensor, demand: torch.Tensor, out: torch.Tensor) -> None:
    """Places for ``demand`` pages each behind the ring's content, which count as in the ring from now on.

    As ``take_spans``; places are counted like ``counters[1]``.
    """
    prepare_return_spans(counters, demand, out)()


def prepare_return_spans(counters: torch.Tensor, demand: torch.Tensor, out: torch.Tensor) -> Launch:
    """``return_spans`` of what these tensors hold by then."""
    return _prepare(demand, out, counters, PUT)
