"""DiffKV: a compressed KV cache for SGLang, as a plugin (``--attention-backend diffkv``)."""

__version__ = "0.2.0"
