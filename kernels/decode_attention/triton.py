"""Decode attention on the GPU: same results as ``reference.py``, fixed shapes, no host synchronisation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton

from sglang_diffkv.kernels.decode_attention.reference import StepScores
from sglang_diffkv.kernels.decode_attention.triton_finish import finish_kernel
from sglang_diffkv.kernels.decode_attention.triton_split import split_kernel
from sglang_diffkv.kernels.triton_table import INTERPRETED, check_rows, format_constants
from sglang_diffkv.mem_pool.page_format import PageFormat, TierLayout
from sglang_diffkv.mem_pool.state import PageState

NOTHING = 2**63 - 1


@dataclass(frozen=True)
class DecodeConfig:
    """How the first pass is cut: at most ``tile`` tokens an iteration, ``stages`` asynchronous copies in flight,
    at most ``registers`` of a thread up to head_dim 128 (0: the compiler's choice); the score pass gives a head
    ``score_parts`` programs of ``score_tokens`` tokens an iteration."""

    tile: int = 64
    warps: int = 1
    stages: int = 2
    registers: int = 168
    score_parts: int = 4
    score_tokens: int = 256


def tile_tokens(layout: TierLayout, limit: int) -> int:
    """Slots of a tile, a power of two up to ``limit``: few tiles a page and few slots past its end.

    A tile's fixed work is worth about 16 slots.
    """
    sizes = [n for n in (16, 32, 64, 128) if n <= max(limit, 16)]
    return min(sizes, key=lambda n: (-(-layout.tokens // n) * (n + 16), -n))


def tile_constants(fmt: PageFormat, config: DecodeConfig) -> dict[str, int]:
    """Tokens and bytes of a tile of each tier."""
    sizes = [tile_tokens(layout, config.tile) for layout in (fmt.high, fmt.low)]
    cost = [
        n * x.tier.token_bytes(fmt.head_dim, fmt.v_head_dim) // 16
        for n, x in zip(sizes, (fmt.high, fmt.low), strict=True)
    ]
    return {"N_H": sizes[0], "N_L": sizes[1], "WEIGHT_H": cost[0], "WEIGHT_L": cost[1]}


def default_splits(state: PageState, batch: int) -> int:
    """Splits of a head's pages that fill the GPU once for a batch of this size."""
    processors = 8
    if state.device.type == "cuda":
        processors = torch.cuda.get_device_properties(state.device).multi_processor_count
    resident = 12 if state.fmt.head_dim <= 128 else 8  # one-warp programs that a processor's registers hold
    return max(1, min(64, processors * resident // (batch * state.num_heads)))


@dataclass
class FoundTokens:
    """Searches of a decode step, a packed (score bits, own slot) for each split: what ``StepScores`` is to the
    reference. Index 0 of the fourth axis is the candidate, 1 + t the least significant token of tier t."""

    packed: torch.Tensor  # [B, L, H, T + 1, score parts] int64
    judge_low: bool = True

    @classmethod
    def create(
        cls, state: PageState, batch: int, config: DecodeConfig | None = None, *, judge_low: bool = True
    ) -> FoundTokens:
        shape = (
            batch,
            state.num_layers,
            state.num_heads,
            len(state.fmt.tiers) + 1,
            (config or DecodeConfig()).score_parts,
        )
        return cls(torch.full(shape, NOTHING, dtype=torch.int64, device=state.device), judge_low)

    def unpack(self) -> StepScores:
        best = self.packed.amin(4)  # [B, L, H, T + 1]
        slot = torch.where(best == NOTHING, -1, best & 0xFFFFFFFF)
        score = (best >> 32).int().view(torch.float32)
        score = torch.where(best == NOTHING, float("inf"), score)
        return StepScores(slot[..., 0], score[..., 0], slot[..., 1:], score[..., 1:], self.judge_low)


@dataclass
class DecodeWorkspace:
    """Scratch of decode attention, shared by all layers; static addresses for graph capture.

    ``logits`` and ``tile_max`` are empty unless scores are kept. A head's slots past the first ``room`` are
    attended to, but keep their old score.
    """

    config: DecodeConfig
    splits: int
    room: int
    partial_out: torch.Tensor  # [B, H, slots, G, v_head_dim] float32
    partial_lse: torch.Tensor  # [B, H, slots, G] float32, base 2
    logits: torch.Tensor  # [B, H, room, G] fp16, base 2, relative to tile_max
    tile_max: torch.Tensor  # [B, H, room / 16, G] float32

    @classmethod
    def create(
        cls,
        state: PageState,
        batch: int,
        q_heads: int,
        *,
        splits: int = 0,
        max_tokens: int = 0,
        config: DecodeConfig | None = None,
    ) -> DecodeWorkspace:
        """``max_tokens`` is the longest sequence whose scores are kept; 0 if none are. ``splits`` 0 chooses."""
        scratch = DecodeScratch.create(state, batch, q_heads, splits=splits, max_tokens=max_tokens, config=config)
        return scratch.workspace(state, batch)


@dataclass
class DecodeScratch:
    """Memory from which workspaces for all batch sizes are cut, for steps that follow one another: a smaller batch
    gets more splits in the same memory."""

    config: DecodeConfig
    splits: int  # of every batch size; 0: as many as fill the GPU
    slots: int  # of one head, all requests together
    room: int
    group: int
    partial_out: torch.Tensor  # [slots * H * G * v_head_dim] float32
    partial_lse: torch.Tensor  # [slots * H * G] float32
    logits: torch.Tensor  # [max batch, H, room, G] fp16
    tile_max: torch.Tensor  # [max batch, H, room / 16, G] float32

    @classmethod
    def create(
        cls,
        state: PageState,
        max_batch: int,
        q_heads: int,
        *,
        splits: int = 0,
        max_tokens: int = 0,
        config: DecodeConfig | None = None,
    ) -> DecodeScratch:
        """``max_tokens`` is the longest sequence whose scores are kept; 0 if none are."""
        config = config or DecodeConfig()
        fmt, heads = state.fmt, state.num_heads
        group = q_heads // heads
        extra = len(fmt.tiers) - 1
        slots = max(b * ((splits or default_splits(state, b)) + extra) for b in range(1, max_batch + 1))
        # Pages of segments and the ends of both tiers may be part-filled: half as many slots again as tokens.
        tile = tile_constants(fmt, config)
        waste = max(-(-x.tokens // n) * n / x.tokens for x, n in ((fmt.high, tile["N_H"]), (fmt.low, tile["N_L"])))
        room = (int(max_tokens * waste * 1.5) // 128 + 4) * 128 if max_tokens else 0

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=state.device)

        return cls(
            config,
            splits,
            slots,
            room,
            group,
            empty(slots * heads * group * fmt.v_head_dim),
            empty(slots * heads * group),
            empty(max_batch, heads, room, group, dtype=torch.float16),
            empty(max_batch, heads, room // 16, group),
        )

    def workspace(self, state: PageState, batch: int) -> DecodeWorkspace:
        """The scratch of a step of ``batch`` requests, at most the scratch's."""
        assert batch <= self.logits.shape[0]
        splits = self.splits or default_splits(state, batch)
        shape = (batch, state.num_heads, splits + len(state.fmt.tiers) - 1, self.group)
        size, dim = math.prod(shape), state.fmt.v_head_dim
        return DecodeWorkspace(
            self.config,
            splits,
            self.room,
            self.partial_out[: size * dim].view(*shape, dim),
            self.partial_lse[:size].view(shape),
            self.logits[:batch],
            self.tile_max[:batch],
        )


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
    logit_cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from each request's newest token (already appended, at position ``seq_lens - 1``).

    Args:
        q: [B, Hq, head_dim], contiguous. rows, seq_lens: [B] integers.
        workspace: for at least B requests.
        num_valid: [1] int32, requests that are not padding; the others get zeros.
        out: [B, Hq, v_head_dim] in q's dtype. lse: [B, Hq] float32.
        found: where given, own tokens' scores are updated and the searches are filled in.

    Returns:
        ``out`` and ``lse`` (natural logarithm).
    """
    fmt = state.fmt
    batch, q_heads, dim = q.shape
    heads = state.num_heads
    assert q.is_contiguous() and dim == fmt.head_dim and q_heads % heads == 0
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert not fmt.high.tier.is_raw or q.dtype == state.dtype, "the raw tier holds the dtype of q"
    assert seq_lens.shape == rows.shape == (batch,) and workspace.partial_lse.shape[0] >= batch
    assert workspace.partial_lse.shape[3] * heads == q_heads
    check_rows(rows, num_valid, state)
    if out is None:
        out = torch.empty(batch, q_heads, fmt.v_head_dim, dtype=q.dtype, device=q.device)
    if lse is None:
        lse = torch.empty(batch, q_heads, dtype=torch.float32, device=q.device)
    assert out.is_contiguous() and lse.is_contiguous()
    if found is not None:
        assert workspace.room > 0, "scores are wanted: create the workspace with max_tokens"
        assert found.packed.shape[4] == workspace.config.score_parts and found.packed.shape[0] >= batch
    judge_low = found is not None and found.judge_low
    config, splits, group = workspace.config, workspace.splits, q_heads // heads
    constants = {**format_constants(fmt), **tile_constants(fmt, config)}
    shape = {"MAX_BLOCKS": state.block_table.shape[1], "L": state.num_layers, "H": heads, "G": group, "S": splits}
    limit = {"maxnreg": config.registers} if config.registers and dim <= 128 and not INTERPRETED else {}
    split_kernel[(batch * heads, splits)](
        q, workspace.partial_out, workspace.partial_lse, workspace.logits, workspace.tile_max,
        state.pages, state.page_table, state.range_lo, state.range_hi, state.block_table, state.entries,
        rows, num_valid, layer, sm_scale, logit_cap, workspace.room,
        **constants, **shape, GP=max(8, triton.next_power_of_2(group)),
        HAS_CAP=logit_cap > 0, KEEP=found is not None, KEEP_LOW=judge_low, ASM=not INTERPRETED,
        num_warps=config.warps, num_stages=config.stages, **limit,
    )  # fmt: skip
    kept = {k: v for k, v in constants.items() if k in finish_kernel.arg_names}
    finish_kernel[(batch * heads, 1 + config.score_parts if found is not None else 1)](
        out, lse, found.packed if found is not None else workspace.partial_lse,
        workspace.partial_out, workspace.partial_lse, workspace.logits, workspace.tile_max,
        state.pages, state.page_table, state.range_hi, state.block_table, state.entries, state.own_entry,
        rows, seq_lens, num_valid, layer, window, workspace.room,
        **kept, **shape, PARTS=config.score_parts, SIZE=config.score_tokens, JUDGE_LOW=judge_low, num_warps=4,
    )  # fmt: skip
    return out, lse
