"""Cuts of whole heads on the GPU: a radix select over the bits of values, digit by digit; no host synchronisation.

Values are not negative, so their bits as integers are in their order. Each pass adds up the weights of the values that
agree with the cut so far by their next digit, and chooses the digit at which the wanted sum is reached. All sums are
of integers, so the order of programs does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from sglang_diffkv.kernels.select import reference

DIGIT = tl.constexpr(4)
"""Bits of a digit."""
RADIX = tl.constexpr(16)
DIGITS = 8
"""Of 32 bits, of which the sign's is 0."""
VALUES = 512
"""Values of an iteration."""
CHUNK = 4096
"""Values of a program at least, while the head has as many."""
MOST_CHUNKS = 16
SHARE_BITS = tl.constexpr(reference.SHARE_BITS)
SHARE_ONE = tl.constexpr(1 << reference.SHARE_BITS)
MOST_SCALE = tl.constexpr(reference.MOST_SCALE)
SCALE = tl.constexpr(float(1 << reference.WEIGHT_BITS))
EVERYTHING = tl.constexpr(1 << 60)
"""More than any sum."""
PARTS = tl.constexpr(float(1 << reference.PART_BITS))


@triton.jit
def weight_of(value, top, MASS: tl.constexpr, TOGETHER: tl.constexpr):
    """What a value adds to a sum, int64: its share of the head's largest finite one, with ``TOGETHER`` itself as a part
    of 1; or 1 for any token."""
    if MASS:
        finite = tl.abs(value) < float("inf")
        scale = PARTS
        if not TOGETHER:
            scale = tl.minimum(tl.where(top > 0, tl.div_rn(SCALE, tl.where(top > 0, top, 1.0)), 0.0), MOST_SCALE)
        return tl.floor(tl.where(finite, value, 0.0) * scale).to(tl.int64)
    return (value == value).to(tl.int64)


