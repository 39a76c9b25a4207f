"""What the page manager asks of a policy: it scores and classifies, and never moves bytes."""

from __future__ import annotations

from typing import Protocol

import torch

from sglang_diffkv.kernels.compact_step.reference import StepPlan
from sglang_diffkv.kernels.decode_attention.reference import StepScores


def prunes(policy: Policy, tiers: int) -> bool:
    """Whether a policy may drop tokens where there are so many tiers."""
    return policy.judges_low or (policy.compresses and tiers == 1)


class Policy(Protocol):
    """A compression policy. Policies are frozen dataclasses; one instance serves all requests."""

    @property
    def window(self) -> int:
        """Newest tokens of a request that always stay in the high tier."""
        ...

    @property
    def sinks(self) -> int:
        """First tokens of a sequence that always stay in the high tier."""
        ...

    @property
    def horizon(self) -> int:
        """Later tokens after which a score forgets, see ``kernels/decode_attention``; 0: it is a mean over all."""
        ...

    @property
    def compresses(self) -> bool:
        """False if the policy never moves a token, so that scores need not be kept."""
        ...

    @property
    def judges_low(self) -> bool:
        """False if no decision reads scores of low-tier tokens, which are then not kept up."""
        ...

    def classify_prompt(
        self, score: torch.Tensor, position: torch.Tensor, seq_len: int, num_tiers: int
    ) -> torch.Tensor:
        """Tier of each prompt token, ``num_tiers`` to prune it. All tensors have one shape."""
        ...

    def plan_step(self, scores: StepScores, seq_lens: torch.Tensor, num_tiers: int) -> StepPlan:
        """Decisions of one generation step; ``seq_lens`` [B] counts the new token."""
        ...
