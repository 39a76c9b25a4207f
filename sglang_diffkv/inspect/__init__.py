"""The KV cache of a running server, by layer and head: ``python -m sglang_diffkv.inspect --help``."""

from sglang_diffkv.extra import SERVED, require

require("requests", "rich", *SERVED)