@triton.jit
def value_bits(value):
    return tl.where(value == value, value, 0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit(do_not_specialize=["length"])
def top_kernel(values, top, length, N: tl.constexpr):
    """Grid (heads): the largest finite value of each head, 0 if there is none."""
    head = tl.program_id(0)
    best = tl.zeros([N], tl.float32)
    for first in range(0, length, N):
        at = first + tl.arange(0, N)
        value = tl.load(values + head.to(tl.int64) * length + at, mask=at < length, other=float("inf"))
        best = tl.maximum(best, tl.where(tl.abs(value) < float("inf"), value, 0.0))
    tl.store(top + head, tl.max(best, 0))


@triton.jit(do_not_specialize=["length", "place"])
def digit_kernel(
    values, top, prefix, sums, length, place, MASS: tl.constexpr, TOGETHER: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Grid (heads, chunks): add the weights of values that agree with ``prefix`` above digit ``place`` (0: the last) to
    sums [groups, 16] int64 by that digit. ``TOGETHER``: all heads are one group."""
    head = tl.program_id(0)
    group = 0 if TOGETHER else head
    digit = tl.arange(0, RADIX)
    agreed = tl.load(prefix + group)
    largest = 0.0
    if MASS and not TOGETHER:
        largest = tl.load(top + head)
    share = tl.cdiv(tl.cdiv(length, tl.num_programs(1)), N) * N
    total = tl.zeros([RADIX], tl.int64)
    begin = tl.program_id(1) * share
    for first in range(begin, tl.minimum(begin + share, length), N):
        at = first + tl.arange(0, N)
        value = tl.load(values + head.to(tl.int64) * length + at, mask=at < length, other=float("nan"))
        bits = value_bits(value) >> (place * DIGIT)
        weight = tl.where((value == value) & (bits >> DIGIT == agreed), weight_of(value, largest, MASS, TOGETHER), 0)
        here = (bits & (RADIX - 1))[:, None] == digit[None, :]
        total += tl.sum(tl.where(here, weight[:, None], 0), 0)
    tl.atomic_add(sums + group * RADIX + digit, total)


@triton.jit(do_not_specialize=["share"])
def choose_kernel(prefix, wanted, sums, share, FIRST: tl.constexpr, MASS: tl.constexpr, LEAST: tl.constexpr):
    """Grid (groups): the largest digit from which on the sums reach ``wanted``; it counts what is left for values equal
    to the cut so far. The first pass limits ``wanted`` to all there is, with ``MASS`` to ``share``, in units of
    2^-SHARE_BITS, of it. With ``LEAST`` less than ``share`` of it and of ``wanted`` is to be left over, of nothing
    nothing, values that weigh nothing included."""
    group = tl.program_id(0)
    digit = tl.arange(0, RADIX)
    sums_at = sums + group * RADIX + digit
    each = tl.load(sums_at)
    total = tl.sum(each, 0)
    need = tl.load(wanted + group)
    if FIRST:
        if LEAST:
            over = ((total + need) * share + (SHARE_ONE - 1)) >> SHARE_BITS
            need = tl.where(over > 0, tl.maximum(total - over + 1, 0), EVERYTHING)
        else:
            need = (total * share + (SHARE_ONE - 1)) >> SHARE_BITS if MASS else tl.minimum(need, total)
    from_here = total - tl.cumsum(each, 0) + each  # the digit's and all larger ones'
    chosen = tl.max(tl.where((from_here >= need) & (each > 0), digit, 0), 0)
    above = tl.sum(tl.where(digit > chosen, each, 0), 0)
    tl.store(wanted + group, need - above)
    tl.store(prefix + group, (tl.load(prefix + group) << DIGIT) | chosen)
    tl.store(sums_at, tl.zeros([RADIX], tl.int64))


@triton.jit(do_not_specialize=["length"])
def equal_kernel(values, prefix, equal, length, N: tl.constexpr):
    """Grid (heads): values of each head, all of one group, that equal the cut; int64."""
    head = tl.program_id(0)
    cut = tl.load(prefix)
    count = tl.zeros([N], tl.int64)
    for first in range(0, length, N):
        at = first + tl.arange(0, N)
        value = tl.load(values + head.to(tl.int64) * length + at, mask=at < length, other=float("nan"))
        count += ((value == value) & (value_bits(value) == cut)).to(tl.int64)
    tl.store(equal + head, tl.sum(count, 0))


@triton.jit(do_not_specialize=["length"])
def tie_kernel(
    values, top, prefix, wanted, earlier, cut_out, tie_out, length, MASS: tl.constexpr, TOGETHER: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Grid (heads): the cut, and the position of the last value that equals it and is wanted. ``earlier`` [heads]
    int64: with ``TOGETHER`` values of earlier heads that equal the cut."""
    head = tl.program_id(0)
    group = 0 if TOGETHER else head
    bits = tl.load(prefix + group)
    cut = bits.to(tl.float32, bitcast=True)
    left = tl.load(wanted + group)
    none = left == 0
    if MASS:
        left = tl.cdiv(left, tl.maximum(weight_of(cut, tl.load(top + head), MASS, TOGETHER), 1))
    if TOGETHER:
        left = tl.maximum(left - tl.load(earlier + head), 0)
    tie = tl.full([N], -1, tl.int32)
    seen = tl.full([], 0, tl.int64)
    for first in range(0, length, N):
        at = first + tl.arange(0, N)
        value = tl.load(values + head.to(tl.int64) * length + at, mask=at < length, other=float("nan"))
        equal = ((value == value) & (value_bits(value) == bits)).to(tl.int64)
        rank = seen + tl.cumsum(equal, 0)
        tie = tl.maximum(tie, tl.where((equal > 0) & (rank <= left), at, -1))
        seen += tl.sum(equal, 0)
    tl.store(cut_out + head, tl.where(none, float("inf"), cut))
    tl.store(tie_out + head, tl.where(none, -1, tl.max(tie, 0)))


def select_count(values: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``reference.select_count``."""
    assert count.dtype == torch.int64 and count.shape in (values.shape[:2], (1, 1))
    return _select(values, count.clone(), together=count.shape != values.shape[:2], share=None)


def select_mass(values: torch.Tensor, share: float, *, together: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """``reference.select_mass``."""
    groups = (1, 1) if together else values.shape[:2]
    wanted = torch.zeros(groups, dtype=torch.int64, device=values.device)
    return _select(values, wanted, together=together, share=round(share * (1 << reference.SHARE_BITS)))


@triton.jit(do_not_specialize=["length"])
def above_kernel(values, cut, tie, count, length, N: tl.constexpr):
    """Grid (heads, chunks): count [heads] int64 gets the values that cut and tie choose."""
    head = tl.program_id(0)
    least, last = tl.load(cut + head), tl.load(tie + head)
    share = tl.cdiv(tl.cdiv(length, tl.num_programs(1)), N) * N
    begin = tl.program_id(1) * share
    found = tl.zeros([N], tl.int64)
    for first in range(begin, tl.minimum(begin + share, length), N):
        at = first + tl.arange(0, N)
        value = tl.load(values + head.to(tl.int64) * length + at, mask=at < length, other=float("nan"))
        found += ((value > least) | ((value == least) & (at <= last))).to(tl.int64)
    tl.atomic_add(count + head, tl.sum(found, 0))


def count_above(values: torch.Tensor, cut: torch.Tensor, tie: torch.Tensor) -> torch.Tensor:
    """``reference.count_above``."""
    assert values.is_contiguous() and cut.is_contiguous() and tie.is_contiguous()
    assert cut.shape == tie.shape == values.shape[:2] and cut.dtype == torch.float32 and tie.dtype == torch.int32
    layers, heads, length = values.shape
    count = torch.zeros(layers, heads, dtype=torch.int64, device=values.device)
    above_kernel[(layers * heads, chunks_of(length))](values, cut, tie, count, length, N=VALUES, num_warps=4)
    return count


def chunks_of(length: int) -> int:
    """Programs that share a head's values."""
    return max(1, min(MOST_CHUNKS, triton.cdiv(length, CHUNK)))


def select_least(
    values: torch.Tensor, shares: Sequence[float], *, window: int, sinks: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """``reference.select_least``."""
    layers, heads, length = values.shape
    top = torch.zeros(layers * heads, device=values.device)
    top_kernel[(layers * heads,)](values, top, length, N=VALUES, num_warps=4)
    scale = torch.where(top > 0, float(1 << reference.WEIGHT_BITS) / top, 0.0).clamp(max=reference.MOST_SCALE)
    lasting = torch.zeros(layers, heads, dtype=torch.int64, device=values.device)
    for edge in (values[:, :, :sinks], values[:, :, max(length - window, sinks) :]):
        weight = torch.where(edge.isfinite(), edge * scale.view(layers, heads, 1), 0.0).floor().long()
        lasting += weight.sum(2)
        edge.masked_fill_(~edge.isnan(), float("inf"))
    return [
        _select(values, lasting.clone(), together=False, share=round(x * (1 << reference.SHARE_BITS)), top=top)
        for x in shares
    ]


def _select(
    values: torch.Tensor, wanted: torch.Tensor, *, together: bool, share: int | None, top: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """With ``top``, what scales the weights, ``share`` is what is to be left over."""
    assert values.dtype == torch.float32 and values.is_contiguous() and wanted.is_contiguous()
    layers, heads, length = values.shape
    count, groups, device, mass = layers * heads, wanted.numel(), values.device, share is not None
    least = top is not None
    if top is None:
        top = torch.zeros(count, device=device)
    prefix = torch.zeros(groups, dtype=torch.int32, device=device)
    sums = torch.zeros(groups, RADIX.value, dtype=torch.int64, device=device)
    if mass and not least and not together:
        top_kernel[(count,)](values, top, length, N=VALUES, num_warps=4)
    chunks = chunks_of(length)
    kinds = {"MASS": mass, "TOGETHER": together, "N": VALUES, "num_warps": 4}
    for place in range(DIGITS - 1, -1, -1):
        digit_kernel[(count, chunks)](values, top, prefix, sums, length, place, **kinds)
        first = place == DIGITS - 1
        chosen = {"FIRST": first, "MASS": mass and first, "LEAST": least and first}
        choose_kernel[(groups,)](prefix, wanted, sums, share or 0, **chosen, num_warps=1)
    earlier = torch.zeros(count, dtype=torch.int64, device=device)
    if together:
        equal_kernel[(count,)](values, prefix, earlier, length, N=VALUES, num_warps=4)
        earlier = earlier.cumsum(0) - earlier
    cut = torch.empty(layers, heads, device=device)
    tie = torch.empty(layers, heads, dtype=torch.int32, device=device)
    tie_kernel[(count,)](values, top, prefix, wanted, earlier, cut, tie, length, **kinds)
    return cut, tie
