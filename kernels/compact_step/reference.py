"""Generation-phase compaction: at most one token a head and step moves down a tier or is dropped.

The slot it leaves in the high tier becomes the row's hole, which the next token fills, so nothing else moves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_diffkv.kernels.allocate.reference import add_own_pages
from sglang_diffkv.kernels.append.reference import read_tokens, write_tokens
from sglang_diffkv.kernels.cuts import StepBudget, StepCuts, StepRule, tier_of
from sglang_diffkv.kernels.decode_attention.reference import StepScores
from sglang_diffkv.kernels.table import own_slot_location
from sglang_diffkv.layout.page_format import EMPTY
from sglang_diffkv.layout.state import PageState


@dataclass
class StepMoves:
    """The decisions of one step, each [B, L, H] int64 of own slots, -1 for none."""

    demote: torch.Tensor  # high slot whose token is requantised to a lower tier
    drop: torch.Tensor  # high slot whose token is pruned
    replace: torch.Tensor  # slot of that tier which the demoted token takes over; -1 appends it
    tier: torch.Tensor  # the lower tier; means nothing where no token is demoted


def step_moves(
    rule: StepRule, scores: StepScores, seq_lens: torch.Tensor, num_tiers: int, sums: torch.Tensor | None = None
) -> StepMoves:
    """What the rule makes of a step's searches, for all layers and heads. ``seq_lens`` [B] counts the new token.
    ``sums`` [B, L, H]: of heads' scores, where the rule is ``of_sum``."""
    if isinstance(rule, StepBudget):
        return _moves_by_budget(rule, scores, seq_lens)
    return _moves_by_cuts(rule, scores, seq_lens, num_tiers, sums)


def _moves_by_budget(rule: StepBudget, scores: StepScores, seq_lens: torch.Tensor) -> StepMoves:
    """Drop the least significant token where the budget has not grown with the sequence."""
    full = rule.kept(seq_lens) == rule.kept(seq_lens - 1)
    nothing = torch.full_like(scores.candidate_slot, -1)
    return StepMoves(nothing, torch.where(full, scores.least_slot[..., 0], nothing), nothing, nothing)


def _moves_by_cuts(
    cuts: StepCuts, scores: StepScores, seq_lens: torch.Tensor, num_tiers: int, sums: torch.Tensor | None
) -> StepMoves:
    """DiffKV's Algorithm 1; with more than two tiers the token that leaves the high one goes to the tier that its score
    names. The searches pass over window and sinks."""
    assert (sums is not None) == cuts.of_sum
    n = seq_lens.view(-1, 1, 1).float()
    between = () if cuts.between is None else cuts.between
    upper = [cuts.high] if num_tiers > 1 else []
    thresholds = [cut / n if sums is None else cut * sums for cut in (*upper, *between, cuts.low)]

    def tier_named(score: torch.Tensor) -> torch.Tensor:
        return tier_of([score >= threshold for threshold in thresholds])

    candidate, least = scores.candidate_slot, scores.least_slot[..., 0]
    present, own = candidate >= 0, tier_named(scores.candidate_score)
    victim = present & (own == 0) & (least >= 0)
    leaves = torch.where(victim, least, candidate)
    tier = torch.where(victim, tier_named(scores.least_score[..., 0]), own)
    gone = present & (tier > 0)
    none = torch.full_like(candidate, -1)
    demote = torch.where(gone & (tier < num_tiers), leaves, none)
    drop = torch.where(gone & (tier == num_tiers), leaves, none)
    replace = none
    for lower in range(1, num_tiers):
        worst = scores.least_slot[..., lower]
        evicts = present & (own == lower) & (worst >= 0) & (scores.least_score[..., lower] < thresholds[-1])
        replace = torch.where(evicts, worst, replace)
    return StepMoves(demote, drop, replace, tier)


def compact_step(state: PageState, rows: torch.Tensor, moves: StepMoves) -> None:
    """Apply ``moves`` to all layers and heads of ``rows`` ([B] int64, distinct)."""
    for tier in range(1, len(state.tiers)):
        _demote(state, rows, moves, tier)
    leaving = torch.maximum(moves.demote, moves.drop)
    page, slot = own_slot_location(state, rows, 0, leaving.clamp(min=0).unsqueeze(3))
    gone = leaving >= 0
    page = torch.where(gone, page.squeeze(3), state.scratch_page)
    state.tiers[0].positions[page, slot.squeeze(3)] = EMPTY
    state.hole[rows] = torch.where(gone, leaving, state.hole[rows].long()).int()


def _demote(state: PageState, rows: torch.Tensor, moves: StepMoves, tier: int) -> None:
    low = state.tiers[tier]
    moving = (moves.demote >= 0) & (moves.tier == tier)
    appended = moving & (moves.replace < 0)
    used = state.own_tokens[rows, :, :, tier].long()
    have = (state.entries[rows, :, :, tier] - state.own_entry[rows, :, :, tier]).long()
    demand = (appended & (used >= have * low.layout.tokens)).long()
    add_own_pages(state, rows, tier, demand, 1)
    state.own_tokens[rows, :, :, tier] += appended.int()
    target = torch.where(moves.replace >= 0, moves.replace, used)
    if not moving.any():
        return
    page, slot = own_slot_location(state, rows, 0, moves.demote.clamp(min=0).unsqueeze(3))
    page, slot = page.squeeze(3)[moving], slot.squeeze(3)[moving]
    high = state.tiers[0]
    key, value = read_tokens(high, page, slot)
    low_page, low_slot = own_slot_location(state, rows, tier, torch.where(moving, target, 0).unsqueeze(3))
    write_tokens(
        low,
        low_page.squeeze(3)[moving],
        low_slot.squeeze(3)[moving],
        key,
        value,
        high.scores_of(page, slot),
        high.positions[page, slot],
        high.layout.tier,
    )
