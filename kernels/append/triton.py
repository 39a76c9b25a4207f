"""Quantise new tokens and write keys, values, scores and positions in one launch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Protocol

import torch
import triton
import triton.language as tl

from sglang_diffkv.kernels.append.triton_rotated import rotated_append_kernel
from sglang_diffkv.kernels.device import launches_early
from sglang_diffkv.kernels.launch import Launch
from sglang_diffkv.kernels.quantize.triton import store_vectors
from sglang_diffkv.kernels.rotate.reference import NO_ROTATION, Rotation, block_size
from sglang_diffkv.kernels.triton_table import INTERPRETED, check_rows, layout_constants, reserved_slots
from sglang_diffkv.kernels.triton_tokens import store_numbers
from sglang_diffkv.layout.page_format import PageFormat
from sglang_diffkv.layout.state import PageState

ONE_BY_ONE, SOME = 256, 8
"""So many tokens get a program each; of more, some share one."""
FEW_VECTORS, MANY_VECTORS = 16, 32
"""Vectors of a program that rotates, of up to ``ONE_BY_ONE`` tokens and of more: at least what the tensor cores take,
and few enough for ``mma.sync``, which adds in the same order for both."""


@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["rows", "offset", "position"])
def append_kernel(
    key, value, key_stride, key_head, value_stride, value_head, pages, page_table, row_blocks, own_entry,
    write_slot, rows, offset, position, num_valid, layer,
    KB: tl.constexpr, VB: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr, KMETA: tl.constexpr,
    VALUES: tl.constexpr, VMETA: tl.constexpr, SCORES: tl.constexpr, POSITIONS: tl.constexpr,
    TIERS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr,
    L: tl.constexpr, H: tl.constexpr, R: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(tokens / R), H): ``R`` tokens of one KV head. Strides are in elements. ``EARLY``: decode attention
    may be launched once all programs have begun; it waits for what they write."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0) * R + tl.arange(0, R)
    head = tl.program_id(1)
    page_ptr, slot, keep = reserved_slots(
        token, head, rows, offset, num_valid, write_slot, own_entry, row_blocks, page_table, pages, layer,
        TIERS, TOKENS, PAGE_BYTES, MAX_BLOCKS, L, H,
    )  # fmt: skip
    wide = token.to(tl.int64)
    store_vectors(page_ptr, slot, key + wide * key_stride + head * key_head, keep, D, KB, KEYS, KMETA)
    store_vectors(page_ptr, slot, value + wide * value_stride + head * value_head, keep, DV, VB, VALUES, VMETA)
    at = tl.load(position + token, mask=keep, other=0).to(tl.int32)
    store_numbers(page_ptr, slot, keep, tl.zeros([R], tl.int32), at, SCORES, POSITIONS)


@cache
def _constants(fmt: PageFormat, max_blocks: int, layers: int, heads: int, few: bool) -> Mapping[str, Any]:
    """Compile-time constants and warps of ``append_kernel``."""
    return MappingProxyType(
        {
            **_shared_constants(fmt, max_blocks, layers, heads),
            "R": 1 if few else SOME,
            "num_warps": 1 if few else 4,
        }
    )


@cache
def _turned_constants(
    fmt: PageFormat, max_blocks: int, layers: int, heads: int, few: bool, rotation: Rotation, less_means: bool
) -> Mapping[str, Any]:
    """The same of ``rotated_append_kernel``."""
    block, v_block = block_size(fmt.head_dim), block_size(fmt.v_head_dim)
    return MappingProxyType(
        {
            **_shared_constants(fmt, max_blocks, layers, heads),
            "R": FEW_VECTORS if few else MANY_VECTORS,
            "TURN_KEYS": rotation.keys,
            "TURN_VALUES": rotation.values,
            "B": block,
            "BV": v_block,
            "NORM": block**-0.5,
            "NORM_V": v_block**-0.5,
            "LESS_MEANS": less_means,
            "ASM": not INTERPRETED,
            "num_warps": 4,
        }
    )


def _shared_constants(fmt: PageFormat, max_blocks: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        **layout_constants(fmt.high),
        "TIERS": len(fmt.tiers),
        "D": fmt.head_dim,
        "DV": fmt.v_head_dim,
        "PAGE_BYTES": fmt.page_bytes,
        "MAX_BLOCKS": max_blocks,
        "L": layers,
        "H": heads,
        "EARLY": launches_early(),
    }


def append(
    state: PageState,
    layer: int,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: torch.Tensor,
    offset: torch.Tensor,
    position: torch.Tensor,
    num_valid: torch.Tensor,
    *,
    rotation: Rotation = NO_ROTATION,
    key_means: torch.Tensor | None = None,
    query: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Store one layer's new tokens in the high tier, with score 0, at the slots that ``reserve`` set aside.

    Args:
        key: [tokens, H, head_dim]. value: [tokens, H, v_head_dim]. The last dimension is contiguous.
        rows, offset, position: [tokens] integers: owner, number among its row's new tokens, position.
        num_valid: [1] int32, tokens that are not padding.
        rotation, key_means: as for the reference. query: [tokens, Hq, head_dim], its last dimension contiguous.

    Returns:
        ``query`` as it attends to what is stored: rotated as keys are.
    """
    return prepare_append(
        state, key, value, rows, offset, position, num_valid, rotation=rotation, key_means=key_means, query=query
    )(layer, key, value, key_means, query)  # fmt: skip


