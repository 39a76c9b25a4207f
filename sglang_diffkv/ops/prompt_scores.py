"""Scores that tokens get while a prompt is computed, where FlashInfer attends: of new tokens and of stored ones."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from sglang_diffkv.kernels.extend_attention.triton import prepare_score_new, prepare_score_pages
from sglang_diffkv.kernels.rotate.reference import Rotation
from sglang_diffkv.layout.state import PageState
from sglang_diffkv.ops.base import Scaling, Step
from sglang_diffkv.ops.launches import rotate_again
from sglang_diffkv.policies.base import Policy


def prompts_scored(state: PageState, step: Step, policy: Policy) -> bool:
    """Whether tokens of the step get scores."""
    scored: bool = step.launches.prepared("scored", lambda: policy.scored_tiers(len(state.fmt.tiers)) > 0)
    return scored


def score_new(
    state: PageState, layer: int, q: torch.Tensor, key: torch.Tensor, lse: torch.Tensor, step: Step, scaling: Scaling,
    policy: Policy,
) -> None:  # fmt: skip
    """The scores of new tokens. ``lse``: [tokens, Hq] float32, base 2, of all that queries attend to."""

    def prepare() -> Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]:
        lens = (step.rows, step.starts, step.extend_lens, step.prefix_lens)
        observers = step.observers(policy.observation)
        return prepare_score_new(state, q, key, *lens, step.max_extend, *scaling, **observers)

    step.launches.prepared(("new scores", scaling), prepare, q, key, lse)(layer, q, key, lse)


def score_stored(
    state: PageState, layer: int, q: torch.Tensor, lse: torch.Tensor, step: Step, scaling: Scaling, policy: Policy,
    rotation: Rotation, key_means: torch.Tensor | None,
) -> None:  # fmt: skip
    """The scores of stored tokens: of the requests from the first to the last that has any."""
    stored = [number for number, prefix in enumerate(step.prefixes) if prefix]
    first, last = stored[0], stored[-1] + 1
    tokens = slice(sum(step.counts[:first]), sum(step.counts[:last]))
    queries, norm = q[tokens], lse[tokens]
    if key_means is not None:  # taken off keys, and so off logits
        grouped = queries.float().unflatten(1, (state.num_heads, -1))  # [tokens, H, G, head_dim]
        shift = (grouped @ key_means.unsqueeze(2)).flatten(1)  # [tokens, Hq]
        norm = norm - shift * (scaling.scale * math.log2(math.e))
    queries = rotate_again(step.launches, queries)[0] if rotation.keys else queries.contiguous()

    def prepare() -> Callable[[int, torch.Tensor, torch.Tensor], None]:
        observers = step.observers(policy.observation)
        if observers["observe_from"] is not None:
            observers["observe_from"] = observers["observe_from"][first:last]
        starts = step.starts[first:last] - tokens.start
        lens = (step.rows[first:last], starts, step.extend_lens[first:last], step.prefix_lens[first:last])
        shared_scores = {number - first: scores for number, scores in step.shared_scores.items()}
        return prepare_score_pages(state, queries, *lens, step.max_prefix, *scaling, shared_scores, **observers)

    step.launches.prepared(("stored scores", scaling), prepare, queries)(layer, queries, norm.contiguous())
