"""The allocator of this process, for what SGLang calls without one: the decode log line, metrics and the canary."""

from __future__ import annotations

from sglang_diffkv.srt.allocator import DiffKVAllocator

SERVED: dict[str, DiffKVAllocator] = {}
"""Of the name of the backend, once a server has built it."""
