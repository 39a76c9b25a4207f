"""What the host wants to know of rows between steps: pages they may take, table entries, pages of their own."""

from __future__ import annotations

import torch

from sglang_diffkv.layout.state import PageState

DEMAND, ENTRIES, PRIVATE, FAULT = range(4)
"""First columns. Behind them the most entries of each tier, and a zero for each."""


def columns(tiers: int) -> int:
    """Columns of what is counted."""
    return FAULT + 1 + 2 * tiers


def count_rows(
    state: PageState, rows: torch.Tensor, *, steps: int, low_grows: bool, out: torch.Tensor | None = None,
    used: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Counts of each row, and the ring's counters.

    Row i of the result is of ``rows[i]``. It has the most pages that its next ``steps`` decode steps can take; its
    entries over all layers, heads and tiers; those of them that no segment holds; its fault. Then come the most entries
    that a head has in each tier, and zeros for what ``kernels/measure`` may add. The last row is pages taken, pages
    put, and zeros.

    Args:
        rows: [n] int32 or int64, n may be 0.
        low_grows: whether a step can add a token to one of the lower tiers too (the policy compresses).
        out: [n + 1, 4 + 2 * T] int64 to write to, or None for a new tensor.
        used: [L, H, T] int32, 1 where steps may move tokens of a head to a tier, else 0; None where they may to all.

    Returns:
        [n + 1, 4 + 2 * T] int64.
    """
    assert steps >= 0
    rows = rows.long()
    entries = state.entries[rows].long()  # [n, L, H, T]
    tokens = torch.tensor([x.tokens for x in state.fmt.layouts], device=state.device)  # [T]
    slack = (entries - state.own_entry[rows]) * tokens - state.own_tokens[rows]  # [n, L, H, T]
    slack[..., 0] += state.hole[rows] >= 0
    demand = -(-(steps - slack).clamp(min=0) // tokens)  # [n, L, H, T]
    if used is not None:
        demand *= used
    lower = demand[..., 1:].sum(3).clamp(max=steps)  # a step moves one token of a head
    shape = (rows.shape[0] + 1, columns(len(state.tiers)))
    if out is None:
        out = torch.empty(shape, dtype=torch.int64, device=state.device)
    assert out.shape == shape and out.dtype == torch.int64
    out.zero_()
    counts = out[:-1]  # [n, 4 + 2 * T]
    counts[:, DEMAND] = (demand[..., 0] + lower * low_grows).sum((1, 2))
    counts[:, ENTRIES] = entries.sum((1, 2, 3))
    counts[:, PRIVATE] = (entries - state.kept_entry[rows]).sum((1, 2, 3))
    counts[:, FAULT] = state.fault[rows]
    counts[:, FAULT + 1 : -len(state.tiers)] = entries.amax((1, 2))
    out[-1, :2] = state.counters
    return out
