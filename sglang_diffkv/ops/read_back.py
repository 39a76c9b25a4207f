"""Attention of new tokens and the stored ones before them by a library, for which these are read back from pages."""

from __future__ import annotations

import torch

from sglang_diffkv.kernels.read_back.triton import PreparedReadBack, prepare_read_back
from sglang_diffkv.kernels.rotate.reference import Rotation
from sglang_diffkv.layout.state import PageState
from sglang_diffkv.ops.base import Scaling, Step, WholeRequests
from sglang_diffkv.ops.library import PrefillLibrary
from sglang_diffkv.ops.prompt_scores import StoredSums, prompts_scored, score_new
from sglang_diffkv.policies.base import Policy, prunes

MOST_BYTES = 256 << 20
"""Of keys and values of all tokens of a pass's requests, of the KV heads that attend together: 65,536 tokens of
Llama-3-8B's 8, or 524,288 of one. They live while these attend, in the room that the activations of a pass have. Where
one head has more, requests attend to pages as they are."""
FEW_TOKENS = 2048
"""New tokens of a pass whose layers have one room for these keys and values. Beside the rest of so short a pass it may
stay; and the host, which such passes wait for, takes it once."""

FEW_REQUESTS = 2
"""That a bounded pass is expected to have. The GPU's programs are shared out among so many."""


def heads_hold_all(policy: Policy, tiers: int) -> bool:
    """Whether every head of a request holds all of its stored tokens, as attention to requests as a whole takes for
    granted."""
    rules = [policy] if policy.under_pressure is None else [policy, policy.under_pressure]
    return policy.running is None and not any(prunes(rule, tiers) for rule in rules)


def whole_requests(state: PageState, step: Step, library: PrefillLibrary) -> WholeRequests | None:
    """Places for all tokens of an extend step's requests; None where none has stored ones, or all are too many."""
    if not any(step.prefixes):
        return None
    lens = tuple(stored + new for stored, new in zip(step.prefixes, step.counts, strict=True))
    fmt = state.fmt
    token = (fmt.head_dim + fmt.v_head_dim) * (state.dtype.itemsize + library.copy_bytes)
    most = MOST_BYTES // (sum(lens) * token)
    heads = max((n for n in range(1, state.num_heads + 1) if state.num_heads % n == 0 and n <= most), default=0)
    return WholeRequests(step.seq_lens.cumsum(0) - step.seq_lens, lens, heads) if heads else None


def attend(
    state: PageState, layer: int, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: Step,
    library: PrefillLibrary, scaling: Scaling, policy: Policy, rotation: Rotation, key_means: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """``Ops.extend_unpacked`` of a step that has a place for ``whole`` requests, which ``library`` is planned for."""
    whole, heads = step.whole, state.num_heads
    assert whole is not None
    scored = prompts_scored(state, step, policy)
    sums = StoredSums.of(state, step) if scored else None
    if whole.heads == heads:
        keys, values = _unpacked(state, layer, key, value, step, rotation, key_means, 0)
        out, lse = library.run(q, keys, values, scaling, lse=scored)
        if sums is not None:
            assert lse is not None
            sums.add(state, q, keys, lse, step, scaling, policy, 0, library.lse_unit)
    else:
        out, lse = _by_heads(
            state, layer, q, key, value, step, library, scaling, policy, rotation, key_means, scored, sums
        )  # fmt: skip
    if lse is not None:
        score_new(state, layer, q, key, lse, step, scaling, policy, library.lse_unit)
    if sums is not None:
        sums.fold(state, layer, step, policy)
    return out


def _by_heads(
    state: PageState, layer: int, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: Step,
    library: PrefillLibrary, scaling: Scaling, policy: Policy, rotation: Rotation, key_means: torch.Tensor | None,
    scored: bool, sums: StoredSums | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """The same, some KV heads after the other: the keys and values of all do not fit."""
    assert step.whole is not None
    together, tokens, q_heads = step.whole.heads, q.shape[0], q.shape[1]
    group = q_heads // state.num_heads
    out = torch.empty(tokens, q_heads, state.fmt.v_head_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(tokens, q_heads, dtype=torch.float32, device=q.device) if scored else None
    for first in range(0, state.num_heads, together):
        asked = slice(first * group, (first + together) * group)
        keys, values = _unpacked(state, layer, key, value, step, rotation, key_means, first)
        some, norm = library.run(q[:, asked], keys, values, scaling, lse=lse is not None)
        out[:, asked] = some
        if lse is not None and norm is not None:
            lse[:, asked] = norm
            if sums is not None:
                sums.add(state, q, keys, lse, step, scaling, policy, first, library.lse_unit)
    return out, lse


def _unpacked(
    state: PageState, layer: int, key: torch.Tensor, value: torch.Tensor, step: Step, rotation: Rotation,
    key_means: torch.Tensor | None, first_head: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Keys and values of whole requests, of so many heads as the step says. The caller keeps them for attention and
    what follows from them alone: the next call may write over them."""
    whole = step.whole
    assert whole is not None

    def room() -> tuple[torch.Tensor, torch.Tensor]:
        shape, dims = (sum(whole.lens), whole.heads), (state.fmt.head_dim, state.fmt.v_head_dim)
        keys, values = (torch.empty(*shape, dim, dtype=key.dtype, device=key.device) for dim in dims)
        return keys, values

    few = sum(step.counts) <= FEW_TOKENS
    keys, values = whole.room or (step.launches.prepared("unpacked", room) if few else room())

    def prepare() -> PreparedReadBack:
        lens = (step.rows, step.starts, step.extend_lens, step.prefix_lens)
        longest = max(step.max_prefix, step.max_extend)
        return prepare_read_back(
            state, key, value, *lens, whole.into, keys, values, longest, rotation=rotation, key_means=key_means,
            requests=step.rows.shape[0] if step.ends is None else FEW_REQUESTS,
        )  # fmt: skip

    again: PreparedReadBack = step.launches.prepared(
        ("read back", rotation), prepare, key, value, keys, values, key_means
    )  # fmt: skip
    again(layer, key, value, keys, values, key_means, first_head)
    return keys, values
