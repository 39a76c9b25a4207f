"""Device functions over the tokens of pages: move them as they are or into a lower tier, and score a prompt's."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from sglang_diffkv.kernels.cuts import Cuts
from sglang_diffkv.kernels.quantize.triton import (
    chunk_bytes,
    group_elements,
    quantize_groups,
    slice_bytes,
    slice_of,
    slices_of,
    store_packed,
)
from sglang_diffkv.kernels.triton_codec import meta_pair
from sglang_diffkv.kernels.triton_table import (
    I_KB,
    I_KEYS,
    I_KMETA,
    I_KTURNED,
    I_POSITIONS,
    I_SCORES,
    I_VALUES,
    I_VB,
    I_VMETA,
    I_VTURNED,
    NO_SCORES,
    dot_padded,
    load_bound,
    load_positions,
    padded,
    store_positions,
    table_column,
    table_index,
)


def cut_arguments(cuts: Cuts) -> tuple[Any, ...]:
    """``high_cut``, ``between``, ``low_cut``, ``tie_high``, ``tie_low``, ``values`` and ``values_len`` of kernels. If
    heads were not scored as a whole, the last four are not read. With two tiers ``between`` is None."""
    if cuts.values is None:
        return cuts.high, cuts.between, cuts.low, cuts.high, cuts.low, cuts.high, 0
    return cuts.high, None, cuts.low, cuts.tie_high, cuts.tie_low, cuts.values, cuts.values.shape[2]


@triton.jit
def lasting_of(window, sinks, lasting, layer):
    """A layer's window and sinks; ``lasting`` is None where all have the same."""
    if lasting is not None:
        window = tl.load(lasting + layer * 2)
        sinks = tl.load(lasting + layer * 2 + 1)
    return window, sinks


@triton.jit
def number_at(page, OFFSET: tl.constexpr, slot):
    """Pointers to the int32 numbers of a field."""
    return (page + OFFSET).to(tl.pointer_type(tl.int32)) + slot


@triton.jit
def load_scores(page, SCORES: tl.constexpr, slot, mask):
    """Score words of slots of a page, int32; 0 without ``mask``, and where pages have no scores."""
    word = tl.zeros(slot.shape, tl.int32)
    if SCORES != NO_SCORES:
        word = tl.load(number_at(page, SCORES, slot), mask=mask, other=0)
    return word


