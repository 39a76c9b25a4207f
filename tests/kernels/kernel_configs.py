"""The configurations for which all kernels are compiled. Imports nothing: its readers choose how Triton runs."""

CONFIGS = {
    "llama3-8b": ("K8V4 K4V2", 128, 4),
    "qwen2.5-0.5b": ("K8V4 K4V2", 64, 7),
    "one head a rank": ("K8V4 K4V2", 64, 7),
    "lossless": ("BF16", 128, 4),
    "raw and low": ("BF16 K8V4", 96, 1),
    "wide": ("K8V2 K4V1", 256, 2),
    "capped": ("K8V4 K4V2", 64, 2),
    "snapkv": ("K6V3", 64, 4),
    "knorm": ("K8V4", 128, 4),
    "random": ("BF16", 64, 7),
    "h2o": ("BF16", 128, 2),
    "leankv": ("K8V4 K4V2", 128, 4),
    "three tiers": ("BF16 K8V4 K4V2", 128, 4),
    "four tiers": ("K8V8 K8V4 K4V4 K4V2", 64, 7),
    "any bits": ("K6V3 K3V2", 128, 4),
    "odd bits": ("K7V5 K5V3", 96, 7),
    "chosen": ("K8V6 K5V4", 128, 4),
    "chosen, wide": ("K8V6 K5V4", 256, 4),
    "chosen by layer": ("K8V6 K6V4 K5V4", 128, 4),
    "careful": ("K8V5", 64, 3),
    "sampled queries": ("K8V4 K4V2", 128, 4),
    "window alone": ("K8V4 K4V2", 128, 4),
    "xkv": ("K8V4 K4V2", 128, 4),
    "xkv by retention": ("BF16", 64, 7),
    "zipage": ("BF16", 128, 4),
    "zipage in two tiers": ("K8V4 K4V2", 64, 7),
    "sliding": ("K8V4 K4V2", 256, 2),
    "sliding, lossless, with sinks": ("BF16", 64, 8),
}
"""Name -> tiers, head_dim, query heads of a KV head."""

KV_HEADS = {"one head a rank": 1}
"""Name -> KV heads of a rank, where there are not 8."""

NO_MEANS = {"one head a rank"}
"""From whose rotated keys nothing is taken off."""

METHODS = {
    "three tiers": '{"name": "diffkv", "alpha_high": 1, "alpha_between": [0.7], "window": 64}',
    "four tiers": '{"name": "diffkv", "alpha_high": 1, "alpha_between": [0.7, 0.4], "window": 64}',
    "chosen by layer": '{"name": "diffkv", "alpha_high": 20, "alpha_between": [[20, 0]], "window": 64}',
    "snapkv": '{"name": "snapkv", "budget": 512}',
    "knorm": '{"name": "knorm", "budget": 512}',
    "random": '{"name": "random", "budget": 512, "seed": 4000000000}',
    "h2o": '{"name": "h2o", "fraction": 0.5, "window": 16}',
    "leankv": '{"name": "leankv", "mass_high": 0.1, "mass_low": 0.001}',
    "sampled queries": '{"name": "diffkv", "observe_every": 4}',
    "window alone": '{"name": "diffkv", "alpha_high": 1e9}',
    "xkv": '{"name": "xkv", "keep": 0.3, "high": 0.5}',
    "xkv by retention": '{"name": "xkv", "min_retention": 0.8}',
    "zipage": '{"name": "zipage", "max_blocks": 3}',
    "zipage in two tiers": '{"name": "zipage", "max_blocks": 3, "compare": "all", "layer_stride": 1}',
}
"""Name of a configuration -> its policy, where it is not DiffKV's with two tiers or uniform with one."""

REACHES = {"sliding": (512, 0), "sliding, lossless, with sinks": (128, 0)}
"""Name -> of the two layers, how many tokens a query sees, where it does not see all."""

LONGEST = {"wide": 131072, "h2o": 131072}
"""Name -> longest sequence that pages have room for, where it is not 4096."""

SINKS = {"sliding, lossless, with sinks"}
"""Whose layers have attention sinks."""

SCALINGS = {"capped": ((0.05, 30.0), (0.125, 0.0))}
"""Name -> scales and logit caps of the model's layers, where they are not the usual one."""
