"""Attention of new tokens and the stored ones before them by FlashInfer, for which these are read back from pages."""

from __future__ import annotations

import math

import torch

from sglang_diffkv.kernels.extend_attention.triton import score_new, score_pages
from sglang_diffkv.kernels.read_back.triton import read_back
from sglang_diffkv.kernels.rotate.reference import Rotation
from sglang_diffkv.kernels.rotate.triton import rotate
from sglang_diffkv.mem_pool.state import PageState
from sglang_diffkv.ops.base import Scaling, Step, WholeRequests
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
    if policy.scored_tiers(len(state.fmt.tiers)) > 0:
        _score(state, layer, q, key, lse, step, scaling, policy, rotation, key_means)
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
    read_back(
        state, layer, key, value, step.rows, step.starts, step.extend_lens, step.prefix_lens, whole.into, keys, values,
        max(step.max_prefix, step.max_extend), rotation=rotation, key_means=key_means,
    )  # fmt: skip
    return keys, values


def _score(
    state: PageState, layer: int, q: torch.Tensor, key: torch.Tensor, lse: torch.Tensor, step: Step, scaling: Scaling,
    policy: Policy, rotation: Rotation, key_means: torch.Tensor | None,
) -> None:  # fmt: skip
    """The scores of new tokens, and those of stored ones: of the requests from the first to the last that has any."""
    (scale, cap), observers = scaling, step.observers(policy.observation)
    lens = (step.rows, step.starts, step.extend_lens, step.prefix_lens)
    score_new(state, layer, q, key, lse, *lens, step.max_extend, scale, cap, **observers)
    stored = [number for number, prefix in enumerate(step.prefixes) if prefix]
    first, last = stored[0], stored[-1] + 1
    tokens = slice(sum(step.counts[:first]), sum(step.counts[:last]))
    queries, norm = q[tokens], lse[tokens]
    if key_means is not None:  # taken off keys, and so off logits
        grouped = queries.float().unflatten(1, (state.num_heads, -1))  # [tokens, H, G, head_dim]
        shift = (grouped @ key_means.unsqueeze(2)).flatten(1)  # [tokens, Hq]
        norm = norm - shift * (scale * math.log2(math.e))
    queries = rotate(queries)[0] if rotation.keys else queries.contiguous()
    rows, starts, extend_lens, prefix_lens = (x[first:last] for x in lens)
    if observers["observe_from"] is not None:
        observers["observe_from"] = observers["observe_from"][first:last]
    score_pages(
        state, layer, queries, norm.contiguous(), rows, starts - tokens.start, extend_lens, prefix_lens,
        step.max_prefix, scale, cap, {number - first: scores for number, scores in step.judged.items()}, **observers,
    )  # fmt: skip
