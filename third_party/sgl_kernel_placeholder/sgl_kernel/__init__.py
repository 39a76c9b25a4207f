"""Importable stand-in for the CPU build of ``sgl_kernel``.

With ``SGLANG_USE_CPU_ENGINE=1`` SGLang imports ``*_cpu`` operators from ``sgl_kernel`` at module level. No
registry carries that build, and on a processor without AMX none is called but by speculative decoding and by layers of
Qwen3-Next and Qwen3.5. Those are here, in plain PyTorch (``speculative``, ``mamba``, ``gated``); every other ``*_cpu``
name resolves to a function that raises. Under ``torch.ops.sgl_kernel`` nothing but what such layers look for is
registered, so SGLang sees no AMX support and its layers take their native PyTorch path.
"""

from typing import Any, Callable

import sgl_kernel.gated  # noqa: F401
from sgl_kernel.speculative import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_tree_kernel_efficient_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    verify_tree_greedy_cpu,
)

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
]
__version__ = "0.1.0+placeholder"


def _unavailable(name: str) -> Callable[..., Any]:
    def operator(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"sgl_kernel.{name} is not available: the installed sgl_kernel is a placeholder without operators"
        )

    operator.__name__ = operator.__qualname__ = name
    return operator


def __getattr__(name: str) -> Callable[..., Any]:
    if name.endswith("_cpu"):
        return _unavailable(name)
    raise AttributeError(f"module {__name__!r} (placeholder) has no attribute {name!r}")
