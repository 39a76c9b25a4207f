"""Device functions of the circular free page list: spans for many heads at once, with one atomic a program.

The order of pages within the ring is free, so programs take spans in the order in which they arrive. An
attempt to take more than the ring holds leaves the counter too high; the last program to finish puts it
right (:func:`settle`), before any page returns.
"""

import triton
import triton.language as tl

from sglang_diffkv.kernels.triton_table import BLOCK, padded

EMPTY = tl.constexpr(-1)
NO_LIMIT = tl.constexpr(2**31 - 1)


@triton.jit
def add_own_pages(
    demand, row, layer, head, start, pages, ring, counters, refcount, block_table, page_table, range_lo, range_hi,
    fault, num_pages,
    HIGH: tl.constexpr, TOKENS: tl.constexpr, POSITIONS: tl.constexpr, PAGE_BYTES: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Append ``demand`` fresh pages to each head's table from entry ``start`` on, all slots empty.

    All of demand, row, layer, head, start are [R]. What the ring cannot give becomes the scratch page with an
    empty range, and raises the row's fault.
    """
    total = tl.sum(demand, 0)
    if total > 0:
        ahead = tl.cumsum(demand, 0) - demand  # [R]
        first = tl.atomic_add(counters, total.to(tl.int64))
        limit = tl.load(counters + 1)
        token = tl.arange(0, padded(TOKENS))
        for step in range(tl.max(demand, 0)):
            wanted = step < demand
            place = first + (ahead + step).to(tl.int64)
            granted = wanted & (place < limit)
            page = tl.load(ring + place % num_pages, mask=granted, other=0)
            page = tl.where(granted, page, num_pages)  # the scratch page lies behind the ring's
            entry = start + step
            column = entry if HIGH else MAX_BLOCKS * BLOCK - 1 - entry
            block = tl.load(block_table + row * MAX_BLOCKS + column // BLOCK, mask=wanted, other=0)
            at = ((block.to(tl.int64) * L + layer) * H + head) * BLOCK + column % BLOCK
            tl.store(page_table + at, page, mask=wanted)
            tl.store(range_lo + at, tl.zeros([R], tl.int32), mask=wanted)
            tl.store(range_hi + at, tl.where(granted, NO_LIMIT, 0), mask=wanted)
            tl.store(refcount + page, tl.full([R], 1, tl.int32), mask=granted)
            tl.store(fault + row, tl.full([R], 1, tl.int32), mask=wanted & (place >= limit))
            numbers = (pages + page.to(tl.int64) * PAGE_BYTES + POSITIONS).to(tl.pointer_type(tl.int32))
            tl.store(
                numbers[:, None] + token[None, :],
                tl.full([R, padded(TOKENS)], EMPTY, tl.int32),
                mask=wanted[:, None] & (token[None, :] < TOKENS),
            )


@triton.jit
def settle(counters, ticket):
    """Last of a launch's programs: take back what was taken beyond the ring's content, reset the ticket."""
    if tl.atomic_add(ticket, 1) == tl.num_programs(0) - 1:
        tl.store(ticket, 0)
        excess = tl.atomic_add(counters, tl.full([], 0, tl.int64)) - tl.load(counters + 1)
        if excess > 0:
            tl.atomic_add(counters, -excess)


@triton.jit
def drop_references(page, mask, ring, counters, refcount, num_pages):
    """Drop one reference of each of [R] pages where ``mask``; pages without references enter the ring."""
    before = tl.atomic_add(refcount + tl.where(mask, page, 0), tl.where(mask, -1, 0))
    freed = (mask & (before == 1)).to(tl.int32)
    total = tl.sum(freed, 0)
    if total > 0:
        first = tl.atomic_add(counters + 1, total.to(tl.int64))
        place = first + (tl.cumsum(freed, 0) - freed).to(tl.int64)
        tl.store(ring + place % num_pages, page, mask=freed > 0)
