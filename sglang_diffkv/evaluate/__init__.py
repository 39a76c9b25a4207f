"""Quality of cache configurations on task files: ``python -m sglang_diffkv.evaluate --help``."""

from sglang_diffkv.extra import require

require("requests", "tqdm")
