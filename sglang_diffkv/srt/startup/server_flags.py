"""Every option of the supported SGLang versions, by its field of ``ServerArgs``: it works with diffkv, is refused at
start, or has no bearing on it. ``tests/servers/test_server_flags.py`` fails for a field that is not here;
``docs/flags.md`` is for users.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from sglang_diffkv.srt.models.speculation import (
    MOST_DRAFTS,
    NGRAM,
    OF_A_MODEL,
    algorithm_of,
    drafts_by_model,
    drafts_of,
    drafts_trees,
    tree_sizes,
)
from sglang_diffkv.srt.startup.option_kinds import Flag, NoBearing, OnlyWith, Predicate, Refused, Works, unlike
from sglang_diffkv.srt.startup.optional_parts import PARTS
from sglang_diffkv.srt.startup.prefill_graphs import graphs_obstacle
from sglang_diffkv.srt.startup.supported_flags import NO_BEARING, ONLY_WITH, ORTHOGONAL, WORKS
from sglang_diffkv.srt.versions import compat
from sglang_diffkv.srt.versions.selection import BACKEND


def _above_one(value: Any, args: Any) -> bool:
    return (value or 1) > 1


def _second_backend(value: Any, args: Any) -> bool:
    return value not in (None, BACKEND)


def _canary(value: Any, args: Any) -> bool:
    runs = args.device != "cpu" or (compat.installed().canary_on_cpu and os.environ.get("TRITON_INTERPRET") == "1")
    return value != "none" and not runs


def _other_algorithm(value: Any, args: Any) -> bool:
    served = algorithm_of(args) in (NGRAM, *OF_A_MODEL)
    return bool(value) and not served


def _too_many_drafts(value: Any, args: Any) -> str:
    """The numbers to choose from, where another is given."""
    least, most = 2, MOST_DRAFTS
    if drafts_by_model(args) and drafts_trees(args):
        least, most = tree_sizes(args)
    return f"{least} to {most}" if drafts_of(args) and value is not None and not least <= value <= most else ""


def _long_paths(value: Any, args: Any) -> bool:
    return drafts_by_model(args) and value is not None and value >= MOST_DRAFTS


def _with_kept_states(*values: Any) -> Predicate:
    """Other values than these, where the prefix cache may keep states of layers that do not attend."""
    return lambda value, args: value not in values and not args.disable_radix_cache


def _prefill_graphs(value: Any, args: Any) -> str:
    return graphs_obstacle(args) if args.device == "cuda" else ""


def _broken_graphs(value: Any, args: Any) -> bool:
    config = getattr(args, "cuda_graph_config", None)
    wanted = {value, config.decode.backend} if config is not None and args.device == "cuda" else {value}
    return not wanted <= {None, "full", "disabled"}


_BACKENDS = "a second attention backend beside diffkv: prefill and decode must both use --attention-backend diffkv"
_PREFILL_GRAPHS = (
    "CUDA graphs for prefill ({found}): drop that option, or add --disable-prefill-cuda-graph (decode graphs work)"
)
_PREFILL_GRAPHS_RUN = "a comparison with stock on an H100: docs/results.md"
_CONTEXT = "context parallelism, or DWDP: leave --attn-cp-size, --dcp-size and --dwdp-size at 1"
_ELASTIC = "elastic expert parallelism, in which ranks leave while others decide with them: drop its options"

_DESIGN = "; docs/designs.md says what they would take"
_MODELS_RUN = "tests/servers/test_server_identity.py::test_drafts_of_a_model_give_stock_tokens"
_CHAINS_RUN = "tests/servers/test_server_identity.py::test_chains_of_drafts_give_stock_tokens"

REFUSED: dict[str, Refused] = {
    "attention_backend": Refused(_BACKENDS, _second_backend, "all server tests"),
    "prefill_attention_backend": Refused(_BACKENDS, _second_backend, "is --attention-backend for prefill"),
    "decode_attention_backend": Refused(_BACKENDS, _second_backend, "is --attention-backend for decode"),
    "kv_cache_dtype": Refused(
        "--kv-cache-dtype {value}: drop it, tiers take its place (the default stores fewer than 8 bits a number, "
        '{{"tiers": ["K8V8"]}} in --diffkv-config 8; auto, bf16 and bfloat16 are accepted)',
        unlike("auto", "bf16", "bfloat16"),
        "tests/servers/test_server_kv_dtype.py::test_a_checkpoint_that_asks_for_an_fp8_cache_gets_the_tiers",
    ),
    "speculative_algorithm": Refused(
        f"--speculative-algorithm {{value}}: use {NGRAM}, {', '.join(OF_A_MODEL)}, or drop it",
        _other_algorithm,
        _CHAINS_RUN,
    ),
    "speculative_num_steps": Refused(
        f"--speculative-num-steps {{value}}: use up to {MOST_DRAFTS - 1}", _long_paths, _MODELS_RUN
    ),
    "speculative_adaptive": Refused(
        "drafts of changing number: drop --speculative-adaptive", lambda value, args: value and drafts_of(args)
    ),
    "speculative_draft_attention_backend": Refused(
        "pages for the draft model, whose keys and values are few: drop --speculative-draft-attention-backend, or name "
        "one of SGLang's",
        lambda value, args: value == BACKEND,
        _MODELS_RUN,
    ),
    "speculative_ngram_external_sam_budget": Refused(
        "drafts from an external corpus, which were not tried: drop --speculative-ngram-external-sam-budget",
        lambda value, args: drafts_of(args) and value > 0,
    ),
    "speculative_num_draft_tokens": Refused(
        "--speculative-num-draft-tokens {value}: use {found}",
        _too_many_drafts,
        _CHAINS_RUN,
    ),
    "enable_multi_layer_eagle": Refused("speculative decoding: drop --enable-multi-layer-eagle"),
    "decoupled_spec_role": Refused("speculative decoding: drop --decoupled-spec-role", unlike("null", None)),
    "uno_lora_path": Refused("speculative decoding: drop --uno-lora-path"),
    "enable_return_aux_hidden_states": Refused(
        "auxiliary hidden states in replies: drop --enable-return-aux-hidden-states"
    ),
    "enable_pd_role_switch": Refused("prefill/decode disaggregation: drop --enable-pd-role-switch"),
    "disaggregation_decode_enable_offload_kvcache": Refused(
        "offloading KV to the host: drop --disaggregation-decode-enable-offload-kvcache"
    ),
    "encoder_only": Refused(
        "a server of encoders alone, which has no KV cache: drop --attention-backend diffkv for it"
    ),
    "enable_lmcache": Refused("LMCache: drop --enable-lmcache"),
    "enable_flexkv": Refused("FlexKV, which moves K and V by KV slot: drop --enable-flexkv"),
    "enable_unified_cache_external_linker": Refused(
        "an external KV store, which moves K and V by KV slot: drop --enable-unified-cache-external-linker"
    ),
    "radix_cache_backend": Refused(
        "--radix-cache-backend {value}: drop it, diffkv brings its own",
        unlike(None, "", BACKEND),
        "names our own cache",
    ),
    "enable_hisparse": Refused("hierarchical sparse attention: drop --enable-hisparse"),
    "enable_page_major_kv_layout": Refused("the page-major KV layout: drop --enable-page-major-kv-layout"),
    "enable_unified_memory": Refused("the unified memory pool: drop --enable-unified-memory"),
    "enable_memory_saver": Refused("the memory saver: drop --enable-memory-saver"),
    "enable_mixed_chunk": Refused(
        "mixed chunks beside drafts, of which SGLang runs none in a pass over prompts: drop --enable-mixed-chunk",
        lambda value, args: value and drafts_of(args),
        "tests/servers/test_server_mixed_chunks.py::test_lossless_gives_stock_tokens",
    ),
    "prefill_only_disable_kv_cache": Refused("a server without KV cache: drop --prefill-only-disable-kv-cache"),
    "is_embedding": Refused(
        "--is-embedding: an embedding would change once its prefix is cached, as cached tokens are compressed; serve "
        "embeddings with another --attention-backend"
    ),
    "enable_mis": Refused("multi-item scoring, whose items must not see each other: drop --enable-mis"),
    "attn_cp_size": Refused(_CONTEXT, _above_one),
    "dcp_size": Refused(_CONTEXT, _above_one),
    "dwdp_size": Refused(_CONTEXT, _above_one),
    "enable_prefill_cp": Refused("context parallelism: drop --enable-prefill-cp"),
    "enable_prefill_context_parallel": Refused("context parallelism: drop --enable-prefill-context-parallel"),
    "enable_dsa_prefill_context_parallel": Refused("context parallelism: drop --enable-dsa-prefill-context-parallel"),
    "enable_kv_cache_sharding": Refused("KV sharded over ranks: drop --enable-kv-cache-sharding"),
    "pp_size": Refused(f"pipeline parallelism: use --pp-size 1{_DESIGN}", _above_one),
    "enable_dp_attention": Refused(
        f"data-parallel attention: drop --enable-dp-attention{_DESIGN}", lambda value, args: value and args.dp_size > 1
    ),
    "attn_dp_size": Refused(f"data-parallel attention: leave --attn-dp-size at 1{_DESIGN}", _above_one),
    "elastic_ep_backend": Refused(_ELASTIC),
    "elastic_ep_rejoin": Refused(_ELASTIC),
    "ep_join_mode": Refused(_ELASTIC),
    "use_ray": Refused("Ray, whose actors do not get the configuration: drop --use-ray"),
    "enable_two_batch_overlap": Refused("two-batch overlap: drop --enable-two-batch-overlap"),
    "enable_pdmux": Refused("PD multiplexing: drop --enable-pdmux"),
    "dllm_algorithm": Refused("diffusion language models: drop --dllm-algorithm"),
    "enable_streaming_session": Refused("streaming sessions: drop --enable-streaming-session"),
    "mamba_radix_cache_strategy": Refused(
        "--mamba-radix-cache-strategy {value}: drop it, states are copied behind the pass that makes them and take no "
        "buffers of a request",
        _with_kept_states(None, "auto", "no_buffer"),
        "tests/servers/test_server_kept_states.py::test_lossless_gives_the_tokens_of_a_server_without_a_prefix_cache",
    ),
    "mamba_max_states_per_path": Refused(
        "--mamba-max-states-per-path {value}: drop it, what was not used for longest goes first",
        _with_kept_states(None, -1),
    ),
    "enable_int8_mamba_checkpoint": Refused(
        "states kept in 8 bits: drop --enable-int8-mamba-checkpoint, or add --disable-radix-cache",
        _with_kept_states(None, False),
    ),
    "enable_linear_replayssm": Refused(
        "states that fall behind their tokens, beside which the prefix cache cannot keep one: drop "
        "--enable-linear-replayssm, or add --disable-radix-cache",
        _with_kept_states(None, False),
    ),
    "device": Refused("device {value}: use cuda or cpu", unlike(None, "", "cuda", "cpu"), "all server tests"),
    "enable_deterministic_inference": Refused(
        "deterministic inference: a reply may differ by whether its prefix was cached; drop "
        "--enable-deterministic-inference"
    ),
    "rl_on_policy_target": Refused(
        "--rl-on-policy-target: log-probabilities under a compressed cache are not those of training; drop it"
    ),
    "enable_torch_compile": Refused(
        "torch.compile on a CPU, which SGLang has for another backend only: drop --enable-torch-compile",
        lambda value, args: value and args.device == "cpu",
        "a run on an H200, which started and answered: docs/flags.md",
    ),
    "enable_nvidia_megakernel": Refused(
        "the megakernel, which reads K and V by KV slot: drop --enable-nvidia-megakernel"
    ),
    "enable_amd_monokernel": Refused("the monokernels, which read K and V by KV slot: drop --enable-amd-monokernel"),
    "cuda_graph_config": Refused(_PREFILL_GRAPHS, _prefill_graphs, _PREFILL_GRAPHS_RUN),
    "cuda_graph_backend_prefill": Refused(_PREFILL_GRAPHS, _prefill_graphs, _PREFILL_GRAPHS_RUN),
    "cuda_graph_prefill_max_context": Refused(
        "--cuda-graph-prefill-max-context: drop it, graphs of prompts hold nothing that depends on lengths",
        unlike(None, 0),
    ),
    "cuda_graph_backend_decode": Refused(
        "decode graphs with breaks: use --cuda-graph-backend-decode full or disabled",
        _broken_graphs,
        "the H200 runs of docs/results.md",
    ),
    "debug_cuda_graph": Refused("--debug-cuda-graph: use --disable-cuda-graph to run eagerly"),
    "enable_return_routed_experts": Refused(
        "routed experts in replies, which SGLang keeps by KV slot in a table with fewer rows than DiffKV has KV slots: "
        "drop --enable-return-routed-experts"
    ),
    "enable_return_indexer_topk": Refused(
        "the indexer's choices in replies, which SGLang keeps by KV slot: drop --enable-return-indexer-topk"
    ),
    "kv_canary": Refused(
        "--kv-canary {value} on a CPU, for which SGLang has no canary kernels (from 0.5.21 on TRITON_INTERPRET=1 runs "
        "them, slowly)",
        _canary,
        "tests/servers/test_server_options.py::test_the_canary_stays_silent",
    ),
    "kv_canary_real_data": Refused(
        "--kv-canary-real-data {value}: use none, as a token's bytes change when it goes down a tier",
        unlike("none", None),
    ),
    **{name: refused for part in PARTS for name, refused in part.refused.items()},
}


def flags() -> dict[str, Flag]:
    """Field of ``ServerArgs`` -> what it is to diffkv."""
    found: dict[str, Flag] = dict(REFUSED)
    every: list[tuple[Callable[[str], Flag], Mapping[str, str]]] = [(Works, WORKS)]
    every += [(Works, part.works) for part in PARTS]
    every += [(Works, ORTHOGONAL), (NoBearing, NO_BEARING), (OnlyWith, ONLY_WITH)]
    for kind, groups in every:
        for text, names in groups.items():
            for name in names.split():
                if name in found:
                    raise ValueError(f"{name} is listed twice")
                found[name] = kind(text)
    return found


def refusals(args: Any) -> list[str]:
    """What of ``args`` does not work, each with what to do. Fields that ``args`` lacks are those of other versions."""
    bad = [
        flag.why.format(value=getattr(args, name), found=found)
        for name, flag in REFUSED.items()
        if hasattr(args, name) and (found := flag.when(getattr(args, name), args))
    ]
    return list(dict.fromkeys(bad))
