"""What a compressed cache would do to attention, in plain PyTorch and without pages: keys and values are rounded as a
tier rounds them where the policy would have put them there. For programs that read a text once.

The text stands for one request: a prompt that the prefix cache had, a new prompt behind it, and a reply. Queries of the
first see everything as the model computed it. Those of the new prompt see the cached one as it is stored, and each
other as computed. Those of the reply see everything as it is stored when their step comes.

Scores are means over all later queries, as of an ``observe_every`` of 1, and a token is looked at once: at the end of
its prompt, or when it leaves the window. Only what a policy's thresholds make of a layer's tiers is emulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from sglang_diffkv.attention.whole import Sight
from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.kernels.quantize.reference import NEW, dequantize, quantize, source_of
from sglang_diffkv.kernels.rotate.fitted import NOT_FITTED, FittedTransform
from sglang_diffkv.kernels.rotate.reference import NO_ROTATION, Rotation, rotated
from sglang_diffkv.layout.page_format import RAW_BITS, Tier
from sglang_diffkv.noise_shaping import NoiseShaping
from sglang_diffkv.policies.base import Policy
from sglang_diffkv.policies.diffkv import DiffKVPolicy

QUERIES = 256
"""Whose attention is worked out at once."""
ROWS = 32
"""Distributions that are compared at once: vocabularies are large."""
LEAST_WEIGHT, LARGEST_WEIGHT = 1e-30, 256.0
OTHER_SCALE = 0.75
"""Between powers of two: numbers that are rounded to a dtype have other roundings at this scale."""
LARGEST_E4M3 = 448.0
"""Larger numbers become this one. Stock SGLang's cast makes them NaN, so its loss is not above what is found here."""


@dataclass(frozen=True)
class Span:
    """Where the parts of a text end.

    Attributes:
        cached: tokens of the prompt that the prefix cache had. prompt: those, and the tokens of the new prompt.
    """

    cached: int
    prompt: int


@dataclass(frozen=True)
class Forms:
    """Keys or values [H, N, D] float32 as computed, and as each tier stores them, the high one first. Each has been
    multiplied by the fitted matrices, rounded, and turned back."""

    computed: torch.Tensor
    stored: tuple[torch.Tensor, ...]

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Forms:
        """All of them changed."""
        return Forms(change(self.computed), tuple(map(change, self.stored)))


