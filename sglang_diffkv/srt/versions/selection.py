"""Whether a server runs diffkv."""

from __future__ import annotations

from typing import Any

BACKEND = "diffkv"
"""The name in ``--attention-backend``."""


def is_selected(server_args: Any) -> bool:
    """Whether any phase of attention is to run on diffkv."""
    return BACKEND in (
        server_args.attention_backend,
        getattr(server_args, "prefill_attention_backend", None),
        getattr(server_args, "decode_attention_backend", None),
    )
