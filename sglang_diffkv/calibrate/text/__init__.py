"""Thresholds of a model within a loss on plain text: ``python -m sglang_diffkv.calibrate --text FILE --help``."""
