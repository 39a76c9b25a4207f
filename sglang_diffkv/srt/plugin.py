"""Entry point of the group ``sglang.srt.plugins``. SGLang calls ``register`` in every process, before it parses
arguments."""

from sglang.srt.plugins import load_plugins

from sglang_diffkv.srt.hooks.registration import register

__all__ = ["load_plugins", "register"]
