"""What a factor of a head's thresholds costs in error and takes in bytes, on one sequence of a prompt and a reply.

Every token is scored once. Those that are outside the window when the prompt ends are scored by the prompt, as in the
prompt phase. Their score is the mean attention from later prompt tokens, maximum over the query heads of the KV head,
and ``cuts.prompt_tiers`` sorts them into tiers. The others are scored when they leave the window, by the attention of
the ``window`` tokens behind them, as the generation phase first does. That it scores them again later is left out. A
text without a reply is all prompt.

The reply's queries (all queries, where there is no reply) see tokens outside their window as the tiers keep them, and
newer ones in the high tier. A prompt's own queries see nothing compressed, so they do not count.

The error is what reaches the residual stream: the head's change of the attention output, through its columns of the
output projection, squared, over the squared norm of the residual stream at that token. Raw attention outputs of heads
are not comparable, since the projection may amplify one and ignore another. After the norm that comes next, only the
change relative to the stream counts, and the stream grows from layer to layer. Errors of heads are added: their
products, which may have either sign, are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_diffkv.calibrate.heads.capture import LayerPass
from sglang_diffkv.kernels.cuts import Cuts, prompt_tiers
from sglang_diffkv.kernels.quantize.reference import NEW, dequantize, quantize, source_of
from sglang_diffkv.kernels.rotate.reference import Rotation, rotate
from sglang_diffkv.layout.page_format import RAW_BITS, SCORE_BYTES, SHORT_POSITION_BYTES, Tier
from sglang_diffkv.policies.base import Pointwise

QUERY_BLOCK = 256
PRUNED = 2


@dataclass(frozen=True)
class Rule:
    """The setting that factors are fitted at."""

    tiers: tuple[Tier, Tier]
    alpha_high: float
    alpha_low: float
    window: int
    sinks: int = 0
    rotate: str = "none"

    def scored_at(self, count: int, prompt: int, device: torch.device) -> torch.Tensor:
        """[N] int64: the last query that each token is scored by; beyond the sequence for one never scored."""
        position = torch.arange(count, device=device)
        return torch.where(position < prompt - self.window, prompt - 1, position + self.window)

    def classify(self, score: torch.Tensor, prompt: int, factor: float) -> torch.Tensor:
        """Tier of every token once it is scored, ``PRUNED`` for none: [H, N] from scores [H, N]."""
        high, low = (score.new_full((1, 1), alpha * factor) for alpha in (self.alpha_high, self.alpha_low))
        position = torch.arange(score.shape[1], device=score.device)
        # The prompt phase compares with the mean attention at the token, the generation phase with that of the moment.
        shared_by = torch.where(position < prompt - self.window, position, position + self.window)
        nowhere_near = score.shape[1] + self.window  # the end of the sequence: the window is not the tokens' affair
        tier = prompt_tiers(Cuts(high, low, window=0), score.unsqueeze(0), shared_by, nowhere_near, 2)[0]
        return tier.masked_fill(position < self.sinks, 0)


def measure(seen: LayerPass, prompt: int, rule: Rule, factors: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Errors, mean over the queries that count, and bytes at the end of the sequence: both [H, factors] float64 on the
    CPU. ``prompt``: how many of the N tokens are the prompt."""
    q, k, v = seen.q, seen.k, seen.v.float()
    rotation = Rotation.named(rule.rotate)
    if rotation.keys:
        q, k = rotate(q, k)
    heads, count, _ = k.shape
    grouped = q.float().unflatten(0, (heads, -1)) * seen.scale  # [H, G, N, D]
    score = significance(grouped, k.float(), rule.scored_at(count, prompt, k.device))
    tiers = torch.stack([rule.classify(score, prompt, factor) for factor in factors])  # [F, H, N]
    stored_values = _stored(rotate(v)[0] if rotation.values else v, rule.tiers, "v_bits", turned=rotation.values)
    stored_keys = _stored(k, rule.tiers, "k_bits", turned=rotation.keys)
    stored = stored_keys, rotate(*stored_values) if rotation.values else stored_values
    gram = _gram(seen.out_weight, heads)
    energy = seen.stream.float().square().sum(1)  # [N]
    error = torch.zeros(heads, len(factors), dtype=torch.float64, device=k.device)
    queries = counted(count, prompt, rule.window)
    for first in range(queries.start, queries.stop, QUERY_BLOCK):
        query = torch.arange(first, min(first + QUERY_BLOCK, queries.stop), device=k.device)
        block, shown = grouped[:, :, query], _causal(query, count)
        exact = _attend(block @ k.float().mT.unsqueeze(1), shown) @ v.unsqueeze(1)  # [H, G, n, Dv]
        logits = [block @ keys.mT.unsqueeze(1) for keys in stored[0]]
        old = query.unsqueeze(1) - torch.arange(count, device=k.device) >= rule.window  # [n, N]
        for number, tier in enumerate(tiers):
            low = ((tier == 1).unsqueeze(1) & old).unsqueeze(1)  # [H, 1, n, N]
            gone = ((tier == PRUNED).unsqueeze(1) & old).unsqueeze(1)
            prob = _attend(torch.where(low, logits[1], logits[0]), shown & ~gone)
            high_part, low_part = (values.unsqueeze(1) for values in stored[1])
            out = prob.masked_fill(low, 0.0) @ high_part + prob.masked_fill(~low, 0.0) @ low_part
            change = (out - exact).transpose(1, 2).flatten(2)  # [H, n, G * Dv]
            square = ((change @ gram) * change).sum(2) / energy[query]  # [H, n]
            error[:, number] += square.double().sum(1)
    size = _bytes(tiers, rule, k.shape[2], v.shape[2])
    return error.cpu() / max(1, len(queries)), size.cpu()


