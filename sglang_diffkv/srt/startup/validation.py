"""Combinations that are refused at start, by name and with what to do."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.errors import UnsupportedError
from sglang_diffkv.policies.base import Pointwise
from sglang_diffkv.srt.models.hybrids import hybrid_problems
from sglang_diffkv.srt.models.scaling import attention_layers
from sglang_diffkv.srt.models.speculation import (
    DRAFTS_GPU_VERSIONS,
    MODEL_CHAIN,
    SEEN_ON_A_GPU,
    TREES_GPU_VERSIONS,
    TREES_SEEN_ON_A_GPU,
    algorithm_of,
    drafts_by_model,
    drafts_trees,
)
from sglang_diffkv.srt.startup import disaggregation, tree_pages
from sglang_diffkv.srt.startup.optional_parts import PARTS
from sglang_diffkv.srt.startup.server_flags import refusals
from sglang_diffkv.srt.versions.compat import (
    resolved,
    sglang_version,
    untested_on_a_gpu,
    untried_on_a_gpu,
)

PAGE_DTYPES = (torch.bfloat16, torch.float16)
"""What a raw tier can hold."""


def check_server_args(args: Any, config: DiffKVConfig | None = None) -> None:
    """Raise UnsupportedError, listing every refused option at once."""
    config = config or DiffKVConfig()
    problems = [text for part in PARTS for text in part.problems(args, config)] + tree_pages.problems(args, config)
    args = resolved(args)
    problems = refusals(args) + problems + disaggregation.problems(args, config)
    device = str(getattr(args, "device", None) or "")
    eager = getattr(args, "disable_cuda_graph", False) and getattr(args, "disable_overlap_schedule", False)
    if device == "cuda" and config.gpu_ops == "reference" and not eager:
        problems.append(
            '"gpu_ops": "reference" under CUDA graphs or overlap scheduling: add --disable-cuda-graph and '
            "--disable-overlap-schedule"
        )
    if drafts_by_model(args) and getattr(args, "kv_canary", "none") != "none":
        problems.append("--kv-canary with a draft model, whose cache it does not know: drop --kv-canary")
    problems += untested_on_a_gpu(device)
    if device == "cuda" and _switched_on("SGLANG_ENABLE_METADATA_GLUE_GRAPH"):
        problems.append("SGLANG_ENABLE_METADATA_GLUE_GRAPH, by which table blocks would not reach the device: unset it")
    problems += _drafts_on_a_gpu(args, device)
    if getattr(args, "enable_mixed_chunk", False):
        if _switched_on("SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP"):
            problems.append(
                "--enable-mixed-chunk with SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP, by which requests would end "
                "while their next token is planned: unset it"
            )
        if getattr(config.policy, "asynchronous", False):
            problems.append('--enable-mixed-chunk with "asynchronous": true: drop one of them')
    if config.keep_seconds and disaggregation.mode_of(args) == disaggregation.DECODE:
        problems.append(
            f'"keep_seconds" with {disaggregation.OPTION} decode, where no prefix is kept: leave "keep_seconds" out'
        )
    elif config.keep_seconds and getattr(args, "disable_radix_cache", False):
        problems.append('"keep_seconds" with --disable-radix-cache, which keeps no prefix: drop one of them')
    if getattr(config.policy, "asynchronous", False):
        problems += untried_on_a_gpu(device, '"asynchronous": true', "leave it out of the policy")
    if problems:
        raise UnsupportedError("--attention-backend diffkv does not work with " + "; and not with ".join(problems))


def _switched_on(variable: str) -> bool:
    """As SGLang reads a variable of the environment."""
    return os.environ.get(variable, "").lower() in ("1", "true", "yes", "y")


def _drafts_on_a_gpu(args: Any, device: str) -> list[str]:
    """What is wrong on a GPU with the way in which a server is to draft."""
    algorithm, problems = algorithm_of(args), []
    if not algorithm or device != "cuda":
        return []
    if _switched_on("SGLANG_ENABLE_OVERLAP_PLAN_STREAM"):
        problems.append(
            "SGLANG_ENABLE_OVERLAP_PLAN_STREAM, by which table blocks would change under the pass that runs: unset it"
        )
    eager, overlap = getattr(args, "disable_cuda_graph", False), not getattr(args, "disable_overlap_schedule", False)
    if algorithm not in SEEN_ON_A_GPU or sglang_version() not in DRAFTS_GPU_VERSIONS:
        what = f"--speculative-algorithm {algorithm} of SGLang {sglang_version()}"
        problems += untried_on_a_gpu(device, what, "drop --speculative-algorithm")
    elif drafts_trees(args) and drafts_by_model(args) and not _trees_were_seen(algorithm):
        problems += untried_on_a_gpu(device, f"trees of {algorithm}'s drafts", f"add {MODEL_CHAIN}")
    elif algorithm == "STANDALONE" and not (eager or overlap):
        what = f"{algorithm} in CUDA graphs with --disable-overlap-schedule (SGLang's own server fails so, too)"
        problems += untried_on_a_gpu(device, what, "drop --disable-overlap-schedule, or add --disable-cuda-graph")
    return problems


def _trees_were_seen(algorithm: str) -> bool:
    """Whether trees of a model's drafts gave stock's tokens on a GPU."""
    return algorithm in TREES_SEEN_ON_A_GPU and sglang_version() in TREES_GPU_VERSIONS


def check_model(configurator: Any) -> None:
    """Refuse model architectures that diffkv cannot serve. ``configurator`` is SGLang's KVCacheConfigurator."""
    config = configurator.model_config
    name = getattr(config, "hf_config", None).__class__.__name__
    problems = []
    if configurator.use_mla_backend:
        problems.append("multi-head latent attention (MLA), which has no per-head keys and values to compress")
    if configurator.is_hybrid_swa:
        problems.append("pools of its own for sliding-window layers; start with --disable-hybrid-swa-memory")
    if (getattr(getattr(config, "hf_text_config", None), "num_kv_shared_layers", None) or 0) > 0:
        problems.append("layers that share the keys and values of others")
    if getattr(config, "attention_chunk_size", None):
        problems.append("attention in chunks (iRoPE)")
    if getattr(configurator, "mambaish_config", None) is not None:
        problems += hybrid_problems(configurator)
    problems += disaggregation.model_problems(configurator)
    if not getattr(config, "is_generation", True):
        problems.append("embeddings or scores for output, which would change once a prefix is cached")
    if getattr(config, "is_encoder_decoder", False):
        problems.append("cross attention")
    if configurator.kv_cache_dtype not in PAGE_DTYPES:
        problems.append(f"a KV dtype of {configurator.kv_cache_dtype}; start with --dtype bfloat16 or float16")
    _refuse_model(name, problems)


