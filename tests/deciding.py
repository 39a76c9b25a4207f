"""What policies decide of numbers that tests make up, by the reference ops."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from sglang_diffkv.kernels.compact_step import reference as compact_step
from sglang_diffkv.kernels.compact_step.reference import StepMoves
from sglang_diffkv.kernels.cuts import prompt_tiers
from sglang_diffkv.kernels.decode_attention.reference import StepScores
from sglang_diffkv.layout.ranks import Ranks
from sglang_diffkv.ops.decisions import REFERENCE, Decisions, WholeHeadKernels
from sglang_diffkv.policies.base import Policy


def _state(layers: int, heads: int, num_tiers: int) -> Any:
    fmt = SimpleNamespace(tiers=("",) * num_tiers)
    return SimpleNamespace(slides=False, num_layers=layers, num_heads=heads, device=torch.device("cpu"), fmt=fmt)


def classify_prompt(
    policy: Policy, score: torch.Tensor, position: torch.Tensor, seq_len: int, num_tiers: int,
    kernels: WholeHeadKernels = REFERENCE, ranks: Ranks | None = None,
) -> torch.Tensor:  # fmt: skip
    """Tier of each prompt token, ``num_tiers`` to prune it. score, position: [L, H, N], or one head's [N], whose tokens
    are in any order; position -1 names no token. ``kernels``: those that judge whole heads. ``ranks``: of which one has
    these heads."""
    if score.dim() == 1:
        return classify_prompt(policy, score[None, None], position[None, None], seq_len, num_tiers)[0, 0]

    def gather(state: Any, parts: Any, values: torch.Tensor, length: int, *, sums: bool, **limits: Any) -> torch.Tensor:
        """The op's values, of the numbers given."""
        values.fill_(float("nan"))
        held = position >= 0
        value = score * (length - 1 - position) if sums else score
        lasting = (position >= length - limits["window"]) | (position < limits["sinks"])
        layer, head, _ = held.nonzero(as_tuple=True)
        values[layer, head, position[held].long()] = value.masked_fill(lasting, float("inf"))[held]
        return held.sum(2)

    decisions = Decisions(replace(kernels, gather=gather), ranks=ranks or Ranks())
    cuts = decisions.of_row(_state(*score.shape[:2], num_tiers), 0, seq_len, policy)
    assert cuts is not None
    tier = prompt_tiers(cuts, score, position, seq_len, num_tiers)
    return torch.where(position >= 0, tier, num_tiers)


def step_moves(
    policy: Policy, found: StepScores, seq_lens: torch.Tensor, num_tiers: int, sums: torch.Tensor | None = None
) -> StepMoves | None:
    """A generation step's moves; None where the policy wants nothing of it."""
    rule = Decisions().step(_state(*found.candidate_slot.shape[1:], num_tiers), policy)
    return None if rule is None else compact_step.step_moves(rule, found, seq_lens, num_tiers, sums)


def moves_of(
    policy: Policy, found: StepScores, seq_lens: torch.Tensor, num_tiers: int, sums: torch.Tensor | None = None
) -> StepMoves:
    """Of a policy that wants something."""
    moves = step_moves(policy, found, seq_lens, num_tiers, sums)
    assert moves is not None
    return moves
