"""The configurations that figures compare, by names that figures share so that none is measured twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sglang_diffkv.calibration import CalibratedThresholds, HeadScale, lookup, policy_fields
from sglang_diffkv.config import DiffKVConfig, DiffKVPolicyConfig
from sglang_diffkv.evaluate.configuration import FP8, FP8_DTYPE, STOCK, Configuration
from sglang_diffkv.layout.page_format import Tier

MORE_KEYS, MORE_VALUES, EQUAL = "more bits for keys", "more bits for values", "equal bits"
ALPHA_HIGH, ALPHA_LOW = "DiffKV, nothing pruned", "DiffKV, pruning"
MASS_HIGH, MASS_LOW = "LeanKV, nothing pruned", "LeanKV, pruning"
DYNAMIC, PROMPT_BUDGET, STEP_BUDGET = "dynamic per head (DiffKV)", "static, prompt (SnapKV)", "static, each step (H2O)"
STATIC = {PROMPT_BUDGET: "snapkv", STEP_BUDGET: "h2o"}


@dataclass(frozen=True)
class Case:
    """A configuration in its place in a figure; the fields are those of ``Point``."""

    configuration: Configuration
    series: str
    label: str
    alpha_high: float | None = None
    alpha_low: float | None = None
    fraction: float | None = None
    matched_to: str | None = None

    @property
    def name(self) -> str:
        return self.configuration.name


ROTATED = {"none": "", "keys": " rotated", "values": " rotated values", "both": " rotated both"}
"""What the name of a case says, by ``rotate``."""


@dataclass(frozen=True)
class Thresholds:
    """The thresholds at which a model is used. ``source`` says where they come from.

    ``alpha_high`` is None with a single tier.
    """

    tiers: tuple[str, ...]
    alpha_high: float | None
    alpha_low: float
    window: int
    source: str
    rotate: str = "none"
    sinks: int = 0
    horizon: int = 0
    head_scale: HeadScale | None = None


DEFAULTS = DiffKVPolicyConfig()
TIERS = DiffKVConfig().tiers
STOCK_CASE = Case(Configuration(STOCK), "stock bf16", "bf16")
FP8_CASE = Case(Configuration(FP8, kv_cache_dtype=FP8_DTYPE), "stock fp8", "fp8")


def chosen(model: str, alpha_high: float | None = None) -> Thresholds:
    """The calibrated thresholds of a model or the defaults, perhaps at another ``alpha_high``."""
    entry = lookup(model)
    if not isinstance(entry, CalibratedThresholds):
        source = "defaults, none are calibrated for this model"
        rest = (DEFAULTS.window, source, DiffKVConfig().rotate, DEFAULTS.sinks)
        found = Thresholds(TIERS, DEFAULTS.alpha_high, DEFAULTS.alpha_low, *rest)
    else:
        source = f"calibrated, {entry.source}"
        more = (entry.window, source, entry.rotate, entry.sinks, entry.horizon, entry.head_scale)
        found = Thresholds(entry.tiers, entry.alpha_high, entry.alpha_low, *more)
    if alpha_high is None:
        return found
    tiers = found.tiers if len(found.tiers) > 1 else TIERS
    alpha_low = min(found.alpha_low, alpha_high)
    return replace(found, tiers=tiers, alpha_high=alpha_high, alpha_low=alpha_low, source="command line")


def uniform(tier: str, series: str | None = None) -> Case:
    """Every token at one tier. Raises ValueError for an impossible one."""
    parsed = Tier.parse(tier)
    kind = EQUAL if parsed.k_bits == parsed.v_bits else MORE_KEYS if parsed.k_bits > parsed.v_bits else MORE_VALUES
    return Case(_configuration(parsed.name, tiers=(parsed.name,)), series or kind, parsed.name)


def diffkv(at: Thresholds, series: str) -> Case:
    """DiffKV's policy; with nothing to decide, the uniform tier that it then is."""
    if not at.alpha_high and not at.alpha_low:
        return Case(uniform(at.tiers[0]).configuration, series, "low tier off", alpha_high=0.0, alpha_low=0.0)
    shown = "-" if at.alpha_high is None else f"{at.alpha_high:g}"
    label = f"({shown}, {at.alpha_low:g})"
    name = f"diffkv {'-'.join(at.tiers)} {label}" + (f" window {at.window}" if at.window != DEFAULTS.window else "")
    name += ROTATED[at.rotate] + (f" sinks {at.sinks}" if at.sinks else "")
    name += (f" horizon {at.horizon}" if at.horizon else "") + (" scaled" if at.head_scale else "")
    policy = policy_fields(at.alpha_high, at.alpha_low, at.window, at.sinks, at.horizon, at.head_scale)
    configuration = _configuration(name, tiers=at.tiers, policy=policy, rotate=at.rotate)
    return Case(configuration, series, label, alpha_high=at.alpha_high, alpha_low=at.alpha_low)


def static(series: str, tier: str, fraction: float, window: int, matched_to: str) -> Case:
    """The same share of tokens in every head."""
    policy = {"name": STATIC[series], "fraction": fraction, "window": window}
    name = f"{STATIC[series]} {tier} {fraction:.3f}"
    configuration = _configuration(name, tiers=(tier,), policy=policy)
    return Case(configuration, series, f"keep {fraction:.3f}", fraction=fraction, matched_to=matched_to)


def _configuration(name: str, **fields: Any) -> Configuration:
    return Configuration(name, DiffKVConfig.model_validate(fields))


def distinct(cases: Sequence[Case]) -> list[Case]:
    """The first case of each configuration."""
    found: dict[str, Case] = {}
    for case in cases:
        found.setdefault(case.name, case)
    return list(found.values())
