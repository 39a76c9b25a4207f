"""Decode attention on the GPU: same results as ``reference.py``, fixed shapes, no host synchronisation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton

from sglang_diffkv.kernels.decode_attention.cuda import prepare_split
from sglang_diffkv.kernels.decode_attention.reference import StepScores
from sglang_diffkv.kernels.decode_attention.triton_finish import finish_kernel
from sglang_diffkv.kernels.decode_attention.triton_split import split_kernel
from sglang_diffkv.kernels.decode_attention.triton_workspace import (
    MAX_SCORE_PARTS,
    DecodeConfig,
    DecodeWorkspace,
    result_slots,
    score_programs,
    tile_constants,
)
from sglang_diffkv.kernels.device import launches_early
from sglang_diffkv.kernels.launch import Launch
from sglang_diffkv.kernels.triton_table import INTERPRETED, check_rows, check_windows, format_constants
from sglang_diffkv.layout.state import NO_LIMIT, PageState

NOTHING = 2**63 - 1
JOINED_BY_WARP = 2048
"""Numbers of partial results that a warp of the second pass holds while it joins them."""
MOST_AT_ONCE = 128
"""Partial results joined in an iteration at most."""
FEW_AT_ONCE = 16
"""The same of normalisers in a large batch, where a head has few."""


@dataclass
class FoundTokens:
    """Searches of a decode step, a packed (score bits, own slot) for each program that shared a head: what
    ``StepScores`` is to the reference. Index 0 of the fourth axis is the candidate, 1 + t the least significant token
    of tier t."""

    packed: torch.Tensor  # [B, L, H, T + 1, most parts] int64
    score_low: bool = True
    scored: bool = True

    @classmethod
    def create(
        cls,
        state: PageState,
        batch: int,
        config: DecodeConfig | None = None,
        *,
        score_low: bool = True,
        scored: bool = True,
    ) -> FoundTokens:
        shape = (
            batch,
            state.num_layers,
            state.num_heads,
            len(state.fmt.tiers) + 1,
            (config or DecodeConfig()).score_parts or MAX_SCORE_PARTS,
        )
        return cls(torch.full(shape, NOTHING, dtype=torch.int64, device=state.device), score_low and scored, scored)

    def unpack(self) -> StepScores:
        best = self.packed.amin(4)  # [B, L, H, T + 1]
        slot = torch.where(best == NOTHING, -1, best & 0xFFFFFFFF)
        score = (best >> 32).int().view(torch.float32)
        score = torch.where(best == NOTHING, float("inf"), score)
        return StepScores(slot[..., 0], score[..., 0], slot[..., 1:], score[..., 1:], self.score_low, self.scored)

    def of_requests(self, which: slice) -> FoundTokens:
        return FoundTokens(self.packed[which], self.score_low, self.scored)


@dataclass
class SearchRoom:
    """Memory for the searches of steps that follow one another: the more requests a step has, the fewer programs share
    a head of each."""

    memory: torch.Tensor  # int64
    score_low: bool
    scored: bool
    config: DecodeConfig

    @staticmethod
    def nbytes(state: PageState, max_batch: int, config: DecodeConfig) -> int:
        """For steps of up to ``max_batch`` requests."""
        most = max(batch * score_programs(state, batch, config)[0] for batch in range(1, max_batch + 1))
        return 8 * most * state.num_layers * state.num_heads * (len(state.fmt.tiers) + 1)

    def found(self, state: PageState, batch: int) -> FoundTokens:
        """For a step of ``batch`` requests."""
        parts = score_programs(state, batch, self.config)[0]
        shape = (batch, state.num_layers, state.num_heads, len(state.fmt.tiers) + 1, parts)
        return FoundTokens(self.memory[: math.prod(shape)].view(shape), self.score_low, self.scored)


def join_plan(
    state: PageState, batch: int, group: int, config: DecodeConfig, *, searched: bool
) -> tuple[int, dict[str, int]]:
    """Programs that share a head's scores in the second pass at most, and its constants that follow the batch's size.

    ``searched``: whether tokens are searched for."""
    parts, joiners = score_programs(state, batch, config)
    if not searched:
        parts, joiners = 0, max(joiners, 1)
    slice_of_head = triton.next_power_of_2(group) * triton.next_power_of_2(state.fmt.v_head_dim) // max(joiners, 1)
    at_once = max(1, min(MOST_AT_ONCE, config.score_warps * JOINED_BY_WARP // slice_of_head))
    return parts, {"AT_ONCE": at_once, "LSE_AT_ONCE": MOST_AT_ONCE if joiners > 1 else FEW_AT_ONCE, "JOINERS": joiners}


def batches_of_each_variant(
    state: PageState, most: int, group: int, config: DecodeConfig, *, searched: bool
) -> list[int]:
    """Sizes of batches up to ``most`` that between them need every kernel that any of them needs."""
    first: dict[tuple[int, ...], int] = {}
    for batch in range(1, most + 1):
        _, joining = join_plan(state, batch, group, config, searched=searched)
        first.setdefault(tuple(joining.values()), batch)
    return list(first.values())


def decode_attention(
    state: PageState,
    layer: int,
    q: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    workspace: DecodeWorkspace,
    num_valid: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    found: FoundTokens | None = None,
    window: int = 0,
    sinks: int = 0,
    horizon: int = 0,
    every: int = 1,
    logit_cap: float = 0.0,
    reduce: str = "max",
    attention_span: int = 0,
    sink_logits: torch.Tensor | None = None,
    row_windows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from each request's newest token (already appended, at position ``seq_lens - 1``).

    Args:
        q: [B, Hq, head_dim], contiguous. rows, seq_lens: [B] integers.
        workspace: for at least B requests; ``workspace.plan`` was called for this step.
        num_valid: [1] int32, requests that are not padding; the others get zeros.
        out: [B, Hq, v_head_dim] in q's dtype. lse: [B, Hq] float32.
        found: where given, own tokens' scores are updated and the searches are filled in, as far as it says, by as many
            programs a head as it has room for, at most.
        window, sinks: newest and first tokens that the searches pass over. horizon, every, reduce, attention_span: as
            for the reference.
        sink_logits: [Hq] of any float type, contiguous. row_windows: as for the reference.

    Returns:
        ``out`` and ``lse`` (natural logarithm).
    """
    if out is None:
        out = torch.empty(*q.shape[:2], state.fmt.v_head_dim, dtype=q.dtype, device=q.device)
    if lse is None:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    assert out.is_contiguous() and lse.is_contiguous()
    split, finish = prepare_decode(
        state, q, rows, seq_lens, sm_scale, workspace, num_valid, found=found, window=window, sinks=sinks,
        horizon=horizon, every=every, logit_cap=logit_cap, reduce=reduce, attention_span=attention_span,
        sink_logits=sink_logits, row_windows=row_windows,
    )  # fmt: skip
    split(q=q, layer=layer)
    finish(out=out, lse_out=lse, layer=layer, sink_logits=sink_logits)
    return out, lse