class PreparedAppend(Protocol):
    """``append`` of another layer, with tensors of the same form and the same places."""

    def __call__(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, key_means: torch.Tensor | None,
        query: torch.Tensor | None,
    ) -> torch.Tensor | None: ...  # fmt: skip


def prepare_append(
    state: PageState, key: torch.Tensor, value: torch.Tensor, rows: torch.Tensor, offset: torch.Tensor,
    position: torch.Tensor, num_valid: torch.Tensor, *, rotation: Rotation, key_means: torch.Tensor | None,
    query: torch.Tensor | None,
) -> PreparedAppend:  # fmt: skip
    """What layers have in common. Arguments as of ``append``."""
    fmt, count = state.fmt, key.shape[0]
    assert key.shape == (count, state.num_heads, fmt.head_dim) and key.stride(2) == 1
    assert value.shape == (count, state.num_heads, fmt.v_head_dim) and value.stride(2) == 1
    assert rows.shape == offset.shape == position.shape == (count,)
    assert offset.is_contiguous() and position.is_contiguous()
    assert not fmt.high.tier.is_raw or key.dtype == value.dtype == state.dtype
    check_rows(rows, num_valid, state)
    if not count:
        return lambda layer, key, value, key_means, query: query
    places = (rows, offset, position, num_valid)
    if rotation != NO_ROTATION or key_means is not None:
        return _prepare_rotated(state, key, value, places, rotation, key_means, query)
    return _prepare(state, key, value, places)


def _prepare(
    state: PageState, key: torch.Tensor, value: torch.Tensor, places: tuple[torch.Tensor, ...]
) -> PreparedAppend:  # fmt: skip
    count, heads, few = key.shape[0], state.num_heads, key.shape[0] <= ONE_BY_ONE
    launch = Launch(
        append_kernel,
        (-(-count // (1 if few else SOME)), heads),
        (
            None, None, key.stride(0), key.stride(1), value.stride(0), value.stride(1), state.pages, state.page_table,
            state.row_blocks, state.own_entry, state.write_slot, *places, None,
        ),
        _constants(state.fmt, state.row_blocks.shape[1], state.num_layers, heads, few),
    )  # fmt: skip

    def append_again(
        layer: int, key: torch.Tensor, value: torch.Tensor, key_means: torch.Tensor | None, query: torch.Tensor | None
    ) -> torch.Tensor | None:
        launch(key=key, value=value, layer=layer)
        return query

    return append_again


def _prepare_rotated(
    state: PageState,
    key: torch.Tensor,
    value: torch.Tensor,
    places: tuple[torch.Tensor, ...],
    rotation: Rotation,
    key_means: torch.Tensor | None,
    query: torch.Tensor | None,
) -> PreparedAppend:
    fmt, (count, heads, dim) = state.fmt, key.shape
    assert key_means is None or (key_means.shape == (heads, dim) and key_means.is_contiguous())
    assert key_means is None or key_means.dtype == torch.float32
    turns = query is not None and rotation.keys
    asked, vectors = key, 0
    if query is not None and rotation.keys:
        assert (query.shape[0], query.shape[2]) == (count, dim) and query.stride(2) == 1 and query.dtype == key.dtype
        asked, vectors = query, count * query.shape[1]
    few = count <= ONE_BY_ONE
    size = FEW_VECTORS if few else MANY_VECTORS
    tiles = -(-count * heads // size)
    constants = _turned_constants(
        fmt, state.row_blocks.shape[1], state.num_layers, heads, few, rotation, key_means is not None
    )  # fmt: skip
    launch = Launch(
        rotated_append_kernel,
        (2 * tiles - (-vectors // size),),
        (
            None, None, asked.stride(0), asked.stride(1), asked.shape[1], vectors, tiles, None, None, key.stride(0),
            key.stride(1), value.stride(0), value.stride(1), None, state.pages, state.page_table, state.row_blocks,
            state.own_entry, state.write_slot, *places, None,
        ),
        constants,
    )  # fmt: skip

    def append_again(
        layer: int, key: torch.Tensor, value: torch.Tensor, key_means: torch.Tensor | None, query: torch.Tensor | None
    ) -> torch.Tensor | None:
        rotated = query.new_empty(query.shape) if query is not None and turns else query
        asked, target = (query, rotated) if turns else (key, key)
        launch(query=asked, query_out=target, key=key, value=value, means=key_means, layer=layer)
        return rotated

    return append_again
