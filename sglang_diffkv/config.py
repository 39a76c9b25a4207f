"""The user's configuration: one pydantic model, given as ``--diffkv-config`` or ``SGLANG_DIFFKV_CONFIG``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from sglang_diffkv.errors import ConfigError
from sglang_diffkv.mem_pool.page_format import PageFormat, Tier
from sglang_diffkv.policies.base import Policy
from sglang_diffkv.policies.budget import Budget
from sglang_diffkv.policies.diffkv import DiffKVPolicy
from sglang_diffkv.policies.h2o import H2OPolicy
from sglang_diffkv.policies.snapkv import SnapKVPolicy
from sglang_diffkv.policies.uniform import UniformPolicy

CONFIG_ENV = "SGLANG_DIFFKV_CONFIG"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class UniformPolicyConfig(_Strict):
    """Every token at one tier."""

    name: Literal["uniform"] = "uniform"

    def build(self) -> Policy:
        return UniformPolicy()


class DiffKVPolicyConfig(_Strict):
    """DiffKV's thresholds, in units of the mean attention of a sequence."""

    name: Literal["diffkv"] = "diffkv"
    alpha_high: float = Field(default=1.0, ge=0, description="at or above this, a token stays in the high tier")
    alpha_low: float = Field(default=0.0, ge=0, description="below this, a token is pruned")
    window: int = Field(default=256, ge=1, le=4096, description="newest tokens that always stay in the high tier")
    sinks: int = Field(default=0, ge=0, le=4096, description="first tokens that always stay in the high tier")
    horizon: int = Field(default=0, ge=0, le=1 << 30, description="later tokens after which scores forget; 0: never")
    head_scale: tuple[tuple[Annotated[float, Field(gt=0, le=1e6)], ...], ...] | None = Field(
        default=None, min_length=1, description="[layers][KV heads] factors of both thresholds"
    )

    @field_validator("head_scale", mode="before")
    @classmethod
    def _of_file(cls, given: Any) -> Any:
        """The list itself, or what ``sglang_diffkv.calibrate.heads`` writes."""
        return given["head_scale"] if isinstance(given, dict) and "head_scale" in given else given

    @model_validator(mode="after")
    def _ordered(self) -> DiffKVPolicyConfig:
        if self.alpha_low > self.alpha_high:
            raise ValueError(f"alpha_low {self.alpha_low} is above alpha_high {self.alpha_high}")
        return self

    @field_validator("head_scale")
    @classmethod
    def _rectangular(cls, scale: tuple[tuple[float, ...], ...] | None) -> tuple[tuple[float, ...], ...] | None:
        if scale is not None and (not scale[0] or len({len(layer) for layer in scale}) > 1):
            raise ValueError("every layer needs a factor for each KV head, so all lists have one length above 0")
        return scale

    def build(self) -> DiffKVPolicy:
        rule = (self.alpha_high, self.alpha_low, self.window, self.sinks, self.horizon)
        return DiffKVPolicy(*rule, head_scale=self.head_scale)


class _BudgetPolicyConfig(_Strict):
    """The same number of tokens for every head: ``fraction`` of the sequence, but at least ``budget`` tokens."""

    budget: int = Field(default=0, ge=0, description="tokens that a head keeps in any case")
    fraction: float = Field(default=0.0, ge=0, le=1, description="share of its tokens that a head keeps")
    window: int = Field(default=64, ge=1, le=4096, description="newest tokens that always stay, within the budget")

    @model_validator(mode="after")
    def _sensible(self) -> _BudgetPolicyConfig:
        if not self.budget and not self.fraction:
            raise ValueError("give budget (tokens) or fraction (of the sequence)")
        if 0 < self.budget <= self.window:
            raise ValueError(f"budget {self.budget} must be above window {self.window}")
        return self


class SnapKVPolicyConfig(_BudgetPolicyConfig):
    """A static budget for each head, applied once at the end of the prompt."""

    name: Literal["snapkv"] = "snapkv"
    window: int = Field(default=32, ge=1, le=4096, description="newest prompt tokens that always stay")
    pool: int = Field(default=7, ge=1, le=63, description="width of the max-pooling of scores, odd")

    @field_validator("pool")
    @classmethod
    def _odd(cls, pool: int) -> int:
        if pool % 2 == 0:
            raise ValueError(f"pool {pool} is even: a neighbourhood has the token in its middle")
        return pool

    def build(self) -> Policy:
        return SnapKVPolicy(Budget(self.budget, self.fraction), self.window, self.pool)


class H2OPolicyConfig(_BudgetPolicyConfig):
    """Heavy hitters and the newest tokens, kept to a budget at every step."""

    name: Literal["h2o"] = "h2o"

    def build(self) -> Policy:
        return H2OPolicy(Budget(self.budget, self.fraction), self.window)


PolicyConfig = DiffKVPolicyConfig | UniformPolicyConfig | SnapKVPolicyConfig | H2OPolicyConfig