def counted(count: int, prompt: int, window: int) -> range:
    """The queries whose errors count: of the reply, or of a text without one, with a token outside the window."""
    return range(max(window, prompt if prompt < count else 0), count)


def significance(grouped: torch.Tensor, k: torch.Tensor, scored_at: torch.Tensor) -> torch.Tensor:
    """[H, N]: column sums of the attention from the queries behind a token up to ``scored_at`` [N], maximum over the
    group, over the number of those queries. grouped: scaled queries [H, G, N, D]. k: [H, N, D]."""
    heads, group, count, _ = grouped.shape
    position = torch.arange(count, device=k.device)
    received = grouped.new_zeros(heads, group, count)
    for first in range(0, count, QUERY_BLOCK):
        query = position[first : first + QUERY_BLOCK]
        prob = _attend(grouped[:, :, query] @ k.mT.unsqueeze(1), _causal(query, count))
        scores_it = (query.unsqueeze(1) > position) & (query.unsqueeze(1) <= scored_at)  # [n, N]
        received += prob.masked_fill(~scores_it, 0.0).sum(2)
    return received.amax(1) / (scored_at.clamp(max=count - 1) - position).clamp(min=1)


def _causal(query: torch.Tensor, count: int) -> torch.Tensor:
    return torch.arange(count, device=query.device) <= query.unsqueeze(1)  # [n, N]


def _attend(logits: torch.Tensor, shown: torch.Tensor) -> torch.Tensor:
    return logits.masked_fill(~shown, float("-inf")).softmax(-1)


def _stored(x: torch.Tensor, tiers: Sequence[Tier], bits: str, *, turned: bool) -> list[torch.Tensor]:
    """``x`` [H, N, dim] as each tier gives it back, float32; the low tier is made of what the high one has. ``turned``:
    whether it is rotated."""
    found, source = [x.float()], NEW
    for tier in tiers:
        width = getattr(tier, bits)
        before = source_of(width, source, turned=turned)
        found.append(found[-1] if width == RAW_BITS else dequantize(*quantize(found[-1], width, before), width))
        source = width
    return found[1:]


def _gram(out_weight: torch.Tensor, heads: int) -> torch.Tensor:
    """[H, G * Dv, G * Dv]: ``x @ gram @ x`` is the squared norm of what a group's output x adds to the stream."""
    parts = out_weight.float().unflatten(1, (heads, -1)).transpose(0, 1)  # [H, hidden, G * Dv]
    return parts.mT @ parts


def _bytes(tiers: torch.Tensor, rule: Rule, dim: int, v_dim: int) -> torch.Tensor:
    """[H, factors] float64: bytes of a head's tokens, positions of 16 bits and scores that are read included, without
    free slots of pages."""
    count = tiers.shape[2]
    window = torch.arange(count, device=tiers.device) >= count - rule.window
    scored = Pointwise(rule.alpha_high, rule.alpha_low).scored_tiers(len(rule.tiers))
    sizes = [
        tier.token_bytes(dim, v_dim, SCORE_BYTES if number < scored else 0, SHORT_POSITION_BYTES)
        for number, tier in enumerate(rule.tiers)
    ]
    sizes.append(0)
    table = torch.tensor(sizes, dtype=torch.float64, device=tiers.device)
    return table[tiers.masked_fill(window, 0)].sum(2).T
