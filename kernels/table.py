"""Addressing of the bidirectional page table, shared by every reference op."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch

from sglang_diffkv.layout.state import TABLE_BLOCK, PageState, bounds

Numbers = TypeVar("Numbers", torch.Tensor, np.ndarray)


def table_column(state: PageState, tier: int, entry: Numbers) -> Numbers:
    """Columns of entries of ``tier``, see ``PageState``; of the same shape."""
    if tier == 0:
        return entry
    if tier == 1:
        return state.width - 1 - entry
    return state.width // 2 - 1 - entry if tier == 2 else state.width // 2 + entry


def in_line(table: torch.Tensor) -> torch.Tensor:
    """A table of all layers, or of a group of them (``PageState.groups``), as flat indices count its entries."""
    return table.as_strided((1 + sum((n - 1) * step for n, step in zip(table.shape, table.stride())),), (1,))


def table_index(state: PageState, rows: torch.Tensor, tier: int, entry: torch.Tensor) -> torch.Tensor:
    """Flat index into ``page_table``/``range_lo``/``range_hi`` of table entries.

    Args:
        rows: [B] int64.
        entry: [B, L, H, E] int64, entry numbers of ``tier``; they must lie inside the row's blocks.

    Returns:
        [B, L, H, E] int64.
    """
    column = table_column(state, tier, entry)
    block = state.row_blocks[rows].long()  # [B, max_blocks]
    batch = torch.arange(rows.shape[0], device=rows.device).view(-1, 1, 1, 1)
    block = block[batch, column // TABLE_BLOCK]  # [B, L, H, E]
    layer = torch.arange(entry.shape[1], device=rows.device).view(1, -1, 1, 1)
    head = torch.arange(entry.shape[2], device=rows.device).view(1, 1, -1, 1)
    return ((block * state.row_layers + layer) * state.num_heads + head) * TABLE_BLOCK + column % TABLE_BLOCK


def head_index(state: PageState, row: torch.Tensor | int, head: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """Flat index, [n] int64, as :func:`table_index`, of ``column`` [n] of heads [n], which count over layers, and of a
    row, or rows [n]."""
    block = state.row_blocks[row, column // TABLE_BLOCK].long()
    return (block * (state.num_layers * state.num_heads) + head) * TABLE_BLOCK + column % TABLE_BLOCK


def layer_table(
    state: PageState, rows: torch.Tensor, tier: int, layer: int, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pages and position ranges of the first ``width`` entries of one layer.

    Entries past a head's count have page 0 and the empty range [0, 0), so every slot of them is masked.

    Returns:
        page [B, H, E] int64, lo [B, H, E] int32, hi [B, H, E] int32.
    """
    entry = torch.arange(width, device=rows.device)
    column = table_column(state, tier, entry)
    block = state.row_blocks[rows].long()[:, column // TABLE_BLOCK]  # [B, E]
    used = entry < state.entries[rows, layer, :, tier].unsqueeze(2)  # [B, H, E]
    flat = (block * state.num_layers + layer).unsqueeze(1) * state.num_heads  # [B, 1, E]
    flat = (flat + torch.arange(state.num_heads, device=rows.device).view(1, -1, 1)) * TABLE_BLOCK
    flat = flat + column % TABLE_BLOCK
    page = torch.where(used, state.page_table.view(-1)[flat], 0).long()
    lo = torch.where(used, bounds(state.range_lo.view(-1)[flat]), 0)
    hi = torch.where(used, bounds(state.range_hi.view(-1)[flat]), 0)
    return page, lo, hi


def row_table(
    state: PageState, rows: torch.Tensor, tier: int, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As :func:`layer_table` for all layers: page, lo, hi, each [B, L, H, E]."""
    shape = (rows.shape[0], state.num_layers, state.num_heads, width)
    entry = torch.arange(width, device=rows.device).expand(shape)
    used = entry < state.entries[rows, :, :, tier].unsqueeze(3)
    flat = table_index(state, rows, tier, entry)
    page = torch.where(used, in_line(state.page_table)[flat], 0).long()
    lo = torch.where(used, bounds(in_line(state.range_lo)[flat]), 0)
    hi = torch.where(used, bounds(in_line(state.range_hi)[flat]), 0)
    return page, lo, hi


def put_entries(state: PageState, where: torch.Tensor, page: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor) -> None:
    """Write table entries.

    Args:
        where: [n] int64, of :func:`table_index`. page, lo, hi: [n] integers, pages and position ranges.
    """
    in_line(state.page_table)[where] = page.int()
    in_line(state.range_lo)[where] = lo.to(state.range_lo.dtype)
    in_line(state.range_hi)[where] = hi.to(state.range_hi.dtype)


def max_entries(state: PageState, rows: torch.Tensor, tier: int, layer: int | None = None) -> int:
    """Most entries that any head of ``rows`` uses. Reads the device: for CPU references only."""
    counts = state.entries[rows, ..., tier] if layer is None else state.entries[rows, layer, :, tier]
    return int(counts.max()) if counts.numel() else 0


def own_slot_location(
    state: PageState, rows: torch.Tensor, tier: int, slot: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Page and slot in the page of own slots.

    Args:
        slot: [B, L, H, S] int64, own slot numbers of ``tier``, each backed by an own page.

    Returns:
        page [B, L, H, S] int64, slot in page [B, L, H, S] int64.
    """
    tokens = state.fmt.layouts[tier].tokens
    entry = state.own_entry[rows, :, :, tier].long().unsqueeze(3) + slot // tokens
    page = in_line(state.page_table)[table_index(state, rows, tier, entry)].long()
    return page, slot % tokens
