"""What depends on the SGLang version of models whose layers have states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sglang_diffkv.srt.versions.compat import decide, installed, kv_of, resolved


def planned_states(hybrid: Any, ranks: int) -> Any:
    """``mamba2_cache_params`` of a model's configuration, on each of so many ranks, before there are ranks: ``layers``
    that have states, and ``mamba_cache_per_req``, bytes of a request's."""
    from sglang.srt.runtime_context import get_parallel

    widths = {
        "attn_tp_size": ranks,
        **({"enable_cp_tp_group_sharing": False} if installed().states_need_cp_sharing else {}),
    }
    with get_parallel().override(**widths):
        return hybrid.mamba2_cache_params


def model_has_states(server_args: Any) -> bool:
    """Whether some of the model's layers have states, by its configuration."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    if not installed().declared_arguments:
        return mambaish_config(server_args.get_model_config()) is not None
    from sglang.srt.arg_groups.model_override_base import model_config_of

    return mambaish_config(model_config_of(server_args)) is not None


def state_buffers(rows: Any) -> list[Any]:
    """Where the states of all slots lie: tensors [layers, slots, ...], for SGLang's table of requests."""
    cache = rows.mamba_pool.mamba_cache
    return [*cache.conv, cache.temporal]


def state_slot(req: Any) -> Any:
    """Number of the request's state slot, an int64 tensor of no dimensions; None while it has none."""
    return getattr(kv_of(req), "mamba_pool_idx", None)


def takes_result(req: Any) -> bool:
    """Whether SGLang can look at a pass's result for the request though it was retracted meanwhile, behind which its
    state stands. Not with buffers beside its slot, nor where more than tokens is kept of a pass."""
    if getattr(kv_of(req), "mamba_ping_pong_track_buffer", None) is not None:
        return False
    return not any(getattr(req, name, False) for name in ("return_sampling_mask", "return_hidden_states"))


def give_state(req: Any, slot: Any, source: Any) -> None:
    """The request has ``slot`` (int64 [1]), to which SGLang copies the state in ``source`` (int64 [1]) before the next
    pass."""
    kv = kv_of(req)
    kv.mamba_pool_idx, kv.mamba_cow_src_index, kv.mamba_needs_clear = slot[0], source, False


def take_state(req: Any) -> Any:
    """The request's slot (int64 [1]), which is not its own any more."""
    slot = state_slot(req).reshape(1)
    kv_of(req).mamba_pool_idx = None
    return slot


def keep_without_buffers(server_args: Any) -> None:
    """Have SGLang give requests no buffers beside their state slots, by which its own prefix cache keeps states under
    overlap scheduling, unless the user asked for some."""
    args = resolved(server_args)
    if not args.disable_radix_cache and args.mamba_radix_cache_strategy == "auto":
        decide(server_args, mamba_radix_cache_strategy="no_buffer")


@contextmanager
def no_waits_without_cuda() -> Iterator[None]:
    """Inside, waiting for CUDA does nothing where torch has none. Prediction layers of models with states wait for it
    on a CPU too, when they take the target's embeddings."""
    wait = torch.cuda.synchronize
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda *_: None
    try:
        yield
    finally:
        torch.cuda.synchronize = wait
