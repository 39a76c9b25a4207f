"""Scores that tokens get while a prompt is computed, where a library attends: of new tokens and of stored ones."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_diffkv.kernels.extend_attention.triton import prepare_fold_sums, prepare_score_new, prepare_stored_sums
from sglang_diffkv.layout.state import PageState
from sglang_diffkv.layout.transfer import to_device
from sglang_diffkv.ops.base import Scaling, Step
from sglang_diffkv.policies.base import Policy

SumStored = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], None]
"""As ``prepare_stored_sums`` gives it."""


def prompts_scored(state: PageState, step: Step, policy: Policy) -> bool:
    """Whether tokens of the step get scores."""
    scored: bool = step.launches.prepared("scored", lambda: policy.scored_tiers(len(state.fmt.tiers)) > 0)
    return scored


def score_new(
    state: PageState, layer: int, q: torch.Tensor, key: torch.Tensor, lse: torch.Tensor, step: Step, scaling: Scaling,
    policy: Policy, lse_unit: float,
) -> None:  # fmt: skip
    """The scores of new tokens. ``lse``: [tokens, Hq] float32, of all that queries attend to; ``lse_unit`` times it is
    base 2."""

    def prepare() -> Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]:
        lens = (step.rows, step.starts, step.extend_lens, step.prefix_lens)
        observers = step.observers(policy.observation)
        return prepare_score_new(state, q, key, lse, *lens, step.max_extend, *scaling, lse_unit=lse_unit, **observers)

    step.launches.prepared(("new scores", scaling), prepare, q, key, lse)(layer, q, key, lse)


class StoredSums:
    """What stored tokens receive from a layer's new ones: [H, all tokens] float32, from keys that were read back.

    Attributes:
        most: tokens of a request that count.
    """

    def __init__(self, sums: torch.Tensor, first: torch.Tensor, most: int):
        self.most = most
        self._sums, self._first = sums, first

    @classmethod
    def of(cls, state: PageState, step: Step) -> StoredSums | None:
        """Room for a step that has a place for ``whole`` requests; None if no stored token gets a score."""
        assert step.whole is not None
        unscored = step.unscored or (0,) * len(step.prefixes)
        most = max(prefix - held for prefix, held in zip(step.prefixes, unscored, strict=True))
        if most <= 0:
            return None
        first: torch.Tensor = step.launches.prepared("unscored", lambda: to_device(unscored, state.device))
        shape = (state.num_heads, sum(step.whole.lens))
        return cls(torch.empty(shape, dtype=torch.float32, device=state.device), first, most)

    def add(
        self, state: PageState, q: torch.Tensor, keys: torch.Tensor, lse: torch.Tensor, step: Step, scaling: Scaling,
        policy: Policy, first_head: int, lse_unit: float,
    ) -> None:  # fmt: skip
        """Of the KV heads of ``keys`` [all tokens, n, head_dim], the first of which is ``first_head``. ``lse``,
        ``lse_unit``: as of ``score_new``, of these heads' queries."""
        whole = step.whole
        assert whole is not None

        def prepare() -> SumStored:
            lens = (step.starts, step.extend_lens, step.prefix_lens, self._first, whole.into)
            observers = step.observers(policy.observation)
            return prepare_stored_sums(state, q, keys, lse, *lens, self.most, *scaling, lse_unit=lse_unit, **observers)

        again: SumStored = step.launches.prepared(("stored sums", scaling), prepare, q, keys, lse, self._sums)
        again(q, keys, lse, self._sums, first_head)

    def fold(self, state: PageState, layer: int, step: Step, policy: Policy) -> None:
        """Into the scores of the layer's stored tokens."""
        whole = step.whole
        assert whole is not None

        def prepare() -> Callable[[int, torch.Tensor], None]:
            lens = (step.rows, step.extend_lens, step.prefix_lens, whole.into, self._sums.shape[1], step.max_prefix)
            observers = step.observers(policy.observation)
            del observers["reduce"]  # sums are joined over heads already
            return prepare_fold_sums(state, *lens, step.shared_scores, **observers)

        step.launches.prepared("fold", prepare, self._sums)(layer, self._sums)
