"""Decode attention over packed pages, with the score update and the policy's searches in the same pass.

For the one new token of each request: attention over its high-tier pages, then its low-tier pages,
joined by one softmax. Scales and zero points are folded out of both products
(``q.k = s (q.Qk) + z sum(q)``; ``sum_j p_j v_j = sum_j (p_j s_j) Qv_j + sum_j p_j z_j``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_diffkv.kernels.quantize.reference import planes
from sglang_diffkv.kernels.table import layer_table, max_entries
from sglang_diffkv.layout.page_format import EMPTY
from sglang_diffkv.layout.state import PageState, TierView


@dataclass
class StepScores:
    """What one decode step's attention learns for the policy, for all layers.

    Slots are own slots (see ``PageState``), -1 where there is none. Scores are means of the attention
    received from later tokens, maximum or mean over the query heads of a KV head. Without ``score_low`` tokens of the
    low tier keep the scores they have, and none of them is searched for. Without ``scored`` no score is updated or
    read, only the token that leaves the window is searched for, and its score is 0.
    """

    candidate_slot: torch.Tensor  # [B, L, H] int64, high tier: the token that leaves the window
    candidate_score: torch.Tensor  # [B, L, H] float32
    least_slot: torch.Tensor  # [B, L, H, T] int64, the tier's least significant token outside the window
    least_score: torch.Tensor  # [B, L, H, T] float32
    score_low: bool = True
    scored: bool = True

    @classmethod
    def create(cls, state: PageState, batch: int, score_low: bool = True, scored: bool = True) -> StepScores:
        heads, device = (batch, state.num_layers, state.num_heads), state.device
        tiers = (*heads, len(state.tiers))
        return cls(
            torch.full(heads, EMPTY, dtype=torch.int64, device=device),
            torch.zeros(heads, device=device),
            torch.full(tiers, EMPTY, dtype=torch.int64, device=device),
            torch.zeros(tiers, device=device),
            score_low and scored,
            scored,
        )


def _gather(state: PageState, tier: int, page: torch.Tensor) -> TierView:
    """Views of copies of pages [B, H, E], flat: [B * H * E, tokens, ...]. Whole pages are copied at once."""
    copies = state.pages.index_select(0, page.flatten())
    return TierView.of(copies, state.tiers[tier].layout, state.dtype)


def _logits(q: torch.Tensor, view: TierView) -> torch.Tensor:
    """q [B, H, G, D] float32 and gathered pages to unscaled logits [B, H, G, N], ``N = E * tokens``."""
    heads = q.shape[:2]

    def per_head(x: torch.Tensor) -> torch.Tensor:
        return x.float().reshape(*heads, -1, x.shape[-1])  # [B, H, N, .]

    if view.key_meta is None:
        return q @ per_head(view.keys).transpose(2, 3)
    out = q.new_zeros(())
    for p, plane in enumerate(planes(view.keys, view.layout.tier.k_bits)):
        step = plane.shape[-1]
        out = out + q[..., p * step : (p + 1) * step] @ per_head(plane).transpose(2, 3)
    scale, zero = per_head(view.key_meta).unbind(-1)  # [B, H, N]
    return out * scale.unsqueeze(2) + q.sum(3, keepdim=True) * zero.unsqueeze(2)


def _weighted_values(prob: torch.Tensor, view: TierView, valid: torch.Tensor) -> torch.Tensor:
    """prob [B, H, G, N], gathered pages and valid [B, H, N] to [B, H, G, v_head_dim].

    Slots that are not valid may hold any bytes, NaN among them, which a probability of 0 does not cancel.
    """
    heads = prob.shape[:2]

    def per_head(x: torch.Tensor) -> torch.Tensor:
        return x.float().reshape(*heads, -1, x.shape[-1])  # [B, H, N, .]

    if view.value_meta is None:
        return prob @ per_head(view.values).masked_fill(~valid.unsqueeze(3), 0.0)
    meta = per_head(view.value_meta).masked_fill(~valid.unsqueeze(3), 0.0)
    scale, zero = meta.unbind(-1)  # [B, H, N]
    scaled = prob * scale.unsqueeze(2)
    parts = [scaled @ per_head(plane) for plane in planes(view.values, view.layout.tier.v_bits)]
    return torch.cat(parts, dim=3) + prob @ zero.unsqueeze(3)


def decode_attention(
    state: PageState,
    layer: int,
    q: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    *,
    scores: StepScores | None = None,
    window: int = 0,
    sinks: int = 0,
    horizon: int = 0,
    every: int = 1,
    logit_cap: float = 0.0,
    reduce: str = "max",
    attention_span: int = 0,
    sink_logits: torch.Tensor | None = None,
    known_lse: torch.Tensor | None = None,
    row_windows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from each request's newest token (already appended, at position ``seq_lens - 1``).

    Args:
        q: [B, Hq, head_dim]. Query head ``h`` belongs to KV head ``h // (Hq / H)``.
        rows: [B] int64. seq_lens: [B] int64, the new token included.
        scores: where given, own tokens' scores are updated and the policy's searches are filled in, as far as it says.
        window, sinks: newest and first tokens that the policy must not touch.
        horizon: where given, a token with more later tokens than this has an exponential mean of the attention
            received, of weight ``1 / horizon`` for the newest, and not the mean over all of them.
        every: scores take in what the tokens at every Nth position give, counted N times; those
            before the ``every``-th, the ``2 * every``-th and so on leave them as they are.
        logit_cap: 0 for none, else logits become ``cap * tanh(logits / cap)``.
        reduce: ``max`` or ``mean``: what a token's score takes of the attention from a KV head's query heads.
        attention_span: newest tokens, the new one included, that are seen; 0 for all. Searches are for layers that
            see all.
        sink_logits: [Hq] of any float type: of each query head, the logit of a sink that joins the softmax and has no
            value.
        known_lse: [B, Hq] float32: attention is relative to this, and not to the log-sum-exp of what is stored.
        row_windows: [R] int32, of every row: a window of its own, or -1 for ``window``; None: no row has one.

    Returns:
        out [B, Hq, v_head_dim] in q's dtype, lse [B, Hq] float32 (natural logarithm, of a sink too). A head that sees
        no token (a row that lost its only page) gives zeros and -inf.
    """
    batch, q_heads, dim = q.shape
    assert not attention_span or scores is None, "nothing is searched for where tokens are out of its span"
    grouped = q.float().view(batch, state.num_heads, -1, dim) * sm_scale
    tables = [
        layer_table(state, rows, tier, layer, max_entries(state, rows, tier, layer)) for tier in range(len(state.tiers))
    ]
    gathered = [_gather(state, tier, table[0]) for tier, table in enumerate(tables)]
    logits, positions, valids = [], [], []
    for view, (page, lo, hi) in zip(gathered, tables, strict=True):
        position = view.positions[:].reshape(*page.shape, view.layout.tokens)  # [B, H, E, tokens]
        valid = ((position >= lo.unsqueeze(3)) & (position < hi.unsqueeze(3))).flatten(2)
        if attention_span:
            valid &= position.flatten(2) >= (seq_lens - attention_span).view(-1, 1, 1)
        tier_logits = _logits(grouped, view)
        if logit_cap:
            tier_logits = logit_cap * torch.tanh(tier_logits / logit_cap)
        logits.append(tier_logits.masked_fill(~valid.unsqueeze(2), float("-inf")))
        positions.append(position.flatten(2))
        valids.append(valid)
    joined = torch.cat(logits, dim=3)
    lse = joined.logsumexp(3)  # [B, H, G]
    if sink_logits is not None:
        lse = torch.logaddexp(lse, sink_logits.float().view(1, *lse.shape[1:]))
    if known_lse is not None:
        lse = known_lse.view(lse.shape)
    prob = (joined - lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(3)).exp()
    probs = prob.split([x.shape[3] for x in logits], dim=3)
    out = torch.zeros((), device=q.device)
    for p, view, valid in zip(probs, gathered, valids, strict=True):
        out = out + _weighted_values(p, view, valid)
    if scores is not None:
        windows = windows_of(row_windows, rows, window)
        shared_scores = len(tables) if scores.score_low else 1
        for tier, (p, position, valid) in enumerate(zip(probs[:shared_scores], positions, valids, strict=False)):
            page, old = tables[tier][0], gathered[tier].scores if scores.scored else None
            received = p.amax(2) if reduce == "max" else p.mean(2)
            _update_scores(
                state, layer, tier, rows, page, position, valid, old, received, seq_lens, scores, windows, sinks,
                horizon, every,
            )  # fmt: skip
    return out.reshape(batch, q_heads, -1).to(q.dtype), lse.view(batch, q_heads)


