"""What a request holds of a pool, by its lengths: pages of each tier, and how many such requests run at once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property, partial

from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.layout.spans import retained_tokens
from sglang_diffkv.mem_pool.growth import GROWTH_MARGIN, part_filled
from sglang_diffkv.plan import MemoryPlan
from sglang_diffkv.policies.base import NEVER
from sglang_diffkv.policies.diffkv import DiffKVPolicy

MEASURED = ((1.0, 0.67), (3.0, 0.38), (5.0, 0.24))
"""(threshold, share of the tokens outside window and sinks that reach it): 1,008 questions, 57M parameters, H200
(``benchmarks/results/quality.csv``: ``a3w128r``, ``a5w128r``, and ``default`` of that time)."""
ON_TEXT = 0.17
"""The same share at 3 on prose behind 4,096 tokens, SmolLM2-135M."""
CLIP = 4096
"""Tokens of a reply that SGLang looks at when it admits."""
SAMPLES = 32
"""Lengths between a prompt's and a reply's end at which what is held is averaged."""


def reached(threshold: float) -> float:
    """Share of the tokens outside window and sinks that reach a threshold, by those measured: between two by the
    logarithm, and as at the nearest one beyond them."""
    if threshold <= 0:
        return 1.0
    if threshold >= NEVER:
        return 0.0
    low = [x for x in MEASURED if x[0] <= threshold]
    high = [x for x in MEASURED if x[0] > threshold]
    if not low:
        return 1.0 if threshold < 0.1 else MEASURED[0][1]
    if not high:
        return MEASURED[-1][1] if threshold < 1000 else 0.0
    (a, at_a), (b, at_b) = low[-1], high[0]
    return at_a + (at_b - at_a) * math.log(threshold / a) / math.log(b / a)


def tier_shares(config: DiffKVConfig, high_share: float | None) -> tuple[tuple[float, ...], bool]:
    """Of the tokens outside window and sinks, the share in each tier, and whether it was measured rather than certain.

    ``high_share``: of the first tier, instead of a measured one. Raises ConfigError for a method whose shares depend on
    more than thresholds.
    """
    layers = shares_by_layer(config, high_share)
    return tuple(sum(x) / len(x) for x in zip(*layers)), any(0 < x < 1 for layer in layers for x in layer)


def shares_by_layer(config: DiffKVConfig, high_share: float | None) -> list[tuple[float, ...]]:
    """As ``tier_shares``, of each layer; one for all where thresholds are. Pruned tokens count in the last tier."""
    tiers, policy = len(config.tiers), config.build_policy()
    if not policy.compresses or tiers == 1:
        if policy.compresses and not isinstance(policy, DiffKVPolicy):
            raise ConfigError(_unknown(config))
        return [(1.0, *(0.0,) * (tiers - 1))]
    if not isinstance(policy, DiffKVPolicy):
        raise ConfigError(_unknown(config))
    high = reached(policy.alpha_high)
    if high_share is not None and 0 < policy.alpha_high < NEVER:
        high = high_share
    found = []
    for layer in range(policy.prompt.layers or 1):
        used, ends = policy.used_tiers(tiers, layer), [high]
        for tier, threshold in enumerate(policy.alpha_between, 1):
            here = threshold[layer] if isinstance(threshold, tuple) else threshold
            ends.append(max(reached(here), ends[-1]) if tier in used else ends[-1])
        found.append(tuple(b - a for a, b in zip([0.0, *ends], [*ends, 1.0])))
    return found


def _unknown(config: DiffKVConfig) -> str:
    name = config.method.name
    return (
        f"policy {name}: what it keeps depends on the requests, so a plan knows diffkv and uniform alone. Measure it: "
        "python -m sglang_diffkv.evaluate"
    )


@dataclass(frozen=True)
class Holding:
    """What requests hold of a pool.

    Attributes:
        capacity: tokens that the pool holds in its own unit, high-tier ones here. shares: as of ``shares_by_layer``.
        high_share: of the first tier, as given; None for measured ones.
    """

    plan: MemoryPlan
    capacity: int
    high_share: float | None = field(default=None)

    @cached_property
    def shares(self) -> list[tuple[float, ...]]:
        return shares_by_layer(self.plan.config, self.high_share)

    def _pages(self, tokens: float, tier: int, tail: float = 0.0, *, by_chance: bool) -> float:
        """Pages of ``tokens`` of a tier in one head, with ``tail`` tokens that are surely there. ``by_chance``: whether
        scores decide which tokens of a head are in which tier, so that ends of pages fall anywhere."""
        of_page = self.plan.fmt.layouts[tier].tokens
        if tokens + tail <= 0:
            return 0.0
        if not by_chance:
            return math.ceil((tokens + tail) / of_page)
        return (tokens + tail) / of_page + 0.5 if tokens > 0 else math.ceil(tail / of_page)

    def _of_head(self, prompt: int, reply: int, shares: tuple[float, ...]) -> float:
        """Pages of one head that sees all, behind ``reply`` generated tokens: those of the frozen part of the prompt,
        and the request's own. ``shares``: of its layer."""
        config, policy = self.plan.config, self.plan.config.build_policy()
        window, sinks = (policy.window, policy.sinks) if policy.compresses and len(config.tiers) > 1 else (0, 0)
        # The prompt's last token is computed again, so its page is the request's own.
        frozen = max(prompt - window, 0) if prompt >= config.share_min_tokens + window else 0
        own = prompt + reply - frozen
        newest = min(window + 1, own) if window else 0
        rest = max(own - newest, 0)
        first = min(sinks, frozen)
        own_first = min(sinks - first, rest)
        pages_of = partial(self._pages, by_chance=any(0 < x < 1 for x in shares))
        pages = pages_of((frozen - first) * shares[0], 0, first)
        pages += pages_of((rest - own_first) * shares[0], 0, newest + own_first)
        for tier in range(1, len(shares)):
            pages += pages_of((frozen - first) * shares[tier], tier)
            pages += pages_of((rest - own_first) * shares[tier], tier)
        return pages

    def tokens(self, prompt: int, reply: int) -> float:
        """High-tier tokens of capacity that a request of these lengths takes, averaged over layers."""
        of_page, spans = self.plan.fmt.high.tokens, self.plan.attention_spans
        of_shares = {x: self._of_head(prompt, reply, x) * of_page for x in set(self.shares)}
        full = [of_shares[x] for x in self.shares]
        if not any(spans):
            return sum(full) / len(full)
        length = prompt + reply
        full = full if len(full) > 1 else full * len(spans)
        kept = [
            math.ceil(min(retained_tokens(span), length) / of_page + 0.5) * of_page if span else of_all
            for span, of_all in zip(spans, full, strict=True)
        ]
        return sum(kept) / len(kept)

    def bytes_of(self, prompt: int, reply: int) -> float:
        """Bytes of the pages of such a request, on one rank."""
        return self.tokens(prompt, reply) / self.plan.fmt.high.tokens * self.plan.fmt.page_bytes * self.plan.heads

    @property
    def window(self) -> int:
        """Newest tokens that stay in the high tier."""
        policy = self.plan.config.build_policy()
        return policy.window if policy.compresses and not policy.prunes else 0

    @property
    def part_filled(self) -> float:
        """High-tier tokens that the part-filled pages of a request lack on average."""
        return part_filled(self.plan.fmt)

    def prompt_tokens(self, prompt: int) -> float:
        """High-tier tokens that a prompt takes while it is computed."""
        return float(prompt)


