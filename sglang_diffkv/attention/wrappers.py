"""Plan/run wrappers over the GPU kernels, usable without SGLang.

As in FlashInfer, ``plan`` takes what a step knows once and ``run`` is called once a layer. Both wrappers work on
a :class:`PageState`; the caller keeps a :class:`TableSpace` for it and calls ``space.append(row, tokens)`` for each
row and ``space.flush()`` before a step, so that every table entry has its block.
"""

from __future__ import annotations

import torch

from sglang_diffkv.kernels.allocate.triton import reserve
from sglang_diffkv.kernels.append.triton import append
from sglang_diffkv.kernels.compact_prompt.triton import PromptWorkspace, compact_prompt
from sglang_diffkv.kernels.compact_step.triton import CompactWorkspace, compact_step
from sglang_diffkv.kernels.decode_attention.triton import FoundTokens, decode_attention
from sglang_diffkv.kernels.decode_attention.triton_workspace import DecodeConfig, DecodeWorkspace
from sglang_diffkv.kernels.extend_attention.triton import extend_attention
from sglang_diffkv.mem_pool.state import PageState
from sglang_diffkv.ops.decisions import Decisions
from sglang_diffkv.ops.triton import WHOLE_HEADS
from sglang_diffkv.policies.base import Policy


class DecodeWrapper:
    """Decode steps of up to ``max_batch`` requests.

    ``plan`` copies a step's rows and lengths into static buffers. ``begin_step``, ``run`` for each layer and
    ``end_step`` launch kernels only, on static addresses: a CUDA graph can hold them, and replays after each new
    plan. Requests past those of the plan are padding, and get zeros.
    """

    def __init__(
        self,
        state: PageState,
        q_heads: int,
        max_batch: int,
        *,
        sm_scale: float,
        policy: Policy | None = None,
        max_tokens: int = 0,
        logit_cap: float = 0.0,
        splits: int = 0,
        config: DecodeConfig | None = None,
    ):
        """``policy`` None keeps every token; else ``max_tokens`` is the longest sequence."""
        assert policy is None or max_tokens > 0, "a policy needs max_tokens"
        self.state, self.policy = state, policy
        self.sm_scale, self.logit_cap = sm_scale, logit_cap
        kept = max_tokens if policy else 0
        self.workspace = DecodeWorkspace.create(
            state, max_batch, q_heads, splits=splits, max_tokens=kept, config=config
        )
        self.found = None
        if policy is not None:
            settings = self.workspace.config
            self.found = FoundTokens.create(state, max_batch, settings, judge_low=policy.judges_low)
        self.compaction = CompactWorkspace.create(state, max_batch)
        self.rule = None if policy is None else Decisions(WHOLE_HEADS).step(state, policy)
        device = state.device
        self.rows = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self.seq_lens = torch.ones(max_batch, dtype=torch.int64, device=device)
        self.positions = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self.num_valid = torch.zeros(1, dtype=torch.int32, device=device)
        self._one = torch.ones(max_batch, dtype=torch.int64, device=device)
        self._zero = torch.zeros(max_batch, dtype=torch.int64, device=device)
        shape = (max_batch, q_heads, state.fmt.v_head_dim)
        self.lse = torch.empty(shape[:2], dtype=torch.float32, device=device)
        self.out = torch.empty(shape, dtype=state.dtype, device=device)

    def plan(self, rows: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """rows, seq_lens: [n] integers on any device, n at most ``max_batch``; the new token is counted."""
        count = rows.shape[0]
        self.rows.zero_()
        self.rows[:count].copy_(rows, non_blocking=True)
        self.seq_lens[:count].copy_(seq_lens, non_blocking=True)
        torch.sub(self.seq_lens, 1, out=self.positions)
        self.num_valid.fill_(count)

    def begin_step(self) -> None:
        """Slots and pages for the new tokens of all layers."""
        reserve(self.state, self.rows, self._one, self.compaction.ticket, self.num_valid)
        if self.found is not None:
            self.workspace.plan(self.state, self.rows, self.num_valid, judge_low=self.found.judge_low)

    def run(self, layer: int, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Store one layer's new tokens and attend from them.

        Args:
            q: [B, Hq, head_dim] in the state's dtype. key: [B, H, head_dim]. value: [B, H, v_head_dim]; B is at
                most ``max_batch``.

        Returns:
            [B, Hq, v_head_dim], a buffer that the next call overwrites.
        """
        batch = q.shape[0]
        rows = self.rows[:batch]
        append(self.state, layer, key, value, rows, self._zero[:batch], self.positions[:batch], self.num_valid)
        out, _ = decode_attention(
            self.state,
            layer,
            q,
            rows,
            self.seq_lens[:batch],
            self.sm_scale,
            self.workspace,
            self.num_valid,
            out=self.out[:batch],
            lse=self.lse[:batch],
            found=self.found,
            window=self.policy.window if self.policy else 0,
            sinks=self.policy.sinks if self.policy else 0,
            horizon=self.policy.horizon if self.policy else 0,
            logit_cap=self.logit_cap,
            reduce=self.policy.observation.reduce if self.policy else "max",
        )
        return out

    def end_step(self) -> None:
        """Compaction of all layers, where there is a policy."""
        if self.rule is not None and self.found is not None:
            compact_step(self.state, self.rows, self.seq_lens, self.found, self.compaction, self.num_valid, self.rule)


class ExtendWrapper:
    """Prompts, whole or in chunks. Not for graph capture: shapes follow the plan."""

    def __init__(self, state: PageState, *, sm_scale: float, policy: Policy | None = None, logit_cap: float = 0.0):
        self.state, self.policy = state, policy
        self.sm_scale, self.logit_cap = sm_scale, logit_cap
        self.workspace = PromptWorkspace.create(state)
        self.decisions = Decisions(WHOLE_HEADS)

    def plan(
        self,
        rows: list[int],
        extend_lens: list[int],
        prefix_lens: list[int],
        observe_from: list[int] | None = None,
    ) -> None:
        """New tokens of each row and the tokens before them; takes slots and pages for all layers. ``observe_from``:
        for a policy that observes the end of a prompt only, the first position of each that observes."""
        device = self.state.device
        self.max_extend, self.max_prefix = max(extend_lens), max(prefix_lens)
        self.rows = torch.tensor(rows, device=device)
        self.extend_lens = torch.tensor(extend_lens, device=device)
        self.prefix_lens = torch.tensor(prefix_lens, device=device)
        self.starts = self.extend_lens.cumsum(0) - self.extend_lens
        self.observe_from = None if observe_from is None else torch.tensor(observe_from, device=device)
        count = sum(extend_lens)
        owner = torch.repeat_interleave(self.extend_lens, output_size=count)
        self.owners = self.rows[owner]
        self.offsets = torch.arange(count, device=device) - self.starts[owner]
        self.positions = self.offsets + self.prefix_lens[owner]
        self.num_tokens = torch.tensor([count], dtype=torch.int32, device=device)
        batch = torch.tensor([len(rows)], dtype=torch.int32, device=device)
        reserve(self.state, self.rows, self.extend_lens, self.workspace.ticket, batch)

    def run(self, layer: int, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Store one layer's new tokens and attend from them; all [tokens, heads, dim], requests in the plan's order.

        Returns:
            [tokens, Hq, v_head_dim] in q's dtype.
        """
        append(self.state, layer, key, value, self.owners, self.offsets, self.positions, self.num_tokens)
        out, _ = extend_attention(
            self.state,
            layer,
            q,
            key,
            value,
            self.rows,
            self.starts,
            self.extend_lens,
            self.prefix_lens,
            self.max_extend,
            self.max_prefix,
            self.sm_scale,
            update_scores=self.policy is not None,
            logit_cap=self.logit_cap,
            observe_from=self.observe_from,
            reduce=self.policy.observation.reduce if self.policy else "max",
        )
        return out

    def end_prompt(self, row: int, seq_len: int) -> None:
        """Sort a row's prompt of ``seq_len`` tokens into tiers, where there is a policy."""
        if self.policy is not None and seq_len > self.policy.window:
            cuts = self.decisions.of_row(self.state, row, seq_len, self.policy)
            if cuts is not None:
                compact_prompt(self.state, row, seq_len, self.workspace, cuts)
