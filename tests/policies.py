"""Rules as tests build them. What a test does not name is switched off, or as in the method's configuration."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar, get_args

from benchmarks.paths import REPOSITORY
from sglang_diffkv.policies.base import Policy
from sglang_diffkv.policies.diffkv import DiffKVPolicy
from sglang_diffkv.policies.duo import DuoPolicy, DuoPolicyConfig
from sglang_diffkv.policies.h2o import H2OPolicy, H2OPolicyConfig
from sglang_diffkv.policies.leankv import LeanKVPolicy, LeanKVPolicyConfig
from sglang_diffkv.policies.options import PolicyOptions
from sglang_diffkv.policies.pyramidkv import PyramidKVPolicy, PyramidKVPolicyConfig
from sglang_diffkv.policies.registry import PolicyConfig
from sglang_diffkv.policies.snapkv import SnapKVPolicy, SnapKVPolicyConfig
from sglang_diffkv.policies.streaming import StreamingPolicy, StreamingPolicyConfig
from sglang_diffkv.policies.xkv import XKVPolicy, XKVPolicyConfig
from sglang_diffkv.policies.zipage import ZipagePolicy, ZipagePolicyConfig

Kind = TypeVar("Kind", bound=Policy)


def _builder(kind: type[Kind], config: type[PolicyOptions] | None = None, **usual: Any) -> Callable[..., Kind]:
    """Of a rule with its fields in their order, or by name; the others are ``usual`` or those of ``config``."""
    names = [x.name for x in fields(kind)]  # type: ignore[arg-type]
    options = {} if config is None else config.model_fields
    given_by = {name: options[name].default for name in names if name in options and not options[name].is_required()}

    def build(*args: Any, **given: Any) -> Kind:
        return kind(**{**given_by, **usual, **dict(zip(names, args)), **given})

    return build


diffkv_policy = _builder(
    DiffKVPolicy, window=0, sinks=0, horizon=0, head_scale=None, alpha_between=(), observe_every=1,
    pressure_window=None, generated_every=1, turn_window=None,
)  # fmt: skip
duo_policy = _builder(DuoPolicy, DuoPolicyConfig)
h2o_policy = _builder(H2OPolicy, H2OPolicyConfig)
leankv_policy = _builder(LeanKVPolicy, LeanKVPolicyConfig)
pyramidkv_policy = _builder(PyramidKVPolicy, PyramidKVPolicyConfig)
snapkv_policy = _builder(SnapKVPolicy, SnapKVPolicyConfig)
streaming_policy = _builder(StreamingPolicy, StreamingPolicyConfig)
xkv_policy = _builder(XKVPolicy, XKVPolicyConfig)
zipage_policy = _builder(ZipagePolicy, ZipagePolicyConfig, high=None, redundancy=None, slots=1.0, constrained=False)

PAIR, ONE, THREE = ("K8V4", "K4V2"), ("K8V4",), ("BF16", "K8V4", "K4V2")
WINDOWED: dict[str, tuple[tuple[str, ...], Policy]] = {
    "window alone": (PAIR, diffkv_policy(1e9, 0.0, window=8)),
    "thresholds, pruning": (PAIR, diffkv_policy(2.0, 0.9, window=8, sinks=2)),
    "one tier, pruning": (ONE, diffkv_policy(1.0, 1.0, window=8)),
    "three tiers": (THREE, diffkv_policy(2.0, 0.5, window=8, alpha_between=(1.0,))),
    "tiers by layer": (("BF16", "K5V4", "K4V3"), diffkv_policy(2.0, 0.0, window=8, alpha_between=((2.0, 0.0),))),
    "shares of the sum": (PAIR, leankv_policy(0.3, 0.1, 8)),
}
"""Tiers and rules under which tokens leave a window of eight."""


def between_in(policy: DiffKVPolicy, layer: int) -> tuple[float, ...]:
    """Thresholds between tiers in a layer."""
    return tuple(x[layer] if isinstance(x, tuple) else x for x in policy.alpha_between)


def documented_methods(layers: int, heads: int) -> dict[str, dict[str, Any]]:
    """Of each method the fields of ``policy`` in its first example in docs/methods.md, with a pattern of so many layers
    and KV heads where that names a file. A method without an example has its name alone."""
    page = (REPOSITORY / "docs" / "methods.md").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = {}
    for text in re.findall(r'^`(\{.*?"policy": .*?\}\})`', page, re.MULTILINE):
        policy = json.loads(text)["policy"]
        if "pattern" in policy:
            policy["pattern"] = [[1.0, *[0.25] * (heads - 1)]] * layers
        found.setdefault(policy["name"], policy)
    return {name: found.get(name, {"name": name}) for name in METHOD_NAMES}


METHOD_NAMES: tuple[str, ...] = tuple(kind.model_fields["name"].default for kind in get_args(PolicyConfig))
