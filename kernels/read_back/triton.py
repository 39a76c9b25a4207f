"""``reference.py`` on the GPU: one launch for all requests and tiers of a layer.

A code is an integer below 256, which the tensor cores hold exactly: rotated tokens are rotated back as codes, and scale
and zero point follow, so that nothing is rounded but the result.
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl

from sglang_diffkv.kernels.device import processors_of
from sglang_diffkv.kernels.launch import Launch
from sglang_diffkv.kernels.rotate.reference import NO_ROTATION, Rotation, block_size
from sglang_diffkv.kernels.rotate.triton import block_signs, signs, times_signs
from sglang_diffkv.kernels.triton_table import (
    I_KB,
    I_KEYS,
    I_KMETA,
    I_POSITIONS,
    I_TOKENS,
    I_VALUES,
    I_VB,
    I_VMETA,
    INTERPRETED,
    ceil_div,
    dot_padded,
    earlier_entries,
    format_constants,
    layout_of,
    load_bound,
    load_positions,
    padded,
    table_column,
    table_index,
)
from sglang_diffkv.kernels.triton_tokens import vector_codes
from sglang_diffkv.layout.state import PageState

SLOTS = 32
"""Slots of a page that a program reads at a time, at most."""
NEW_TOKENS = 64
"""New tokens that a program copies at a time."""
RESIDENT = 8
"""Programs of a multiprocessor: more of them would each make the matrix that turns tokens back."""


SIDE = tl.constexpr(64)
"""Rows and columns of a product where codes are rotated back: a block of more elements is several, added with signs."""


@triton.constexpr_function
def whole_sides(dim, bits, block):
    """Products of a vector that is one block of codes; 0 where it is none, or no multiple of ``SIDE`` elements."""
    return dim // SIDE.value if bits < 16 and block == dim and dim % SIDE.value == 0 else 0


@triton.constexpr_function
def odd(row, column):
    """Whether Sylvester's matrix has a minus one there."""
    return (row & column).bit_count() % 2 == 1


@triton.jit
def read_turned(
    page, slot, chosen, target, means,
    DIM: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr, META: tl.constexpr, NORM: tl.constexpr,
    ADD_MEANS: tl.constexpr,
):  # fmt: skip
    """``read_vectors`` of codes that are one block of a multiple of ``SIDE`` elements. Sums of codes are integers that
    fp16 holds exactly, so they are added before they are multiplied."""
    PARTS: tl.constexpr = whole_sides(DIM, BITS, DIM)
    side = tl.arange(0, SIDE)
    inside = tl.broadcast_to(chosen[:, None], [slot.shape[0], SIDE])
    matrix = signs(side[:, None], side[None, :]).to(tl.float16)
    parts = ()
    scale = tl.full(slot.shape, 1.0, tl.float32)
    zero = tl.zeros(slot.shape, tl.float32)
    for part in tl.static_range(PARTS):
        x, scale, zero = vector_codes(
            page, slot, chosen, inside, part * SIDE + side[None, :], DIM, BITS, OFFSET, META
        )  # fmt: skip
        parts = parts + (x.to(tl.float16),)  # type: ignore[assignment]
    for column in tl.static_range(PARTS):
        total = parts[0]  # type: ignore[misc]
        for part in tl.static_range(1, PARTS):
            total = total - parts[part] if odd(part, column) else total + parts[part]
        y = tl.dot(total, matrix) * scale[:, None]
        if column == 0:  # the first column of the whole matrix adds up all elements, and so all zero points
            y += tl.where(side == 0, DIM * 1.0, 0.0)[None, :] * zero[:, None]
        y = y * NORM
        element = column * SIDE + side
        if ADD_MEANS:
            y += tl.load(means + element)[None, :]
        tl.store(target[:, None] + element[None, :], y.to(target.dtype.element_ty), mask=inside)


