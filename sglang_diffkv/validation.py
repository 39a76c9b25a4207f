"""Combinations that are refused at start, by name and with what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sglang_diffkv.compat import GPU_VERSIONS, UnsupportedError, prefill_graphs_wanted, sglang_version

BACKEND = "diffkv"


def is_selected(server_args: Any) -> bool:
    """Whether any phase of attention is to run on diffkv."""
    return BACKEND in (
        server_args.attention_backend,
        getattr(server_args, "prefill_attention_backend", None),
        getattr(server_args, "decode_attention_backend", None),
    )


def check_server_args(args: Any, gpu_ops: str = "triton") -> None:
    """Raise UnsupportedError, listing every refused option at once."""
    device = str(getattr(args, "device", None) or "")
    eager = getattr(args, "disable_cuda_graph", False) and getattr(args, "disable_overlap_schedule", False)
    refused = [
        (
            any(
                getattr(args, name, None) not in (None, BACKEND)
                for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
            ),
            "a second attention backend beside diffkv: prefill and decode must both use --attention-backend diffkv",
        ),
        (
            args.kv_cache_dtype != "auto",
            f"--kv-cache-dtype {args.kv_cache_dtype}: leave it at auto and set tiers in --diffkv-config",
        ),
        (bool(args.speculative_algorithm), "speculative decoding: drop --speculative-algorithm"),
        (
            args.disaggregation_mode != "null",
            "prefill/decode disaggregation: drop --disaggregation-mode",
        ),
        (args.enable_hierarchical_cache, "the hierarchical cache: drop --enable-hierarchical-cache"),
        (getattr(args, "enable_lmcache", False), "LMCache: drop --enable-lmcache"),
        (
            args.radix_cache_backend not in (None, "", BACKEND),
            f"--radix-cache-backend {args.radix_cache_backend}: drop it, diffkv brings its own",
        ),
        (args.page_size not in (None, 1), f"--page-size {args.page_size}: use 1 (pages are set by page_tokens)"),
        (args.enable_mixed_chunk, "mixed chunks: drop --enable-mixed-chunk"),
        (getattr(args, "nnodes", 1) > 1, "several hosts: use --nnodes 1"),
        (
            any(getattr(args, name, 1) > 1 for name in ("attn_cp_size", "dcp_size", "dwdp_size")),
            "context parallelism, or DWDP: leave --attn-cp-size, --dcp-size and --dwdp-size at 1",
        ),
        (args.pp_size > 1, "pipeline parallelism: use --pp-size 1"),
        (args.dp_size > 1 and args.enable_dp_attention, "data-parallel attention: drop --enable-dp-attention"),
        (getattr(args, "enable_unified_memory", False), "the unified memory pool: drop --enable-unified-memory"),
        (getattr(args, "enable_memory_saver", False), "the memory saver: drop --enable-memory-saver"),
        (getattr(args, "dllm_algorithm", None), "diffusion language models: drop --dllm-algorithm"),
        (getattr(args, "enable_two_batch_overlap", False), "two-batch overlap: drop --enable-two-batch-overlap"),
        (getattr(args, "enable_pdmux", False), "PD multiplexing: drop --enable-pdmux"),
        (getattr(args, "enable_beam_search", False), "beam search: drop --enable-beam-search"),
        (getattr(args, "enable_streaming_session", False), "streaming sessions: drop --enable-streaming-session"),
        (
            getattr(args, "enable_session_radix_cache", False),
            "references by session in the prefix cache: drop --enable-session-radix-cache (sessions work without)",
        ),
        (
            getattr(args, "radix_eviction_policy", None) == "tlru",
            "--radix-eviction-policy tlru: use another policy (it keeps its account in a tree that diffkv replaces)",
        ),
        (bool(device) and device not in ("cpu", "cuda"), f"device {device}: use cuda or cpu"),
        (
            device == "cuda" and gpu_ops == "reference" and not eager,
            '"gpu_ops": "reference" under CUDA graphs or overlap scheduling: add --disable-cuda-graph and '
            "--disable-overlap-schedule",
        ),
        (
            device == "cuda" and sglang_version() not in GPU_VERSIONS,
            f"SGLang {sglang_version()} on a GPU, where it was not tested: install SGLang {', '.join(GPU_VERSIONS)}, "
            "or serve with --device cpu",
        ),
        (
            device == "cuda" and prefill_graphs_wanted(args),
            "CUDA graphs for prefill: drop the option that asks for them (decode graphs work)",
        ),
    ]
    problems = [text for bad, text in refused if bad]
    if problems:
        raise UnsupportedError("--attention-backend diffkv does not work with " + "; and not with ".join(problems))


def check_model(configurator: Any) -> None:
    """Refuse model architectures that diffkv cannot serve. ``configurator`` is SGLang's KVCacheConfigurator."""
    import torch

    config = configurator.model_config
    name = getattr(config, "hf_config", None).__class__.__name__
    problems = []
    if configurator.use_mla_backend:
        problems.append("multi-head latent attention (MLA), which has no per-head keys and values to compress")
    if configurator.is_hybrid_swa or (configurator.sliding_window_size or 0) > 0:
        problems.append("sliding-window attention layers")
    if getattr(configurator, "mambaish_config", None) is not None:
        problems.append("state-space or linear-attention layers")
    if getattr(config, "is_encoder_decoder", False):
        problems.append("cross attention")
    if configurator.kv_cache_dtype not in (torch.bfloat16, torch.float16):
        problems.append(f"a KV dtype of {configurator.kv_cache_dtype}; start with --dtype bfloat16 or float16")
    _refuse_model(name, problems)


def check_layers(model: Any) -> None:
    """Refuse models whose attention layers compute something else than causal attention, which a backend has to know
    of. ``model`` is SGLang's, loaded."""
    problems: dict[str, None] = {}
    for layer in attention_layers(model):
        problems.update(dict.fromkeys(_unlike_causal(layer)))
    _refuse_model(type(model).__name__, list(problems))


def attention_layers(model: Any) -> Iterator[Any]:
    """The layers of SGLang's loaded ``model`` that call an attention backend. Its wrapper of Transformers models keeps
    them in a dictionary, which ``modules`` does not find."""
    from sglang.srt.layers.radix_attention import RadixAttention

    for module in model.modules():
        if isinstance(module, RadixAttention):
            yield module
        instances = getattr(module, "attention_instances", None)
        if isinstance(instances, dict):
            yield from instances.values()


def _unlike_causal(layer: Any) -> Iterator[str]:
    kind = str(getattr(layer.attn_type, "value", layer.attn_type))
    if kind != "decoder":
        yield f"attention that is not causal ({kind})"
    if layer.is_cross_attention:
        yield "cross attention"
    if (layer.sliding_window_size or -1) > 0:
        yield "sliding-window attention layers"
    if getattr(layer, "use_irope", False):
        yield "attention in chunks (iRoPE)"
    if layer.pos_encoding_mode != "NONE":
        yield f"positions in attention's logits ({layer.pos_encoding_mode})"
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        yield f"logits capped by {layer.logit_capping_method}"
    if getattr(layer, "xai_temperature_len", -1) > 0:
        yield "logits scaled by position"


def _refuse_model(name: str, problems: Sequence[str]) -> None:
    if problems:
        raise UnsupportedError(
            f"--attention-backend diffkv cannot serve this model ({name}): it has {', and '.join(problems)}. "
            "Use another --attention-backend for it."
        )
