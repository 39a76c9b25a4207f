"""What the host wants to know of rows between steps: pages they may take, table entries, pages of their own."""

from __future__ import annotations

import torch

from sglang_diffkv.mem_pool.state import PageState

COLUMNS = 6
"""Demand, most entries of tier 0 and of tier 1, entries, private entries, fault."""


def count_rows(
    state: PageState, rows: torch.Tensor, *, steps: int, low_grows: bool, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Counts of each row, and the ring's counters.

    Row i of the result is, for ``rows[i]``: the most pages that its next ``steps`` decode steps can take; the
    most entries that a head has in tier 0 and in tier 1 (0 without one); its entries over all layers, heads and
    tiers; those of them that no segment holds; its fault. The last row is pages taken, pages put, and zeros.

    Args:
        rows: [n] int32 or int64, n may be 0.
        low_grows: whether a step can add a token to the low tier too (the policy compresses).
        out: [n + 1, COLUMNS] int64 to write to, or None for a new tensor.

    Returns:
        [n + 1, COLUMNS] int64.
    """
    assert steps >= 0
    rows = rows.long()
    entries = state.entries[rows].long()  # [n, L, H, T]
    tokens = torch.tensor([x.tokens for x in state.fmt.layouts], device=state.device)  # [T]
    slack = (entries - state.own_entry[rows]) * tokens - state.own_tokens[rows]  # [n, L, H, T]
    slack[..., 0] += state.hole[rows] >= 0
    demand = -(-(steps - slack).clamp(min=0) // tokens)  # [n, L, H, T]
    if not low_grows:
        demand[..., 1:] = 0
    if out is None:
        out = torch.empty(rows.shape[0] + 1, COLUMNS, dtype=torch.int64, device=state.device)
    assert out.shape == (rows.shape[0] + 1, COLUMNS) and out.dtype == torch.int64
    out.zero_()
    counts = out[:-1]  # [n, COLUMNS]
    counts[:, 0] = demand.sum((1, 2, 3))
    counts[:, 1 : 1 + entries.shape[3]] = entries.amax((1, 2))
    counts[:, 3] = entries.sum((1, 2, 3))
    counts[:, 4] = (entries - state.kept_entry[rows]).sum((1, 2, 3))
    counts[:, 5] = state.fault[rows]
    out[-1, :2] = state.counters
    return out
