"""Attention of new tokens and the stored ones before them by FlashInfer, for which these are read back from pages."""

from __future__ import annotations

import torch

from sglang_diffkv.kernels.read_back.triton import PreparedReadBack, prepare_read_back
from sglang_diffkv.kernels.rotate.reference import Rotation
from sglang_diffkv.layout.state import PageState
from sglang_diffkv.ops.base import Scaling, Step, WholeRequests
from sglang_diffkv.ops.prompt_scores import prompts_scored, score_new, score_stored
from sglang_diffkv.ops.ragged import RaggedPrefill
from sglang_diffkv.policies.base import Policy, prunes

MOST_BYTES = 128 << 20
"""Of keys and values of all tokens of a pass's requests in a layer: 32,768 tokens of Llama-3-8B's. They live while a
layer attends, in the room that the activations of a pass have; longer requests attend to pages as they are."""


def heads_hold_all(policy: Policy, tiers: int) -> bool:
    """Whether every head of a request holds all of its stored tokens, as attention to requests as a whole takes for
    granted."""
    rules = [policy] if policy.under_pressure is None else [policy, policy.under_pressure]
    return policy.running is None and not any(prunes(rule, tiers) for rule in rules)


def whole_requests(state: PageState, step: Step) -> WholeRequests | None:
    """Places for all tokens of an extend step's requests; None where none has stored ones, or all are too many."""
    if not any(step.prefixes):
        return None
    lens = tuple(stored + new for stored, new in zip(step.prefixes, step.counts, strict=True))
    fmt, heads = state.fmt, state.num_heads
    if sum(lens) * heads * (fmt.head_dim + fmt.v_head_dim) * state.dtype.itemsize > MOST_BYTES:
        return None
    return WholeRequests(step.seq_lens.cumsum(0) - step.seq_lens, lens)


def attend(
    state: PageState, layer: int, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: Step,
    ragged: RaggedPrefill, scaling: Scaling, policy: Policy, rotation: Rotation, key_means: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """``Ops.extend_unpacked`` of a step that has a place for ``whole`` requests, which ``ragged`` is planned for."""
    out, lse = ragged.run(q, *_unpacked(state, layer, key, value, step, rotation, key_means))
    if prompts_scored(state, step, policy):
        score_new(state, layer, q, key, lse, step, scaling, policy)
        score_stored(state, layer, q, lse, step, scaling, policy, rotation, key_means)
    return out


def _unpacked(
    state: PageState, layer: int, key: torch.Tensor, value: torch.Tensor, step: Step, rotation: Rotation,
    key_means: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Keys and values of whole requests. The caller keeps them for attention alone: scores take memory of their own."""
    whole, fmt, heads = step.whole, state.fmt, state.num_heads
    assert whole is not None
    tokens = sum(whole.lens)
    keys = torch.empty(tokens, heads, fmt.head_dim, dtype=key.dtype, device=key.device)
    values = torch.empty(tokens, heads, fmt.v_head_dim, dtype=value.dtype, device=value.device)

    def prepare() -> PreparedReadBack:
        lens = (step.rows, step.starts, step.extend_lens, step.prefix_lens)
        longest = max(step.max_prefix, step.max_extend)
        return prepare_read_back(
            state, key, value, *lens, whole.into, keys, values, longest, rotation=rotation, key_means=key_means
        )  # fmt: skip

    again: PreparedReadBack = step.launches.prepared(
        ("read back", rotation), prepare, key, value, keys, values, key_means
    )  # fmt: skip
    again(layer, key, value, keys, values, key_means)
    return keys, values
