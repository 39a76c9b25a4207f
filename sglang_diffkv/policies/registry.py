"""The methods that a configuration can name."""

from __future__ import annotations

from sglang_diffkv.policies.diffkv import DiffKVPolicyConfig
from sglang_diffkv.policies.duo import DuoPolicyConfig
from sglang_diffkv.policies.h2o import H2OPolicyConfig
from sglang_diffkv.policies.knorm import KnormPolicyConfig
from sglang_diffkv.policies.leankv import LeanKVPolicyConfig
from sglang_diffkv.policies.pyramidkv import PyramidKVPolicyConfig
from sglang_diffkv.policies.random_eviction import RandomPolicyConfig
from sglang_diffkv.policies.snapkv import SnapKVPolicyConfig
from sglang_diffkv.policies.streaming import StreamingPolicyConfig
from sglang_diffkv.policies.uniform import UniformPolicyConfig
from sglang_diffkv.policies.xkv import XKVPolicyConfig
from sglang_diffkv.policies.zipage import ZipagePolicyConfig

PolicyConfig = (
    DiffKVPolicyConfig
    | LeanKVPolicyConfig
    | UniformPolicyConfig
    | SnapKVPolicyConfig
    | H2OPolicyConfig
    | StreamingPolicyConfig
    | DuoPolicyConfig
    | XKVPolicyConfig
    | PyramidKVPolicyConfig
    | KnormPolicyConfig
    | RandomPolicyConfig
    | ZipagePolicyConfig
)
