"""Prompt-phase compaction on the GPU; no host synchronisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sglang_diffkv.kernels.attach.triton import ENTRIES
from sglang_diffkv.kernels.compact_prompt.triton_lower import PARTS, REGISTERS, lower_kernel
from sglang_diffkv.kernels.compact_prompt.triton_move import compact_kernel, return_kernel, spare_kernel
from sglang_diffkv.kernels.cuts import Cuts
from sglang_diffkv.kernels.launch import Launch
from sglang_diffkv.kernels.prefix_sum.triton import prepare_return_spans
from sglang_diffkv.kernels.triton_ring import Spans
from sglang_diffkv.kernels.triton_table import SAME_BITS, format_constants
from sglang_diffkv.kernels.triton_tokens import cut_arguments
from sglang_diffkv.layout.state import PageState

PROMPTS = 16
"""Prompts that are compacted together at most."""
DECIDED = (
    "rows", "seq_lens", "tails", "window", "sinks", "lasting", "high_cut", "between", "low_cut", "tie_high", "tie_low",
    "values", "values_len",
)  # fmt: skip
"""What kernels are told of prompts and cuts, by their own names."""


@dataclass
class PromptWorkspace:
    """Pages that compaction may need beyond rows' own, and those that it leaves over. ``B``: prompts, at most."""

    spare: torch.Tensor  # [B, T, L * H] int32: of each lower tier, and with which a prompt's tail begins
    surplus: torch.Tensor  # [B, L * H, 2] int32, high table entries from and to
    freed: torch.Tensor  # [B * L * H] int32, pages of each head that return
    places: torch.Tensor  # [B * L * H + 1] int64, where in the ring they return to
    spans: Spans  # of other operations on one row

    @classmethod
    def create(cls, state: PageState, prompts: int = PROMPTS) -> PromptWorkspace:
        def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=state.device)

        count = state.num_layers * state.num_heads
        return cls(
            numbers(prompts, len(state.fmt.tiers), count),
            numbers(prompts, count, 2),
            numbers(prompts * count),
            numbers(prompts * count + 1, dtype=torch.int64),
            Spans.create(state, 1),
        )


class PreparedCompaction(Protocol):
    """``compact_prompts`` of other rows, by cuts of the same form (``form_of_cuts``), with tails or without."""

    def __call__(
        self, rows: torch.Tensor, seq_lens: torch.Tensor, cuts: Cuts, tails: torch.Tensor | None = None
    ) -> None: ...


def compact_prompts(
    state: PageState,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    workspace: PromptWorkspace,
    cuts: Cuts,
    tails: torch.Tensor | None = None,
) -> None:
    """``reference.compact_prompts``: sort the own high-tier tokens of ``rows`` into tiers, all rows at once.

    It borrows one page a head and lower tier of each row from the ring, and with ``tails`` one more. If a head gets
    none, its tokens for that tier stay in the high tier, and its tail does not begin a page. The other new pages are
    the row's own, so they are as many as the reference's, but not the same ones.

    Args:
        rows, seq_lens: [B] int64, contiguous, as many as the workspace is for at most, different rows; one where heads
            were scored as a whole.
        tails: [B] int64, contiguous, or None for none.
    """
    prepare_compact(state, workspace, cuts, tailed=tails is not None)(rows, seq_lens, cuts, tails)


def prepare_compact(
    state: PageState, workspace: PromptWorkspace, cuts: Cuts, *, tailed: bool
) -> PreparedCompaction:  # fmt: skip
    """What compactions by cuts of a form have in common. Arguments as of ``compact_prompts``."""
    fmt, heads = state.fmt, state.num_layers * state.num_heads
    spares = len(fmt.tiers) - 1 + tailed
    constants = dict(
        **format_constants(fmt), MAX_BLOCKS=state.row_blocks.shape[1], L=state.row_layers, H=state.num_heads,
        WHOLE=cuts.values is not None, TAILED=tailed, num_warps=4, **SAME_BITS,
    )  # fmt: skip
    raw_like = state.pages.view(state.dtype)
    decided = (*(None,) * len(DECIDED), workspace.spare)
    spare = Launch(
        spare_kernel, (1,),
        (workspace.spare, state.ring, state.counters, state.refcount, state.num_pages, None),
        {"R": 256, "num_warps": 4},
    )  # fmt: skip
    lower = Launch(
        lower_kernel, (1,),
        (
            *decided, raw_like, state.pages, state.page_table, state.row_blocks, state.own_entry, state.own_tokens,
            state.fault, state.num_pages,
        ),
        {**constants, "PARTS": PARTS, "maxnreg": REGISTERS if max(fmt.head_dim, fmt.v_head_dim) <= 128 else None},
    )  # fmt: skip
    move = Launch(
        compact_kernel, (1,),
        (
            *decided, workspace.surplus, workspace.freed, raw_like, state.pages, state.page_table, state.range_lo,
            state.range_hi, state.row_blocks, state.entries, state.own_entry, state.own_tokens, state.hole, state.fault,
            state.refcount, state.num_pages,
        ),
        constants,
    )  # fmt: skip
    places = prepare_return_spans(state.counters, workspace.freed, workspace.places)
    give_back = Launch(
        return_kernel, (1,),
        (
            None, workspace.spare, workspace.surplus, workspace.places, state.page_table, state.row_blocks, state.ring,
            state.refcount, state.num_pages,
        ),
        {
            "SPARES": spares, "MAX_BLOCKS": state.row_blocks.shape[1], "L": state.row_layers, "H": state.num_heads,
            "E": ENTRIES, "num_warps": 1,
        },
    )  # fmt: skip

    def compact_again(
        rows: torch.Tensor, seq_lens: torch.Tensor, cuts: Cuts, tails: torch.Tensor | None = None
    ) -> None:
        cuts.check(state.num_layers, state.num_heads, len(fmt.tiers))
        batch = rows.shape[0]
        assert rows.shape == seq_lens.shape == (batch,) and rows.dtype == seq_lens.dtype == torch.int64
        assert rows.is_contiguous() and seq_lens.is_contiguous() and rows.device == seq_lens.device == state.device
        assert batch <= workspace.spare.shape[0] and (cuts.values is None or batch == 1)
        assert (tails is not None) == tailed
        if tails is not None:
            assert tails.shape == (batch,) and tails.dtype == torch.int64 and tails.is_contiguous()
        assert state.num_layers == state.row_layers or (batch == 1 and spares <= 1), "a group has no room for more"
        count = batch * heads
        if not count:
            return
        numbers = (
            rows, seq_lens, seq_lens if tails is None else tails, cuts.window, cuts.sinks, cuts.lasting,
            *cut_arguments(cuts),
        )  # fmt: skip
        given = dict(zip(DECIDED, numbers, strict=True))
        if spares:
            spare(count=spares * count)
        if len(fmt.tiers) > 1:
            lower.resize(count * PARTS)
            lower(**given)
        move.resize(count)
        move(**given)
        places(count=count)
        give_back.resize(count)
        give_back(rows=rows)

    return compact_again
