"""Copy-on-compress: tokens of rows' pages, which others may read, compressed into pages of another row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_diffkv.kernels.allocate.reference import append_slots, make_room
from sglang_diffkv.kernels.append.reference import read_tokens, write_tokens
from sglang_diffkv.kernels.compact_prompt.reference import PromptClassifier
from sglang_diffkv.kernels.table import max_entries, row_table
from sglang_diffkv.mem_pool.page_format import EMPTY
from sglang_diffkv.mem_pool.state import PageState

Part = tuple[int, int, int]
"""(row, first position, position after the last)."""


def copy_compact(
    state: PageState,
    target: int,
    parts: Sequence[Part],
    seq_len: int,
    policy: PromptClassifier,
    judged: torch.Tensor | None = None,
) -> None:
    """Append the tokens of ``parts`` to the own pages of ``target``, each in the tier that the policy chooses, or not
    at all. No page of a source changes, and a token never rises above the tier it is in.

    The policy is asked once for all tokens of a head, so that it may rank them.

    Args:
        target: a row without a hole in its own pages.
        parts: (row, lo, hi): the tokens of a row with position in [lo, hi); disjoint, in order.
        seq_len: tokens of the target's sequence, for the policy's window.
        judged: [L, H, n] float32, scores by position for positions below n where they are numbers; elsewhere the
            pages' own scores count.
    """
    tiers = len(state.segments)
    found = [x for part in parts for tier in range(tiers) if (x := _held(state, part, tier, judged)) is not None]
    if not found:
        return
    score = torch.cat([x.score.flatten(2) for x in found], 2)  # [L, H, N]
    position = torch.cat([x.position.masked_fill(~x.held, EMPTY).flatten(2) for x in found], 2)
    tier_of = policy.classify_prompt(score, position, seq_len, tiers)
    chosen = tier_of.split([x.held[0, 0].numel() for x in found], 2)
    wanted = [
        torch.where(x.held, to.view(x.held.shape).clamp(min=x.tier), tiers) for x, to in zip(found, chosen, strict=True)
    ]
    for part in parts:
        held = [(x, to) for x, to in zip(found, wanted, strict=True) if x.part == part]
        for tier in range(tiers):  # pages for all tokens of a tier, whatever tier they come from
            counts = [(to == tier).flatten(2).sum(2) for _, to in held]
            if counts:
                make_room(state, target, tier, torch.stack(counts).sum(0))
        for x, to in held:
            for tier in range(x.tier, tiers):
                _append(state, target, tier, x.tier, x.page, to == tier, x.score)


@dataclass(frozen=True)
class _Held:
    """Slots of a part's pages in one tier."""

    part: Part
    tier: int
    page: torch.Tensor  # [L, H, E] int64
    position: torch.Tensor  # [L, H, E, tokens] int32
    held: torch.Tensor  # [L, H, E, tokens] bool: the slots that are copied
    score: torch.Tensor  # [L, H, E, tokens] float32


def _held(state: PageState, part: Part, tier: int, judged: torch.Tensor | None) -> _Held | None:
    source, lo, hi = part
    seg, rows = state.segments[tier], torch.tensor([source], device=state.device)
    width = max_entries(state, rows, tier)
    if not width:
        return None
    page, page_lo, page_hi = (x[0] for x in row_table(state, rows, tier, width))  # [L, H, E]
    position = seg.positions[page]
    held = (position >= page_lo.clamp(min=lo).unsqueeze(3)) & (position < page_hi.clamp(max=hi).unsqueeze(3))
    return _Held(part, tier, page, position, held, _scores(seg.scores[page], position, held, judged))


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
