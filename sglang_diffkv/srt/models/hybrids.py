"""Models most of whose layers are linear attention, state spaces or short convolutions, and only some attend to keys
and values. Those have pages; the others' states are SGLang's, as are their kernels and who has which: a request holds a
state slot for as long as it holds a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from sglang_diffkv.config import read_config
from sglang_diffkv.errors import UnsupportedError
from sglang_diffkv.releases import seen_on_gpu
from sglang_diffkv.srt.models.speculation import (
    CHAIN,
    MODEL_CHAIN,
    drafts_by_model,
    drafts_by_own_layer,
    drafts_of,
    drafts_trees,
)
from sglang_diffkv.srt.versions import compat
from sglang_diffkv.srt.versions.places import sglang_class

MIB = 1 << 20
STATES_GPU_VERSIONS = seen_on_gpu("states")
"""Versions of SGLang with which such models gave stock's tokens on a GPU, but for roundings."""
DELTA_GPU_VERSIONS = seen_on_gpu("states of a gated delta rule")
"""Versions with which those of Qwen3-Next's kind did, and no others."""
DRAFTS_GPU_VERSIONS = seen_on_gpu("drafts beside states")
"""Versions with which these did with drafts of their own layer."""


def paged_layers(configurator: Any) -> tuple[int, ...]:
    """Ids of the layers that have keys and values, for SGLang's KVCacheConfigurator: in order, and as many as there are
    layers in a page manager."""
    layers = configurator.layer_info
    every = range(layers.start_layer, layers.start_layer + layers.num_effective_layers)
    hybrid = configurator.mambaish_config
    return tuple(every) if hybrid is None else tuple(x for x in sorted(hybrid.full_attention_layer_ids) if x in every)


def hybrid_problems(configurator: Any) -> Iterator[str]:
    """What of a model with states cannot be served, by ``mambaish_config`` of SGLang's KVCacheConfigurator."""
    hybrid, args = configurator.mambaish_config, compat.resolved(configurator.server_args)
    if not hybrid.full_attention_layer_ids:
        yield "states alone and no layer with keys and values to compress"
    if not args.disable_radix_cache and (args.chunked_prefill_size or 0) <= 0:
        yield (
            "layers with states and prompts that are never cut, of which the prefix cache would find next to nothing; "
            "drop --chunked-prefill-size -1, or add --disable-radix-cache"
        )
    if not args.disable_radix_cache and read_config().prefix_fidelity == "exact":
        yield (
            "layers with states, beside which the prefix cache keeps compressed prompts only; start with "
            '"prefix_fidelity": "compressed" in --diffkv-config, or with --disable-radix-cache'
        )
    size = compat.tree_page_size(getattr(configurator, "arguments", None) or configurator.server_args)
    if size > 1 and not args.disable_radix_cache:
        yield (
            f"layers with states, which are kept at the ends of prompts and not at multiples of --page-size {size}; "
            "drop --page-size"
        )
    yield from _with_drafts(configurator, args)
    if getattr(args, "enable_mixed_chunk", False):
        yield "layers with states, beside which mixed chunks were not seen to be right; drop --enable-mixed-chunk"
    if configurator.device == "cuda" and compat.prefill_graphs(configurator.server_args) != "disabled":
        yield "layers with states, with which CUDA graphs of prompts were not tried; add --disable-prefill-cuda-graph"
    if getattr(configurator.model_config.hf_text_config, "indexer_n_heads", None) is not None:
        yield "sparse attention with an index of its own"
    known = (*STATES_GPU_VERSIONS, *(DELTA_GPU_VERSIONS if _has_delta_rule(configurator) else ()))
    if compat.sglang_version() not in known:
        what = f"layers with states, of SGLang {compat.sglang_version()},"
        yield from compat.untried_on_a_gpu(configurator.device, what, "use another --attention-backend")


def _has_delta_rule(configurator: Any) -> bool:
    """Whether its states are those of a gated delta rule: Qwen3-Next, Qwen3.5."""
    return hasattr(configurator.mambaish_config, "linear_num_value_heads")


def _with_drafts(configurator: Any, args: Any) -> Iterator[str]:
    """What is wrong with drafts beside states. SGLang stores the state behind each draft of a chain, and puts back the
    one behind the last that was accepted."""
    if not drafts_of(args):
        return
    if not _has_delta_rule(configurator):
        yield (
            "states other than those of a gated delta rule (Qwen3-Next, Qwen3.5), which were not tried with drafts; "
            "drop --speculative-algorithm"
        )
    if drafts_trees(args):
        yield (
            "trees of drafts beside layers with states, of which SGLang keeps those behind the drafts of a chain; add "
            + (MODEL_CHAIN if drafts_by_model(args) else CHAIN)
        )
    if configurator.device == "cpu" and not compat.installed().draft_states_on_cpu:
        yield (
            "drafts beside layers with states on a CPU, where this SGLang has no room for the states behind drafts; "
            "drop --speculative-algorithm, or install a later SGLang"
        )
    if compat.sglang_version() not in DRAFTS_GPU_VERSIONS or not drafts_by_own_layer(args):
        of = "drafts of the model's own layer" if drafts_by_own_layer(args) else "other drafts than its own layer's"
        what = f"{of} beside layers with states, of SGLang {compat.sglang_version()},"
        yield from compat.untried_on_a_gpu(configurator.device, what, "drop --speculative-algorithm")


def check_paged_layers(name: str, found: set[int], paged: tuple[int, ...]) -> None:
    """Raise UnsupportedError unless the layers that call the attention backend, ``found`` in SGLang's loaded model
    ``name``, are those that have pages: the last of these ends a pass."""
    if found != set(paged):
        raise UnsupportedError(
            f"--attention-backend diffkv cannot serve this model ({name}): attention is in layers {sorted(found)}, and "
            f"SGLang keeps keys and values for {list(paged)}. Use another --attention-backend for it."
        )


def state_bytes(configurator: Any) -> int:
    """Bytes of a request's states on a rank, for SGLang's KVCacheConfigurator; 0 for a model without."""
    hybrid = configurator.mambaish_config
    return 0 if hybrid is None else int(hybrid.mamba2_cache_params.mamba_cache_per_req)


def has_states(rows: Any) -> bool:
    """Whether SGLang's table of requests hands out state slots with its rows."""
    return isinstance(rows, _class_of_states())


@cache  # SGLang asks several times a request
def _class_of_states() -> Any:
    return sglang_class("HybridReqToTokenPool")


def describe_layers(configurator: Any, states: Any) -> str:
    """What of a model's layers is compressed and what is not, for SGLang's KVCacheConfigurator and its
    ``mamba2_cache_params``."""
    every, paged = configurator.layer_info.num_effective_layers, paged_layers(configurator)
    listed = ", ".join(map(str, paged)) if len(paged) < every else "all"
    alone = compat.resolved(configurator.server_args).disable_radix_cache
    shared = "Prefixes are not shared between requests" if alone else "Prefixes are shared up to where a state is kept"
    size = f"{states.mamba_cache_per_req / MIB:.2f} MiB"
    return (
        f"{len(paged)} of {every} layers have keys and values, which are compressed ({listed}); {len(states.layers)} "
        f"have states, {size} a request in SGLang's own pool, which are not. {shared}"
    )
