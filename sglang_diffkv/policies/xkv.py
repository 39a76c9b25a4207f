"""XKV's sizes by layer (Li et al., "XKV: Personalized KV Cache Memory Reduction for Long-Context LLM Inference").

At the end of the prompt a token's importance in a layer is the attention it received from the prompt's last tokens, the
observation window. It is the mean over these and over all query heads, then averaged over neighbouring positions.
Layers differ in how few tokens have most of the importance, so they share one size. Token after token goes to the layer
whose next one adds most to the *importance retention*, the share of a layer's importance that its retained tokens have
(Algorithm 1). This ends when a total size or a mean retention is reached. Each head then keeps as many tokens as its
layer was given, those important to itself (Algorithm 2), beside the window. Generated tokens all stay.

What differs from the paper:

- there is no mini-prefill, a forward pass before the prompt's for the importance of all layers. A prompt's tokens lie
  in the high tier until its last chunk has run, and all layers are scored then. So a prompt takes its full size until
  then, which the paper's second pass is there to avoid;
- the loop of Algorithm 1 is one selection of the largest parts of importance of all layers, with the same result;
- with several tensor-parallel ranks a layer's importance is the mean over all ranks' heads: ranks add up their heads'
  at the end of a prompt, and find the same sizes;
- what each head keeps it chooses by its own query heads' attention, where the paper does not say which heads share a
  choice;
- a prefix that comes from the prefix cache was scored when it was cached; sizes and retention are then those of the
  request's own prompt tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from sglang_diffkv.bounds import ByLayer, Fraction, Pool, SomeFraction, Window
from sglang_diffkv.policies.base import AcrossLayers, Observation, Policy, TopCount
from sglang_diffkv.policies.budget import Budget
from sglang_diffkv.policies.options import PolicyOptions, odd

Fractions = tuple[float, ...]
"""[layers]."""


@dataclass(frozen=True)
class XKVPolicy(Policy):
    """Of the tokens outside ``window`` layers keep ``keep`` on average, or what retains ``min_retention`` of the
    importance on average, or each the share that ``layer_fractions`` gives it. ``pool`` (odd) is the width of the
    pooling. With two tiers the share ``high`` of what a head keeps so stays in the high one."""

    window: int = field()
    pool: int
    keep: float | None
    min_retention: float | None
    layer_fractions: Fractions | None = field(repr=False)
    high: float

    @property
    def observation(self) -> Observation:
        return Observation(queries=self.window, reduce="mean")

    @property
    def kept_share(self) -> float | None:
        """With ``min_retention`` the prompt decides."""
        return self.keep if self.layer_fractions is None else Budget(fraction=self.layer_fractions).share

    @property
    def prompt(self) -> AcrossLayers | TopCount:
        if self.layer_fractions is None:
            keep, high = (1.0 if self.keep is None else self.keep), (self.high if self.high < 1 else None)
            return AcrossLayers(keep, self.min_retention, high, smooth=self.pool, pooling="average")
        high_fractions = tuple(self.high * x for x in self.layer_fractions)
        return TopCount(
            Budget(fraction=self.layer_fractions, beside=True),
            Budget(fraction=high_fractions, beside=True) if self.high < 1 else None,
            smooth=self.pool,
            pooling="average",
        )


class XKVPolicyConfig(PolicyOptions):
    """Sizes by layer, by how much of its importance a layer retains."""

    most_tiers: ClassVar[int] = 2

    name: Literal["xkv"] = "xkv"
    keep: SomeFraction | None = Field(
        default=None, description="share of the tokens outside the window that stay, mean over layers"
    )
    min_retention: SomeFraction | None = Field(
        default=None, description="share of the importance that what stays has, mean over layers"
    )
    layer_fractions: ByLayer[Fraction] | None = Field(
        default=None, description="[layers] share of the tokens outside the window that stay"
    )
    window: Window = Field(default=8, description="newest prompt tokens: they stay, and score the others")
    pool: Pool = Field(default=7, description="width of the average pooling of scores, odd")
    high: Fraction = Field(
        default=1.0, description="with two tiers, the share of the kept tokens that stay in the high one"
    )

    @field_validator("pool")
    @classmethod
    def _odd(cls, pool: int) -> int:
        return odd(pool)

    @model_validator(mode="after")
    def _one_size(self) -> XKVPolicyConfig:
        given = [name for name in ("keep", "min_retention", "layer_fractions") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(f"give one of keep, min_retention and layer_fractions (found: {found})")
        return self

    def obstacle(self, layers: int, kv_heads: int) -> str:
        if self.layer_fractions is None or (found := len(self.layer_fractions)) == layers:
            return ""
        return f"policy.layer_fractions is of {found} layers, the model has {layers}"

    def build(self) -> XKVPolicy:
        return XKVPolicy(self.window, self.pool, self.keep, self.min_retention, self.layer_fractions, self.high)