@dataclass(frozen=True)
class Stored:
    """How tokens are stored, and attend.

    Attributes:
        tiers: high first; a layer may use some of them. policy: which of several a token goes to.
        rotation: before rounding. means: [layers, H, D], taken off keys before they are rounded; None for none.
        fitted: matrices that come before the rotation, of each KV head, in the model's dtype. Before any that are no
            rotations the means come off.
        only: layers in which tokens are stored so, to be told what these lose; others attend as computed. None for all.
        turned: whether keys, and values, count as rotated; None where ``rotation`` says so.
        prompts_in_8_bits: queries of prompts attend in e4m3, as with ``"prefill": "fa3_fp8"``, however short they are.
    """

    tiers: tuple[Tier, ...]
    policy: Policy | None = None
    rotation: Rotation = NO_ROTATION
    means: torch.Tensor | None = None
    fitted: FittedTransform = NOT_FITTED
    only: frozenset[int] | None = None
    turned: tuple[bool, bool] | None = None
    prompts_in_8_bits: bool = False

    def __post_init__(self) -> None:
        policy = self.policy
        if len(self.tiers) > 1 and not isinstance(policy, DiffKVPolicy):
            raise ValueError("of several tiers DiffKV's thresholds are emulated, and nothing else")
        dropped = policy is not None and len(self.tiers) == 1 and policy.compresses
        if dropped or (isinstance(policy, DiffKVPolicy) and (policy.prompt.prunes or policy.head_scale)):
            raise ValueError("policies that drop tokens, and factors of heads, are not emulated")

    def in_layer(self, layer: int) -> Stored:
        """What a layer does of it, by thresholds of its own and in the tiers that it uses. ``layer``: as of
        ``attend``."""
        if self.only is not None and layer not in self.only:
            return AS_COMPUTED
        policy = self.policy
        if len(self.tiers) <= 2 or not isinstance(policy, DiffKVPolicy):
            return self
        used = policy.prompt.used_tiers(len(self.tiers), layer)
        between = [x[layer] if isinstance(x, tuple) else x for x in policy.alpha_between]
        ends = tuple(between[tier - 1] for tier in used[1:-1])  # of the tiers that are neither first nor last
        here = replace(policy, alpha_between=ends) if len(used) > 1 else None
        return replace(self, tiers=tuple(self.tiers[x] for x in used), policy=here)

    @property
    def scored(self) -> DiffKVPolicy | None:
        """The policy that places tokens, None where all have one tier."""
        return self.policy if len(self.tiers) > 1 and isinstance(self.policy, DiffKVPolicy) else None

    @property
    def rounds_nothing(self) -> bool:
        """Whether all tokens attend as computed, in prompts and replies alike."""
        exact = all(tier.is_raw for tier in self.tiers) and type(self) is Stored and not self.prompts_in_8_bits
        return exact and self.rotation == NO_ROTATION and self.means is None and self.fitted is NOT_FITTED

    @property
    def choosing(self) -> tuple[bool, bool]:
        """Whether codes of keys, and of values, that go down choose their range."""
        return (self.rotation.keys, self.rotation.values) if self.turned is None else self.turned

    def keys(self, key: torch.Tensor, layer: int) -> Forms:
        """``key`` [H, N, D], in the model's dtype. ``layer``: its place in ``means`` and ``fitted``."""
        means = None if self.means is None else self.means[layer].to(key.device).float()[:, None]
        pair, fitted = None, self.fitted
        if fitted.keys is not None:
            undone = fitted.keys if fitted.queries is None else fitted.queries
            pair = fitted.keys[layer].to(key.device), undone[layer].mT.to(key.device)
        bits, turned = [x.k_bits for x in self.tiers], self.rotation.keys
        if means is None or not fitted.stretches_keys:
            return self._forms(key, bits, turned=turned, means=means, pair=pair, chooses=self.choosing[0])
        off = means.to(key.dtype)
        found = self._forms(key - off, bits, turned=turned, means=None, pair=pair, chooses=self.choosing[0])
        return found.each(lambda x: x + off.float())

    def values(self, value: torch.Tensor, layer: int) -> Forms:
        """``value`` [H, N, D], in the model's dtype. ``layer``: its place in ``fitted``."""
        pair, fitted = None, self.fitted
        if fitted.values is not None:
            undone = fitted.values.mT if fitted.outputs is None else fitted.outputs
            pair = fitted.values[layer].to(value.device), undone[layer].to(value.device)
        bits, form = [x.v_bits for x in self.tiers], {"turned": self.rotation.values, "chooses": self.choosing[1]}
        return self._forms(value, bits, **form, means=None, pair=pair)

    def asked(self, query: torch.Tensor, layer: int) -> torch.Tensor:
        """``query`` [Hq, N, D], in the model's dtype: float32, as it is rounded behind ``fitted``, and turned back."""
        fitted = self.fitted
        if fitted.keys is None:
            return query.float()
        undone = (fitted.keys if fitted.queries is None else fitted.queries)[layer]
        back = torch.linalg.inv(undone.double()).float()
        there, back = (x.to(query.device).repeat_interleave(query.shape[0] // x.shape[0], 0) for x in (undone, back))
        return (query @ there).float() @ back

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """``query`` as it meets stored keys."""
        return query

    def weights(self, weights: torch.Tensor) -> torch.Tensor:
        """Attention ``weights`` [..., N] of stored tokens, 0 for others, as they meet values."""
        return weights

    def _forms(
        self, x: torch.Tensor, bits: list[int], *, turned: bool, means: torch.Tensor | None,
        pair: tuple[torch.Tensor, torch.Tensor] | None, chooses: bool,
    ) -> Forms:  # fmt: skip
        """``pair``: the matrix that ``x`` is multiplied by, and the one that undoes it."""
        stored, off = x, means
        if pair is not None:
            stored, off = x @ pair[0], None if means is None else means @ pair[0].float()
        computed = stored.float() if pair is None else stored.float() @ pair[1].float()
        stored = rotated(stored) if turned else stored.float()
        if off is not None:
            off = (rotated(off) if turned else off).to(x.dtype).float()
            stored = stored - off
        high = _rounded(stored, bits[0])
        lower = (_rounded(high, x, source_of(x, bits[0], turned=chooses)) for x in bits[1:])

        def back(y: torch.Tensor) -> torch.Tensor:
            y = y if off is None else y + off
            y = rotated(y) if turned else y
            return y if pair is None else y @ pair[1].float()

        return Forms(computed, tuple(map(back, (high, *lower))))


AS_COMPUTED = Stored((Tier(RAW_BITS, RAW_BITS),))
"""Nothing is rounded: what others are compared with, by the same arithmetic."""


class Fp8(Stored):
    """Stock SGLang's ``fp8_e4m3`` without scales, for comparison. As in its Triton kernels and in FlashAttention-3,
    queries and attention weights are rounded too where tokens are stored. New tokens of a prompt see each other as
    computed, as Triton's do; with ``prompts_in_8_bits`` as by FlashAttention-3, which loses more there."""

    def __init__(self, *, prompts_in_8_bits: bool = False) -> None:
        super().__init__((Tier(8, 8),), prompts_in_8_bits=prompts_in_8_bits)

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        return _as_e4m3(query)

    def weights(self, weights: torch.Tensor) -> torch.Tensor:
        """FlashAttention-3 scales a row so that its largest weight is ``LARGEST_WEIGHT``; Triton's kernels do not, and
        lose small weights."""
        return _weights_in_8_bits(weights)

    def _forms(self, x: torch.Tensor, bits: list[int], **form: Any) -> Forms:
        return Forms(x.float(), (_as_e4m3(x),))


class RoundedAgain(Stored):
    """Nothing is stored in fewer bits, but keys and values are rounded to the model's dtype once more. In bfloat16 any
    change, however small, makes all that follows round otherwise. So this is what every way to store loses beside what
    it loses itself."""

    def __init__(self) -> None:
        super().__init__((Tier(RAW_BITS, RAW_BITS),))

    def _forms(self, x: torch.Tensor, bits: list[int], **form: Any) -> Forms:
        again = (x.float() * OTHER_SCALE).to(x.dtype).float() / OTHER_SCALE
        return Forms(again, (again,))


def _weights_in_8_bits(weights: torch.Tensor) -> torch.Tensor:
    """As FlashAttention-3 rounds a row's attention weights."""
    scale = weights.amax(-1, keepdim=True).clamp(min=LEAST_WEIGHT) / LARGEST_WEIGHT
    return _as_e4m3(weights / scale) * scale


def _as_e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.float().clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn).float()


def stored_of(
    config: DiffKVConfig, means: torch.Tensor | None, shaping: NoiseShaping | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Stored:  # fmt: skip
    """How a server with this configuration stores tokens. Raises ValueError for what is not emulated.

    Args:
        means: of the keys, if it takes any off. shaping: of its model, if it shapes noise. dtype: of the model.
    """
    if config.key_rotation is not None or config.value_rotation is not None:
        raise ValueError("fitted rotations are not emulated")
    taken = means if config.key_means is not None else None
    plain = Stored(config.parsed_tiers, config.build_policy(), config.rotation, taken, turned=config.turned)
    if config.noise_shaping is None or shaping is None:
        return plain
    fitted = shaping.transform(dtype, "cpu", config.rotation)
    return replace(plain, rotation=shaping.left_of(config.rotation), fitted=fitted)


def _rounded(x: torch.Tensor, bits: int, source_bits: int = NEW) -> torch.Tensor:
    """Vectors [..., D] float32 as a tier stores them."""
    return x if bits == RAW_BITS else dequantize(*quantize(x, bits, source_bits), bits)


@dataclass(frozen=True)
class _Attended:
    """What a part of a text attends by. queries: [H, query heads of each, N, D]. eight_bits: whether attention weights
    are rounded too."""

    queries: torch.Tensor
    keys: Forms
    values: Forms
    eight_bits: bool = False

    def in_8_bits(self) -> _Attended:
        keys, values = (x.each(_as_e4m3) for x in (self.keys, self.values))
        return _Attended(_as_e4m3(self.queries), keys, values, eight_bits=True)

    def rounded(self, weights: torch.Tensor) -> torch.Tensor:
        return _weights_in_8_bits(weights) if self.eight_bits else weights


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, layer: int, stored: Stored, span: Span,
    sight: Sight,
) -> torch.Tensor:  # fmt: skip
    """Attention of one sequence over what is stored of it.

    Args:
        query: [Hq, N, D]. key, value: [H, N, D], with any whole number of query heads to a KV head.
        layer: its place among the layers that have pages. sight: without attention sinks.

    Returns:
        [N, Hq, D], in the queries' dtype.
    """
    assert sight.sinks is None, "attention sinks are not emulated"
    stored, (heads, tokens) = stored.in_layer(layer), key.shape[:2]
    queries = stored.asked(query, layer).view(heads, -1, *query.shape[1:])  # [H, G, N, D]
    keys, values = stored.keys(key, layer), stored.values(value, layer)
    policy, least = stored.scored, tokens if stored.scored else span.cached
    out = torch.empty(*queries.shape[:3], value.shape[2], device=key.device)
    if stored.rounds_nothing:
        for rows, logits in _logits(queries, keys.computed, scale, sight, slice(0, tokens)):
            out[:, :, rows] = logits.softmax(-1) @ values.computed[:, None]
        return out.flatten(0, 1).transpose(0, 1).to(query.dtype)
    received = torch.zeros(*queries.shape[:3], device=key.device)  # [H, G, N]
    ends = None if policy is None else evidence_ends(tokens, policy.window, span, key.device)
    of_replies = _Attended(queries, keys, values)
    of_prompts = of_replies.in_8_bits() if stored.prompts_in_8_bits else of_replies
    for attended, within in ((of_prompts, slice(0, min(span.prompt, least))), (of_replies, slice(span.prompt, least))):
        for rows, logits in _logits(attended.queries, attended.keys.computed, scale, sight, within):
            weights = logits.softmax(-1)
            out[:, :, rows] = attended.rounded(weights) @ attended.values.computed[:, None]
            if ends is not None:
                row = torch.arange(rows.start, rows.stop, device=key.device)[:, None]
                column = torch.arange(tokens, device=key.device)
                received += (weights * ((row > column) & (row <= ends))).sum(2)
    places = None if policy is None or ends is None else placed(received, policy, ends, span)
    for attended, within in ((of_prompts, slice(span.cached, span.prompt)), (of_replies, slice(span.prompt, tokens))):
        for rows, computed in _logits(attended.queries, attended.keys.computed, scale, sight, within):
            met, seen_by = stored.queries(attended.queries[:, :, rows]), _Seen(rows, span, places, ends)
            fresh, *rest = _softmax_as_stored(computed, met, attended.keys, scale, sight, seen_by)
            seen = map(attended.rounded, (fresh, *map(stored.weights, rest)))
            forms = (attended.values.computed, *attended.values.stored)
            out[:, :, rows] = torch.stack([part @ x[:, None] for part, x in zip(seen, forms, strict=True)]).sum(0)
    return out.flatten(0, 1).transpose(0, 1).to(query.dtype)


def evidence_ends(tokens: int, window: int, span: Span, device: torch.device) -> torch.Tensor:
    """[tokens] int64: the last query whose attention a token's score has when it is looked at."""
    position = torch.arange(tokens, device=device)
    ends = position + window
    for end in (span.prompt, span.cached):
        ends = torch.where(position < end - window, torch.full_like(ends, end - 1), ends)
    return ends


def placed(received: torch.Tensor, policy: DiffKVPolicy, ends: torch.Tensor, span: Span) -> torch.Tensor:
    """[H, N] int64: the tier of each token once it is looked at, 0 for the high one.

    Args:
        received: [H, query heads of each, N], sums of the attention that each token got. ends: of ``evidence_ends``.
    """
    position = torch.arange(ends.shape[0], device=ends.device)
    scores = (received / (ends - position)).amax(1)
    length = torch.where(position < span.prompt - policy.window, position, ends) + 1  # of a prompt: up to the token
    alphas = [policy.alpha_high]
    for alpha in policy.alpha_between:
        assert not isinstance(alpha, tuple), "a layer has thresholds of its own"
        alphas.append(alpha)
    below = [scores < alpha / length for alpha in alphas]
    return torch.stack(below).sum(0) * (position >= policy.sinks)


@dataclass(frozen=True)
class _Seen:
    """In which form queries see tokens."""

    rows: slice
    span: Span
    places: torch.Tensor | None
    ends: torch.Tensor | None

    def masks(self, tokens: int, tiers: int, device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Which tokens are seen as computed [M, N], and which as each of the tiers but the first stores them
        [H, 1, M, N]."""
        row = torch.arange(self.rows.start, self.rows.stop, device=device)[:, None]
        computed = (row < self.span.prompt) & (torch.arange(tokens, device=device) >= self.span.cached)
        if self.places is None or self.ends is None:
            return computed, []
        looked_at = (row > self.ends) & ~computed
        return computed, [((self.places == tier)[:, None] & looked_at)[:, None] for tier in range(1, tiers)]


def _softmax_as_stored(
    computed: torch.Tensor, queries: torch.Tensor, keys: Forms, scale: float, sight: Sight, seen: _Seen
) -> tuple[torch.Tensor, ...]:
    """Attention weights [H, G, M, N] of tokens that are seen as computed, and as each tier stores them: each 0 where a
    token is seen otherwise. ``computed``: the logits of keys as computed."""
    high, *lower = keys.stored
    as_computed, as_lower = seen.masks(computed.shape[-1], len(keys.stored), computed.device)
    hidden = torch.isneginf(computed)
    logits = torch.where(as_computed, computed, _capped(queries @ high[:, None].mT * scale, sight))
    for mask, form in zip(as_lower, lower, strict=True):
        logits = torch.where(mask, _capped(queries @ form[:, None].mT * scale, sight), logits)
    weights = logits.masked_fill(hidden, float("-inf")).softmax(-1)
    in_high = weights * ~as_computed
    for mask in as_lower:
        in_high = in_high * ~mask
    return (weights * as_computed, in_high, *(weights * mask for mask in as_lower))


def _logits(
    queries: torch.Tensor, keys: torch.Tensor, scale: float, sight: Sight, within: slice
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Some queries at a time: which, and their logits [H, G, M, N], -inf where a token is not seen."""
    column = torch.arange(keys.shape[1], device=keys.device)
    for first in range(within.start, within.stop, QUERIES):
        rows = slice(first, min(first + QUERIES, within.stop))
        row = column[rows, None]
        hidden = column > row
        if sight.window is not None:
            hidden = hidden | (column <= row - sight.window)
        logits = _capped(queries[:, :, rows] @ keys[:, None].mT * scale, sight)
        yield rows, logits.masked_fill(hidden, float("-inf"))


def _capped(logits: torch.Tensor, sight: Sight) -> torch.Tensor:
    return logits if sight.softcap is None else sight.softcap * torch.tanh(logits / sight.softcap)


def divergence(reference: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """[M] float64: KL divergence in nats of next-token distributions from those of ``reference``; both are logits
    [M, vocabulary]. Infinite where ``found`` has numbers that are not finite."""
    parts: list[Any] = []
    for first in range(0, reference.shape[0], ROWS):
        p, q = (x[first : first + ROWS].float().log_softmax(-1).double() for x in (reference, found))
        parts.append((p.exp() * (p - q)).sum(-1))
    return torch.cat(parts).nan_to_num(nan=float("inf")).clamp(min=0)
