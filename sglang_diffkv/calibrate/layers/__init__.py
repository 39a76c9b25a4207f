"""Shares of a prompt by layer, from a sample of a task: ``python -m sglang_diffkv.calibrate.layers --help``."""
