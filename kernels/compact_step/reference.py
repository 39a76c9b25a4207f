"""Generation-phase compaction: at most one token a head and step moves down a tier or is dropped.

The slot it leaves in the high tier becomes the row's hole, which the next token fills, so nothing else moves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_diffkv.kernels.allocate.reference import add_own_pages
from sglang_diffkv.kernels.append.reference import read_tokens, write_tokens
from sglang_diffkv.kernels.cuts import StepBudget, StepCuts, StepRule
from sglang_diffkv.kernels.decode_attention.reference import StepScores
from sglang_diffkv.kernels.table import own_slot_location
from sglang_diffkv.mem_pool.page_format import EMPTY
from sglang_diffkv.mem_pool.state import PageState


@dataclass
class StepMoves:
    """The decisions of one step, each [B, L, H] int64 of own slots, -1 for none."""

    demote: torch.Tensor  # high slot whose token is requantised to the low tier
    drop: torch.Tensor  # high slot whose token is pruned
    replace: torch.Tensor  # low slot that the demoted token takes over; -1 appends it


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
    return StepMoves(nothing, torch.where(full, scores.least_slot[..., 0], nothing), nothing)


def _moves_by_cuts(
    cuts: StepCuts, scores: StepScores, seq_lens: torch.Tensor, num_tiers: int, sums: torch.Tensor | None
) -> StepMoves:
    """DiffKV's Algorithm 1. The searches pass over window and sinks."""
    assert (sums is not None) == cuts.of_sum
    n = seq_lens.view(-1, 1, 1).float()
    low = cuts.low / n if sums is None else cuts.low * sums
    high = (cuts.high / n if sums is None else cuts.high * sums) if num_tiers > 1 else low
    candidate, least = scores.candidate_slot, scores.least_slot[..., 0]
    candidate_score, least_score = scores.candidate_score, scores.least_score[..., 0]
    present = candidate >= 0
    stays = present & (candidate_score >= high)
    goes_low = present & ~stays & (candidate_score >= low)
    victim_low = stays & (least >= 0) & (least_score < high) & (least_score >= low)
    victim_out = stays & (least >= 0) & (least_score < low)
    none = torch.full_like(candidate, -1)
    demote = torch.where(goes_low, candidate, torch.where(victim_low, least, none))
    drop = torch.where(present & ~stays & ~goes_low, candidate, torch.where(victim_out, least, none))
    replace = none
    if num_tiers > 1:
        worst = scores.least_slot[..., 1]
        evicts = goes_low & (worst >= 0) & (scores.least_score[..., 1] < low)
        replace = torch.where(evicts, worst, none)
    return StepMoves(demote, drop, replace)


def compact_step(state: PageState, rows: torch.Tensor, moves: StepMoves) -> None:
    """Apply ``moves`` to all layers and heads of ``rows`` ([B] int64, distinct)."""
    if len(state.tiers) > 1:
        _demote(state, rows, moves)
    leaving = torch.maximum(moves.demote, moves.drop)
    page, slot = own_slot_location(state, rows, 0, leaving.clamp(min=0).unsqueeze(3))
    gone = leaving >= 0
    page = torch.where(gone, page.squeeze(3), state.scratch_page)
    state.tiers[0].positions[page, slot.squeeze(3)] = EMPTY
    state.hole[rows] = torch.where(gone, leaving, state.hole[rows].long()).int()


def _demote(state: PageState, rows: torch.Tensor, moves: StepMoves) -> None:
    low = state.tiers[1]
    moving = moves.demote >= 0
    appended = moving & (moves.replace < 0)
    used = state.own_tokens[rows, :, :, 1].long()
    have = (state.entries[rows, :, :, 1] - state.own_entry[rows, :, :, 1]).long()
    demand = (appended & (used >= have * low.layout.tokens)).long()
    add_own_pages(state, rows, 1, demand, 1)
    state.own_tokens[rows, :, :, 1] += appended.int()
    target = torch.where(moves.replace >= 0, moves.replace, used)
    if not moving.any():
        return
    page, slot = own_slot_location(state, rows, 0, moves.demote.clamp(min=0).unsqueeze(3))
    page, slot = page.squeeze(3)[moving], slot.squeeze(3)[moving]
    high = state.tiers[0]
    key, value = read_tokens(high, page, slot)
    low_page, low_slot = own_slot_location(state, rows, 1, torch.where(moving, target, 0).unsqueeze(3))
    write_tokens(
        low,
        low_page.squeeze(3)[moving],
        low_slot.squeeze(3)[moving],
        key,
        value,
        high.scores[page, slot],
        high.positions[page, slot],
        high.layout.tier,
    )
