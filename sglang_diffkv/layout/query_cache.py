"""The newest queries of running requests, for methods that score tokens by them: tensors only, no decisions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_diffkv.layout.page_format import EMPTY


@dataclass
class QueryCache:
    """Of each request that has a query slot, the queries of its newest tokens: that of position ``p`` at ``p % w``."""

    queries: torch.Tensor  # [S, L, w, Hq, D] in the model's dtype, rotated as stored keys are
    slot_of: torch.Tensor  # [R] int32, the query slot of each request row, or -1

    @classmethod
    def create(
        cls,
        *,
        slots: int,
        rows: int,
        layers: int,
        window: int,
        q_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> QueryCache:
        return cls(
            torch.zeros(slots, layers, window, q_heads, head_dim, dtype=dtype, device=device),
            torch.full((rows,), EMPTY, dtype=torch.int32, device=device),
        )

    @property
    def slots(self) -> int:
        return self.queries.shape[0]

    @property
    def window(self) -> int:
        return self.queries.shape[2]
