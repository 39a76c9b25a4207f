"""What SGLang calls of ``sgl_kernel`` for gated delta rule layers (Qwen3-Next) on a CPU, in plain PyTorch: a causal
convolution and a recurrence, token by token. States are updated in place, in the slots that the indices name; a
negative index is padding. Where drafts are verified the state behind each of them is stored apart instead, as on a GPU:
a CPU's real operators do not verify. Importing this registers the operators that SGLang finds under
``torch.ops.sgl_kernel``."""

from collections.abc import Iterator

import torch
from torch.nn import functional

Spans = Iterator[tuple[int, int, int]]


def _spans(starts: torch.Tensor, slots: torch.Tensor) -> Spans:
    """Slot, first token and end of each sequence of a batch."""
    edges = starts.tolist()
    yield from zip(slots.tolist(), edges, edges[1:])


def _convolved(window: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None):
    """[C, n] of a window [C, width - 1 + n]."""
    out = functional.conv1d(window.float()[None], weight.float()[:, None], None, groups=weight.shape[0])[0]
    out = out if bias is None else out + bias.float()[:, None]
    return functional.silu(out) if activation in ("silu", "swish") else out


def causal_conv1d_fn_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    conv_states: torch.Tensor | None = None,
    activation: str | None = "silu",
    **_: object,
) -> torch.Tensor:
    """The convolution of a prefill pass. ``x``: [C, tokens]; ``weight``: [C, width]; ``conv_states``: [slots, C,
    width - 1], the tokens before a sequence's first."""
    out, width = torch.zeros_like(x), weight.shape[1]
    resumes = has_initial_state.tolist()
    for (slot, start, end), resumed in zip(_spans(query_start_loc, cache_indices), resumes):
        if slot < 0:
            continue
        state = conv_states[slot] if resumed else torch.zeros_like(conv_states[slot])
        window = torch.cat([state.to(x.dtype), x[:, start:end]], 1)
        out[:, start:end] = _convolved(window, weight, bias, activation).to(x.dtype)
        conv_states[slot] = window[:, -(width - 1) :].to(conv_states.dtype)
    return out


def causal_conv1d_update_cpu(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    conv_state_indices: torch.Tensor | None = None,
    intermediate_conv_window: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    **_: object,
) -> torch.Tensor:
    """The same for one token each. ``x``: [batch, C]; of chains of drafts [batch, C, drafts], whose states go to
    ``intermediate_conv_window`` [rows, drafts, C, width - 1]."""
    out = torch.zeros_like(x)
    if intermediate_conv_window is not None:
        for i, (slot, row) in enumerate(zip(conv_state_indices.tolist(), intermediate_state_indices.tolist())):
            if slot < 0:
                continue
            window = torch.cat([conv_states[slot].to(x.dtype), x[i]], 1)
            out[i] = _convolved(window, weight, bias, activation).to(x.dtype)
            before = conv_states.shape[2]
            for t in range(x.shape[2]):
                intermediate_conv_window[row, t] = window[:, t + 1 : t + 1 + before].to(conv_states.dtype)
        return out
    for i, slot in enumerate(conv_state_indices.tolist()):
        if slot < 0:
            continue
        window = torch.cat([conv_states[slot].to(x.dtype), x[i, :, None]], 1)
        out[i] = _convolved(window, weight, bias, activation)[:, 0].to(x.dtype)
        conv_states[slot] = window[:, 1:].to(conv_states.dtype)
    return out


def _gated_delta_rule(q, k, v, decay, beta, states, slots, starts, each=None, rows=None) -> torch.Tensor:
    """[1, tokens, HV, V] of q, k [1, tokens, H, K], v [1, tokens, HV, V], decay (a logarithm) and beta [tokens, HV];
    states [slots, HV, V, K] go on; with ``each`` [rows, drafts, HV, V, K] they stay, and the state behind each token
    goes there, in the rows ``rows``. Queries and keys are normalised, as SGLang asks for in the kernel."""
    out, groups = torch.zeros_like(v), v.shape[2] // k.shape[2]
    q, k = (functional.normalize(x[0].float(), dim=-1).repeat_interleave(groups, 1) for x in (q, k))
    q, value, decay, beta = q * q.shape[-1] ** -0.5, v[0].float(), decay.float().exp(), beta.float()
    for number, (slot, start, end) in enumerate(_spans(starts, slots)):
        if slot < 0:
            continue
        state = states[slot].float()
        for t in range(start, end):
            state = state * decay[t, :, None, None]
            change = (value[t] - torch.einsum("hvk,hk->hv", state, k[t])) * beta[t, :, None]
            state = state + change[:, :, None] * k[t][:, None]
            out[0, t] = torch.einsum("hvk,hk->hv", state, q[t]).to(out.dtype)
            if each is not None:
                each[rows[number], t - start] = state.to(each.dtype)
        if each is None:
            states[slot] = state.to(states.dtype)
    return out


def chunk_gated_delta_rule_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    initial_state_indices: torch.Tensor,
    **_: object,
) -> tuple[torch.Tensor, None, None]:
    """A prefill pass: the output, and no states at chunks' ends."""
    gates = (x.reshape(-1, v.shape[2]) for x in (g, beta))
    return _gated_delta_rule(q, k, v, *gates, initial_state, initial_state_indices, cu_seqlens), None, None


def fused_gdn_gating_cpu(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decay (a logarithm) and beta of each token and head, [1, tokens, HV]."""
    decay = -A_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    is_kda: bool = False,
    disable_state_update: bool = False,
    intermediate_states_buffer: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: torch.Tensor | None = None,
) -> torch.Tensor:
    """A decode step, or with ``disable_state_update`` a pass over chains of drafts."""
    gates = (x[0] for x in fused_gdn_gating_cpu(A_log, a, b, dt_bias))
    each = intermediate_states_buffer if disable_state_update else None
    which = (initial_state_source, initial_state_indices, cu_seqlens, each, intermediate_state_indices)
    return _gated_delta_rule(q, k, v, *gates, *which)


_LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")
_LIBRARY.define("fused_gdn_gating_cpu(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)")
_LIBRARY.define(
    "fused_sigmoid_gating_delta_rule_update_cpu(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor a, "
    "Tensor b, Tensor(a!) initial_state_source, Tensor initial_state_indices, Tensor cu_seqlens, "
    "bool use_qk_l2norm_in_kernel, float softplus_beta=1.0, float softplus_threshold=20.0, bool is_kda=False, "
    "bool disable_state_update=False, Tensor(b!)? intermediate_states_buffer=None, "
    "Tensor? intermediate_state_indices=None, int? cache_steps=None, Tensor? retrieve_parent_token=None) -> Tensor"
)
for _operator in (fused_gdn_gating_cpu, fused_sigmoid_gating_delta_rule_update_cpu):
    _LIBRARY.impl(_operator.__name__, _operator, "CPU")
