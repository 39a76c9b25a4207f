"""The KV cache of a running server, by layer and head: ``python -m sglang_diffkv.inspect --help``."""
