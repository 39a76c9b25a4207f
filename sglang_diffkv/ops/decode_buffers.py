"""Memory of the decode steps on a GPU, which CUDA graphs hold by its addresses."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_diffkv.kernels.compact_step.triton import CompactWorkspace
from sglang_diffkv.kernels.decode_attention.triton import SearchRoom
from sglang_diffkv.kernels.decode_attention.triton_workspace import DecodeConfig, DecodeScratch
from sglang_diffkv.layout.state import PageState
from sglang_diffkv.policies.base import Policy

DENSEST = 4.0
"""Where tokens are pruned, a head may keep this many times what heads keep on average with room for all its logits."""


@dataclass
class DecodeBuffers:
    """What decode steps of up to ``max_batch`` requests write: static addresses, shared by all batch sizes and
    layers, since steps follow one another on one stream."""

    max_batch: int
    scratch: DecodeScratch
    searches: SearchRoom | None  # in the scratch's memory, behind what layers use
    compaction: CompactWorkspace  # but for its spans in the scratch's memory
    positions: torch.Tensor  # [max_batch] int64
    ones: torch.Tensor  # [max_batch] int64
    zeros: torch.Tensor  # [max_batch] int64
    num_valid: torch.Tensor  # [1] int32
    firsts: torch.Tensor  # [slices] int32, the first request of each slice
    valid_of: torch.Tensor  # [slices, 4] int32, ``num_valid`` of each slice in the first column

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

        kept = policy.step_tiers(len(state.fmt.tiers))
        search_bytes = SearchRoom.nbytes(state, max_batch, config) if policy.searches_steps else 0
        scratch = DecodeScratch.create(
            state,
            max_batch,
            q_heads,
            max_tokens=max_tokens if kept else 0,
            densest=DENSEST if kept and policy.scores_low else 0.0,
            least_bytes=least_scratch,
            layer_bytes=CompactWorkspace.nbytes(state, max_batch),
            rest_bytes=search_bytes,
            score_low=kept > 1,
            config=config,
        )
        searches = None
        if policy.searches_steps:
            searches = SearchRoom(scratch.rest[:search_bytes].view(torch.int64), kept > 1, kept > 0, config)
        firsts = torch.arange(0, max_batch, config.requests, dtype=torch.int32, device=state.device)
        return cls(
            max_batch,
            scratch,
            searches,
            CompactWorkspace.create(state, max_batch, scratch.of_layers),
            full(0),
            full(1),
            full(0),
            torch.zeros(1, dtype=torch.int32, device=state.device),
            firsts,
            torch.zeros(len(firsts), 4, dtype=torch.int32, device=state.device),
        )

    def share_out(self, num_valid: torch.Tensor) -> None:
        """Which requests of each slice are none of a step's first ``num_valid`` [1]."""
        torch.clamp(num_valid - self.firsts, min=0, out=self.valid_of[:, 0])
