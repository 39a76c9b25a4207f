"""SGLang's ``--page-size``: the prefix cache finds and stores multiples of so many tokens, as routers count them.

Bytes are in pages of the plugin's own, and KV slots stay single (``compat.hand_out_single_slots``). So the option is
the tree's alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.errors import UnsupportedError
from sglang_diffkv.srt.models.speculation import CHAIN, MODEL_CHAIN, drafts_by_model, drafts_trees
from sglang_diffkv.srt.versions import compat


def problems(args: Any, config: DiffKVConfig) -> list[str]:
    """What does not work with the page size that the user's arguments ask for, each with what to do."""
    size, view = compat.tree_page_size(args), compat.resolved(args)
    if size == 1 or getattr(view, "disable_radix_cache", False):
        return []
    with_size, drop = f"--page-size {size} with", "drop --page-size"
    found = {
        f'{with_size} "prefix_fidelity": "exact", whose copies begin anywhere: {drop}, or use "compressed"': (
            config.prefix_fidelity == "exact"
        ),
        f"{with_size} a policy that compresses running requests in pages of their own: {drop}, or choose another": (
            config.build_policy().running is not None
        ),
        f"{with_size} trees of drafts: {drop}, or add {MODEL_CHAIN if drafts_by_model(view) else CHAIN}": (
            drafts_trees(view)
        ),
        f"{with_size} --kv-canary, which follows single tokens: drop one of them": (
            getattr(view, "kv_canary", "none") != "none"
        ),
    }
    return [text for text, wrong in found.items() if wrong]


def check_spans(args: Any, attention_spans: Sequence[int]) -> None:
    """Raise UnsupportedError for layers with a sliding window. ``args``: the user's. ``attention_spans``: as of
    ``Geometry``."""
    size = compat.tree_page_size(args)
    if any(attention_spans) and size > 1 and not getattr(compat.resolved(args), "disable_radix_cache", False):
        raise UnsupportedError(
            f"--attention-backend diffkv does not work with --page-size {size} for layers with a sliding window, which "
            "hold the newest tokens only: drop --page-size"
        )
