"""What is asked of a library that computes the attention of a prefill's new tokens."""

from __future__ import annotations

from typing import Protocol

import torch

from sglang_diffkv.ops.base import Scaling, Step


class PrefillLibrary(Protocol):
    """``RaggedPrefill`` (FlashInfer) and ``FlashPrefill`` (FlashAttention-3), whose docstrings say more."""

    lse_unit: float
    """The log-sum-exps that ``run`` gives are base 2 once they are multiplied by this."""

    copy_bytes: int
    """Of each number of keys and values that it may copy while it attends."""

    def serves(self, scaling: Scaling) -> bool:
        """Whether layers of this scaling can attend by it."""

    def plan(self, step: Step) -> None:
        """Before the layers of a pass."""

    def run(
        self, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: Scaling, *, lse: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Causal attention within each request, whose last tokens the queries are, and the log-sum-exp of logits,
        [tokens, Hq] float32 of any strides, times ``lse_unit`` base 2; None without ``lse``."""


def base_2(library: PrefillLibrary, lse: torch.Tensor) -> torch.Tensor:
    """What ``library`` gave, base 2 and contiguous."""
    return (lse if library.lse_unit == 1 else lse * library.lse_unit).contiguous()
