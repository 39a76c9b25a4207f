"""DiffKV's request- and length-adaptive policy (DiffKV, SOSP 2025, section 4 and Algorithm 1).

The significance of a token is the mean attention it received from later tokens, maximum over the query
heads of its KV head. It is compared with ``alpha / i``, where ``1 / i`` is the mean attention that ``i`` tokens
share.

Beyond the paper:

- the first tokens can be kept high: models put much attention on them whatever they say, and are lost without them
  (Xiao et al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024);
- scores can forget: past ``horizon`` later tokens the mean in the generation phase is an exponential one, of weight
  ``1 / horizon`` for the newest token's attention. Jo and Shin, "A2SF: Accumulative Attention Scoring with Forgetting
  Factor for Token Pruning in Transformer Decoder", 2024, do so with sums. The prompt phase stays a mean over all later
  prompt tokens, which then counts as that of ``horizon - 1`` tokens at most;
- all thresholds can be multiplied for each layer and KV head by ``head_scale``, since heads differ in what they lose.
  Feng et al., "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference", 2024,
  give heads budgets of their own. Here a head's share follows from its thresholds, as in the paper;
- of a long prompt's queries all but the newest ``OBSERVERS`` can be sampled. Every ``observe_every``-th then counts for
  as many in the mean, and a prompt's scores cost that much less. Of longer prompts fewer are taken, since about
  ``SAMPLED`` queries tell the mean. Of generated tokens every ``generated_every``-th can
  be taken;
- there may be three or four tiers, for which the paper has page tables (section 5.3) and no algorithm. A prompt's token
  goes to the first tier whose threshold its score reaches. In the generation phase the token that leaves the high tier
  goes to the tier of its own score. It is the candidate or, if that stays, the high tier's least significant token.
  There the candidate takes the place of the tier's least significant token if that is below the last threshold. Tokens
  of the tiers between stay there: at most one token of a head moves in a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from sglang_diffkv.bounds import Alpha, ByHead, ByLayer, Every, Factor, OneOrByLayer, Sinks, Tokens, Window
from sglang_diffkv.layout.page_format import MOST_TIERS
from sglang_diffkv.policies.base import SAMPLED, HeadValues, LayerValues, Observation, Pointwise, Policy
from sglang_diffkv.policies.options import PolicyOptions

OBSERVERS = 256
"""Newest tokens of a prompt that all observe where others are sampled."""
EVERY = 4
"""Every Nth of the others observes, by default."""
SPARSEST = 64
"""Of the longest prompts every so manieth observes, or a smaller one where the window is smaller."""


def filling_window(window: int, page_tokens: int) -> int:
    """The largest window, at most ``window``, with which what stays of a running request in the high tier in any case,
    its newest tokens and the one that is being stored, fills its pages. ``window`` itself where that is less than a
    page."""
    over = (window + 1) % page_tokens
    return window - over if over < window else window


@dataclass(frozen=True)
class DiffKVPolicy(Policy):
    """Thresholds ``alpha_high`` and ``alpha_low`` in units of the mean attention; newest ``window`` and first
    ``sinks`` tokens stay high. ``horizon``: later tokens after which scores forget, 0 for never.
    ``head_scale``: [layers][KV heads] positive factors of all thresholds, None for 1 everywhere.
    ``observe_every``: of a prompt's tokens but the newest, every Nth observes; ``generated_every``: the same of
    generated ones. ``pressure_window``: the window that is left to running requests before one is retracted, None for
    no other. ``turn_window``: the window that is left to earlier turns of a conversation, None for no other.

    With a single tier there is no low one, so a token at or above ``alpha_low`` stays and the rest go. With more than
    two, ``alpha_between`` are the thresholds of the tiers from the second to the last but one, falling: each one for
    all layers, or [layers]. A layer where one is as the threshold before has no token in its tier.
    """

    alpha_high: float
    alpha_low: float
    window: int = field()
    sinks: int = field()
    horizon: int = field()
    head_scale: HeadValues | None = field(repr=False)
    alpha_between: tuple[float | LayerValues, ...]
    observe_every: int
    pressure_window: int | None
    generated_every: int = field()
    turn_window: int | None = field()

    @property
    def under_pressure(self) -> DiffKVPolicy | None:
        """The same with a smaller window."""
        smaller = self.pressure_window
        if smaller is None or smaller >= self.window or not self.alpha_high:
            return None
        return replace(self, window=smaller, pressure_window=None)

    @property
    def of_turns(self) -> DiffKVPolicy | None:
        smaller = self.turn_window
        if smaller is None or smaller >= self.window or not self.alpha_high or self.prunes:
            return None
        return replace(self, window=smaller, pressure_window=None, turn_window=None)

    @property
    def least_window(self) -> int:
        """Of what goes unobserved for longer than its window there would be no score."""
        return max(self.observe_every, self.generated_every)

    def with_window(self, window: int) -> DiffKVPolicy:
        return replace(self, window=window)

    @property
    def observation(self) -> Observation:
        if self.observe_every == 1:
            return Observation()
        sparsest = max(self.observe_every, min(SPARSEST, self.window))
        return Observation(queries=OBSERVERS, every=self.observe_every, sparsest=sparsest)

    @property
    def prompt(self) -> Pointwise:
        """The token at 0-based ``position`` is compared with ``alpha / (position + 1)``."""
        return Pointwise(self.alpha_high, self.alpha_low, self.head_scale, self.alpha_between)

    @property
    def generation(self) -> Pointwise:
        """Algorithm 1."""
        return self.prompt

    def window_hint(self, tiers: int, page_tokens: int) -> str:
        """What a slightly smaller window would save, for the log; empty if nothing, or if scores keep other tokens high
        too, of which a head's last page is filled by chance."""
        better = filling_window(self.window, page_tokens)
        over = self.window - better
        if tiers == 1 or self.scored_tiers(tiers) or not 0 < over <= page_tokens // 2:
            return ""
        return (
            f"window {self.window} leaves {page_tokens - over} of {page_tokens} places of a page empty in each head; "
            f"window {better} fills its pages"
        )

    def of_rank(self, rank: int, ranks: int, heads: int) -> DiffKVPolicy:
        """With the factors of the rank's heads; of more ranks than heads several have the same one, as SGLang deals
        them out."""
        if self.head_scale is None:
            return self
        first = rank * len(self.head_scale[0]) // ranks
        return replace(self, head_scale=tuple(layer[first : first + heads] for layer in self.head_scale))


