"""What the page manager and the attention backend ask of a set of kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sglang_diffkv.mem_pool.state import PageState
from sglang_diffkv.policies.base import Policy


@dataclass
class Step:
    """One forward pass: ``B`` requests with ``extend_lens`` new tokens after ``prefix_lens`` stored ones.

    Tensors are on the state's device. ``found`` holds what decode attention finds for the policy, in the ops' own
    form; None where nothing is asked.
    """

    rows: torch.Tensor  # [B] int64
    prefix_lens: torch.Tensor  # [B] int64
    extend_lens: torch.Tensor  # [B] int64
    token_rows: torch.Tensor  # [tokens] int64
    token_offset: torch.Tensor  # [tokens] int64
    token_position: torch.Tensor  # [tokens] int64
    max_extend: int
    max_prefix: int
    found: Any = None

    @property
    def seq_lens(self) -> torch.Tensor:
        """[B] int64, new tokens included."""
        return self.prefix_lens + self.extend_lens

    @classmethod
    def build(cls, rows: list[int], prefixes: list[int], counts: list[int], device: torch.device) -> Step:
        row, prefix, count = (torch.tensor(x, dtype=torch.int64, device=device) for x in (rows, prefixes, counts))
        offset = torch.cat([torch.arange(n, device=device) for n in counts])
        return cls(
            row,
            prefix,
            count,
            row.repeat_interleave(count),
            offset,
            prefix.repeat_interleave(count) + offset,
            max(counts),
            max(prefixes),
        )


class Ops(Protocol):
    """Kernels over a ``PageState``. The references in ``kernels/<op>/reference.py`` are their specification."""

    def reserve(self, state: PageState, rows: torch.Tensor, new_tokens: torch.Tensor, most: int) -> None: ...

    def append(self, state: PageState, layer: int, key: torch.Tensor, value: torch.Tensor, step: Step) -> None: ...

    def new_found(self, state: PageState, batch: int) -> Any: ...

    def decode(
        self, state: PageState, layer: int, q: torch.Tensor, step: Step, scale: float, window: int, cap: float
    ) -> torch.Tensor: ...

    def extend(
        self,
        state: PageState,
        layer: int,
        q: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        step: Step,
        scale: float,
        cap: float,
        update_scores: bool,
    ) -> torch.Tensor: ...

    def compact_step(
        self, state: PageState, rows: torch.Tensor, seq_lens: torch.Tensor, found: Any, policy: Policy
    ) -> None: ...

    def compact_prompt(self, state: PageState, row: int, seq_len: int, policy: Policy) -> None: ...

    def attach(
        self, state: PageState, target: int, source: int, lo: int, hi: int, *, kept_only: bool = False
    ) -> None: ...

    def release(self, state: PageState, row: int) -> None: ...

    def trim(self, state: PageState, row: int, end: int) -> None: ...
