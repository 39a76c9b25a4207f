"""Quality of cache configurations on task files: ``python -m sglang_diffkv.evaluate --help``."""