KEEP = DiffKVPolicy(
    alpha_high=0.0, alpha_low=0.0, window=0, sinks=0, horizon=0, head_scale=None,
    alpha_between=(0.0,) * (MOST_TIERS - 2), observe_every=1, pressure_window=None, generated_every=1,
    turn_window=None,
)  # fmt: skip
"""Every token stays in its tier: for copies."""
STAY = replace(KEEP, window=1 << 30)
"""The same of tokens without scores: for a prompt that gets a tail and nothing else."""


class DiffKVPolicyConfig(PolicyOptions):
    """DiffKV's thresholds, in units of the mean attention of a sequence."""

    most_tiers: ClassVar[int] = MOST_TIERS

    name: Literal["diffkv"] = "diffkv"
    alpha_high: Alpha = Field(default=3.0, description="at or above this, a token stays in the high tier")
    alpha_between: tuple[OneOrByLayer[Alpha], ...] = Field(
        default=(),
        max_length=MOST_TIERS - 2,
        fail_fast=True,
        description="with three and four tiers: below alpha_high, at or above the first of these, a token is in the "
        "second tier; below that, at or above the next, in the third. Each one for all layers, or a list with one for "
        "each",
    )
    alpha_low: Alpha = Field(default=0.0, description="below this, a token is pruned")
    window: Window = Field(default=256, description="newest tokens that always stay in the high tier")
    sinks: Sinks = Field(default=4, description="first tokens that always stay in the high tier")
    horizon: Tokens = Field(default=0, description="later tokens after which scores forget; 0: never")
    observe_every: Every | None = Field(
        default=None,
        description=f"every Nth prompt query contributes to the scores and counts N times; the newest {OBSERVERS} do "
        f"always. Of prompts above {SAMPLED:,} N tokens it is every 2Nth, 4Nth and so on, up to {SPARSEST}. Default: "
        f"{EVERY}, or the window if that is smaller",
    )
    generated_every: Every = Field(
        default=1, description="every Nth generated token contributes to the scores and counts N times"
    )
    pressure_window: Window | None = Field(
        default=64,
        description="a smaller window, to which the replies of running requests are compressed once more, before one "
        "of them is retracted for want of pages; null: never",
    )
    turn_window: Window | None = Field(
        default=None,
        description="with compressed prefixes: newest tokens of a conversation's earlier turn that stay in the high "
        "tier, once `window` tokens have followed it; null: all that were in the window when its request ended",
    )
    head_scale: ByLayer[ByHead[Factor]] | None = Field(
        default=None, description="[layers][KV heads] factors of all thresholds"
    )

    @field_validator("head_scale", mode="before")
    @classmethod
    def _of_file(cls, given: Any) -> Any:
        """The list itself, or what ``sglang_diffkv.calibrate.heads`` writes."""
        return given["head_scale"] if isinstance(given, dict) and "head_scale" in given else given

    @model_validator(mode="after")
    def _ordered(self) -> DiffKVPolicyConfig:
        if self.alpha_low > self.alpha_high:
            raise ValueError(
                f"alpha_low {self.alpha_low} is above alpha_high {self.alpha_high}: allowed is at most that"
            )
        if self.observe_every is not None and self.observe_every > self.window:
            raise ValueError(
                f"observe_every {self.observe_every} is above window {self.window}: a chunk's last tokens outside the "
                "window would have no score"
            )
        if self.turn_window is not None:
            for problem, idle in (
                (f"turn_window {self.turn_window} is not below window {self.window}", self.turn_window >= self.window),
                ("turn_window is of no use with alpha_high 0, which keeps all tokens high", not self.alpha_high),
                ("turn_window does not work with pruning (alpha_low above 0)", self.alpha_low > 0),
            ):
                if idle:
                    raise ValueError(f"{problem}: change one of them, or leave turn_window out")
        for name in ("window", "pressure_window", "turn_window"):
            window = getattr(self, name) or self.window
            if self.generated_every > window:
                raise ValueError(
                    f"generated_every {self.generated_every} is above {name} {window}: tokens would leave it that "
                    "have no score"
                )
        if len(lengths := {len(x) for x in self.alpha_between if isinstance(x, tuple)}) > 1:
            raise ValueError(
                f"alpha_between has lists of {' and '.join(map(str, sorted(lengths)))} layers: allowed is one length"
            )
        for layer in range(max(lengths, default=1)):
            between = [x[layer] if isinstance(x, tuple) else x for x in self.alpha_between]
            falling = [self.alpha_high, *between, self.alpha_low]
            if falling != sorted(falling, reverse=True):
                where = f" in layer {layer}" if lengths else ""
                raise ValueError(
                    f"alpha_between {between}{where} must fall from alpha_high {self.alpha_high} to alpha_low "
                    f"{self.alpha_low}"
                )
        return self

    def check_tiers(self, tiers: int) -> None:
        """Every threshold between two tiers is given, and no more."""
        if (found := len(self.alpha_between)) != (wanted := max(tiers - 2, 0)):
            raise ValueError(
                f"policy.alpha_between has {found} thresholds, {tiers} tiers take {wanted}: alpha_high ends the first "
                "tier, alpha_between the tiers behind it but the last, alpha_low the last"
            )

    @field_validator("head_scale")
    @classmethod
    def _rectangular(cls, scale: HeadValues | None) -> HeadValues | None:
        if scale is not None and (not scale[0] or len({len(layer) for layer in scale}) > 1):
            raise ValueError("every layer needs a factor for each KV head, so all lists have one length above 0")
        return scale

    def obstacle(self, layers: int, kv_heads: int) -> str:
        scale = self.head_scale
        if (found_layers := self.build().prompt.layers) not in (None, layers):
            return f"policy.alpha_between is of {found_layers} layers, the model has {layers} that are stored in pages"
        if scale is None or (found := (len(scale), len(scale[0]))) == (layers, kv_heads):
            return ""
        of = f"{found[0]} layers with {found[1]} KV heads"
        return f"policy.head_scale is of {of}, the model has {layers} with {kv_heads}"

    @property
    def _every(self) -> int:
        return self.observe_every or min(EVERY, self.window)

    def whole(self) -> dict[str, Any]:
        return {**super().whole(), "observe_every": self._every}

    def build(self) -> DiffKVPolicy:
        return DiffKVPolicy(
            self.alpha_high, self.alpha_low, self.window, self.sinks, self.horizon, self.head_scale, self.alpha_between,
            self._every, self.pressure_window, self.generated_every, self.turn_window,
        )  # fmt: skip
