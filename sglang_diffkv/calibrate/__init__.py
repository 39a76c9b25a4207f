"""Thresholds of a model within a loss of accuracy: ``python -m sglang_diffkv.calibrate --help``."""

from sglang_diffkv.extra import SERVED, require

require("requests", "tqdm", *SERVED)