@dataclass(frozen=True)
class StockHolding:
    """The same of SGLang's own cache, of ``token_bytes`` a token on one rank in all layers. ``kept``: of layers with a
    sliding window, attention spans."""

    capacity: int
    token_bytes: int
    spans: tuple[int, ...] = ()
    window: int = 0
    """Of a tier of its own: all tokens are alike."""
    part_filled: float = 0.0

    def tokens(self, prompt: int, reply: int) -> float:
        """Tokens that a request takes: in layers with a window those that it can see."""
        length = prompt + reply
        if not any(self.spans):
            return float(length)
        return sum(min(x, length) if x else length for x in self.spans) / len(self.spans)

    def bytes_of(self, prompt: int, reply: int) -> float:
        """Bytes on one rank."""
        return self.tokens(prompt, reply) * self.token_bytes

    def prompt_tokens(self, prompt: int) -> float:
        """Tokens that a prompt takes while it is computed."""
        return float(prompt)


@dataclass(frozen=True)
class Running:
    """Requests of equal lengths that run at once: ``together``, if they begin at the same time and all reach their
    ends; ``mean``, of those that begin one after another while others always wait."""

    together: int
    mean: float


def _reserved(holding: Holding | StockHolding, prompt: int, reply: int, ended: float) -> float:
    """What admission expects of a reply (``PageLedger.growth``): whole until the window is full, then as what is behind
    it takes. ``ended``: what a request takes at its end."""
    more, inside = min(reply, CLIP), min(holding.window, prompt + reply)
    full = min(max(holding.window - prompt, 0), more)
    behind = max(prompt + reply - inside, 1)
    taken = max(ended - inside - holding.part_filled, 0.0)
    return full + (more - full) * min(GROWTH_MARGIN * taken / behind, 1.0)


def running(holding: Holding | StockHolding, prompt: int, reply: int, most: int | None) -> Running:
    """How many run in a pool. ``most``: requests that SGLang lets run, None for no limit.

    Where others wait, a pool is never quite full: a prompt is admitted once it fits before it is compressed, with what
    is expected of its reply, so half of that is free on average.
    """
    capacity = holding.capacity
    ended = holding.tokens(prompt, reply)
    if max(holding.prompt_tokens(prompt), ended) > capacity:
        return Running(0, 0.0)
    before = holding.tokens(prompt, 1)
    together = min(capacity / ended, 1 + (capacity - holding.prompt_tokens(prompt)) / before)
    steps = [reply * (x + 0.5) / SAMPLES for x in range(SAMPLES)]
    mean_held = sum(holding.tokens(prompt, round(x)) for x in steps) / SAMPLES
    free = (holding.prompt_tokens(prompt) + _reserved(holding, prompt, reply, ended)) / 2
    mean = max((capacity - free) / mean_held, 1.0)
    limit = most or math.inf
    return Running(int(min(together, limit)), min(mean, limit))