class PreparedDecode(NamedTuple):
    """The two passes of ``decode_attention``, to be launched in this order in each layer of a step, with tensors of the
    same form."""

    split: Callable[..., None]
    """Of a layer's ``q`` and its ``layer``."""
    finish: Launch
    """Of its contiguous ``out`` and ``lse_out``, its ``sink_logits``, or None, and its ``layer``."""


def prepare_decode(
    state: PageState, q: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, sm_scale: float,
    workspace: DecodeWorkspace, num_valid: torch.Tensor, *, found: FoundTokens | None, window: int, sinks: int,
    horizon: int, every: int, logit_cap: float, reduce: str, attention_span: int, sink_logits: torch.Tensor | None,
    row_windows: torch.Tensor | None = None,
) -> PreparedDecode:  # fmt: skip
    """What the layers of a step have in common. Arguments as of ``decode_attention``; ``q`` and ``sink_logits`` for
    their form."""
    fmt = state.fmt
    batch, q_heads, dim = q.shape
    heads = state.num_heads
    assert q.is_contiguous() and dim == fmt.head_dim and q_heads % heads == 0
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert not fmt.high.tier.is_raw or q.dtype == state.dtype, "the raw tier holds the dtype of q"
    assert seq_lens.shape == rows.shape == (batch,) and workspace.partial_lse.shape[1] * heads == q_heads
    assert workspace.partial_lse.shape[0] >= result_slots(state, batch, workspace.programs, workspace.config)
    assert workspace.planned == batch, "plan comes first"
    assert every >= 1 and (not attention_span or found is None), (
        "nothing is searched for where tokens are out of its span"
    )
    assert sink_logits is None or (sink_logits.shape == (q_heads,) and sink_logits.is_contiguous())
    check_rows(rows, num_valid, state)
    check_windows(row_windows, state)
    config, group = workspace.config, q_heads // heads
    parts, joining = join_plan(state, batch, group, config, searched=found is not None)
    max_parts = 1
    if found is not None:
        assert workspace.room > 0 or not found.scored, "scores are wanted: create the workspace with max_tokens"
        wanted = (len(fmt.tiers) if found.score_low else 1) if found.scored else 0
        assert fmt.scored >= wanted, "steps update no scores of a tier that has none"
        max_parts = found.packed.shape[4]
        parts = min(parts, max_parts)
        assert found.packed.shape[0] >= batch and found.packed.is_contiguous()
    scored = found is not None and found.scored
    score_low = scored and found is not None and found.score_low
    constants = {**format_constants(fmt), **tile_constants(fmt, config)}
    shape = {"MAX_BLOCKS": state.row_blocks.shape[1], "L": state.num_layers, "H": heads, "G": group}
    shape["ROOM_FOR"] = workspace.offsets.shape[2]
    early = launches_early()
    overlap = {"launch_pdl": True} if early else {}
    limit = {"maxnreg": config.registers} if config.registers and dim <= 128 and not INTERPRETED else {}
    split: Callable[..., None]
    if config.cuda:
        split = prepare_split(
            state, q, rows, seq_lens, sm_scale, workspace, constants,
            logit_cap=logit_cap, attention_span=attention_span, every=every, scored=scored, score_low=score_low,
            early=early,
        )  # fmt: skip
    else:
        split = Launch(
            split_kernel,
            (workspace.programs,),
            (
                None, workspace.partial_out, workspace.partial_lse, workspace.logits, workspace.tile_max,
                workspace.offsets, workspace.begun, workspace.ranges, state.pages, state.page_table, state.range_lo,
                state.range_hi, state.row_blocks, state.entries, state.own_entry, rows, None, sm_scale, logit_cap,
                workspace.room, seq_lens, attention_span, every,
            ),
            dict(
                **constants, **shape, GP=max(8, triton.next_power_of_2(group)), PROGRAMS=workspace.programs,
                AHEAD=config.ahead, HAS_CAP=logit_cap > 0, KEEP=scored, KEEP_LOW=score_low, ASM=not INTERPRETED,
                EARLY=early, SLIDES=attention_span > 0, num_warps=config.warps, num_stages=config.stages, **limit,
                **overlap,
            ),
        )  # fmt: skip
    kept = {k: v for k, v in constants.items() if k in finish_kernel.arg_names}
    finish = Launch(
        finish_kernel,
        (batch * heads, joining["JOINERS"] + parts),
        (
            None, None, found.packed if found is not None else workspace.partial_lse, max_parts,
            workspace.partial_out, workspace.partial_lse, workspace.logits, workspace.tile_max, workspace.offsets,
            workspace.parts_of, workspace.starts, workspace.ranges, state.pages, state.page_table, state.row_blocks,
            state.entries, state.own_entry, rows, seq_lens, num_valid, None, window, sinks, horizon or NO_LIMIT,
            every, state.scratch_page, workspace.room, None, row_windows,
        ),
        dict(
            **kept, **shape, **joining, UNITS=workspace.starts.shape[1],
            SIZE=config.score_tokens, SCORED=scored, SCORE_LOW=score_low, EARLY=early, MEAN=reduce == "mean",
            HAS_SINK=sink_logits is not None, MERGED=config.cuda, num_warps=config.score_warps, **overlap,
        ),
    )  # fmt: skip
    return PreparedDecode(split, finish)
