"""Copy-on-compress: tokens of rows' pages, which others may read, compressed into pages of another row."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_diffkv.kernels.allocate.reference import append_slots, make_room
from sglang_diffkv.kernels.append.reference import read_tokens, write_tokens
from sglang_diffkv.kernels.cuts import Cuts, prompt_tiers
from sglang_diffkv.kernels.parts import Part, held_tokens
from sglang_diffkv.layout.page_format import EMPTY
from sglang_diffkv.layout.state import PageState


def copy_compact(
    state: PageState,
    target: int,
    parts: Sequence[Part],
    seq_len: int,
    cuts: Cuts,
    shared_scores: torch.Tensor | None = None,
) -> None:
    """Append the tokens of ``parts`` to the own pages of ``target``, each in the tier that ``cuts`` say, or not
    at all. No page of a source changes, and a token never rises above the tier it is in.

    Cuts of whole heads are those of all parts together.

    Args:
        target: a row without a hole in its own pages.
        parts: (row, lo, hi): the tokens of a row with position in [lo, hi); disjoint, in order.
        seq_len: tokens of the target's sequence, for the window.
        shared_scores: [L, H, n] float32, scores by position for positions below n where they are numbers; elsewhere the
            pages' own scores count.
    """
    tiers = len(state.tiers)
    found = [
        x for part in parts for tier in range(tiers) if (x := held_tokens(state, part, tier, shared_scores)) is not None
    ]
    if not found:
        return
    score = torch.cat([x.score.flatten(2) for x in found], 2)  # [L, H, N]
    position = torch.cat([x.position.masked_fill(~x.held, EMPTY).flatten(2) for x in found], 2)
    tier_of = prompt_tiers(cuts, score, position, seq_len, tiers)
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
    view, origin = state.tiers[tier], state.tiers[source_tier]
    to_page, to_slot = append_slots(state, target, tier, chosen.flatten(2))
    from_page = page.unsqueeze(3).expand(chosen.shape)[chosen]
    from_slot = chosen.nonzero(as_tuple=True)[3]
    position = origin.positions[from_page, from_slot]
    if tier == source_tier:
        for field in (view.keys, view.key_meta, view.values, view.value_meta):
            if field is not None:
                field[to_page, to_slot] = field[from_page, from_slot]
        if view.scores is not None:
            view.scores[to_page, to_slot] = score[chosen]
        view.positions[to_page, to_slot] = position
    else:
        key, value = read_tokens(origin, from_page, from_slot)
        write_tokens(view, to_page, to_slot, key, value, score[chosen], position, origin.layout.tier)