def scores_whole_heads(config: DiffKVConfig) -> bool:
    """Whether the method scores tokens by others of their head. Such a method is not served with sliding layers."""
    policy = config.build_policy()
    rules = (policy.prompt, policy.generation)
    return policy.running is not None or not all(rule is None or isinstance(rule, Pointwise) for rule in rules)


def check_policy(config: DiffKVConfig, attention_spans: Sequence[int]) -> None:
    """Refuse a method that scores whole heads, and earlier turns that are compressed, for layers with a sliding window.

    ``attention_spans``: as of ``Geometry``.
    """
    if any(attention_spans) and scores_whole_heads(config):
        name = config.policy.name if config.policy else ""
        raise UnsupportedError(
            f"--attention-backend diffkv: policy {name} scores the heads of all layers as a whole, and this model has "
            "layers with a sliding window. Use policy diffkv, uniform, streaming or duo in --diffkv-config for it."
        )
    if any(attention_spans) and getattr(config.policy, "turn_window", None) is not None:
        raise UnsupportedError(
            "--attention-backend diffkv: policy.turn_window does not work with a model that has layers with a sliding "
            "window, which drop old tokens themselves. Leave it out of --diffkv-config."
        )


def check_layers(model: Any) -> None:
    """Refuse models whose attention layers compute something else than causal attention, which a backend has to know
    of. ``model`` is SGLang's, loaded."""
    problems: dict[str, None] = {}
    layers = list(attention_layers(model))
    if len({(x.tp_q_head_num, x.tp_k_head_num, x.qk_head_dim, x.v_head_dim) for x in layers}) > 1:
        problems["layers with heads of other numbers or sizes than others"] = None
    windows: dict[int, int | None] = {}
    for layer in layers:
        problems.update(dict.fromkeys(_unlike_causal(layer)))
        window = getattr(layer, "sliding_window_size", None)
        window = None if window is None or window < 0 else window
        if windows.setdefault(layer.layer_id, window) != window:
            problems[f"attention of two different windows in layer {layer.layer_id}, which has one set of pages"] = None
    _refuse_model(type(model).__name__, list(problems))


def _unlike_causal(layer: Any) -> Iterator[str]:
    kind = str(getattr(layer.attn_type, "value", layer.attn_type))
    if kind != "decoder":
        yield f"attention that is not causal ({kind})"
    if layer.is_cross_attention:
        yield "cross attention"
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
