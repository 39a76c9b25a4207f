"""Memory of the decode steps on a GPU, which CUDA graphs hold by its addresses."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_diffkv.kernels.compact_step.triton import CompactWorkspace
from sglang_diffkv.kernels.decode_attention.triton import FoundTokens
from sglang_diffkv.kernels.decode_attention.triton_workspace import DecodeConfig, DecodeScratch
from sglang_diffkv.mem_pool.state import PageState
from sglang_diffkv.policies.base import Policy

DENSEST = 4.0
"""Where tokens are pruned, a head may keep this many times what heads keep on average with room for all its logits."""


@dataclass
class DecodeBuffers:
    """What decode steps of up to ``max_batch`` requests write: static addresses, shared by all batch sizes and
    layers, since steps follow one another on one stream."""

    max_batch: int
    scratch: DecodeScratch
    found: FoundTokens | None
    compaction: CompactWorkspace
    positions: torch.Tensor  # [max_batch] int64
    ones: torch.Tensor  # [max_batch] int64
    zeros: torch.Tensor  # [max_batch] int64
    num_valid: torch.Tensor  # [1] int32

    @classmethod
    def create(
        cls,
        state: PageState,
        max_batch: int,
        q_heads: int,
        max_tokens: int,
        policy: Policy,
        config: DecodeConfig,
        least_scratch: int = 0,
    ) -> DecodeBuffers:
        def full(value: int) -> torch.Tensor:
            return torch.full((max_batch,), value, dtype=torch.int64, device=state.device)

        return cls(
            max_batch,
            DecodeScratch.create(
                state,
                max_batch,
                q_heads,
                max_tokens=max_tokens if policy.scores_steps else 0,
                densest=DENSEST if policy.judges_low else 0.0,
                least_bytes=least_scratch,
                config=config,
            ),
            FoundTokens.create(state, max_batch, config, judge_low=policy.judges_low) if policy.scores_steps else None,
            CompactWorkspace.create(state, max_batch),
            full(0),
            full(1),
            full(0),
            torch.zeros(1, dtype=torch.int32, device=state.device),
        )
