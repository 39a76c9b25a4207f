"""Quality of cache configurations on task files: ``python -m sglang_diffkv.evaluate --help``."""

from sglang_diffkv.extra import SERVED, require

require("requests", "tqdm", *SERVED)