class DiffKVConfig(_Strict):
    """Everything a user can set.

    Attributes:
        tiers: high tier first, for example ``["K8V4", "K4V2"]``, ``["K8V4"]`` or ``["BF16"]``.
        policy: ``{"name": "diffkv", ...}`` or ``{"name": "uniform"}``; by default DiffKV with two tiers,
            uniform with one. ``snapkv`` and ``h2o`` are baselines that keep what they keep at one tier.
        page_tokens: high-tier tokens of a page.
        prefix_fidelity: what the prefix cache keeps of a prompt: ``compressed``, the one form that all share, or
            ``exact``, all of it in the high tier, of which a running request takes a compressed copy of its own.
        gpu_ops: what a GPU server runs on: ``triton``, or ``reference`` for the plain PyTorch oracle, which needs
            --disable-cuda-graph and --disable-overlap-schedule. A CPU server always runs on the reference.
        prefill: what computes the attention of new tokens among themselves on a GPU: ``flashinfer``, ``triton``,
            or ``auto`` for FlashInfer where it is installed, has the model's head size, and all layers have one scale
            and logit cap.
        rotate: ``keys`` multiplies queries and keys by one Hadamard matrix before keys are stored. Attention stays the
            same, and keys with outliers lose less at 4 bits; it costs one small launch a layer and pass.
        share_min_tokens: a running request's prompt joins the prefix cache at once if it has at least this
            many tokens of its own; a shorter one joins when the request ends.
        thresholds: ``calibrated`` takes tiers and policy from the calibration file of the model; ``default`` takes
            those given here. A server that is given no configuration at all looks for calibrated ones. It is
            carried out when a server starts and is not part of the resolved configuration.
    """

    tiers: tuple[str, ...] = ("K8V4", "K4V2")
    policy: Annotated[PolicyConfig, Field(discriminator="name")] | None = None
    page_tokens: int = Field(default=32, ge=4, le=256)
    prefix_fidelity: Literal["compressed", "exact"] = "compressed"
    rotate: Literal["none", "keys"] = "none"
    share_min_tokens: int = Field(default=128, ge=1)
    gpu_ops: Literal["triton", "reference"] = "triton"
    prefill: Literal["auto", "flashinfer", "triton"] = "auto"
    thresholds: Literal["calibrated", "default"] = Field(default="default", exclude=True)

    @field_validator("tiers")
    @classmethod
    def _possible(cls, tiers: tuple[str, ...]) -> tuple[str, ...]:
        if not 1 <= len(tiers) <= 2:
            raise ValueError(f"{len(tiers)} tiers given: one or two are supported")
        return tuple(Tier.parse(name).name for name in tiers)

    @model_validator(mode="after")
    def _consistent(self) -> DiffKVConfig:
        PageFormat(128, 128, self.parsed_tiers, self.page_tokens)
        if len(self.tiers) > 1 and self.policy is not None and not isinstance(self.policy, DiffKVPolicyConfig):
            raise ValueError(f"policy {self.policy.name} keeps tokens at one tier, but tiers lists two")
        if self.thresholds == "calibrated" and (given := self.model_fields_set & {"tiers", "policy", "rotate"}):
            named = " and ".join(sorted(given))
            raise ValueError(f'"thresholds": "calibrated" brings tiers, policy and rotate; drop {named}')
        if self.rotate != "none" and all(tier.is_raw for tier in self.parsed_tiers):
            raise ValueError(f'rotate "{self.rotate}" serves quantised keys, and tier BF16 has none')
        return self

    @property
    def parsed_tiers(self) -> tuple[Tier, ...]:
        return tuple(Tier.parse(name) for name in self.tiers)

    @property
    def lossless(self) -> bool:
        """True if tokens are stored as the model wrote them and none is dropped."""
        return self.parsed_tiers[0].is_raw and not self.build_policy().compresses

    def build_policy(self) -> Policy:
        if self.policy is not None:
            return self.policy.build()
        return DiffKVPolicyConfig().build() if len(self.tiers) > 1 else UniformPolicy()

    def check_heads(self, layers: int, kv_heads: int) -> None:
        """Raise ConfigError if factors by head are not for a model of this shape, all ranks' heads together."""
        scale = getattr(self.policy, "head_scale", None)
        if scale is not None and (found := (len(scale), len(scale[0]))) != (layers, kv_heads):
            raise ConfigError(
                f"policy.head_scale is of {found[0]} layers with {found[1]} KV heads, the model has {layers} with "
                f"{kv_heads}"
            )

    def page_format(self, head_dim: int, v_head_dim: int) -> PageFormat:
        """The page format for a model's head sizes. Raises ConfigError for sizes that are not supported."""
        try:
            return PageFormat(head_dim, v_head_dim, self.parsed_tiers, self.page_tokens)
        except ValueError as error:
            raise ConfigError(f"diffkv cannot serve this model: {error}") from None


def load_config(source: str | None = None) -> DiffKVConfig:
    """Read a configuration from inline JSON or a file's path; by default from the environment.

    Raises ConfigError with one line a problem, each naming the field, and for calibrated thresholds, which only
    ``thresholds.resolve`` finds.
    """
    config = read_config(source)
    if config.thresholds == "calibrated":
        raise ConfigError('"thresholds": "calibrated" is looked up for a model; here write out tiers and policy')
    return config


def read_config(source: str | None = None) -> DiffKVConfig:
    """As ``load_config``, but the configuration may ask for calibrated thresholds."""
    text = source if source is not None else os.environ.get(CONFIG_ENV)
    if not text or not text.strip():
        return DiffKVConfig()
    origin = "inline JSON"
    if not text.lstrip().startswith("{"):
        origin = text
        try:
            text = Path(text).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--diffkv-config: cannot read {origin!r}: {error.strerror}") from None
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--diffkv-config ({origin}): not valid JSON: {error}") from None
    try:
        return DiffKVConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_explain(error, origin)) from None


def _explain(error: ValidationError, origin: str) -> str:
    lines = [f"--diffkv-config ({origin}) is not usable:"]
    for problem in error.errors():
        field = ".".join(str(x) for x in problem["loc"]) or "configuration"
        lines.append(f"  {field}: {problem['msg']} (given: {problem['input']!r})")
    return "\n".join(lines)