@triton.jit
def load_cuts(
    high_cut, between, low_cut, tie_high, tie_low, flat, TIERS: tl.constexpr, HEADS: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """Cuts of head ``flat`` of ``HEADS``, the one that tier t asks for at place t, and the ties of the first and the
    last; two tuples. Without ``WHOLE`` there are no ties."""
    cuts = ()
    if TIERS > 1:
        cuts = cuts + (tl.load(high_cut + flat),)
    for tier in tl.static_range(1, TIERS - 1):
        cuts = cuts + (tl.load(between + (tier - 1) * HEADS + flat),)
    cuts = cuts + (tl.load(low_cut + flat),)
    ties = (0, 0)
    if WHOLE:
        ties = (tl.load(tie_high + flat), tl.load(tie_low + flat))
    return cuts, ties


@triton.jit
def prompt_decision(
    score, position, live, seq_len, window, sinks, cuts, ties, values, values_len,
    TIER: tl.constexpr, TIERS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """``cuts.prompt_tiers`` for [T] tokens of ``TIER``, which rise to no tier above it: a tuple of masks, at place 0
    those that stay, at place k those that go down k tiers. ``cuts`` and ``ties`` of ``load_cuts``. ``WHOLE``: heads
    were scored as a whole; ``values`` points to those of this head."""
    lasting = (position >= seq_len - window) | (position < sinks)
    above = ()
    if WHOLE:
        value = tl.load(values + position, mask=live & (position < values_len), other=float("nan"))
        for tier in tl.static_range(TIER, TIERS):
            tie = ties[0 if tier + 1 < TIERS else 1]
            above = above + ((value > cuts[tier]) | ((value == cuts[tier]) & (position <= tie)),)
    else:
        mean = tl.div_rn(tl.full(position.shape, 1.0, tl.float32), tl.maximum(position + 1, 1).to(tl.float32))
        for tier in tl.static_range(TIER, TIERS):
            above = above + (score >= cuts[tier] * mean,)
    stays = live & (lasting | above[0])
    found = (stays,)
    rest = live & (stays == 0)
    for lower in tl.static_range(1, TIERS - TIER):
        found = found + (rest & above[lower],)
        rest = rest & (above[lower] == 0)
    return found


@triton.jit
def page_decision(
    page, slot, live, seq_len, window, sinks, cuts, ties, values, values_len,
    HIGH: tl.constexpr, TIERS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """``prompt_decision`` for the ``live`` of slots [T] of a high-tier page: positions, score words, and the masks."""
    position = load_positions(page, HIGH[I_POSITIONS], slot, live)
    word = load_scores(page, HIGH[I_SCORES], slot, live)
    score = word.to(tl.float32, bitcast=True)
    live = live & (position >= 0)
    chosen = prompt_decision(
        score, position, live, seq_len, window, sinks, cuts, ties, values, values_len, 0, TIERS, WHOLE
    )
    return position, word, chosen


@triton.jit
def held_page(
    entry, source, lo, hi, layer, head, shared_scores, shared_len, pages, page_table, range_lo, range_hi, row_blocks,
    TIER: tl.constexpr, TOKENS: tl.constexpr, SCORES: tl.constexpr, POSITIONS: tl.constexpr,
    PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """A page of a row, and for its [T] slots: scores, positions, and whether the page's range and [lo, hi) hold them.
    ``shared_scores`` points to this head's scores by position for positions below ``shared_len``, which count where
    they are numbers."""
    column = table_column(entry, TIER, MAX_BLOCKS)
    at = table_index(row_blocks, source, layer, head, column, True, MAX_BLOCKS, L, H)
    page = pages + tl.load(page_table + at).to(tl.int64) * PAGE_BYTES
    first = tl.maximum(load_bound(range_lo, at, True), lo)
    last = tl.minimum(load_bound(range_hi, at, True), hi)
    slot = tl.arange(0, padded(TOKENS))
    live = slot < TOKENS
    position = load_positions(page, POSITIONS, slot, live)
    held = live & (position >= first) & (position < last)
    score = load_scores(page, SCORES, slot, held).to(tl.float32, bitcast=True)
    known = held & (position < shared_len)
    own = tl.load(shared_scores + tl.where(known, position, 0), mask=known, other=0.0)
    return page, tl.where(known & (own == own), own, score), position, held


@triton.jit
def store_values(values, position, value, held, seq_len, window, sinks):
    """Write what [T] tokens of a page count to ``values`` of their head, by position: infinity for the newest
    ``window`` and the first ``sinks``. Returns how many were ``held``."""
    lasting = (position >= seq_len - window) | (position < sinks)
    tl.store(values + position, tl.where(lasting, float("inf"), value), mask=held)
    return tl.sum(held.to(tl.int32), 0)


@triton.jit
def load_codes(
    page, slot, chosen, DIM: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr, META: tl.constexpr,
    SLOT_BITS: tl.constexpr = 0,
):  # fmt: skip
    """Vectors as they are, of the chosen of slots [T] of a page. ``SLOT_BITS``: of the tier whose page it is, if it is
    not theirs, see ``lower_in_place``.

    Returns a tuple with the bytes of each slice, uint8 [T, chunks * WP] as of ``packed_slices``, and metadata
    words [T].
    The raw tier has no metadata.
    """
    room: tl.constexpr = SLOT_BITS if SLOT_BITS > 0 else BITS
    codes = ()
    for number in tl.static_range(slices_of(BITS)):
        byte, exists = slice_bytes(DIM, BITS, number)
        mask = chosen[:, None] & exists
        codes = codes + (tl.load(page + OFFSET + slot[:, None] * (DIM * room // 8) + byte, mask=mask, other=0),)
    meta = slot
    if BITS != 16:
        meta = tl.load(meta_at(page, slot, DIM, room, OFFSET, META), mask=chosen, other=0)
    return codes, meta


@triton.jit
def meta_at(page, slot, DIM: tl.constexpr, SLOT_BITS: tl.constexpr, OFFSET: tl.constexpr, META: tl.constexpr):
    """Pointers to the metadata words of slots of pages, which broadcast. Pages of the raw tier have none: there they
    are the last four bytes of the slot, which lower codes leave free."""
    if SLOT_BITS == 16:
        at = number_at(page, OFFSET + DIM * 2 - 4, slot * (DIM // 2))
    else:
        at = number_at(page, META, slot)
    return at


@triton.jit
def requantized(
    page, slot, chosen, raw, DIM: tl.constexpr, FROM: tl.constexpr, TO: tl.constexpr, OFFSET: tl.constexpr,
    META: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """As ``load_codes``, in a lower tier's form. ``raw`` is the raw tier's type. ``TURNED``: whether it is rotated."""
    W: tl.constexpr = chunk_bytes(DIM, TO)
    WP: tl.constexpr = padded(W)
    element = group_elements(W, WP, TO)  # [1, groups, WP]
    inside = (tl.arange(0, WP) < W)[None, None, :]
    mask = inside & chosen[:, None, None]
    if FROM == 16:
        x_ptr = (page + OFFSET).to(raw) + slot[:, None, None] * DIM
        x = tl.load(x_ptr + element, mask=mask, other=0.0).to(tl.float32)
    else:
        codes = element_codes(page + OFFSET + slot[:, None, None] * (DIM * FROM // 8), element, mask, DIM, FROM)
        scale, zero = meta_pair(tl.load(number_at(page, META, slot), mask=chosen, other=0))
        x = codes.to(tl.float32) * scale[:, None, None] + zero[:, None, None]
    wanted = tl.max(chosen.to(tl.int32), 0) > 0
    return quantize_groups(x, inside, TO, FROM if TURNED or FROM == TO else 0, wanted)


@triton.jit
def element_codes(vector, element, mask, DIM: tl.constexpr, BITS: tl.constexpr):
    """Codes of elements ``element`` of packed vectors at ``vector``, which broadcast; int32, 0 without ``mask``."""
    codes = slice_codes(vector, element, mask, DIM, BITS, 0)
    for number in tl.static_range(1, slices_of(BITS)):
        codes |= slice_codes(vector, element, mask, DIM, BITS, number)
    return codes


@triton.jit
def slice_codes(vector, element, mask, DIM: tl.constexpr, BITS: tl.constexpr, NUMBER: tl.constexpr):
    """Of these codes the bits that are in one slice, at their places in the code."""
    place: tl.constexpr = slice_of(BITS, NUMBER)
    WIDTH: tl.constexpr = place[0]
    BYTES: tl.constexpr = DIM * WIDTH // 8
    if place[2] > 0:
        vector += place[2] * chunk_bytes(DIM, BITS)
    codes = tl.load(vector + element % BYTES, mask=mask, other=0)
    codes = (codes.to(tl.int32) >> (element // BYTES * WIDTH)) & ((1 << WIDTH) - 1)
    if place[1] > 0:
        codes <<= place[1]
    return codes


@triton.jit
def vector_codes(
    page, slot, chosen, mask, d, DIM: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr, META: tl.constexpr
):  # fmt: skip
    """Of quantised vectors of the chosen of slots [T] of a page: codes of elements ``d`` [1, N], int32 [T, N], 0
    without ``mask`` [T, N]; scales and zero points, float32 [T]."""
    codes = element_codes(page + OFFSET + slot[:, None] * (DIM * BITS // 8), d, mask, DIM, BITS)
    scale, zero = meta_pair(tl.load(number_at(page, META, slot), mask=chosen, other=0))
    return codes, scale, zero


@triton.jit
def dequantized(
    page, slot, chosen, raw, DIM: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr, META: tl.constexpr
):  # fmt: skip
    """Vectors of the chosen of slots [T] of a page as float32 [T, dot_padded(DIM)], 0 where there is none. ``raw`` is
    the raw tier's type."""
    d = tl.arange(0, dot_padded(DIM))[None, :]
    mask = chosen[:, None] & (d < DIM)
    if BITS == 16:
        return tl.load((page + OFFSET).to(raw) + slot[:, None] * DIM + d, mask=mask, other=0.0).to(tl.float32)
    codes, scale, zero = vector_codes(page, slot, chosen, mask, d, DIM, BITS, OFFSET, META)
    return tl.where(mask, codes.to(tl.float32) * scale[:, None] + zero[:, None], 0.0)


@triton.jit
def store_codes(
    page, slot, chosen, codes, meta, DIM: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr, META: tl.constexpr,
    SLOT_BITS: tl.constexpr = 0,
):  # fmt: skip
    """Write what ``load_codes`` or ``requantized`` gave to slots [T] of pages [T]. ``SLOT_BITS`` as of
    ``load_codes``."""
    room: tl.constexpr = SLOT_BITS if SLOT_BITS > 0 else BITS
    store_packed(page, slot, codes, chosen, DIM, BITS, OFFSET, room)
    if BITS != 16:
        tl.store(meta_at(page, slot, DIM, room, OFFSET, META), meta, mask=chosen)


@triton.jit
def store_numbers(page, slot, chosen, score, position, SCORES: tl.constexpr, POSITIONS: tl.constexpr):
    """Write scores, as int32 words [T], where pages have them, and positions [T] to slots [T] of pages [T]."""
    if SCORES != NO_SCORES:
        tl.store(number_at(page, SCORES, slot), score, mask=chosen)
    store_positions(page, POSITIONS, slot, position, chosen)


@triton.jit
def load_tokens(page, slot, chosen, LAYOUT: tl.constexpr, D: tl.constexpr, DV: tl.constexpr):
    """The chosen of slots [T] of a page as they are: codes and metadata words of keys and of values, a tuple."""
    k, kmeta = load_codes(page, slot, chosen, D, LAYOUT[I_KB], LAYOUT[I_KEYS], LAYOUT[I_KMETA])
    v, vmeta = load_codes(page, slot, chosen, DV, LAYOUT[I_VB], LAYOUT[I_VALUES], LAYOUT[I_VMETA])
    return k, kmeta, v, vmeta


@triton.jit
def requantized_tokens(
    page, slot, chosen, raw, FROM: tl.constexpr, TO: tl.constexpr, D: tl.constexpr, DV: tl.constexpr
):  # fmt: skip
    """As ``load_tokens`` of a page of layout ``FROM``, in the form of the lower tier ``TO``."""
    k, kmeta = requantized(page, slot, chosen, raw, D, FROM[I_KB], TO[I_KB], FROM[I_KEYS], FROM[I_KMETA], TO[I_KTURNED])
    v, vmeta = requantized(
        page, slot, chosen, raw, DV, FROM[I_VB], TO[I_VB], FROM[I_VALUES], FROM[I_VMETA], TO[I_VTURNED]
    )  # fmt: skip
    return k, kmeta, v, vmeta


@triton.constexpr_function
def fits_in_slot(high, low):
    """Whether vectors of the tier ``low`` fit where those of ``high`` are."""
    return low[I_KB.value] <= high[I_KB.value] and low[I_VB.value] <= high[I_VB.value]


@triton.jit
def lower_in_place(
    page, slot, chosen, raw, FROM: tl.constexpr, TO: tl.constexpr, D: tl.constexpr, DV: tl.constexpr
):  # fmt: skip
    """Let the chosen of slots [T] of a page of layout ``FROM`` have their codes in the form of the lower tier ``TO``,
    where they are: ``lowered_tokens`` reads them. ``fits_in_slot``."""
    lower_vectors(
        page, slot, chosen, raw, D, FROM[I_KB], TO[I_KB], FROM[I_KEYS], FROM[I_KMETA], TO[I_KTURNED]
    )  # fmt: skip
    lower_vectors(
        page, slot, chosen, raw, DV, FROM[I_VB], TO[I_VB], FROM[I_VALUES], FROM[I_VMETA], TO[I_VTURNED]
    )  # fmt: skip


@triton.jit
def lower_vectors(
    page, slot, chosen, raw, DIM: tl.constexpr, FROM: tl.constexpr, TO: tl.constexpr, OFFSET: tl.constexpr,
    META: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """``lower_in_place`` of keys, or of values."""
    codes, meta = requantized(page, slot, chosen, raw, DIM, FROM, TO, OFFSET, META, TURNED)
    tl.debug_barrier()  # all of them are read
    store_codes(page + tl.zeros_like(slot), slot, chosen, codes, meta, DIM, TO, OFFSET, META, FROM)


@triton.jit
def lowered_tokens(page, slot, chosen, FROM: tl.constexpr, TO: tl.constexpr, D: tl.constexpr, DV: tl.constexpr):
    """As ``requantized_tokens``, behind ``lower_in_place``."""
    k, kmeta = load_codes(page, slot, chosen, D, TO[I_KB], FROM[I_KEYS], FROM[I_KMETA], FROM[I_KB])
    v, vmeta = load_codes(page, slot, chosen, DV, TO[I_VB], FROM[I_VALUES], FROM[I_VMETA], FROM[I_VB])
    return k, kmeta, v, vmeta


@triton.jit
def store_tokens(page, slot, chosen, codes, score, position, LAYOUT: tl.constexpr, D: tl.constexpr, DV: tl.constexpr):
    """Write what ``load_tokens`` or ``requantized_tokens`` gave, scores, as int32 words [T], and positions [T] to slots
    [T] of pages [T]."""
    k, kmeta, v, vmeta = codes
    store_codes(page, slot, chosen, k, kmeta, D, LAYOUT[I_KB], LAYOUT[I_KEYS], LAYOUT[I_KMETA])
    store_codes(page, slot, chosen, v, vmeta, DV, LAYOUT[I_VB], LAYOUT[I_VALUES], LAYOUT[I_VMETA])
    store_numbers(page, slot, chosen, score, position, LAYOUT[I_SCORES], LAYOUT[I_POSITIONS])
