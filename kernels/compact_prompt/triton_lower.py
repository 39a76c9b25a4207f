"""Before a prompt's tokens move: those that go down get their codes in the lower tier's form, in their own slots.

Programs that move tokens go through a head's pages one after another, since what one frees the next one takes. Working
out codes is most of the time, and needs no order. So it comes first, for all pages at once.
"""

import triton
import triton.language as tl

from sglang_diffkv.kernels.triton_table import (
    I_TOKENS,
    layout_of,
    padded,
    table_index,
)
from sglang_diffkv.kernels.triton_tokens import (
    fits_in_slot,
    lasting_of,
    load_cuts,
    lower_in_place,
    page_decision,
)

PARTS = 16
"""Programs of a head: each has every 16th of its pages."""
REGISTERS = 128
"""Of a thread, at most, for heads of up to 128: so four programs run at once on a multiprocessor and not three. Larger
heads need more."""


@triton.jit(
    do_not_specialize=["window", "sinks", "values_len"],
    do_not_specialize_on_alignment=["rows", "seq_lens", "tails", "own_entry", "own_tokens"],
)
def lower_kernel(
    rows, seq_lens, tails, window, sinks, lasting, high_cut, between, low_cut, tie_high, tie_low, values, values_len,
    spare, raw_like, pages, page_table, row_blocks, own_entry, own_tokens, fault, num_pages,
    LAYOUTS: tl.constexpr, TIERS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE_BYTES: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr, WHOLE: tl.constexpr, TAILED: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Grid (B * L * H * PARTS), a head's programs beside each other. Arguments as of ``compact_kernel``, which decides
    the same of the same numbers. What it does not demote stays as it is: tokens of a row with a fault, and those for a
    tier of which there is no spare page."""
    SPARES: tl.constexpr = TIERS - 1 + TAILED
    part, number = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS
    b, flat = number // (L * H), number % (L * H)
    layer, head = flat // H, flat % H
    row, seq_len = tl.load(rows + b), tl.load(seq_lens + b).to(tl.int32)
    if tl.load(fault + row) != 0:
        return
    high_at = ((row * L + layer) * H + head) * TIERS
    first = tl.load(own_entry + high_at)
    used = tl.load(own_tokens + high_at)
    HIGH: tl.constexpr = layout_of(LAYOUTS, 0)
    TOKENS: tl.constexpr = HIGH[I_TOKENS]
    raw: tl.constexpr = raw_like.dtype
    cuts, ties = load_cuts(high_cut, between, low_cut, tie_high, tie_low, flat, TIERS, L * H, WHOLE)
    window, sinks = lasting_of(window, sinks, lasting, layer)
    if TAILED:
        window = tl.maximum(window, tl.load(tails + b).to(tl.int32))
    values += flat.to(tl.int64) * values_len
    spare += b * SPARES * L * H + flat
    slot = tl.arange(0, padded(TOKENS))
    for page_number in range(part, tl.cdiv(used, TOKENS), PARTS):
        at = table_index(row_blocks, row, layer, head, first + page_number, True, MAX_BLOCKS, L, H)
        page = pages + tl.load(page_table + at).to(tl.int64) * PAGE_BYTES
        live = (slot < TOKENS) & (page_number * TOKENS + slot < used)
        _, _, chosen = page_decision(
            page, slot, live, seq_len, window, sinks, cuts, ties, values, values_len, HIGH, TIERS, WHOLE
        )
        for lower in tl.static_range(TIERS - 1):
            if fits_in_slot(HIGH, layout_of(LAYOUTS, lower + 1)):
                goes = chosen[lower + 1] & (tl.load(spare + lower * L * H) != num_pages)
                if tl.max(goes.to(tl.int32), 0) > 0:
                    lower_in_place(page, slot, goes, raw, HIGH, layout_of(LAYOUTS, lower + 1), D, DV)
