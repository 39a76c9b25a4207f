"""Extend (prefill) attention: new tokens among themselves exactly, earlier tokens from packed pages."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sglang_diffkv.kernels.append.reference import read_tokens
from sglang_diffkv.kernels.table import layer_table, max_entries
from sglang_diffkv.layout.state import PageState

QUERY_BLOCK = 256
OBSERVED = 64
"""What others' queries say of a shared token counts as this many queries at most when a request scores it anew."""
MOST_NODES = 64
"""New tokens of a request at most where each says by a bit which of them it sees."""


@dataclass(frozen=True)
class Observers:
    """Positions whose queries count: all from ``since`` on, and of those before each ``every``-th, which stands for as
    many; 0 for none."""

    since: int
    every: int = 0

    def weight(self, position: torch.Tensor) -> torch.Tensor:
        """For how many queries that of each position counts, any shape."""
        weight = (position >= self.since).long()
        if self.every:
            weight += self.every * ((position < self.since) & (position % self.every == self.every - 1))
        return weight

    def before(self, position: torch.Tensor) -> torch.Tensor:
        """The sum of weights before each of ``position``."""
        count = (position - self.since).clamp(min=0)
        return count + position.clamp(max=self.since) // self.every * self.every if self.every else count


def extend_attention(
    state: PageState,
    layer: int,
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: torch.Tensor,
    extend_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    sm_scale: float,
    *,
    update_scores: bool = False,
    logit_cap: float = 0.0,
    shared_scores: dict[int, torch.Tensor] | None = None,
    observe_from: torch.Tensor | None = None,
    observe_every: int | torch.Tensor = 0,
    reduce: str = "max",
    attention_span: int = 0,
    sink_logits: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    ancestors: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of each request's new tokens, which are already appended to its pages, or will be later where no
    scores are updated.

    Args:
        q: [tokens, Hq, head_dim], requests one after the other. key: [tokens, H, head_dim].
        value: [tokens, H, v_head_dim]. rows, extend_lens, prefix_lens: [B] int64; new token ``j`` of
            request ``b`` is at position ``prefix_lens[b] + j``.
        update_scores: record how much attention each own token received from the new tokens, in the tiers that have
            scores; the high one does. These are column sums without the token's own query, joined over query heads as
            ``reduce`` says.
        shared_scores: request's number -> [L, H, n] float32: with ``update_scores``, the same for the first n tokens
            of the request, which it shares: their mean scores go there and not into the pages.
        observe_from: [B] int64: queries at such positions and later ones count, in this call and as the observers of
            the means so far; None for all. observe_every: of those before, every Nth counts, N times (``Observers``):
            of all requests, or of each, [B]; 0: none.
        reduce: ``max`` or ``mean``.
        attention_span: newest tokens, its own included, that a query sees; 0 for all. Scores are for layers that see
            all.
        sink_logits: [Hq] of any float type: of each query head, the logit of a sink that joins the softmax and has no
            value.
        lse: [tokens, Hq] float32, where given: gets the log-sum-exp of each query's logits, base 2.
        ancestors: [tokens] int64, of trees of at most ``MOST_NODES`` new tokens a request: bit ``j`` is set where a
            token sees its request's new token ``j``. It is set for the token itself, and for none behind it. None
            where each sees all before it. Not with scores or a span.

    Returns:
        [tokens, Hq, v_head_dim] in q's dtype.
    """
    assert not attention_span or not update_scores, "no scores are kept where tokens are out of its span"
    assert ancestors is None or not (update_scores or attention_span), "a tree has neither"
    outs, start = [], 0
    since = [0] * len(rows) if observe_from is None else observe_from.tolist()
    every = [observe_every] * len(rows) if isinstance(observe_every, int) else observe_every.tolist()
    watch = [Observers(*x) for x in zip(since, every, strict=True)]
    lens = zip(rows.tolist(), extend_lens.tolist(), prefix_lens.tolist(), watch, strict=True)
    for number, (row, count, prefix, observers) in enumerate(lens):
        end = start + count
        out, found, received = _attend(
            state,
            layer,
            q[start:end],
            key[start:end],
            value[start:end],
            row,
            prefix,
            sm_scale,
            logit_cap,
            observers,
            reduce,
            attention_span,
            sink_logits,
            None if ancestors is None else ancestors[start:end],
        )
        outs.append(out)
        if lse is not None:
            lse[start:end] = found / math.log(2)
        if update_scores:
            _record(state, layer, row, prefix, count, received, observers)
            if shared_scores and number in shared_scores:
                _score(state, layer, row, prefix, count, received, shared_scores[number][layer], observers)
        start = end
    return torch.cat(outs) if outs else q.new_zeros(0, q.shape[1], value.shape[2])


def _attend(
    state: PageState,
    layer: int,
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    row: int,
    prefix: int,
    sm_scale: float,
    logit_cap: float,
    observers: Observers,
    reduce: str,
    attention_span: int,
    sink_logits: torch.Tensor | None,
    ancestors: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """One request: out [n, Hq, v_dim]; lse [n, Hq]; received attention of [each tier's page slots..., new tokens], each
    [H, .]."""
    count, q_heads, dim = q.shape
    rows = torch.tensor([row], device=q.device)
    keys, values, valid, positions = [], [], [], []
    for tier, view in enumerate(state.tiers):
        width = max_entries(state, rows, tier, layer) if prefix else 0
        page, lo, hi = (x[0] for x in layer_table(state, rows, tier, layer, width))  # [H, E]
        slot = torch.arange(view.layout.tokens, device=q.device).expand(*page.shape, -1)
        page = page.unsqueeze(2).expand(slot.shape)
        tier_keys, tier_values = read_tokens(view, page, slot)
        position = view.positions[page, slot]
        seen = (position >= lo.unsqueeze(2)) & (position < hi.unsqueeze(2)) & (position < prefix)
        keys.append(tier_keys.flatten(1, 2))
        # Slots that are not seen may hold any bytes; a probability of 0 does not cancel a NaN.
        values.append(tier_values.masked_fill(~seen.unsqueeze(3), 0.0).flatten(1, 2))
        valid.append(seen.flatten(1))
        positions.append(position.flatten(1))
    sizes = [x.shape[1] for x in valid] + [count]
    keys.append(key.float().transpose(0, 1))
    values.append(value.float().transpose(0, 1))
    all_keys = torch.cat(keys, 1).transpose(1, 2).unsqueeze(1)  # [H, 1, D, M]
    all_values = torch.cat(values, 1).unsqueeze(1)  # [H, 1, M, Dv]
    paged, paged_position = torch.cat(valid, 1), torch.cat(positions, 1)  # [H, M - n]
    grouped = q.float().view(count, state.num_heads, -1, dim).permute(1, 2, 0, 3) * sm_scale  # [H, G, n, D]
    column = torch.arange(count, device=q.device)
    received = torch.zeros(*grouped.shape[:2], sum(sizes), device=q.device)
    outs, norms = [], []
    for first in range(0, count, QUERY_BLOCK):
        block = grouped[:, :, first : first + QUERY_BLOCK]
        query = first + torch.arange(block.shape[2], device=q.device)
        logits = block @ all_keys  # [H, G, n', M]
        if logit_cap:
            logits = logit_cap * torch.tanh(logits / logit_cap)
        causal = column <= query.unsqueeze(1)  # [n', n]
        if ancestors is not None:
            causal = ((ancestors[query].unsqueeze(1) >> column) & 1).bool()
        stored = paged.unsqueeze(1).expand(-1, len(query), -1)  # [H, n', M - n]
        if attention_span:
            oldest = query.unsqueeze(1) - attention_span + 1
            causal &= column >= oldest
            stored = stored & (paged_position.unsqueeze(1) >= prefix + oldest)
        shown = torch.cat([stored, causal.expand(paged.shape[0], -1, -1)], 2)
        logits = logits.masked_fill(~shown.unsqueeze(1), float("-inf"))
        if sink_logits is not None:
            sink = sink_logits.float().view(*logits.shape[:2], 1, 1).expand(*logits.shape[:3], 1)
            logits = torch.cat([logits, sink], 3)
        norms.append(logits.logsumexp(3))
        prob = logits.softmax(3)[..., : shown.shape[2]]
        outs.append(prob @ all_values)
        own = prob[..., paged.shape[1] :]
        diagonal = own.gather(3, query.view(1, 1, -1, 1).expand(*own.shape[:3], 1)).squeeze(3)
        if prefix + first < observers.since:
            weight = observers.weight(prefix + query)
            prob = prob * weight.view(1, 1, -1, 1)
            diagonal = diagonal * weight
        received += prob.sum(2)
        received[..., paged.shape[1] + query] -= diagonal
    out = torch.cat(outs, 2).permute(2, 0, 1, 3).reshape(count, q_heads, -1).to(q.dtype)
    lse = torch.cat(norms, 2).permute(2, 0, 1).reshape(count, q_heads)
    received = received.amax(1) if reduce == "max" else received.mean(1)
    return out, lse, list(received.split(sizes, 1))


def _record(
    state: PageState, layer: int, row: int, prefix: int, count: int, received: list[torch.Tensor], observers: Observers
) -> None:
    """Fold the column sums into the mean scores of own earlier tokens, and set those of the new tokens."""
    rows = torch.tensor([row], device=state.device)
    before, after = observers.before(torch.tensor([prefix, prefix + count], device=state.device))
    for tier, view in enumerate(state.tiers):
        width = received[tier].shape[1] // view.layout.tokens
        if not width or view.scores is None:
            continue
        page = layer_table(state, rows, tier, layer, width)[0][0]  # [H, E]
        position = view.positions[page]  # [H, E, tokens]
        entry = torch.arange(width, device=page.device)
        own = entry >= state.own_entry[row, layer, :, tier].unsqueeze(1)
        own &= entry < state.entries[row, layer, :, tier].unsqueeze(1)
        earlier = own.unsqueeze(2) & (position >= 0) & (position < prefix)
        shared_scores = (before - observers.before(position + 1)).clamp(min=0)
        total = view.scores[page] * shared_scores + received[tier].unflatten(1, (width, -1))
        mean = total / (shared_scores + after - before).clamp(min=1)
        target = page.unsqueeze(2).expand(position.shape)[earlier]
        slot = torch.arange(view.layout.tokens, device=page.device).expand(position.shape)[earlier]
        view.scores[target, slot] = mean[earlier]
    view = state.tiers[0]
    assert view.scores is not None, "the high tier has no scores to update"
    tokens = view.layout.tokens
    offset = torch.arange(count, device=state.device)
    slot = state.write_slot[row, layer].long().unsqueeze(1) + offset  # [H, n]
    table = layer_table(state, rows, 0, layer, max_entries(state, rows, 0, layer))[0][0]
    page = table.gather(1, state.own_entry[row, layer, :, 0].long().unsqueeze(1) + slot // tokens)
    view.scores[page, slot % tokens] = received[-1] / (after - observers.before(prefix + offset + 1)).clamp(min=1)


def _score(
    state: PageState,
    layer: int,
    row: int,
    prefix: int,
    count: int,
    received: list[torch.Tensor],
    shared_scores: torch.Tensor,
    observers: Observers,
) -> None:
    """Fold the column sums into ``shared_scores`` [H, n], mean scores of the first n tokens. Where it holds none yet,
    the pages' own scores stand for ``OBSERVED`` queries at most."""
    rows, shared = torch.tensor([row], device=state.device), shared_scores.shape[1]
    ends = torch.tensor([shared, prefix, prefix + count], device=state.device)
    at_shared, before, after = observers.before(ends)
    for tier, view in enumerate(state.tiers):
        width = received[tier].shape[1] // view.layout.tokens
        if not width or view.scores is None:
            continue
        page, lo, hi = (x[0] for x in layer_table(state, rows, tier, layer, width))  # [H, E]
        position = view.positions[page]  # [H, E, tokens]
        known = (position >= lo.unsqueeze(2)) & (position < hi.clamp(max=shared).unsqueeze(2))
        at = position[known].long()
        head = torch.arange(page.shape[0], device=page.device).view(-1, 1, 1).expand(position.shape)[known]
        so_far = shared_scores[head, at]
        so_far = torch.where(so_far.isnan(), view.scores[page][known], so_far)
        seen = (at_shared - observers.before(at + 1)).clamp(0, OBSERVED) + before - at_shared
        total = so_far * seen + received[tier].unflatten(1, (width, -1))[known]
        shared_scores[head, at] = total / (seen + after - before).clamp(min=1)
