"""What kernels do to a state's counts of pages and slots, without their contents."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sglang_diffkv.layout.state import PageState
from sglang_diffkv.ops import ReferenceOps
from sglang_diffkv.policies.base import Policy


class CountingOps(ReferenceOps):
    """Draws which tokens go down a tier; the reference's ``count_rows`` reads the counts.

    Args:
        high: share of the tokens behind the policy's window that stay high, by (layer, head); [L, H].
    """

    def __init__(self, state: PageState, policy: Policy, high: np.ndarray, seed: int):
        super().__init__(state, policy)
        self.high, self.window = torch.from_numpy(high), policy.window
        self.random = torch.Generator().manual_seed(seed)

    def _settle(self, rows: torch.Tensor) -> None:
        """As many entries as the slots in use need; the difference comes from the ring or returns to it."""
        state = self.state
        tokens = torch.tensor([x.tokens for x in state.fmt.layouts])
        entries = state.own_entry[rows] + -(-state.own_tokens[rows] // tokens)
        more = entries - state.entries[rows]
        state.counters[0] += int(more.clamp(min=0).sum())
        state.counters[1] += int((-more).clamp(min=0).sum())
        assert state.counters[1] >= state.counters[0], "the ring is empty"
        state.entries[rows] = entries.int()

    def reserve(self, rows: torch.Tensor, new_tokens: torch.Tensor, most: int) -> None:
        state = self.state
        fills = (new_tokens[:, None, None] == 1) & (state.hole[rows] >= 0)
        state.own_tokens[rows, :, :, 0] += torch.where(fills, 0, new_tokens[:, None, None]).int()
        state.hole[rows] = torch.where(fills, -1, state.hole[rows])
        self._settle(rows)

    def compact_prompt(self, row: int, seq_len: int, policy: Policy, tail: int = 0) -> None:
        state = self.state
        assert not tail, "these servers have no prefix cache, for which tails are set apart"
        own = state.own_tokens[row]
        low = ((own.sum(-1) - policy.window).clamp(min=0) * (1 - self.high)).round().int()
        goes = (low - own[:, :, 1]).clamp(min=0)  # those that stayed before stay
        assert state.counters[1] - state.counters[0] >= self.high.numel(), "no spare pages for a compaction"
        state.own_tokens[row, :, :, 0] -= goes
        state.own_tokens[row, :, :, 1] += goes
        state.hole[row] = -1
        self._settle(torch.tensor([row]))

    def decode_step(self, rows: torch.Tensor, *_: Any) -> Any:
        """A new token in every head, and the one that leaves the window goes down or stays."""
        state = self.state
        self.reserve(rows, torch.ones_like(rows), 1)
        drawn = torch.rand(rows.shape[0], *self.high.shape, generator=self.random)
        goes = (drawn >= self.high) & (state.own_tokens[rows, :, :, 0] > self.window) & (state.hole[rows] < 0)
        state.hole[rows] = torch.where(goes, 0, state.hole[rows])
        state.own_tokens[rows, :, :, 1] += goes.int()
        self._settle(rows)

    def release(self, row: int) -> None:
        state = self.state
        state.counters[1] += int(state.entries[row].sum())
        for counts in (state.entries, state.kept_entry, state.own_entry, state.own_tokens):
            counts[row] = 0
        state.hole[row] = -1
