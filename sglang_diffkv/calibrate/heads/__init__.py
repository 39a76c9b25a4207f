"""Factors of the thresholds by head, fitted offline: ``python -m sglang_diffkv.calibrate.heads --help``."""
