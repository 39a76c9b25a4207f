"""The Triton ops, launched eagerly. DiffKV's policy is fused into them, so other policies are refused."""

from __future__ import annotations

import torch

from sglang_diffkv.compat import UnsupportedError
from sglang_diffkv.kernels.allocate.triton import reserve
from sglang_diffkv.kernels.append.triton import append
from sglang_diffkv.kernels.attach.triton import attach
from sglang_diffkv.kernels.compact_prompt.triton import PromptWorkspace, compact_prompt
from sglang_diffkv.kernels.compact_step.triton import CompactWorkspace, compact_step
from sglang_diffkv.kernels.decode_attention.triton import DecodeWorkspace, FoundTokens, decode_attention
from sglang_diffkv.kernels.extend_attention.triton import extend_attention
from sglang_diffkv.kernels.release.triton import release, trim
from sglang_diffkv.mem_pool.state import PageState
from sglang_diffkv.ops.base import Step
from sglang_diffkv.policies.base import Policy
from sglang_diffkv.policies.diffkv import DiffKVPolicy


class TritonOps:
    """Workspaces are made once for each batch size rounded up to a power of two.

    Args:
        max_tokens: longest sequence, for the scratch that keeps a step's logits.
    """

    def __init__(self, state: PageState, policy: Policy, max_tokens: int):
        if policy.compresses and not isinstance(policy, DiffKVPolicy):
            raise UnsupportedError(f"the Triton kernels carry out DiffKV's policy, not {type(policy).__name__}")
        self.max_tokens = max_tokens if policy.compresses else 0
        self.ticket = torch.zeros(1, dtype=torch.int32, device=state.device)
        self.prompt = PromptWorkspace.create(state)
        self.decoding: dict[tuple[int, int], DecodeWorkspace] = {}
        self.compacting: dict[int, CompactWorkspace] = {}

    def _count(self, like: torch.Tensor) -> torch.Tensor:
        """[1] int32: all entries of ``like`` are valid, there is no padding."""
        return torch.full((1,), like.shape[0], dtype=torch.int32, device=like.device)

    def reserve(self, state: PageState, rows: torch.Tensor, new_tokens: torch.Tensor, most: int) -> None:
        reserve(state, rows, new_tokens, self.ticket, self._count(rows))

    def append(self, state: PageState, layer: int, key: torch.Tensor, value: torch.Tensor, step: Step) -> None:
        append(
            state,
            layer,
            key,
            value,
            step.token_rows,
            step.token_offset,
            step.token_position,
            self._count(step.token_rows),
        )

    def new_found(self, state: PageState, batch: int) -> FoundTokens:
        return FoundTokens.create(state, batch)

    def decode(
        self, state: PageState, layer: int, q: torch.Tensor, step: Step, scale: float, window: int, cap: float
    ) -> torch.Tensor:
        batch = 1 << (q.shape[0] - 1).bit_length()
        workspace = self.decoding.get((batch, q.shape[1]))
        if workspace is None:
            workspace = DecodeWorkspace.create(state, batch, q.shape[1], max_tokens=self.max_tokens)
            self.decoding[batch, q.shape[1]] = workspace
        return decode_attention(
            state,
            layer,
            q.contiguous(),
            step.rows,
            step.seq_lens,
            scale,
            workspace,
            self._count(step.rows),
            found=step.found,
            window=window,
            logit_cap=cap,
        )[0]

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
    ) -> torch.Tensor:
        starts = step.extend_lens.cumsum(0) - step.extend_lens
        return extend_attention(
            state,
            layer,
            q.contiguous(),
            key,
            value,
            step.rows,
            starts,
            step.extend_lens,
            step.prefix_lens,
            step.max_extend,
            step.max_prefix,
            scale,
            update_scores=update_scores,
            logit_cap=cap,
        )[0]

    def compact_step(
        self, state: PageState, rows: torch.Tensor, seq_lens: torch.Tensor, found: FoundTokens, policy: Policy
    ) -> None:
        assert isinstance(policy, DiffKVPolicy)
        workspace = self.compacting.get(rows.shape[0])
        if workspace is None:
            workspace = self.compacting[rows.shape[0]] = CompactWorkspace.create(state, rows.shape[0])
        thresholds = {"alpha_high": policy.alpha_high, "alpha_low": policy.alpha_low}
        compact_step(state, rows, seq_lens, found, workspace, self._count(rows), **thresholds)

    def compact_prompt(self, state: PageState, row: int, seq_len: int, policy: Policy) -> None:
        assert isinstance(policy, DiffKVPolicy)
        settings = {"alpha_high": policy.alpha_high, "alpha_low": policy.alpha_low}
        compact_prompt(state, row, seq_len, self.prompt, window=policy.window, **settings)

    def attach(self, state: PageState, target: int, source: int, lo: int, hi: int, *, kept_only: bool = False) -> None:
        attach(state, target, source, lo, hi, kept_only=kept_only)

    def release(self, state: PageState, row: int) -> None:
        release(state, row)

    def trim(self, state: PageState, row: int, end: int) -> None:
        trim(state, row, end)
