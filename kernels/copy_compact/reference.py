"""Copy-on-compress: tokens of one row's pages, which others may read, compressed into pages of another row."""

from __future__ import annotations

import torch

from sglang_diffkv.kernels.allocate.reference import append_slots
from sglang_diffkv.kernels.append.reference import read_tokens, write_tokens
from sglang_diffkv.kernels.compact_prompt.reference import PromptClassifier
from sglang_diffkv.kernels.table import max_entries, row_table
from sglang_diffkv.mem_pool.state import PageState


def copy_compact(
    state: PageState,
    target: int,
    source: int,
    lo: int,
    hi: int,
    seq_len: int,
    policy: PromptClassifier,
    judged: torch.Tensor | None = None,
) -> None:
    """Append the tokens of ``source`` with position in [lo, hi) to the own pages of ``target``, each in the tier that
    the policy chooses, or not at all. No page of ``source`` changes, and a token never rises above the tier it is in.

    Args:
        target: a row without a hole in its own pages.
        seq_len: tokens of the target's sequence, for the policy's window.
        judged: [L, H, n] float32, scores by position for positions below n where they are numbers; elsewhere the
            pages' own scores count.
    """
    tiers = len(state.segments)
    for source_tier, seg in enumerate(state.segments):
        rows = torch.tensor([source], device=state.device)
        width = max_entries(state, rows, source_tier)
        if not width:
            continue
        page, page_lo, page_hi = (x[0] for x in row_table(state, rows, source_tier, width))  # [L, H, E]
        position = seg.positions[page]  # [L, H, E, tokens]
        held = (position >= page_lo.clamp(min=lo).unsqueeze(3)) & (position < page_hi.clamp(max=hi).unsqueeze(3))
        score = _scores(seg.scores[page], position, held, judged)
        tier_of = policy.classify_prompt(score, position, seq_len, tiers).clamp(min=source_tier)
        for tier in range(source_tier, tiers):
            _append(state, target, tier, source_tier, page, held & (tier_of == tier), score)


def _scores(
    stored: torch.Tensor, position: torch.Tensor, held: torch.Tensor, judged: torch.Tensor | None
) -> torch.Tensor:
    if judged is None:
        return stored
    known = held & (position < judged.shape[2])
    at = torch.where(known, position, 0).long().flatten(2)
    own = judged.gather(2, at).view(position.shape)
    return torch.where(known & ~own.isnan(), own, stored)


def _append(
    state: PageState,
    target: int,
    tier: int,
    source_tier: int,
    page: torch.Tensor,  # [L, H, E]
    chosen: torch.Tensor,  # [L, H, E, tokens] bool
    score: torch.Tensor,  # [L, H, E, tokens]
) -> None:
    """Append the chosen tokens, in (entry, slot) order, to the target's own region of ``tier``."""
    seg, origin = state.segments[tier], state.segments[source_tier]
    to_page, to_slot = append_slots(state, target, tier, chosen.flatten(2))
    from_page = page.unsqueeze(3).expand(chosen.shape)[chosen]
    from_slot = chosen.nonzero(as_tuple=True)[3]
    position = origin.positions[from_page, from_slot]
    if tier == source_tier:
        for field in (seg.keys, seg.key_meta, seg.values, seg.value_meta):
            if field is not None:
                field[to_page, to_slot] = field[from_page, from_slot]
        seg.scores[to_page, to_slot] = score[chosen]
        seg.positions[to_page, to_slot] = position
    else:
        key, value = read_tokens(origin, from_page, from_slot)
        write_tokens(seg, to_page, to_slot, key, value, score[chosen], position, origin.layout.tier)
