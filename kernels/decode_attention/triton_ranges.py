"""The work of decode attention laid out in a line, and cut into equal ranges, one for each program.

A layer's line holds its heads behind one another by (request, KV head, tier): a *unit* is one tier of a head. A
program's range may begin and end anywhere in a unit, at whole tiles, and may hold several units. So each program has as
much work as any other, however uneven requests, heads and tiers are. A unit that is not empty begins with the cost of
switching to it. What a program finds in a unit is one partial result, in slot ``program + unit``. Along the line one of
the two grows with every step, so each pair has its own slot, and a head's slots follow one another. In CUDA C++ a
program has one result of a head, whatever its tiers, in slot ``program + head`` (``MERGED``).
"""

import triton
import triton.language as tl

MOST_RANGES = 120
"""Ranges that cut a head at most: its results have to be joined."""
LEAST_TILES = 2
"""Tiles of a range at least."""
TURN_TILES = 1
"""What a program spends on turning to a unit, in the dearest tiles: the first loads of a unit wait for one another."""


@triton.jit
def head_work(entries, rows, heads, first, layer, COSTS: tl.constexpr, TURN: tl.constexpr, TIERS: tl.constexpr,
              L: tl.constexpr, H: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """Of heads [first, first + R): their rows and the work of each of their units, a tuple of [R] int32."""
    head = first + tl.arange(0, R)
    live = head < heads
    row = tl.load(rows + head // H, mask=live, other=0).to(tl.int64)
    at = entries + ((row * L + layer) * H + head % H) * TIERS
    work = ()
    for tier in tl.static_range(TIERS):
        pages = tl.load(at + tier, mask=live, other=0)
        work = work + (pages * COSTS[tier] + tl.where(pages > 0, TURN, 0),)
    return row.to(tl.int32), work


@triton.jit
def sum_of(values, COUNT: tl.constexpr):
    """Of a tuple's tensors."""
    total = values[0]
    for number in tl.static_range(1, COUNT):
        total += values[number]
    return total


@triton.jit(do_not_specialize=["batch", "programs", "least"], do_not_specialize_on_alignment=["rows"])
def ranges_kernel(
    starts, begun, ranges, rows, num_valid, batch, programs, least, entries,
    COSTS: tl.constexpr, TURN: tl.constexpr, MOST: tl.constexpr, TIERS: tl.constexpr, L: tl.constexpr, H: tl.constexpr,
    UNITS: tl.constexpr, PROGRAMS: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Grid (L): where each unit's work begins; of each program the unit in which its range begins, where that begins
    and its row; the length of a range and of the line. ``COSTS``: of a page of each tier. ``R`` heads an iteration.

    starts [L, UNITS], begun [L, PROGRAMS, 4] and ranges [L, 2] int32; what lies behind the last unit or program with
    work is left as it was."""
    layer = tl.program_id(0)
    heads = tl.minimum(tl.load(num_valid), batch) * H
    total = tl.zeros([], tl.int32)
    most = tl.zeros([], tl.int32)
    for first in range(0, heads, R):
        _, work = head_work(entries, rows, heads, first, layer, COSTS, TURN, TIERS, L, H, R)
        all_work = sum_of(work, TIERS)
        total += tl.sum(all_work, 0)
        most = tl.maximum(most, tl.max(all_work, 0))
    each = tl.maximum(tl.cdiv(total, programs), tl.maximum(tl.cdiv(most, MOST), least))
    tl.store(ranges + layer * 2, each)
    tl.store(ranges + layer * 2 + 1, total)
    before = tl.zeros([], tl.int32)
    for first in range(0, heads, R):
        row, work = head_work(entries, rows, heads, first, layer, COSTS, TURN, TIERS, L, H, R)
        all_work = sum_of(work, TIERS)
        head = first + tl.arange(0, R)
        live = head < heads
        start = before + tl.cumsum(all_work, 0) - all_work
        before += tl.sum(all_work, 0)
        for tier in tl.static_range(TIERS):
            unit = head * TIERS + tier
            tl.store(starts + layer * UNITS + unit, start, mask=live)
            program, beyond = tl.cdiv(start, each), tl.cdiv(start + work[tier], each)
            for step in range(tl.max(beyond - program, 0)):
                here = live & (program + step < beyond)
                at = begun + (layer * PROGRAMS + program + step) * 4
                tl.store(at, unit, mask=here)
                tl.store(at + 1, start, mask=here)
                tl.store(at + 2, row, mask=here)
            start += work[tier]


@triton.jit
def range_tiles(begin, stop, start, tiles, WEIGHT: tl.constexpr, TURN: tl.constexpr):
    """Tiles [first, last) of a unit that begins at ``start`` which begin in the range [begin, stop), and where the unit
    ends."""
    tiles_at = start + TURN
    first = tl.minimum(tl.cdiv(tl.maximum(begin - tiles_at, 0), WEIGHT), tiles)
    last = tl.minimum(tl.cdiv(tl.maximum(stop - tiles_at, 0), WEIGHT), tiles)
    return first, last, tl.where(tiles > 0, tiles_at + tiles * WEIGHT, start)


@triton.jit
def head_slots(
    starts, each, layer, bh, tiles, WEIGHTS: tl.constexpr, TURN: tl.constexpr, TIERS: tl.constexpr, UNITS: tl.constexpr,
    MERGED: tl.constexpr,
):  # fmt: skip
    """Slots [first, end) of a head's partial results, those of each tier: two tuples. ``tiles``: of each tier.
    ``MERGED``: a program has one result for all tiers of a head. Every program between the first and the last has one,
    since a range is at least a tile and the cost of switching to the next tier. Each tier has all slots then."""
    firsts = ()
    ends = ()
    begin = tl.full([], 0, tl.int32)
    end = tl.full([], 0, tl.int32)  # 0: no tier has tiles so far
    for tier in tl.static_range(TIERS):
        unit = bh * TIERS + tier
        start = tl.load(starts + layer * UNITS + unit) + TURN
        first = start // each
        last = (start + (tiles[tier] - 1) * WEIGHTS[tier]) // each
        firsts = firsts + (first + unit,)
        ends = ends + (tl.where(tiles[tier] > 0, last + unit + 1, first + unit),)
        begin = tl.where((tiles[tier] > 0) & (end == 0), first + bh, begin)
        end = tl.where(tiles[tier] > 0, last + bh + 1, end)
    if MERGED:
        firsts = ()
        ends = ()
        for _ in tl.static_range(TIERS):
            firsts = firsts + (begin,)
            ends = ends + (end,)
    return firsts, ends


@triton.jit
def is_result(slot, firsts, ends, TIERS: tl.constexpr):
    """Whether slots (any shape) between a head's first and last hold a result: where a tier begins with a range, the
    one before does not."""
    found = (slot >= firsts[0]) & (slot < ends[0])
    for tier in tl.static_range(1, TIERS):
        found = found | ((slot >= firsts[tier]) & (slot < ends[tier]))
    return found