def windows_of(row_windows: torch.Tensor | None, rows: torch.Tensor, window: int) -> torch.Tensor:
    """[B, 1, 1] int64: the window of each of ``rows`` [B], its own or the usual ``window``."""
    if row_windows is None:
        return torch.full_like(rows, window).view(-1, 1, 1)
    own = row_windows.index_select(0, rows).long()
    return torch.where(own < 0, window, own).view(-1, 1, 1)


def _update_scores(
    state: PageState,
    layer: int,
    tier: int,
    rows: torch.Tensor,
    page: torch.Tensor,  # [B, H, E]
    position: torch.Tensor,  # [B, H, N]
    valid: torch.Tensor,  # [B, H, N]
    old: torch.Tensor | None,  # [B * H * E, tokens], scores before this step; None: none are kept
    received: torch.Tensor,  # [B, H, N]
    seq_lens: torch.Tensor,
    scores: StepScores,
    window: torch.Tensor,  # [B, 1, 1]
    sinks: int,
    horizon: int,
    every: int,
) -> None:
    """Running mean of the attention own tokens receive; then the candidate and the least significant."""
    view = state.tiers[tier]
    tokens = view.layout.tokens
    newest = (seq_lens - 1).view(-1, 1, 1)
    first = state.own_entry[rows, layer, :, tier].long().unsqueeze(2)  # [B, H, 1]
    entry = torch.arange(page.shape[2], device=page.device).expand_as(page)
    own = (entry >= first) & (entry < state.entries[rows, layer, :, tier].unsqueeze(2))
    own_token = own.repeat_interleave(tokens, dim=2) & valid
    new = torch.zeros_like(received)
    if old is not None:
        assert view.scores is not None, "steps update no scores of a tier that has none"
        count = (newest - position).clamp(min=1, max=horizon or None)
        old = old.reshape(position.shape)
        observed = (position < newest) & (newest % every == every - 1)
        new = torch.where(observed, old + (received - old) / (count / every).clamp(min=1), old)
        target = torch.where(own, page, state.scratch_page)
        view.scores[target] = torch.where(own_token, new, 0.0).unflatten(2, (-1, tokens))

    slot = torch.arange(position.shape[2], device=page.device) - first * tokens  # [B, H, N]
    movable = own_token & (position >= sinks)
    if tier == 0:
        leaving = movable & (position == newest - window)
        found = leaving.any(2)
        at = leaving.int().argmax(2, keepdim=True)
        scores.candidate_slot[:, layer] = torch.where(found, slot.gather(2, at).squeeze(2), EMPTY)
        scores.candidate_score[:, layer] = new.gather(2, at).squeeze(2)
    if old is None:
        return
    outside = movable & (position <= newest - window)
    ranked = new.masked_fill(~outside, float("inf"))
    if ranked.shape[2]:
        value, at = ranked.min(2, keepdim=True)
        found = value.isfinite()
        scores.least_slot[:, layer, :, tier] = torch.where(found, slot.gather(2, at), EMPTY).squeeze(2)
        scores.least_score[:, layer, :, tier] = value.squeeze(2)
    else:
        scores.least_slot[:, layer, :, tier] = EMPTY
