"""Configurations by name: what ``--diffkv-config safe`` and its like stand for.

``docs/choose.md`` has what each takes and loses, as it was measured.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "auto": {"thresholds": "auto"},
    "lossless": {"tiers": ["BF16"]},
    "careful": {"tiers": ["K8V5"], "rotate": "both"},
    "safe": {"tiers": ["K8V4"]},
    "balanced": {"tiers": ["K8V4", "K4V2"], "key_means": "auto", "policy": {"name": "diffkv"}},
    "small": {
        "tiers": ["K8V4", "K4V2"],
        "rotate": "both",
        "key_means": "auto",
        "policy": {"name": "diffkv", "alpha_high": 1e9, "window": 252, "sinks": 4},
    },
}
"""Name -> the fields that it sets. Fields that it leaves out are defaults, and no thresholds are looked up.
Servers find key means themselves, which 8-bit keys do not need. What ``auto`` stands for is chosen once the model is
loaded (``ladder.py``). ``careful`` has the fewest bytes a token that lost less than FP8 on every model that was
measured (``benchmarks/results/emulated_cpu.md``)."""
CAREFUL = "careful"
"""What a server runs whose model cannot choose, unless it was told what to run."""


def preset_of(text: str) -> str:
    """The preset that a configuration names, empty if it is none. A file of that name is given as ``./small``."""
    name = text.strip()
    return name if name in PRESETS else ""


def looks_like_a_name(text: str) -> bool:
    """Whether a configuration that is no JSON may be meant as a preset's name, and not as a path."""
    return os.sep not in text and "." not in text