@triton.jit
def read_vectors(
    page, slot, chosen, raw, target, means,
    DIM: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr, META: tl.constexpr, TURN: tl.constexpr,
    B: tl.constexpr, NORM: tl.constexpr, ADD_MEANS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Vectors of the chosen of slots [T] of a page, rotated back if ``TURN``, with ``means`` [DIM] added, to ``target``
    [T], where their elements go. ``raw`` is the raw tier's type."""
    DP: tl.constexpr = dot_padded(DIM)
    C: tl.constexpr = min(DP, 64) if TURN else DP
    d = tl.arange(0, DP)
    inside = chosen[:, None] & (d < DIM)[None, :]
    codes_type: tl.constexpr = raw if BITS == 16 else tl.float16
    dot_type: tl.constexpr = codes_type if ASM or codes_type == tl.float16 else tl.float32  # not bf16 when interpreted
    scale = tl.full(slot.shape, 1.0, tl.float32)
    zero = tl.zeros(slot.shape, tl.float32)
    if BITS == 16:
        x = tl.load((page + OFFSET).to(tl.pointer_type(raw)) + slot[:, None] * DIM + d[None, :], mask=inside, other=0.0)
    else:
        x, scale, zero = vector_codes(page, slot, chosen, inside, d[None, :], DIM, BITS, OFFSET, META)
    for first in tl.static_range(0, DP, C):
        column = first + tl.arange(0, C)
        if TURN:
            y = times_signs(x, block_signs(d, column, DP, B), dot_type)
            y = (y * scale[:, None] + tl.where(column % B == 0, B * 1.0, 0.0)[None, :] * zero[:, None]) * NORM
        else:
            y = x.to(tl.float32) * scale[:, None] + zero[:, None]
        if ADD_MEANS:
            y += tl.load(means + column, mask=column < DIM, other=0.0)[None, :]
        there = chosen[:, None] & (column < DIM)[None, :]
        tl.store(target[:, None] + column[None, :], y.to(target.dtype.element_ty), mask=there)


@triton.jit
def read_field(
    page, slot, chosen, raw, target, means,
    DIM: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr, META: tl.constexpr, TURN: tl.constexpr,
    B: tl.constexpr, NORM: tl.constexpr, ADD_MEANS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """``read_vectors``, by the way that takes least."""
    if TURN and whole_sides(DIM, BITS, B) > 0:
        read_turned(page, slot, chosen, target, means, DIM, BITS, OFFSET, META, NORM, ADD_MEANS)
    else:
        read_vectors(
            page, slot, chosen, raw, target, means, DIM, BITS, OFFSET, META, TURN, B, NORM, ADD_MEANS, ASM
        )  # fmt: skip


@triton.jit
def read_tier(
    part, parts, first_place, prefix, extend, key_out, value_out, means, row, layer, head, column_head,
    out_heads, pages, page_table, range_lo, range_hi, row_blocks, entries, own_entry, write_slot,
    TIER: tl.constexpr, LAYOUT: tl.constexpr, TIERS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr, SLOTS: tl.constexpr,
    TURN_KEYS: tl.constexpr, TURN_VALUES: tl.constexpr, B: tl.constexpr, BV: tl.constexpr,
    NORM: tl.constexpr, NORM_V: tl.constexpr, ADD_MEANS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The tokens of a request that one tier of a head holds before its new ones: each ``parts``-th tile of slots. In
    the outputs the head is ``column_head`` of ``out_heads``."""
    TOKENS: tl.constexpr = LAYOUT[I_TOKENS]
    N: tl.constexpr = min(padded(TOKENS), SLOTS)
    CHUNKS: tl.constexpr = ceil_div(TOKENS, N)
    raw: tl.constexpr = key_out.dtype.element_ty
    head_at = (row * L + layer) * H + head
    count = earlier_entries(entries, own_entry, write_slot, head_at, extend, TIER, TIERS, TOKENS)
    for tile in range(part, tl.where(prefix > 0, count, 0) * CHUNKS, parts):
        column = table_column(tile // CHUNKS, TIER, MAX_BLOCKS)
        at = table_index(row_blocks, row, layer, head, column, True, MAX_BLOCKS, L, H)
        page = pages + tl.load(page_table + at).to(tl.int64) * PAGE_BYTES
        slot = tile % CHUNKS * N + tl.arange(0, N)
        position = load_positions(page, LAYOUT[I_POSITIONS], slot, slot < TOKENS)
        last = tl.minimum(load_bound(range_hi, at, True), prefix)
        held = (slot < TOKENS) & (position >= load_bound(range_lo, at, True)) & (position < last)
        vector = (first_place + tl.where(held, position, 0)) * out_heads + column_head
        read_field(
            page, slot, held, raw, key_out + vector * D, means + head * D,
            D, LAYOUT[I_KB], LAYOUT[I_KEYS], LAYOUT[I_KMETA], TURN_KEYS, B, NORM, ADD_MEANS, ASM,
        )  # fmt: skip
        read_field(
            page, slot, held, raw, value_out + vector * DV, means,
            DV, LAYOUT[I_VB], LAYOUT[I_VALUES], LAYOUT[I_VMETA], TURN_VALUES, BV, NORM_V, False, ASM,
        )  # fmt: skip


@triton.jit
def copy_vectors(source, target, live, DIM: tl.constexpr):
    """Vectors from ``source`` [T] to ``target`` [T]."""
    d = tl.arange(0, padded(DIM))
    inside = live[:, None] & (d < DIM)[None, :]
    x = tl.load(source[:, None] + d[None, :], mask=inside, other=0.0)
    tl.store(target[:, None] + d[None, :], x, mask=inside)


@triton.jit
def clear_vectors(target, live, DIM: tl.constexpr):
    """Zeros in vectors at ``target`` [T]."""
    d = tl.arange(0, padded(DIM))
    zeros = tl.zeros([target.shape[0], padded(DIM)], target.dtype.element_ty)
    tl.store(target[:, None] + d[None, :], zeros, mask=live[:, None] & (d < DIM)[None, :])


@triton.jit(
    do_not_specialize=["layer", "first_head", "out_heads"],
    do_not_specialize_on_alignment=["rows", "starts", "extend_lens", "prefix_lens", "into"],
)
def read_back_kernel(
    key, value, key_stride, key_head, value_stride, value_head, key_out, value_out, means,
    rows, starts, extend_lens, prefix_lens, into,
    pages, page_table, range_lo, range_hi, row_blocks, entries, own_entry, write_slot, fault, layer,
    first_head, out_heads,
    LAYOUTS: tl.constexpr, TIERS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE_BYTES: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, L: tl.constexpr, H: tl.constexpr, SLOTS: tl.constexpr, NEW: tl.constexpr,
    TURN_KEYS: tl.constexpr, TURN_VALUES: tl.constexpr, B: tl.constexpr, BV: tl.constexpr,
    NORM: tl.constexpr, NORM_V: tl.constexpr, ADD_MEANS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid (programs that share a head, out_heads, B). Strides are in elements."""
    part, parts = tl.program_id(0), tl.num_programs(0)
    column_head, b = tl.program_id(1), tl.program_id(2)
    head = first_head + column_head
    row = tl.load(rows + b).to(tl.int64)
    prefix, extend = tl.load(prefix_lens + b).to(tl.int32), tl.load(extend_lens + b).to(tl.int32)
    first_place = tl.load(into + b).to(tl.int64)
    missing = tl.where(tl.load(fault + row) != 0, prefix, 0)
    for tier in tl.static_range(TIERS):
        read_tier(
            part, parts, first_place, prefix - missing, extend, key_out, value_out, means, row, layer, head,
            column_head, out_heads, pages, page_table, range_lo, range_hi, row_blocks, entries, own_entry, write_slot,
            tier, layout_of(LAYOUTS, tier), TIERS, D, DV, PAGE_BYTES, MAX_BLOCKS, L, H, SLOTS,
            TURN_KEYS, TURN_VALUES, B, BV, NORM, NORM_V, ADD_MEANS, ASM,
        )  # fmt: skip
    for begin in range(part * NEW, missing, parts * NEW):
        token = begin + tl.arange(0, NEW)
        vector = (first_place + token) * out_heads + column_head
        clear_vectors(key_out + vector * D, token < missing, D)
        clear_vectors(value_out + vector * DV, token < missing, DV)
    start = tl.load(starts + b).to(tl.int64)
    for begin in range(part * NEW, extend, parts * NEW):
        token = begin + tl.arange(0, NEW)
        vector = (first_place + prefix + token) * out_heads + column_head
        wide = start + token
        copy_vectors(key + wide * key_stride + head * key_head, key_out + vector * D, token < extend, D)
        copy_vectors(value + wide * value_stride + head * value_head, value_out + vector * DV, token < extend, DV)


def read_back(
    state: PageState,
    layer: int,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    extend_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    into: torch.Tensor,
    key_out: torch.Tensor,
    value_out: torch.Tensor,
    longest: int,
    *,
    rotation: Rotation = NO_ROTATION,
    key_means: torch.Tensor | None = None,
    first_head: int = 0,
) -> None:
    """As ``reference.read_back``.

    Args:
        key, value: with a contiguous last dimension. longest: tokens of the longest request, on the host: the larger of
            what it has stored and what is new.
    """
    prepare_read_back(
        state, key, value, rows, starts, extend_lens, prefix_lens, into, key_out, value_out, longest,
        rotation=rotation, key_means=key_means,
    )(layer, key, value, key_out, value_out, key_means, first_head)  # fmt: skip


class PreparedReadBack(Protocol):
    """``read_back`` of another layer of the pass or of other heads, with tensors of the same form."""

    def __call__(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, key_out: torch.Tensor, value_out: torch.Tensor,
        key_means: torch.Tensor | None, first_head: int = 0,
    ) -> None: ...  # fmt: skip


def prepare_read_back(
    state: PageState, key: torch.Tensor, value: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor,
    extend_lens: torch.Tensor, prefix_lens: torch.Tensor, into: torch.Tensor, key_out: torch.Tensor,
    value_out: torch.Tensor, longest: int, *, rotation: Rotation, key_means: torch.Tensor | None,
    requests: int | None = None,
) -> PreparedReadBack:  # fmt: skip
    """What layers have in common. Arguments as of ``read_back``. ``requests``: how many of the batch have tokens, as
    far as the host knows; by default all."""
    fmt, heads, batch = state.fmt, state.num_heads, rows.shape[0]
    tokens = key.shape[0]
    assert key.shape == (tokens, heads, fmt.head_dim) and key.stride(2) == 1
    assert value.shape == (tokens, heads, fmt.v_head_dim) and value.stride(2) == 1
    out_heads = key_out.shape[1]
    assert key_out.shape[2] == fmt.head_dim and value_out.shape[1:] == (out_heads, fmt.v_head_dim)
    assert len(key_out) == len(value_out) and key_out.is_contiguous() and value_out.is_contiguous()
    assert key.dtype == value.dtype == key_out.dtype == value_out.dtype
    assert not fmt.high.tier.is_raw or key.dtype == state.dtype, "the raw tier holds the dtype of keys"
    assert rows.shape == starts.shape == extend_lens.shape == prefix_lens.shape == into.shape == (batch,)
    if key_means is not None:
        assert key_means.shape == (heads, fmt.head_dim) and key_means.dtype == torch.float32
        assert key_means.is_contiguous()
    block, v_block = block_size(fmt.head_dim), block_size(fmt.v_head_dim)
    most = triton.cdiv(RESIDENT * processors_of(state.device), out_heads * (requests or batch))
    programs = max(1, min(triton.cdiv(longest, SLOTS), most))
    launch = Launch(
        read_back_kernel,
        (programs, out_heads, batch),
        (
            None, None, key.stride(0), key.stride(1), value.stride(0), value.stride(1), None, None, None,
            rows, starts, extend_lens, prefix_lens, into,
            state.pages, state.page_table, state.range_lo, state.range_hi, state.row_blocks, state.entries,
            state.own_entry, state.write_slot, state.fault, None, None, out_heads,
        ),
        dict(
            **format_constants(fmt), MAX_BLOCKS=state.row_blocks.shape[1], L=state.num_layers, H=heads, SLOTS=SLOTS,
            NEW=NEW_TOKENS, TURN_KEYS=rotation.keys, TURN_VALUES=rotation.values, B=block,
            BV=v_block, NORM=block**-0.5, NORM_V=v_block**-0.5, ADD_MEANS=key_means is not None, ASM=not INTERPRETED,
            num_warps=4,
        ),
    )  # fmt: skip

    def read_again(
        layer: int, key: torch.Tensor, value: torch.Tensor, key_out: torch.Tensor, value_out: torch.Tensor,
        key_means: torch.Tensor | None, first_head: int = 0,
    ) -> None:  # fmt: skip
        means = key_out if key_means is None else key_means
        launch(
            key=key, value=value, key_out=key_out, value_out=value_out, means=means, layer=layer, first_head=first_head
        )  # fmt: skip

    return read_again
