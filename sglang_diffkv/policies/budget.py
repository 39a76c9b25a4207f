"""A number of tokens a KV head keeps, which may follow the length of the sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Budget:
    """A head keeps ``fraction`` of its tokens, but at least ``tokens`` of them."""

    tokens: int = 0
    fraction: float = 0.0

    def kept(self, length: torch.Tensor, window: int) -> torch.Tensor:
        """Tokens that a head keeps of ``length`` (int64, any shape), never fewer than the newest ``window``."""
        share = (length.double() * self.fraction).ceil().long()
        return torch.minimum(length, share.clamp(min=max(self.tokens, window)))
